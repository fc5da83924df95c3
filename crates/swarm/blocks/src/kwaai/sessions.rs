//! `Sessions`: which session of the block belongs to a client's session id.
//!
//! KwaaiNet opens sessions by using them, says nothing of their length and never closes them. So they reserve tokens as they grow,
//! and the block closes those that are not used when it needs their room. An id is of one client only: another client with the
//! same id has another session.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kwaai::KwaaiFailure;
use tokio::sync::OwnedMutexGuard;

use crate::block::{BlockHandle, BlockSession, BlockShape, Client, Refusal, RunError};

/// There are no more entries than the block has sessions and the server has calls: others are removed when a call comes.
pub(super) struct Sessions {
    block: BlockHandle,
    entries: Mutex<HashMap<SessionName, Slot>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionName {
    pub client: Client,
    pub id: u64,
}

/// `None` until the session is open. Calls of one session run one after the other.
type Slot = Arc<tokio::sync::Mutex<Option<BlockSession>>>;

impl Sessions {
    pub fn new(block: BlockHandle) -> Self {
        Self { block, entries: Mutex::default() }
    }

    /// The open session of this name, for one call. One that is not known begins at position 0.
    pub async fn enter(
        &self,
        name: SessionName,
        position: usize,
        shape: &BlockShape,
    ) -> Result<OwnedMutexGuard<Option<BlockSession>>, KwaaiFailure> {
        let mut slot = self.slot(name, position)?.lock_owned().await;
        if !slot.as_ref().is_some_and(BlockSession::is_open) {
            // The call before this one may have failed to open it.
            *slot = None;
            if position != 0 {
                return Err(unknown(name.id));
            }
            let opened = self.block.open_growing(name.client, shape.layers, shape.positions_max).await;
            *slot = Some(opened.map_err(|refusal| failure_of(&refusal))?);
        }
        Ok(slot)
    }

    /// The session is of no use any more.
    pub fn forget(&self, name: SessionName) {
        self.lock().remove(&name);
    }

    fn slot(&self, name: SessionName, position: usize) -> Result<Slot, KwaaiFailure> {
        let mut entries = self.lock();
        entries.retain(|_, slot| is_used(slot));
        if position != 0 {
            return entries.get(&name).cloned().ok_or_else(|| unknown(name.id));
        }
        Ok(Arc::clone(entries.entry(name).or_default()))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionName, Slot>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the session is open, or a call runs or waits.
fn is_used(slot: &Slot) -> bool {
    Arc::strong_count(slot) > 1
        || slot.try_lock().map_or(true, |session| session.as_ref().is_some_and(BlockSession::is_open))
}

fn unknown(id: u64) -> KwaaiFailure {
    KwaaiFailure::Refused(format!("session {id} is not known here, or has expired: begin another one at position 0"))
}

fn failure_of(refusal: &Refusal) -> KwaaiFailure {
    match refusal {
        Refusal::WarmingUp => KwaaiFailure::WarmingUp(": the weights of the block are loading".to_owned()),
        Refusal::Rebuilding => KwaaiFailure::WarmingUp(": the block is being rebuilt".to_owned()),
        Refusal::TooManySessions { .. } | Refusal::NoTokens { .. } | Refusal::Busy => KwaaiFailure::AtCapacity,
        Refusal::Draining | Refusal::TooLong { .. } | Refusal::Layers { .. } | Refusal::Ended => {
            KwaaiFailure::Refused(refusal.to_string())
        }
    }
}

/// Why rows of a session were not run.
pub(super) fn run_failure(error: &RunError) -> KwaaiFailure {
    match error {
        RunError::NoTokens { .. } | RunError::Busy => KwaaiFailure::AtCapacity,
        error => KwaaiFailure::Refused(error.to_string()),
    }
}
