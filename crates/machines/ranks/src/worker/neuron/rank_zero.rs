//! Whether there is a process that could be rank 0. A leader that is rank 0 itself, as with NCCL, starts only the other
//! ranks, which would wait for rank 0 in vain.

use std::fs;
use std::os::unix::fs::MetadataExt;

use rustix::process::{geteuid, getppid};
use types::WorldSize;

/// True if a process of this user was started as rank 0 of `world`, or if that cannot be determined.
pub fn has_rank_zero(world: WorldSize) -> bool {
    // Otherwise the leader is in another pid namespace, and so may be rank 0.
    let Some(parent) = getppid() else { return true };
    if fs::metadata(format!("/proc/{}", parent.as_raw_nonzero())).is_err() {
        return true;
    }
    let Ok(processes) = fs::read_dir("/proc") else { return true };
    processes.flatten().any(|process| {
        let is_own = process.metadata().is_ok_and(|found| found.uid() == geteuid().as_raw());
        is_own && fs::read(process.path().join("cmdline")).is_ok_and(|line| is_rank_zero(&line, world))
    })
}

/// Whether these NUL-terminated arguments start rank 0.
fn is_rank_zero(arguments: &[u8], world: WorldSize) -> bool {
    let arguments: Vec<_> = arguments.split(|&byte| byte == 0).filter_map(|bytes| str::from_utf8(bytes).ok()).collect();
    let value = |name: &str| {
        let apart = arguments.windows(2).find(|pair| pair[0] == name).map(|pair| pair[1]);
        let together = || arguments.iter().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('='));
        apart.or_else(together).and_then(|value| value.parse::<usize>().ok())
    };
    arguments.contains(&"--worker") && value("--rank") == Some(0) && value("--tp-size") == Some(world.get())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn rank_zero_is_known_by_its_arguments() {
        let world = WorldSize::new(2).unwrap();
        let check = |line: &str| is_rank_zero(line.replace(' ', "\0").as_bytes(), world);
        assert!(check("/bin/consort --worker --rank 0 --tp-size 2 --cuda-device 0 "));
        assert!(check("consort --worker --tp-size=2 --rank=0"));
        assert!(!check("consort --worker --rank 1 --tp-size 2"));
        assert!(!check("consort --worker --rank 0 --tp-size 4"));
        assert!(!check("consort --rank 0 --tp-size 2"));
        assert!(!check("consort --worker --rank"));
        assert!(!check(""));
    }

    #[test]
    fn this_test_is_no_rank() {
        assert!(!has_rank_zero(WorldSize::new(9999).unwrap()));
    }
}
