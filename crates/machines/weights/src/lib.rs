//! The weights of a stage: how tensors get from the coordinator's checkpoint into a node's store, and stay there.
//!
//! A tensor is known by the BLAKE3 hash of its bytes ([`TensorId`]). The coordinator computes the hashes of its
//! checkpoint ([`HashCache`]). A node pins what its stage needs in its [`TensorStore`], which makes room for it, checks
//! what is there already, and receives the rest ([`Download`]) from the coordinator ([`upload`]) over several
//! connections. A name from the network is never a path: files are named by the digits of a hash.
//!
//! Nothing that was received or stored is trusted. A tensor gets its name after its hash was verified, and it is verified
//! again before a process uses it for the first time.
#![deny(unsafe_code)]

mod download;
mod error;
mod eviction;
mod file_identity;
mod hash_cache;
mod part_file;
mod pins;
mod store;
mod tree_hash;
mod upload;
mod wire;

use std::fmt;

pub use download::{Download, Progress};
pub use error::{StoreError, TransferError};
pub use hash_cache::HashCache;
pub use pins::PinnedTensors;
pub use store::{StoreLimits, TensorStore};
pub use upload::{CONNECTIONS_DEFAULT, CONNECTIONS_MAX, TensorSource, Upload, serve_tensors, upload};
#[cfg(any(test, fuzzing))]
pub use wire::fuzzing;
pub use wire::{FailReason, RefuseReason, WireError};

/// What identifies a tensor's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorId {
    /// BLAKE3 of the bytes.
    pub hash: [u8; 32],
    pub bytes: u64,
}

impl fmt::Debug for TensorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", Hex(&self.hash), self.bytes)
    }
}

/// Displays a hash as 64 hexadecimal digits.
struct Hex<'a>(&'a [u8; 32]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Displays a number of bytes for people.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ ..1_000_000 => write!(f, "{bytes} bytes"),
            bytes @ ..1_000_000_000 => write!(f, "{:.1} MB", bytes as f64 / 1e6),
            bytes => write!(f, "{:.1} GB", bytes as f64 / 1e9),
        }
    }
}

#[cfg(test)]
mod tests;
