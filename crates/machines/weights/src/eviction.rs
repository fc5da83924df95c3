//! Which files a store removes to make room: a function of what is there, what is needed and the limits.

use std::collections::HashMap;
use std::time::SystemTime;

/// A file of the store.
#[derive(Clone, Debug)]
pub(super) struct StoredFile {
    pub hash: [u8; 32],
    /// It is the incomplete file of a tensor that was being received.
    pub is_part: bool,
    pub bytes: u64,
    /// Bytes that it takes on the disk.
    pub disk_bytes: u64,
    pub used_at: SystemTime,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// The limit of all files together.
    pub bytes_max: u64,
    /// What may still be written to the disk.
    pub disk_free: u64,
}

/// Why no eviction is enough.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Shortage {
    Limit { needed: u64 },
    Disk { needed: u64, free: u64 },
}

/// The files to remove, as positions in `files`: those used least recently first. `pinned` are the lengths of the tensors
/// that are in use or about to be received, by hash. Nothing is to be removed if it would not be enough.
pub(super) fn plan_eviction(
    files: &[StoredFile],
    pinned: &HashMap<[u8; 32], u64>,
    room: Room,
) -> Result<Vec<usize>, Shortage> {
    let needed = pinned.values().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
    if needed > room.bytes_max {
        return Err(Shortage::Limit { needed });
    }
    let to_write = bytes_to_write(files, pinned);
    let mut evictable: Vec<usize> = (0..files.len()).filter(|&at| !pinned.contains_key(&files[at].hash)).collect();
    evictable.sort_by_key(|&at| (files[at].used_at, files[at].hash, files[at].is_part));
    let mut used = evictable.iter().fold(needed, |sum, &at| sum.saturating_add(files[at].bytes));
    let mut free = room.disk_free;
    let mut evicted = Vec::new();
    for at in evictable {
        if used <= room.bytes_max && to_write <= free {
            break;
        }
        used -= files[at].bytes;
        free = free.saturating_add(files[at].disk_bytes);
        evicted.push(at);
    }
    if to_write > free { Err(Shortage::Disk { needed: to_write, free }) } else { Ok(evicted) }
}

/// Bytes of the pinned tensors that are not on the disk yet.
fn bytes_to_write(files: &[StoredFile], pinned: &HashMap<[u8; 32], u64>) -> u64 {
    let mut absent = pinned.clone();
    for file in files {
        if let Some(bytes) = absent.get_mut(&file.hash) {
            let is_whole = !file.is_part && file.bytes == *bytes;
            *bytes = if is_whole { 0 } else { bytes.saturating_sub(file.disk_bytes) };
        }
    }
    absent.values().fold(0, |sum, &bytes| sum.saturating_add(bytes))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn file(name: u8, bytes: u64, used_s: u64) -> StoredFile {
        let used_at = SystemTime::UNIX_EPOCH + Duration::from_secs(used_s);
        StoredFile { hash: [name; 32], is_part: false, bytes, disk_bytes: bytes, used_at }
    }

    fn check(pinned: &[(u8, u64)], bytes_max: u64, disk_free: u64) -> Result<Vec<usize>, Shortage> {
        let files = [file(1, 10, 3), file(2, 10, 1), file(3, 10, 2), file(4, 10, 4)];
        let pinned = pinned.iter().map(|&(name, bytes)| ([name; 32], bytes)).collect();
        plan_eviction(&files, &pinned, Room { bytes_max, disk_free })
    }

    #[test]
    fn what_was_used_least_recently_goes_first_and_only_as_far_as_needed() {
        assert_eq!(check(&[], 40, 0), Ok(vec![]));
        assert_eq!(check(&[], 39, 0), Ok(vec![1]));
        assert_eq!(check(&[(9, 10)], 40, 100), Ok(vec![1]));
        assert_eq!(check(&[(9, 11)], 40, 100), Ok(vec![1, 2]));
        assert_eq!(check(&[(9, 40)], 40, 100), Ok(vec![1, 2, 0, 3]));
        assert_eq!(check(&[(9, 10)], 100, 5), Ok(vec![1]));
    }

    #[test]
    fn what_is_pinned_stays() {
        assert_eq!(check(&[(2, 10), (9, 10)], 40, 100), Ok(vec![2]));
        assert_eq!(check(&[(1, 10), (2, 10), (3, 10), (4, 10), (9, 1)], 40, 100), Err(Shortage::Limit { needed: 41 }));
    }

    #[test]
    fn nothing_goes_if_it_would_not_be_enough() {
        assert_eq!(check(&[(9, 41)], 40, 100), Err(Shortage::Limit { needed: 41 }));
        assert_eq!(check(&[(9, 50)], 100, 9), Err(Shortage::Disk { needed: 50, free: 49 }));
    }

    #[test]
    fn a_part_counts_as_far_as_it_is_on_the_disk() {
        let part = StoredFile { is_part: true, disk_bytes: 6, ..file(9, 12, 0) };
        let pinned = HashMap::from([([9; 32], 10)]);
        let plan = |disk_free| plan_eviction(std::slice::from_ref(&part), &pinned, Room { bytes_max: 10, disk_free });
        assert_eq!(plan(4), Ok(vec![]));
        assert_eq!(plan(3), Err(Shortage::Disk { needed: 4, free: 3 }));
    }

    proptest! {
        #[test]
        fn after_an_eviction_the_limits_hold_and_nothing_more_was_removed(
            files in prop::collection::vec((0_u8..12, 0_u64..50, 0_u64..6), 0..12),
            pinned in prop::collection::hash_map(0_u8..16, 0_u64..50, 0..6),
            bytes_max in 0_u64..300, disk_free in 0_u64..300,
        ) {
            let files: Vec<_> = files.into_iter().map(|(name, bytes, used)| file(name, bytes, used)).collect();
            let pinned: HashMap<_, _> = pinned.into_iter().map(|(name, bytes)| ([name; 32], bytes)).collect();
            let needed: u64 = pinned.values().sum();
            match plan_eviction(&files, &pinned, Room { bytes_max, disk_free }) {
                Err(Shortage::Limit { .. }) => prop_assert!(needed > bytes_max),
                Err(Shortage::Disk { needed, free }) => prop_assert!(needed > free),
                Ok(evicted) => {
                    let kept = |evicted: &[usize]| -> u64 {
                        let is_kept = |at: &usize| !evicted.contains(at) && !pinned.contains_key(&files[*at].hash);
                        (0..files.len()).filter(is_kept).map(|at| files[at].bytes).sum::<u64>() + needed
                    };
                    let free = |evicted: &[usize]| disk_free + evicted.iter().map(|&at| files[at].bytes).sum::<u64>();
                    let to_write = bytes_to_write(&files, &pinned);
                    let fits = |evicted: &[usize]| kept(evicted) <= bytes_max && free(evicted) >= to_write;
                    prop_assert!(fits(&evicted));
                    if let Some((_, fewer)) = evicted.split_last() {
                        prop_assert!(!fits(fewer));
                    }
                    for (at, file) in files.iter().enumerate() {
                        prop_assert!(!(evicted.contains(&at) && pinned.contains_key(&file.hash)));
                        let is_older = |&gone: &usize| files[gone].used_at <= file.used_at;
                        prop_assert!(evicted.contains(&at) || pinned.contains_key(&file.hash) || evicted.iter().all(is_older));
                    }
                }
            }
        }
    }
}
