//! `build_id`: identifies the binary.

use std::fs::File;
use std::path::Path;

/// The id of the running binary. It is the same in every process of one binary, also after the file was replaced, and
/// on every host that has a copy of it.
pub fn build_id() -> String {
    build_id_of(Path::new("/proc/self/exe"))
}

/// The version and a hash of the file.
pub fn build_id_of(program: &Path) -> String {
    let mut hash = blake3::Hasher::new();
    // Without /proc, only the version identifies the build.
    let _ = File::open(program).and_then(|file| hash.update_reader(file).map(drop));
    format!("{}-{}", env!("CARGO_PKG_VERSION"), &hash.finalize().to_hex()[..16])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_the_same_build_and_a_change_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one"), folder.path().join("other"));
        std::fs::write(&one, [7; 100_000]).unwrap();
        std::fs::copy(&one, &other).unwrap();
        assert_eq!(build_id_of(&one), build_id_of(&other));
        let mut bytes = vec![7; 100_000];
        bytes[99_999] = 8;
        std::fs::write(&other, bytes).unwrap();
        assert_ne!(build_id_of(&one), build_id_of(&other));
    }

    #[test]
    fn a_build_is_always_called_the_same() {
        assert_eq!(build_id(), build_id());
    }
}
