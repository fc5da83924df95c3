//! `FrameBudget`: the memory that the frames of all connections of a process may take together.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Frames up to this size are not counted: connections are, and each reads one frame at a time.
const SMALL_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct FrameBudget {
    free: Mutex<usize>,
    freed: Condvar,
    bytes: usize,
}

impl FrameBudget {
    pub fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self { free: Mutex::new(bytes), freed: Condvar::new(), bytes })
    }

    /// Waits until a frame of this size fits. `None` if it does not within `wait`, or never can.
    pub fn take(self: &Arc<Self>, bytes: usize, wait: Duration) -> Option<FramePermit> {
        let bytes = if bytes <= SMALL_BYTES { 0 } else { bytes };
        if bytes > self.bytes {
            return None;
        }
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.freed.wait_timeout_while(free, wait, |free| *free < bytes);
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *free = free.checked_sub(bytes)?;
        Some(FramePermit { budget: Arc::clone(self), bytes })
    }
}

/// A part of the budget, given back when this is dropped.
#[derive(Debug)]
pub(super) struct FramePermit {
    budget: Arc<FrameBudget>,
    bytes: usize,
}

impl Drop for FramePermit {
    fn drop(&mut self) {
        *self.budget.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_frame_waits_until_there_is_room() {
        let budget = FrameBudget::new(1 << 20);
        let first = budget.take(1 << 20, LONG).unwrap();
        assert!(budget.take(SMALL_BYTES, Duration::ZERO).is_some());
        assert!(budget.take(SMALL_BYTES + 1, Duration::ZERO).is_none());
        assert!(budget.take((1 << 20) + 1, LONG).is_none());
        thread::scope(|scope| {
            let second = scope.spawn(|| budget.take(1 << 19, LONG).is_some());
            drop(first);
            assert!(second.join().unwrap());
        });
        assert!(budget.take(1 << 20, Duration::ZERO).is_some());
    }
}
