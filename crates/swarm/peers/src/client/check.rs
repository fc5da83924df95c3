//! Spot checks: other peers recompute what a span's peer returned. Where two results differ, a third decides who was wrong.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, mpsc as sync};

use engine::Phase;
use swarm::{ChainSpan, Offence, PeerChain, PeerId};
use tokio::sync::mpsc;
use tracing::{debug, warn};
use types::LayerRange;

use super::context::{ClientContext, lock};
use super::link::{SpanEvent, SpanLoss};
use super::session::{CheckedPart, Job, Session};
use super::session_state::{JobOutput, SpanId};

/// Results that differ by more, relative to their size, are not due to another order of sums.
const DIFFERENCE_MAX: f64 = 0.01;

/// What a span's peer has computed.
pub(super) struct Check {
    pub span: SpanId,
    pub peer: PeerId,
    pub layers: LayerRange,
    /// The spans before and after it.
    pub outer: [Vec<ChainSpan>; 2],
    /// The rows before its layers, from the first one on.
    pub before: Vec<f32>,
    pub phases: Vec<Phase>,
    /// The states after its layers, of the last rows.
    pub after: Vec<f32>,
    /// To the session that uses the span.
    pub events: mpsc::UnboundedSender<(SpanId, SpanEvent)>,
}

impl Check {
    /// Compares. Nothing happens if no other peers serve the layers.
    pub async fn run(self, context: Arc<ClientContext>) {
        let mut used = context.foreign.with_logits();
        used.insert(self.peer);
        let Some((second, checkers)) = self.recompute(&context, &used).await else {
            debug!(peer = %self.peer, "nobody else can check it");
            return;
        };
        let is_same_as_second = is_same(&self.after, &second);
        context.counters.checks.fetch_add(1, Ordering::Relaxed);
        context.times.change(self.peer, |times| {
            times.checks += 1;
            times.differences += u64::from(!is_same_as_second);
        });
        if is_same_as_second {
            return;
        }
        context.counters.differences.fetch_add(1, Ordering::Relaxed);
        used.extend(&checkers);
        let third = self.recompute(&context, &used).await.map(|(third, _)| third);
        let checked_by = checkers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let agrees = |with: &[f32]| third.as_deref().is_some_and(|third| is_same(third, with));
        if agrees(&second) {
            warn!(peer = %self.peer, layers = %self.layers, "a peer returned wrong results");
            // The session reports it, and replaces the span. An error means that the session has ended.
            let wrong = (self.span, SpanEvent::Ended(SpanLoss::Wrong));
            if self.events.send(wrong).is_err() {
                context.view.report(self.peer, Offence::WrongResult);
            }
        } else if agrees(&self.after) {
            warn!(checkers = checked_by, layers = %self.layers, "a peer that was to check another one returned wrong results");
            checkers.iter().for_each(|peer| context.view.report(*peer, Offence::WrongResult));
        } else {
            warn!(peer = %self.peer, checkers = checked_by, layers = %self.layers, "peers returned different results");
            checkers.iter().chain([&self.peer]).for_each(|peer| context.view.report(*peer, Offence::Slow));
        }
    }

    /// The states as others compute them, and who that was.
    async fn recompute(
        &self,
        context: &Arc<ClientContext>,
        without: &HashSet<PeerId>,
    ) -> Option<(Vec<f32>, Vec<PeerId>)> {
        // A session would wait for a peer that can, and other checks for it.
        let checked = ChainSpan { peer: self.peer, layers: self.layers };
        let spans = [&self.outer[0][..], &[checked], &self.outer[1]].concat();
        let chain = PeerChain { spans, token_seconds: 0.0 };
        context.view.replace(context.request(self.phases.len()), without, &chain, self.layers).ok()?;
        let (jobs, received) = mpsc::unbounded_channel();
        let hidden = context.hidden;
        let (rows, state_rows) = (self.phases.len(), self.after.len() / hidden);
        let mut answers = Vec::new();
        let mut start = 0;
        while start < rows {
            let phase = self.phases[start];
            let same = self.phases[start..].iter().take_while(|other| **other == phase).count();
            let end = start + same.min(context.rows_max);
            let wanted = end.saturating_sub(start.max(rows - state_rows));
            let (reply, answer) = sync::channel();
            let values = self.before[start * hidden..end * hidden].to_vec();
            let job = Job { position: start, phase, rows: values, state_rows: wanted, takes_logits: false, reply };
            jobs.send(job).ok()?;
            answers.push(answer);
            start = end;
        }
        let peers = Arc::<Mutex<Vec<PeerId>>>::default();
        let part = CheckedPart {
            range: self.layers,
            outer: self.outer.clone(),
            excluded: without.clone(),
            used: Some(Arc::clone(&peers)),
        };
        let session = Session::run_check(Arc::clone(context), rows, part, received);
        let session = tokio::spawn(session);
        let collect = move || {
            let mut states = Vec::new();
            for answer in answers {
                let Ok(JobOutput::States(rows)) = answer.recv().ok()? else { return None };
                states.extend(rows);
            }
            Some(states)
        };
        let states = tokio::task::spawn_blocking(collect).await.ok().flatten();
        drop(jobs);
        let _ = session.await;
        let peers = lock(&peers).clone();
        Some((states?, peers))
    }
}

fn is_same(a: &[f32], b: &[f32]) -> bool {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let size = norm(&mut a.iter().map(|value| f64::from(*value)));
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    a.len() == b.len() && apart <= DIFFERENCE_MAX * size
}
