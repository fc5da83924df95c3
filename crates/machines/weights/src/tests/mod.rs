//! Stores on disk, and transfers over loopback.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod faults;
mod store;
mod transfer;

use std::collections::HashMap;
use std::path::Path;

use super::{StoreLimits, TensorId, TensorStore};

/// A tensor of `bytes` bytes; another one for each seed.
fn tensor(seed: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

fn id_of(bytes: &[u8]) -> TensorId {
    TensorId { hash: blake3::hash(bytes).into(), bytes: bytes.len() as u64 }
}

/// Tensors of these lengths, and where a sender finds them.
fn tensors(lengths: &[usize]) -> (Vec<TensorId>, HashMap<[u8; 32], Vec<u8>>) {
    let all: Vec<_> = lengths.iter().enumerate().map(|(seed, &bytes)| tensor(seed as u64, bytes)).collect();
    let ids: Vec<_> = all.iter().map(|bytes| id_of(bytes)).collect();
    let source = ids.iter().map(|id| id.hash).zip(all).collect();
    (ids, source)
}

fn open_store(folder: &Path, bytes_max: u64) -> TensorStore {
    TensorStore::open(folder, StoreLimits { bytes_max, free_bytes_min: 0 }).unwrap()
}

/// The names of the files in a store, without its lock.
fn names(store: &TensorStore) -> Vec<String> {
    let entries = std::fs::read_dir(store.folder()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name != "lock");
    names.sort();
    names
}
