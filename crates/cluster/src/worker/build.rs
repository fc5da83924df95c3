//! `build_id`: what tells this very binary from every other.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Bytes of the binary's beginning that count. Its linker writes an id of the whole there.
const HEAD_BYTES: u64 = 64 << 10;

/// What the running binary is called. The same in every process of one binary, also after its file was replaced.
pub fn build_id() -> String {
    build_id_of(Path::new("/proc/self/exe"))
}

/// The version, and a hash of what a binary is: its size, its time and its beginning.
pub fn build_id_of(program: &Path) -> String {
    let mut hash = blake3::Hasher::new();
    // Without /proc, the version has to do.
    if let Ok(file) = fs::File::open(program) {
        if let Ok(facts) = file.metadata() {
            for fact in [facts.len(), facts.mtime() as u64, facts.mtime_nsec() as u64] {
                hash.update(&fact.to_le_bytes());
            }
        }
        let mut head = Vec::new();
        if file.take(HEAD_BYTES).read_to_end(&mut head).is_ok() {
            hash.update(&head);
        }
    }
    format!("{}-{}", env!("CARGO_PKG_VERSION"), &hash.finalize().to_hex()[..16])
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_build_is_always_called_the_same() {
        assert_eq!(super::build_id(), super::build_id());
    }
}
