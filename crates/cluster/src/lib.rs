//! Layers of one model on the machines of a LAN.
#![deny(unsafe_code)]
