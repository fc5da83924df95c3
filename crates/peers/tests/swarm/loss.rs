//! Loss.
