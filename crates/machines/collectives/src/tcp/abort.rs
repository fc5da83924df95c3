//! `TcpAbort`: aborts a communicator from any thread, and sends the goodbye to the other ranks.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use types::Rank;

use super::connection::Connection;
use super::message::TcpAbortCause;
use crate::comm::CommError;

/// Aborts one [`TcpComm`](super::TcpComm), also while it is being formed. It is made before the communicator, one for
/// each. The first cause stays.
#[derive(Clone, Debug, Default)]
pub struct TcpAbort {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    cause: OnceLock<TcpAbortCause>,
    /// Locked by a collective while it runs. Empty before the communicator is formed.
    connections: Mutex<Vec<Connection>>,
}

impl TcpAbort {
    /// Every wait, and every collective from now on, fails with [`CommError::Aborted`], on all ranks.
    pub fn stop(&self) {
        self.end(TcpAbortCause::Aborted);
    }

    /// Every wait, and every collective from now on, fails with [`CommError::Lost`], on all ranks.
    pub fn lost(&self, rank: Rank) {
        self.end(TcpAbortCause::Lost(rank));
    }

    /// Why the communicator is over, if it is.
    pub fn cause(&self) -> Option<CommError> {
        self.check().err()
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        self.shared.cause.get().map_or(Ok(()), |&cause| Err(cause.into()))
    }

    pub(super) fn connections(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.shared.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the connections of a communicator that is formed. If it was aborted meanwhile, they get the goodbye at
    /// once.
    pub(super) fn hold(&self, connections: Vec<Connection>) {
        let mut held = self.connections();
        *held = connections;
        if let Some(&cause) = self.shared.cause.get() {
            held.iter_mut().for_each(|connection| connection.goodbye(cause));
        }
    }

    /// Aborts with the connections already locked by the caller.
    pub(super) fn end_with(&self, connections: &mut [Connection], cause: TcpAbortCause) {
        if self.shared.cause.set(cause).is_ok() {
            connections.iter_mut().for_each(|connection| connection.goodbye(cause));
        }
    }

    fn end(&self, cause: TcpAbortCause) {
        if self.shared.cause.set(cause).is_ok() {
            // A running collective sees the cause and unlocks the connections within a tick.
            self.connections().iter_mut().for_each(|connection| connection.goodbye(cause));
        }
    }
}
