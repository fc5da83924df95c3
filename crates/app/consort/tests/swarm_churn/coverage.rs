//! `Coverage`: when there were peers for all layers.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Changes, in order: from then on there were peers for all layers, or not.
#[derive(Default)]
pub struct Coverage(Mutex<Vec<(Instant, bool)>>);

impl Coverage {
    /// `blocks`: those of the peers that can be reached now.
    pub fn set(&self, layers: usize, blocks: impl Iterator<Item = (usize, usize)>) {
        let mut is_served = vec![false; layers];
        blocks.for_each(|(start, end)| is_served[start..end].fill(true));
        let is_complete = is_served.into_iter().all(|is_served| is_served);
        let mut changes = self.lock();
        if changes.last().is_none_or(|(_, last)| *last != is_complete) {
            changes.push((Instant::now(), is_complete));
        }
    }

    /// Whether there were peers for all layers at all times since then.
    pub fn was_complete_since(&self, begun: Instant) -> bool {
        let changes = self.lock();
        let before = changes.iter().rfind(|(at, _)| *at <= begun);
        let since = changes.iter().filter(|(at, _)| *at > begun);
        before.into_iter().chain(since).all(|(_, is_complete)| *is_complete)
    }

    /// How often there were not, and for how long.
    pub fn gaps(&self) -> (usize, Duration) {
        let changes = self.lock();
        let ends = changes.iter().skip(1).map(|(at, _)| *at).chain([Instant::now()]);
        let gaps = changes.iter().zip(ends).filter(|((_, is_complete), _)| !is_complete);
        gaps.fold((0, Duration::ZERO), |(count, time), ((at, _), end)| (count + 1, time + (end - *at)))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Instant, bool)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
