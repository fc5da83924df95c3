//! What the fuzz targets share: seeds, and the promise about memory.
#![forbid(unsafe_code)]

use std::alloc::System;
use std::fs;
use std::path::Path;

use cap::Cap;

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Writes seeds into `corpus/TARGET`, and makes the folder for what is found.
pub fn plant(target: &str, seeds: &[Vec<u8>]) {
    fs::create_dir_all("artifacts").expect("the working folder can be written to");
    let folder = Path::new("corpus").join(target);
    fs::create_dir_all(&folder).expect("the working folder can be written to");
    for (number, seed) in seeds.iter().enumerate() {
        fs::write(folder.join(format!("seed-{number}")), seed).expect("the corpus can be written to");
    }
}

/// The files of `seeds/TARGET`.
pub fn seed_files(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new("seeds").join(target);
    let files =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("run this in the folder fuzz: {folder:?}: {error}"));
    let mut paths: Vec<_> = files.map(|file| file.expect("the folder can be read").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a seed can be read")).collect()
}

/// Runs `read` on the input. Should it ask for more memory than a small multiple of the input, the process aborts, which
/// libFuzzer reports.
pub fn within_memory(input: &[u8], read: impl FnOnce(&[u8])) {
    const BASE_BYTES: usize = 64 << 10;
    const BYTES_PER_BYTE: usize = 32;
    within_bytes(BASE_BYTES + BYTES_PER_BYTE * input.len(), || read(input));
}

/// Runs something that may use this much memory. Should it ask for more, the process aborts.
pub fn within_bytes(bytes: usize, run: impl FnOnce()) {
    MEMORY.set_limit(MEMORY.allocated() + bytes).expect("the limit is above what is in use");
    run();
    MEMORY.set_limit(usize::MAX).expect("there is no higher limit");
}
