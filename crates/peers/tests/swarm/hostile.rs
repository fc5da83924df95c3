//! Hostile peers and clients.
