//! The descriptors (open files and sockets) of this process: how many there are, and how many connections they allow.

use crate::listen::CONNECTIONS_MAX;

/// Descriptors for everything but connections: files of the model, the log, pipes, probes.
const RESERVED: u64 = 96;
/// Further descriptors for each rank process: its pipes and sockets, twice while it is replaced.
const RESERVED_PER_RANK: u64 = 16;

/// The limit of descriptors, and the connections that it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorLimit {
    /// `None`: there is no limit, or it is not known.
    pub descriptors: Option<u64>,
    pub connections: usize,
}

impl DescriptorLimit {
    /// Raises the limit of this process as far as the system allows. Reserves descriptors for `ranks` rank processes and
    /// for `others`, such as the connections of another listener.
    pub fn raise(ranks: usize, others: usize) -> Self {
        let descriptors = raise_soft_limit();
        Self { descriptors, connections: connections_max(descriptors, ranks as u64, others as u64) }
    }
}

/// At least half of the descriptors are for connections, however few there are.
fn connections_max(descriptors: Option<u64>, ranks: u64, others: u64) -> usize {
    let Some(descriptors) = descriptors else { return CONNECTIONS_MAX };
    let reserved = RESERVED + ranks.saturating_mul(RESERVED_PER_RANK) + others;
    let rest = descriptors - reserved.min(descriptors / 2);
    usize::try_from(rest).unwrap_or(usize::MAX).clamp(1, CONNECTIONS_MAX)
}

#[cfg(unix)]
fn raise_soft_limit() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        // Some systems report a maximum that they do not allow.
        Err(_) => current,
    }
}

#[cfg(not(unix))]
fn raise_soft_limit() -> Option<u64> {
    None
}

/// The descriptors that are open now, where the system tells.
pub fn open_count() -> Option<u64> {
    let open = std::fs::read_dir("/proc/self/fd").ok()?;
    // One of them is that of the folder itself.
    Some((open.count() as u64).saturating_sub(1))
}

/// The current limit of descriptors, if there is one.
#[cfg(unix)]
pub fn limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

#[cfg(not(unix))]
pub fn limit() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_files_keep_their_descriptors() {
        for (descriptors, ranks, expected) in [
            (None, 1, CONNECTIONS_MAX),
            (Some(1 << 20), 8, CONNECTIONS_MAX),
            (Some(1024), 0, 1024 - 96),
            (Some(1024), 8, 1024 - 96 - 128),
            (Some(256), 0, 160),
            (Some(256), 8, 128),
            (Some(1), 0, 1),
        ] {
            assert_eq!(connections_max(descriptors, ranks, 0), expected, "{descriptors:?}, {ranks} ranks");
        }
    }
}
