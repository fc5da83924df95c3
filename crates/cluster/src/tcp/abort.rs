//! `TcpAbort`: ends a group from any thread, and tells the other ranks.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use types::Rank;

use super::message::Cause;
use super::wire::Wire;
use crate::comm::CommError;

/// Ends one comm, also while it is being formed; made before it, one for each. The first cause stays.
#[derive(Clone, Debug, Default)]
pub struct TcpAbort {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    cause: OnceLock<Cause>,
    /// Held by an exchange while it runs. Empty before the comm is formed.
    wires: Mutex<Vec<Wire>>,
}

impl TcpAbort {
    /// Every wait, and every exchange from now on, fails with [`CommError::Aborted`], on all ranks.
    pub fn stop(&self) {
        self.end(Cause::Aborted);
    }

    /// Every wait, and every exchange from now on, fails with [`CommError::Lost`], on all ranks.
    pub fn lost(&self, rank: Rank) {
        self.end(Cause::Lost(rank));
    }

    /// Why the comm is over, if it is.
    pub fn cause(&self) -> Option<CommError> {
        self.check().err()
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        self.shared.cause.get().map_or(Ok(()), |&cause| Err(cause.into()))
    }

    pub(super) fn wires(&self) -> MutexGuard<'_, Vec<Wire>> {
        self.shared.wires.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the wires of a comm that is formed, and ends it at once if that was wished meanwhile.
    pub(super) fn hold(&self, wires: Vec<Wire>) {
        let mut held = self.wires();
        *held = wires;
        if let Some(&cause) = self.shared.cause.get() {
            held.iter_mut().for_each(|wire| wire.farewell(cause));
        }
    }

    /// Ends it, while the wires are held.
    pub(super) fn end_with(&self, wires: &mut [Wire], cause: Cause) {
        if self.shared.cause.set(cause).is_ok() {
            wires.iter_mut().for_each(|wire| wire.farewell(cause));
        }
    }

    fn end(&self, cause: Cause) {
        if self.shared.cause.set(cause).is_ok() {
            // An exchange that runs sees the cause, and lets go of the wires within a tick.
            self.wires().iter_mut().for_each(|wire| wire.farewell(cause));
        }
    }
}
