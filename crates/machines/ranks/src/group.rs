//! A group of rank processes as one executor: it spawns the processes, forms the communicator, loads the model, runs
//! steps, and recovers when a rank fails.
//!
//! [`Group`] is the supervisor. It holds no model: ranks are separate processes, and the supervisor talks to them in
//! the lines of [`protocol`](crate::protocol). Supervisor and ranks each keep a [`SessionTable`](engine::SessionTable).
//! The supervisor decides about sessions and pages; the ranks follow.
//!
//! # Why it never hangs
//!
//! One thread does everything, and it waits in one place: a `poll` over the pipes of all ranks, never longer than to
//! the next deadline. Pipes are non-blocking, so a rank that stops reading delays nobody. When a process ends, its
//! output ends, which `poll` reports at once. Every request has a deadline. The supervisor looks in `/proc` for stopped
//! processes; for a rank on another host, that host does. Otherwise a remote rank looks the same: separate threads
//! connect to its host and copy its lines between pipes and the network.
//! When a rank fails, the supervisor aborts the group's epoch, in shared memory or by a line to each rank, and the
//! other ranks leave their collective. Each replies to its pending requests or is killed at the drain deadline. When
//! all have replied, the next epoch begins: new processes replace the lost ones, survivors keep their weights, and all
//! ranks join a new communicator.
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
