//! How much memory this process can still allocate: what the host has, or less where a control group limits it.

use std::fs;
use std::path::{Path, PathBuf};

use model::Footprint;

/// The memory that a load would need, and what is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "insufficient memory: {} MiB are needed (weights {}, keys and values {}, working memory {}) and {} MiB are free",
    mebibytes(self.needed()), mebibytes(*weights), mebibytes(*kv), mebibytes(*working), available >> 20
)]
pub struct InsufficientMemory {
    pub weights: u64,
    pub kv: u64,
    pub working: u64,
    pub available: u64,
}

impl InsufficientMemory {
    pub fn needed(&self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.working)
    }
}

/// Checks that this host has memory for all these shards of a model.
pub fn check_memory(shares: &[Footprint]) -> Result<(), InsufficientMemory> {
    let sum = |part: fn(&Footprint) -> u64| shares.iter().map(part).fold(0, u64::saturating_add);
    let needs = InsufficientMemory {
        weights: sum(|footprint| footprint.weights),
        kv: sum(|footprint| footprint.kv),
        working: sum(|footprint| footprint.working),
        // If the system does not report it, the check passes.
        available: memory_available().unwrap_or(u64::MAX),
    };
    if needs.needed() > needs.available { Err(needs) } else { Ok(()) }
}

/// Rounds up, for amounts that are needed.
fn mebibytes(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Bytes that can be allocated and touched without swapping or an OOM kill. `None` if the system does not report it.
pub fn memory_available() -> Option<u64> {
    available(Path::new("/"))
}

/// The same for a system whose `proc` and `sys` are in `root`.
fn available(root: &Path) -> Option<u64> {
    let host = field(&root.join("proc/meminfo"), "MemAvailable:").and_then(|kib| kib.checked_mul(1024));
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    groups.lines().flat_map(|line| cgroup_headroom(root, line)).chain(host).min()
}

/// The file names of one version of control groups.
struct Names {
    root: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// Key in `memory.stat` of the page cache that the kernel reclaims before it refuses memory.
    reclaimable: &'static str,
}

const V1: Names = Names {
    root: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Names =
    Names { root: "sys/fs/cgroup", limit: "memory.max", usage: "memory.current", reclaimable: "inactive_file" };

/// The memory left in the control group that a line of `/proc/self/cgroup` names: the minimum of it and its ancestors,
/// because a limit applies to all descendants. Groups that are not visible from here, as in a container, set no limit.
fn cgroup_headroom(root: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let names = match controllers {
        "" => V2,
        _ if controllers.split(',').any(|name| name == "memory") => V1,
        _ => return None,
    };
    let top = root.join(names.root);
    let own: PathBuf = top.join(path.trim_start_matches('/'));
    own.ancestors().take_while(|group| group.starts_with(&top)).filter_map(|group| headroom(group, &names)).min()
}

/// `None` if the group has no limit.
fn headroom(group: &Path, names: &Names) -> Option<u64> {
    let number = |name: &str| fs::read_to_string(group.join(name)).ok()?.trim().parse::<u64>().ok();
    let (limit, usage) = (number(names.limit)?, number(names.usage)?);
    let reclaimable = field(&group.join("memory.stat"), names.reclaimable).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

/// The number after `key` in a file with one key per line.
fn field(path: &Path, key: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let mut words = text.lines().map(str::split_ascii_whitespace);
    words.find_map(|mut words| (words.next() == Some(key)).then(|| words.next()?.parse().ok())?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_can_not_fit_is_refused_with_both_numbers() {
        let share = Footprint { weights: 1 << 60, kv: 1, working: 1 };
        let refused = check_memory(&[share, share]).unwrap_err();
        assert!(refused.needed() > refused.available);
        assert_eq!(refused.weights, 1 << 61);
        assert_eq!(check_memory(&[Footprint { weights: 1, kv: 1, working: 1 }]), Ok(()));
    }

    use super::*;

    const GIB: u64 = 1 << 30;

    fn check(files: &[(&str, &str)], expected: Option<u64>) {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        assert_eq!(available(root.path()), expected, "{files:?}");
    }

    const HOST: (&str, &str) =
        ("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  100 kB\nMemAvailable:    8388608 kB\n");

    #[test]
    fn without_groups_it_is_what_the_host_has() {
        check(&[HOST], Some(8 * GIB));
        check(&[], None);
        check(&[("proc/meminfo", "MemAvailable: many kB\n")], None);
    }

    #[test]
    fn the_narrowest_group_around_a_process_decides() {
        let files = [
            HOST,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("sys/fs/cgroup/outer/memory.max", "4294967296\n"),
            ("sys/fs/cgroup/outer/memory.current", "3221225472\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 5\ninactive_file 1073741824\n"),
            ("sys/fs/cgroup/outer/inner/memory.max", "max\n"),
            ("sys/fs/cgroup/outer/inner/memory.current", "1\n"),
        ];
        check(&files, Some(2 * GIB));
    }

    #[test]
    fn a_container_sees_its_own_group_at_the_top() {
        let files = [
            HOST,
            ("proc/self/cgroup", "0::/not/to/be/seen\n"),
            ("sys/fs/cgroup/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/memory.current", "2147483648\n"),
        ];
        check(&files, Some(0));
    }

    #[test]
    fn groups_of_the_first_version_count_too() {
        let files = [
            HOST,
            ("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:hugetlb,memory:/a\n0::/\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "3221225472\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "2147483648\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "4294967296\n"),
        ];
        check(&files, Some(GIB));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_host_tells() {
        assert!(memory_available().is_some());
    }
}
