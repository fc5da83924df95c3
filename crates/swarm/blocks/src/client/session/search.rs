//! `SessionSearch`: how long a session has been without a chain that works, and what its peers did meanwhile.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use directory::PeerId;
use tracing::warn;

use super::super::forming::{FOREIGN_FULL_TIME_MAX, FULL_TIME_MAX};
use super::super::link::SpanLoss;
use super::Session;
use crate::wire::FailureKind;

/// Failures that are told.
const TOLD_MAX: usize = 4;

/// It goes on while chains are formed, and ends when a peer that was opened has returned something: a peer that takes every
/// session and never does anything must not hold requests for ever.
pub(super) struct SessionSearch {
    since: Instant,
    /// What each peer did last, by name.
    failures: BTreeMap<String, String>,
    /// A foreign peer had no room: it forgets sessions only after a while.
    is_foreign_full: bool,
}

impl SessionSearch {
    fn new(since: Instant) -> Self {
        Self { since, failures: BTreeMap::new(), is_foreign_full: false }
    }
}

impl Session {
    /// Since when a chain is looked for.
    pub(in super::super) fn search_since(&mut self) -> Instant {
        self.search.get_or_insert_with(|| SessionSearch::new(Instant::now())).since
    }

    /// How long that may take.
    pub(in super::super) fn search_time_max(&self, is_full: bool) -> Duration {
        // A session that runs makes others wait, which may have what it needs.
        if is_full && self.is_in_the_way() {
            return FULL_TIME_MAX;
        }
        let max = self.context.options.search_time_max;
        if self.is_foreign_full() { max.max(FOREIGN_FULL_TIME_MAX) } else { max }
    }

    pub(in super::super) fn is_foreign_full(&self) -> bool {
        self.search.as_ref().is_some_and(|search| search.is_foreign_full)
    }

    /// A chain was formed. The search is over if nothing went wrong before.
    pub(in super::super) fn chain_was_formed(&mut self) {
        self.search = self.search.take().filter(|search| !search.failures.is_empty());
    }

    pub(super) fn note_failure(&mut self, peer: PeerId, loss: &SpanLoss, since: Instant) {
        if *loss == SpanLoss::Replay {
            return;
        }
        let is_foreign = self.context.foreign.contains(&peer);
        let name = self.context.peer_name(&peer);
        let is_check = self.is_check();
        let search = self.search.get_or_insert_with(|| SessionSearch::new(since));
        let is_full = matches!(loss, SpanLoss::Failed { kind: FailureKind::Refused, .. });
        search.is_foreign_full = is_foreign && is_full;
        let before = search.failures.insert(name.clone(), loss.to_string());
        if is_foreign && before.is_none() && loss.is_busy() && !is_check {
            warn!(peer = name, "a server is not ready, and is asked again: {loss}");
        }
    }

    /// What peers did, for people; `None` if they did nothing.
    pub(in super::super) fn failures_text(&self) -> Option<String> {
        let failures = &self.search.as_ref()?.failures;
        let told: Vec<_> = failures.iter().take(TOLD_MAX).map(|(peer, why)| format!("{peer}: {why}")).collect();
        let more = failures.len().saturating_sub(told.len());
        let text = told.join("; ");
        (!text.is_empty()).then(|| if more > 0 { format!("{text}; and {more} more") } else { text })
    }
}
