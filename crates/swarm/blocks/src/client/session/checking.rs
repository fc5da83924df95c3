//! Which results of a session are checked.

use std::sync::Arc;
use std::time::Instant;

use directory::ChainSpan;
use tokio::sync::OwnedSemaphorePermit;

use super::super::check::{Check, CheckedRows, is_chosen};
use super::super::forming::OpenSpan;
use super::super::replay_budget::ReplayShare;
use super::super::session_state::SpanId;
use super::Session;

impl Session {
    /// Has the results of some spans checked, after `rows` rows were run, with which the session has `end`.
    pub(super) fn check_some(&self, end: usize, rows: usize) {
        let part = self.context.options.verify;
        if self.is_check() || part <= 0.0 {
            return;
        }
        let first = (random() * self.spans.len() as f64) as usize;
        for offset in 0..self.spans.len() {
            let index = (first + offset) % self.spans.len();
            let peer = self.spans[index].1.peer;
            let times = self.context.times.peer(&peer);
            if !is_chosen(part, rows, end, times.checks > times.differences, random()) {
                continue;
            }
            let Ok(permit) = Arc::clone(&self.checks).try_acquire_owned() else { return };
            if self.context.is_unverifiable(&peer, Instant::now()) {
                continue;
            }
            if let Some((check, share)) = self.check_of(index, end) {
                let context = Arc::clone(&self.context);
                tokio::spawn(async move {
                    check.run(context).await;
                    drop::<(OwnedSemaphorePermit, ReplayShare)>((permit, share));
                });
            }
        }
    }

    /// `None` if the rows are not there, or there is no memory for a copy of them.
    fn check_of(&self, index: usize, end: usize) -> Option<(Check, ReplayShare)> {
        let (context, (id, span)) = (&self.context, self.spans.get(index)?);
        let spans = |spans: &[(SpanId, OpenSpan)]| -> Vec<ChainSpan> {
            spans.iter().map(|(_, span)| ChainSpan { peer: span.peer, layers: span.layers }).collect()
        };
        let outer = [spans(&self.spans[..index]), spans(&self.spans[index + 1..])];
        let (before, phases) = self.state.rows_before_layer(span.layers.start(), end)?;
        // Those rows, what was returned, and what the next one returns.
        let share = context.replay.reserve(3 * size_of_val(before))?;
        let (positions, values) = self.state.returned_by(*id, end)?;
        let returned = CheckedRows { positions, values };
        let (before, phases) = (before.to_vec(), phases.to_vec());
        let events = self.events.clone();
        let check = Check { span: *id, peer: span.peer, layers: span.layers, outer, before, phases, returned, events };
        (!check.returned.positions.is_empty()).then_some((check, share))
    }
}

/// Uniform in 0..1.
pub(in super::super) fn random() -> f64 {
    (engine::fresh_seed() >> 11) as f64 / (1_u64 << 53) as f64
}
