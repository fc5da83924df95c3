//! `NodeMemory`: the memory that a node lends, and what the stages of all coordinators hold of it. A coordinator that asks for
//! more is refused: what the node says it offers binds whoever asks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Clones share one account.
#[derive(Clone, Debug)]
pub(super) struct NodeMemory(Arc<Account>);

#[derive(Debug)]
struct Account {
    /// `None`: whatever is free.
    max: Option<u64>,
    held: Mutex<u64>,
}

/// Memory that a stage holds until this is dropped.
#[derive(Debug)]
pub(super) struct MemoryShare {
    account: NodeMemory,
    bytes: u64,
}

impl NodeMemory {
    pub fn new(max: Option<u64>) -> Self {
        Self(Arc::new(Account { max, held: Mutex::new(0) }))
    }

    /// What a coordinator may plan with whose own stage holds `own`, while so much is free: its stage gives way to the next one.
    pub fn offered(&self, free: u64, own: u64) -> u64 {
        let of_others = self.held().saturating_sub(own);
        let max = self.0.max.map_or(u64::MAX, |max| max.saturating_sub(of_others));
        free.saturating_add(own).min(max)
    }

    /// Fails if a stage that needs at least so much cannot be held beside what is.
    pub fn check(&self, bytes: u64) -> Result<(), String> {
        self.check_beside(*self.held(), bytes)
    }

    /// Sets memory aside for a stage.
    pub fn take(&self, bytes: u64) -> Result<MemoryShare, String> {
        let mut held = self.held();
        self.check_beside(*held, bytes)?;
        *held += bytes;
        Ok(MemoryShare { account: self.clone(), bytes })
    }

    fn check_beside(&self, held: u64, bytes: u64) -> Result<(), String> {
        let Some(max) = self.0.max.filter(|max| held.saturating_add(bytes) > *max) else { return Ok(()) };
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
        let beside = match held {
            0 => String::new(),
            held => format!(", of which other stages hold {} MiB", mebibytes(held)),
        };
        Err(format!(
            "these layers need {} MiB, and this machine lends {} MiB{beside}: give it fewer layers, or raise its --memory",
            mebibytes(bytes),
            max >> 20,
        ))
    }

    fn held(&self) -> MutexGuard<'_, u64> {
        self.0.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryShare {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        *self.account.held() -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_stages_together_hold_no_more_than_is_lent() {
        const MIB: u64 = 1 << 20;
        let memory = NodeMemory::new(Some(100 * MIB));
        let first = memory.take(60 * MIB).unwrap();
        assert!(memory.check(40 * MIB).is_ok());
        let error = memory.take(40 * MIB + 1).unwrap_err();
        assert!(
            error.contains("need 41 MiB") && error.contains("lends 100 MiB") && error.contains("hold 60 MiB"),
            "{error}"
        );
        assert!(memory.take(u64::MAX).is_err(), "sums do not overflow");
        // The coordinator whose stage this is may plan with it, others may not.
        assert_eq!((memory.offered(500 * MIB, first.bytes()), memory.offered(500 * MIB, 0)), (100 * MIB, 40 * MIB));
        assert_eq!((memory.offered(10 * MIB, first.bytes()), memory.offered(10 * MIB, 0)), (70 * MIB, 10 * MIB));
        drop(first);
        memory.take(100 * MIB).unwrap();
        let unlimited = NodeMemory::new(None);
        let share = unlimited.take(u64::MAX >> 1).unwrap();
        assert_eq!(unlimited.offered(7, 0), 7);
        drop(share);
    }
}
