//! A group of rank processes as one executor: spawned, seated, loaded, driven, and made whole again when one of them fails.
//!
//! [`Group`] is the supervisor. It holds no model: ranks are processes of their own, and it talks to them in the lines of
//! [`protocol`](crate::protocol). It keeps the same [`SessionTable`](engine::SessionTable) as they do, so sessions and pages are decided
//! here and only followed there.
//!
//! # Why it never hangs
//!
//! One thread does everything, and it waits in one place: a `poll` over the pipes of all ranks, never longer than to the next
//! deadline. Pipes are not blocking, so a rank that stopped reading holds nobody up. The end of a process is the end of its
//! output, which `poll` reports at once. Every request has a deadline; a process that was stopped is looked for in `/proc`, on another
//! host by that host. Otherwise a rank there looks the same: threads carry its lines between pipes and the network, and connecting is
//! theirs too.
//!
//! When something goes wrong with a rank, the epoch of the group is aborted, in shared memory or by a line to each rank, and the
//! others leave their exchange. They answer what they were asked, or are killed too when they do not. When all have answered, the next epoch begins: new
//! processes take the places of those that are gone, survivors keep their weights, and everybody takes a new comm.
#![cfg(target_os = "linux")]

mod deadlines;
mod executor;
mod forming;
mod hosts;
mod inbox;
mod launcher;
mod member;
mod process;
mod remote;
mod supervisor;

pub use deadlines::{DeadlineError, Deadlines};
pub use hosts::Hosts;
pub use supervisor::{Group, GroupConfig, StartError};
