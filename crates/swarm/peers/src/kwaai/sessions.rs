//! `Sessions`: which session of the block belongs to a client's session id.
//!
//! KwaaiNet opens sessions by using them and never closes them. An id is of one client only: another client with the same id has
//! another session. Sessions that nobody uses expire; a client that wants more than its share loses those of its own that it has
//! not used for a while, and never anybody else's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kwaai::KwaaiFailure;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::block::{BlockHandle, BlockSession, BlockShape, Client, Refusal};

#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    pub sessions_max: usize,
    pub sessions_per_client_max: usize,
    /// Tokens of a session. All are reserved when it begins, because nothing says how long it will be.
    pub session_tokens_max: usize,
    pub idle: Duration,
    /// When a client begins another session and has no room for it, its oldest session that it has not used for so long ends.
    pub spare_after: Duration,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            sessions_max: 128,
            sessions_per_client_max: 32,
            session_tokens_max: 4096,
            idle: Duration::from_secs(600),
            spare_after: Duration::from_secs(60),
        }
    }
}

pub(super) struct Sessions {
    block: BlockHandle,
    limits: SessionLimits,
    entries: Mutex<HashMap<SessionName, Entry>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionName {
    pub client: Client,
    pub id: u64,
}

struct Entry {
    slot: Slot,
    used: Instant,
}

/// `None` until the session is open. Calls of one session run one after the other.
type Slot = Arc<tokio::sync::Mutex<Option<BlockSession>>>;

impl Entry {
    /// Whether no call is running or waiting.
    fn is_idle(&self) -> bool {
        Arc::strong_count(&self.slot) == 1
    }
}

impl Sessions {
    pub fn new(block: BlockHandle, limits: SessionLimits) -> Self {
        Self { block, limits, entries: Mutex::default() }
    }

    /// The most tokens of a session of a block.
    pub fn tokens_max(&self, shape: &BlockShape) -> usize {
        self.limits.session_tokens_max.min(shape.positions_max)
    }

    /// The open session of this name, for one call. One that is not known begins at position 0.
    pub async fn enter(
        &self,
        name: SessionName,
        position: usize,
        shape: &BlockShape,
    ) -> Result<OwnedMutexGuard<Option<BlockSession>>, KwaaiFailure> {
        let mut slot = self.slot(name, position)?.lock_owned().await;
        if slot.is_none() {
            // The call before this one may have failed to open it.
            let opened = if position == 0 { self.open(name, shape).await } else { Err(unknown(name.id)) };
            match opened {
                Ok(session) => *slot = Some(session),
                Err(failure) => {
                    self.forget(name);
                    return Err(failure);
                }
            }
        }
        Ok(slot)
    }

    /// The session is of no use any more.
    pub fn forget(&self, name: SessionName) {
        self.lock().remove(&name);
    }

    fn slot(&self, name: SessionName, position: usize) -> Result<Slot, KwaaiFailure> {
        let mut entries = self.lock();
        let (now, idle) = (Instant::now(), self.limits.idle);
        entries.retain(|_, entry| !entry.is_idle() || now.duration_since(entry.used) < idle);
        if let Some(entry) = entries.get_mut(&name) {
            entry.used = now;
            return Ok(Arc::clone(&entry.slot));
        }
        if position != 0 {
            return Err(unknown(name.id));
        }
        let own = entries.keys().filter(|other| other.client == name.client).count();
        let is_full = own >= self.limits.sessions_per_client_max || entries.len() >= self.limits.sessions_max;
        if is_full && !self.spare(&mut entries, name.client) {
            return Err(KwaaiFailure::AtCapacity);
        }
        let slot = Slot::default();
        entries.insert(name, Entry { slot: Arc::clone(&slot), used: now });
        Ok(slot)
    }

    async fn open(&self, name: SessionName, shape: &BlockShape) -> Result<BlockSession, KwaaiFailure> {
        loop {
            let refusal = match self.block.open(name.client, shape.layers, self.tokens_max(shape)).await {
                Ok(session) => return Ok(session),
                Err(refusal) => refusal,
            };
            let is_full = matches!(refusal, Refusal::TooManySessions { .. } | Refusal::NoTokens { .. });
            // A session that was spared is closed before the next one is opened: the block takes both in this order.
            if !(is_full && self.spare(&mut self.lock(), name.client)) {
                return Err(failure_of(&refusal));
            }
        }
    }

    /// Ends the session that this client has not used for the longest time, if that is long. False if there is none.
    fn spare(&self, entries: &mut HashMap<SessionName, Entry>, client: Client) -> bool {
        let now = Instant::now();
        let is_spare = |entry: &Entry| entry.is_idle() && now.duration_since(entry.used) >= self.limits.spare_after;
        let own = entries.iter().filter(|(name, entry)| name.client == client && is_spare(entry));
        let oldest = own.min_by_key(|(_, entry)| entry.used).map(|(name, _)| *name);
        oldest.is_some_and(|oldest| entries.remove(&oldest).is_some())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionName, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(id: u64) -> KwaaiFailure {
    KwaaiFailure::Refused(format!("session {id} is not known here, or has expired: begin another one at position 0"))
}

fn failure_of(refusal: &Refusal) -> KwaaiFailure {
    match refusal {
        Refusal::WarmingUp => KwaaiFailure::WarmingUp(": the weights of the block are loading".to_owned()),
        Refusal::Rebuilding => KwaaiFailure::WarmingUp(": the block is being rebuilt".to_owned()),
        Refusal::TooManySessions { .. } | Refusal::NoTokens { .. } => KwaaiFailure::AtCapacity,
        Refusal::Draining | Refusal::TooLong { .. } | Refusal::Layers { .. } | Refusal::Ended => {
            KwaaiFailure::Refused(refusal.to_string())
        }
    }
}
