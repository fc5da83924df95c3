//! `ReplayBudget`: how much memory a client's sessions keep for replays and for checks, all together.
//!
//! With more, the largest session drops what it keeps; if it loses a peer afterwards, it is begun again from its tokens. Others
//! drop theirs a moment later than they are asked to, so a little more than the budget may be taken for a moment: see
//! [`ReplayBudget::bytes_limit`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::Notify;

use super::context::lock;

#[derive(Debug)]
pub(super) struct ReplayBudget {
    bytes_max: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    shares: HashMap<u64, Share>,
    next: u64,
    bytes: usize,
    /// The most that it ever was.
    bytes_peak: usize,
}

#[derive(Debug)]
struct Share {
    bytes: usize,
    /// `None`: it does not drop anything.
    asked: Option<Arc<Notify>>,
    is_asked: bool,
}

/// What one session keeps, or a check that runs.
#[derive(Debug)]
pub(super) struct ReplayShare {
    budget: Arc<ReplayBudget>,
    number: u64,
    asked: Arc<Notify>,
}

impl ReplayBudget {
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, kept: Mutex::default() })
    }

    /// A session with more than this drops its own rows at once, also if another one is larger.
    pub fn bytes_limit(&self) -> usize {
        self.bytes_max.saturating_add(self.bytes_max / 4)
    }

    pub fn bytes_peak(&self) -> usize {
        lock(&self.kept).bytes_peak
    }

    /// The share of a session.
    pub fn share(self: &Arc<Self>) -> ReplayShare {
        let asked = Arc::<Notify>::default();
        self.insert(&mut lock(&self.kept), 0, Some(asked))
    }

    /// Memory for a check, which gives it back when it is dropped; `None` if there is not so much.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Option<ReplayShare> {
        let mut kept = lock(&self.kept);
        let fits = kept.bytes.checked_add(bytes).is_some_and(|bytes| bytes <= self.bytes_max);
        fits.then(|| self.insert(&mut kept, bytes, None))
    }

    fn insert(self: &Arc<Self>, kept: &mut Kept, bytes: usize, asked: Option<Arc<Notify>>) -> ReplayShare {
        let number = kept.next;
        kept.next += 1;
        let share = Share { bytes, asked: asked.clone(), is_asked: false };
        kept.shares.insert(number, share);
        kept.add(bytes);
        ReplayShare { budget: Arc::clone(self), number, asked: asked.unwrap_or_default() }
    }
}

impl Kept {
    fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.bytes_peak = self.bytes_peak.max(self.bytes);
    }
}

impl ReplayShare {
    /// The session keeps so much now. True if it has to drop what it can.
    #[must_use]
    pub fn set(&self, bytes: usize) -> bool {
        let (mut kept, max) = (lock(&self.budget.kept), self.budget.bytes_max);
        let Some(share) = kept.shares.get_mut(&self.number) else { return false };
        let before = std::mem::replace(&mut share.bytes, bytes);
        kept.bytes -= before;
        kept.add(bytes);
        let mut coming: usize = kept.shares.values().filter(|share| share.is_asked).map(|share| share.bytes).sum();
        while kept.bytes - coming.min(kept.bytes) > max {
            let may_drop = |(_, share): &(&u64, &mut Share)| share.asked.is_some() && !share.is_asked;
            let largest = kept.shares.iter_mut().filter(may_drop).max_by_key(|(_, share)| share.bytes);
            match largest {
                Some((number, _)) if *number == self.number => return true,
                Some((_, share)) => {
                    share.is_asked = true;
                    coming += share.bytes;
                    share.asked.iter().for_each(|asked| asked.notify_one());
                }
                None => return true,
            }
        }
        kept.bytes > self.budget.bytes_limit()
    }

    /// The session has dropped what it could.
    pub fn dropped(&self, bytes: usize) {
        let mut kept = lock(&self.budget.kept);
        let Some(share) = kept.shares.get_mut(&self.number) else { return };
        share.is_asked = false;
        let before = std::mem::replace(&mut share.bytes, bytes);
        kept.bytes -= before;
        kept.add(bytes);
    }

    /// Ends when the session is asked to drop what it can.
    pub async fn asked(&self) {
        self.asked.notified().await;
    }
}

impl Drop for ReplayShare {
    fn drop(&mut self) {
        let mut kept = lock(&self.budget.kept);
        let share = kept.shares.remove(&self.number);
        kept.bytes -= share.map_or(0, |share| share.bytes);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn the_largest_session_is_asked_to_drop_its_rows() {
        let budget = ReplayBudget::new(100);
        let [small, large] = [budget.share(), budget.share()];
        assert!(!large.set(70) && !small.set(30));
        assert!(large.asked().now_or_never().is_none());
        assert!(!small.set(40), "the other one is larger");
        assert!(large.asked().now_or_never().is_some());
        assert!(!small.set(50), "it is still asked");
        assert!(small.set(60), "until there is too much");
        large.dropped(5);
        assert!(!small.set(60));
        assert!(small.set(96), "it is the largest");
        small.dropped(0);
        assert!(!large.set(100));
        assert!(budget.bytes_peak() <= budget.bytes_limit() + 10);
    }

    #[test]
    fn a_check_waits_for_nobody_and_asks_nobody() {
        let budget = ReplayBudget::new(100);
        let session = budget.share();
        assert!(!session.set(60));
        assert!(budget.reserve(50).is_none());
        let check = budget.reserve(40).unwrap();
        assert!(session.set(61));
        session.dropped(60);
        drop(check);
        assert!(!session.set(100));
        drop(session);
        assert!(budget.reserve(100).is_some());
    }
}
