//! The headings of `--help`.

/// Which model, and how it computes.
pub const MODEL: &str = "Model";
/// How an answer is chosen, and how long it may be.
pub const SAMPLING: &str = "Sampling";
/// What this machine spends on it.
pub const MACHINE: &str = "This machine";
/// Machines that share a key: clusters, ranks of other hosts, workers of cake.
pub const CLUSTER: &str = "Machines of mine";
/// Peers that nobody has to trust.
#[cfg(feature = "swarm")]
pub const SWARM: &str = "Swarm";
/// Who may ask, and where.
pub const SERVER: &str = "Server";
