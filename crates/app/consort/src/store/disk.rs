//! Room on the disk, looked at before something large is written.

use std::path::{Path, PathBuf};

use indicatif::DecimalBytes;

/// What is left free beside a download, for everything else on the machine.
const SPARE_BYTES: u64 = 32 << 20;

#[derive(Debug, thiserror::Error)]
#[error(
    "no room for {what}: it needs {} in {}, where {} are free",
    DecimalBytes(*.need), .folder.display(), DecimalBytes(*.free)
)]
pub struct NoRoom {
    what: String,
    need: u64,
    folder: PathBuf,
    free: u64,
}

/// Checks that `need` bytes can be written to a folder, which may not exist yet.
pub fn check(what: &str, need: u64, folder: &Path) -> Result<(), NoRoom> {
    match free(folder) {
        Some(free) if need > 0 && free < need.saturating_add(SPARE_BYTES) => {
            Err(NoRoom { what: what.to_owned(), need, folder: folder.to_owned(), free })
        }
        _ => Ok(()),
    }
}

/// The bytes that a download into a folder may have; `None` if the system does not say.
pub fn room(folder: &Path) -> Option<u64> {
    free(folder).map(|free| free.saturating_sub(SPARE_BYTES))
}

/// The bytes that this user can write to the disk of a folder.
#[cfg(unix)]
fn free(folder: &Path) -> Option<u64> {
    let there = folder.ancestors().find(|folder| folder.exists())?;
    let disk = rustix::fs::statvfs(there).ok()?;
    Some(disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_not_there_yet_is_on_the_disk_of_one_that_is() {
        let folder = tempfile::tempdir().unwrap();
        let within = folder.path().join("a/b");
        assert!(free(&within).is_some_and(|bytes| bytes > 0));
        assert!(check("it", 1, &within).is_ok());
        let refused = check("qwen3:4b", 1 << 60, &within).unwrap_err().to_string();
        assert!(refused.starts_with("no room for qwen3:4b: it needs 1.15 EB in "), "{refused}");
        assert!(refused.contains("a/b, where "), "{refused}");
    }
}
