//! `Span`: what the client knows of one span of its chain: which rows its peer has, and which replies are due.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use types::LayerRange;

use crate::wire::PushKey;

/// Runs of one span whose replies are due. With more the client waits: a peer keeps what it has not run in memory, within
/// limits.
pub(in crate::client) const RUNS_DUE_MAX: usize = 4;

/// Names a span, also after it has left the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::client) struct SpanId(pub u64);

/// A span of the chain, with an open session at its peer.
#[derive(Clone, Debug)]
pub(in crate::client) struct NewSpan {
    pub id: SpanId,
    pub layers: LayerRange,
    /// Rows of one run.
    pub rows_max: usize,
    /// It is the last one and returns the logits of a run's last row instead of states. No span feeds such a one.
    pub returns_logits: bool,
    /// With which key the span before passes its rows on to it, if it does.
    pub fed_by: Option<PushKey>,
    /// How long a run of so many rows may take: a fixed part, and one for each row.
    pub wait: Duration,
    pub wait_per_row: Duration,
}

#[derive(Debug)]
pub(super) struct Span {
    pub new: NewSpan,
    /// Rows whose replies have come, or are due.
    pub sent: usize,
    /// Runs whose reply is due.
    pub due: BTreeMap<u64, Due>,
    pub has_replied: bool,
    /// Its own peer has returned the rows after its layers that are known from here on; others those before.
    pub own_from: usize,
    /// Its peer may have rows from here on that were discarded, until it has run others in their place.
    stale_from: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Due {
    /// Which job the rows are.
    pub job: Option<u64>,
    pub position: usize,
    pub rows: usize,
    /// Rows of the reply.
    pub states: usize,
    /// `None` while the rows have not left the span before.
    pub since: Option<Instant>,
    pub is_passed_on: bool,
    /// It is about rows that were discarded since.
    pub is_discarded: bool,
}

impl Due {
    pub fn end(&self) -> usize {
        self.position + self.rows
    }
}

impl Span {
    /// The first `known` rows after its layers came from others.
    pub fn new(known: usize, new: NewSpan) -> Self {
        Self { new, sent: 0, due: BTreeMap::new(), has_replied: false, own_from: known, stale_from: None }
    }

    pub fn is_fed(&self) -> bool {
        self.new.fed_by.is_some()
    }

    /// Discards rows from a position on, and runs with any of them. What else these had is sent again.
    pub fn truncate(&mut self, position: usize) {
        let mut from = position;
        for due in self.due.values_mut().filter(|due| due.end() > position) {
            due.is_discarded = true;
            from = from.min(due.position);
        }
        self.sent = self.sent.min(from);
        self.own_from = self.own_from.min(position);
        self.stale_from = Some(self.stale_from.map_or(from, |known| known.min(from)));
    }

    /// Its peer has run these rows. Those before them it has too, though not all replies may have come.
    pub fn ran(&mut self, due: &Due) {
        if due.is_discarded {
            return;
        }
        if self.sent >= due.position {
            self.sent = self.sent.max(due.end());
        }
        if self.stale_from.is_some_and(|from| due.position <= from && from < due.end()) {
            self.stale_from = None;
        }
    }

    /// Whether rows from a position on can be sent to it, or passed on. What comes from the client and from the span before may
    /// overtake each other, and some may be lost. So runs that were discarded have to be over first, and rows that take their
    /// place come one run at a time: the peer could take discarded rows for those before others.
    pub fn is_in_order(&self, position: usize) -> bool {
        let is_stale = || self.stale_from.is_some_and(|from| from < position);
        !self.is_fed() || (!is_stale() && self.due.values().all(|due| !due.is_discarded))
    }

    /// Rows from this position on are on their way from the span before.
    pub fn is_coming(&self, position: usize) -> bool {
        self.is_fed() && self.due.values().any(|due| due.is_passed_on && !due.is_discarded && due.position == position)
    }

    /// A run whose reply is late.
    pub fn late(&self, now: Instant) -> Option<Due> {
        let limit = |due: &Due| self.new.wait + self.new.wait_per_row * due.rows as u32;
        let is_late = |due: &&Due| due.since.is_some_and(|since| now.saturating_duration_since(since) > limit(due));
        self.due.values().find(is_late).copied()
    }
}
