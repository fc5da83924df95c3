//! Where the repository's files are.

use std::path::{Path, PathBuf};

/// A file or folder of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(path)
}

/// A file or folder of `fixtures/oracle`.
pub fn oracle(path: &str) -> PathBuf {
    repository("fixtures/oracle").join(path)
}
