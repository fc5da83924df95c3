//! Checks: other peers recompute what a span's peer returned. Where two results differ, more peers are asked, until most of them
//! agree.
//!
//! A check runs a session's rows again from the first one on, and compares every row that the peer has returned. Who checks is
//! chosen by chance: the fastest peers could be those that lie together.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use directory::{ChainSpan, Offence, PeerChain, PeerId};
use engine::Phase;
use tokio::sync::mpsc;
use tracing::{debug, warn};
use types::LayerRange;

use super::context::{ClientContext, lock};
use super::job::{Job, JobReply};
use super::link::{SpanEvent, SpanLoss};
use super::session::{CheckedPart, Session, random};
use super::session_state::{JobOutput, SpanId};

/// A row that differs by more, relative to its size, does not do so because sums were taken in another order.
const ROW_DIFFERENCE_MAX: f64 = 0.02;
/// Results that are compared with each other at most, that of the checked peer among them.
const VOTES_MAX: usize = 5;
/// How often others are asked if those that were chosen do not answer.
const ATTEMPTS_MAX: usize = 2;
/// A peer that has not passed a check is checked at once, unless the session has more rows by then.
const FIRST_CHECK_ROWS_MAX: usize = 2048;

/// Whether to check a peer's results, after `rows` rows were run, with which its session has `session_rows`. `chance` is uniform
/// in 0..1.
///
/// A check computes all rows of the session again. So on average `part` of all rows are computed again, however long sessions are,
/// and no peer can know when.
pub(super) fn is_chosen(part: f64, rows: usize, session_rows: usize, has_passed: bool, chance: f64) -> bool {
    let is_first = !has_passed && session_rows <= FIRST_CHECK_ROWS_MAX;
    part > 0.0 && (is_first || chance < part * rows as f64 / session_rows.max(1) as f64)
}

/// Rows after some layers, with their positions in order.
pub(super) struct CheckedRows {
    pub positions: Vec<usize>,
    pub values: Vec<f32>,
}

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
    /// What the peer returned.
    pub returned: CheckedRows,
    /// To the session that uses the span.
    pub events: mpsc::UnboundedSender<(SpanId, SpanEvent)>,
}

/// One row as some peers compute it.
struct Vote {
    peers: Vec<PeerId>,
    row: Vec<f32>,
}

impl Check {
    /// Compares. If no other peers serve the layers, that is told once, and nothing else happens.
    pub async fn run(self, context: Arc<ClientContext>) {
        let mut used = context.foreign.with_logits();
        used.insert(self.peer);
        let Some(first) = self.returned.positions.first().copied() else { return };
        let Some((rows, checkers)) = self.recompute(&context, &used, first..self.phases.len()).await else {
            debug!(peer = %self.peer, "nobody else can check it now");
            if self.others_than_chosen(&context, &used).is_none() {
                context.tell_unverifiable(&self.peer, self.layers);
            }
            return;
        };
        let hidden = context.hidden;
        let expected = |index: usize| {
            let start = (self.returned.positions[index] - first) * hidden;
            &rows[start..start + hidden]
        };
        let found = |index: usize| &self.returned.values[index * hidden..(index + 1) * hidden];
        let indices = 0..self.returned.positions.len();
        let different = indices.clone().find(|&index| !is_same(found(index), expected(index)));
        let is_identical = indices.clone().all(|index| bits(found(index)).eq(bits(expected(index))));
        context.counters.checks.fetch_add(1, Ordering::Relaxed);
        context.counters.identical.fetch_add(is_identical.into(), Ordering::Relaxed);
        context.times.change(self.peer, |times| {
            times.checks += 1;
            times.differences += u64::from(different.is_some());
        });
        debug!(peer = %self.peer, rows = indices.len(), is_identical, "a check");
        let Some(index) = different else { return };
        context.counters.differences.fetch_add(1, Ordering::Relaxed);
        used.extend(&checkers);
        // From here on it is about the first row that differs.
        let mut votes = vec![
            Vote { peers: vec![self.peer], row: found(index).to_vec() },
            Vote { peers: checkers, row: expected(index).to_vec() },
        ];
        let position = self.returned.positions[index];
        while votes.len() < VOTES_MAX && most(&votes).len() * 2 <= VOTES_MAX {
            let Some((row, peers)) = self.recompute(&context, &used, position..position + 1).await else { break };
            used.extend(&peers);
            votes.push(Vote { peers, row });
        }
        self.judge(&context, &votes);
    }

    /// Blames those that disagree with most others.
    fn judge(&self, context: &ClientContext, votes: &[Vote]) {
        let right = most(votes);
        let names = |vote: &Vote| vote.peers.iter().map(|peer| context.peer_name(peer)).collect::<Vec<_>>().join(", ");
        let (layers, peer) = (self.layers, context.peer_name(&self.peer));
        if right.len() * 2 <= votes.len() {
            let peers = votes.iter().map(names).collect::<Vec<_>>().join("; ");
            warn!(peers, %layers, "peers returned different results, and most do not agree");
            votes.iter().flat_map(|vote| &vote.peers).for_each(|peer| context.view.report(*peer, Offence::Slow));
            return;
        }
        for (index, vote) in votes.iter().enumerate().filter(|(index, _)| !right.contains(index)) {
            if index == 0 {
                warn!(peer, %layers, "a peer returned wrong results");
                // The session reports it, and is begun again. An error means that the session has ended.
                if self.events.send((self.span, SpanEvent::Ended(SpanLoss::Wrong))).is_err() {
                    context.view.report(self.peer, Offence::WrongResult);
                }
                continue;
            }
            warn!(peer = names(vote), %layers, "a peer that was to check another one returned wrong results");
            // Of several peers one after the other, nobody knows which one it was.
            let offence = if vote.peers.len() == 1 { Offence::WrongResult } else { Offence::Slow };
            vote.peers.iter().for_each(|peer| context.view.report(*peer, offence));
        }
    }

    /// Rows after the layers, as others compute them, and who that was.
    async fn recompute(
        &self,
        context: &Arc<ClientContext>,
        without: &HashSet<PeerId>,
        rows: std::ops::Range<usize>,
    ) -> Option<(Vec<f32>, Vec<PeerId>)> {
        let mut without = without.clone();
        for _ in 0..ATTEMPTS_MAX {
            let excluded = self.others_than_chosen(context, &without)?;
            let (states, used) = self.recompute_without(context, excluded, rows.clone()).await;
            if let Some(states) = states {
                return Some((states, used));
            }
            without.extend(used);
        }
        None
    }

    /// All peers but some, chosen by chance, that can run the layers. `None` if nobody can. KwaaiNet's servers keep a session for a
    /// while after its end, so they are chosen if there are no others; so are doubtful peers, of which thousands may not be there.
    fn others_than_chosen(&self, context: &ClientContext, without: &HashSet<PeerId>) -> Option<HashSet<PeerId>> {
        let checked = ChainSpan { peer: self.peer, layers: self.layers };
        let chain = PeerChain { spans: [&self.outer[0][..], &[checked], &self.outer[1]].concat(), token_seconds: 0.0 };
        let request = context.request(self.phases.len());
        let is_enough =
            |excluded: &HashSet<PeerId>| context.view.replace(request, excluded, &chain, self.layers).is_ok();
        let mut others = context.view.serving(&context.model, self.layers);
        others.retain(|(peer, _)| !without.contains(peer));
        let excluding = |kept: &[PeerId]| {
            let kept: HashSet<_> = kept.iter().collect();
            let excluded = others.iter().map(|(peer, _)| peer).filter(|peer| !kept.contains(peer));
            without.iter().chain(excluded).copied().collect::<HashSet<_>>()
        };
        let choices = [(false, false), (true, false), (true, true)];
        let mut kept = choices.into_iter().find_map(|(has_foreign, has_doubtful)| {
            let is_wanted = |(peer, is_doubtful): &&(PeerId, bool)| {
                (has_foreign || !context.foreign.contains(peer)) && (has_doubtful || !is_doubtful)
            };
            let kept: Vec<_> = others.iter().filter(is_wanted).map(|(peer, _)| *peer).collect();
            is_enough(&excluding(&kept)).then_some(kept)
        })?;
        for index in (1..kept.len()).rev() {
            kept.swap(index, (random() * (index + 1) as f64) as usize);
        }
        while kept.len() > 1 {
            let halves: [_; 2] = kept.split_at(kept.len() / 2).into();
            let half = halves.into_iter().find(|half| is_enough(&excluding(half))).map(<[_]>::to_vec);
            match half {
                Some(half) => kept = half,
                None => break,
            }
        }
        Some(excluding(&kept))
    }

    async fn recompute_without(
        &self,
        context: &Arc<ClientContext>,
        excluded: HashSet<PeerId>,
        rows: std::ops::Range<usize>,
    ) -> (Option<Vec<f32>>, Vec<PeerId>) {
        let (jobs, received) = mpsc::unbounded_channel();
        let hidden = context.hidden;
        let mut answers = Vec::new();
        let mut start = 0;
        while start < rows.end {
            let phase = self.phases[start];
            let same = self.phases[start..rows.end].iter().take_while(|other| **other == phase).count();
            let end = start + same.min(context.rows_max);
            let state_rows = end.saturating_sub(start.max(rows.start));
            let (reply, answer) = JobReply::new(None);
            let values = self.before[start * hidden..end * hidden].to_vec();
            // The receiver is there until the session runs.
            let _ = jobs.send(Job { position: start, phase, rows: values, state_rows, takes_logits: false, reply });
            answers.push(answer);
            start = end;
        }
        let peers = Arc::<Mutex<Vec<PeerId>>>::default();
        let part =
            CheckedPart { range: self.layers, outer: self.outer.clone(), excluded, used: Some(Arc::clone(&peers)) };
        let session = tokio::spawn(Session::run_check(Arc::clone(context), self.phases.len(), part, received));
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
        // An error means that it panicked, which was told.
        let _ = session.await;
        let states = states.filter(|states| states.len() == rows.len() * hidden);
        (states, lock(&peers).clone())
    }
}

/// The indices of the largest set of votes that agree with one of them.
fn most(votes: &[Vote]) -> Vec<usize> {
    let agreeing = |vote: &Vote| -> Vec<usize> {
        (0..votes.len()).filter(|&index| is_same(&vote.row, &votes[index].row)).collect()
    };
    votes.iter().map(agreeing).max_by_key(Vec::len).unwrap_or_default()
}

/// Whether two results of one row are the same, but for how they were rounded.
fn is_same(a: &[f32], b: &[f32]) -> bool {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let size = |row: &[f32]| norm(&mut row.iter().map(|value| f64::from(*value)));
    let apart = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    a.len() == b.len() && apart <= ROW_DIFFERENCE_MAX * size(a).min(size(b))
}

fn bits(row: &[f32]) -> impl Iterator<Item = u32> {
    row.iter().map(|value| value.to_bits())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        }
    }

    /// Sessions of a prompt and an answer, until a peer that returns one wrong row in `wrong_every` is found. Returns how many tokens
    /// that took, and how many rows were computed again for each row that was run at the peer.
    fn find(random: &mut Random, part: f64, prompt: usize, answer: usize, wrong_every: f64) -> (usize, f64) {
        let (mut tokens, mut again) = (0, 0);
        loop {
            let (mut session_rows, mut is_wrong) = (0, false);
            for rows in std::iter::once(prompt).chain(std::iter::repeat_n(1, answer)) {
                session_rows += rows;
                tokens += rows;
                for _ in 0..rows {
                    is_wrong |= random.next() * wrong_every < 1.0;
                }
                if is_chosen(part, rows, session_rows, true, random.next()) {
                    again += session_rows;
                    if is_wrong {
                        return (tokens, again as f64 / tokens as f64);
                    }
                }
            }
        }
    }

    /// What docs/swarm.md says of the default.
    #[test]
    fn a_peer_that_lies_now_and_then_is_found_soon_at_the_cost_of_a_part_of_the_rows() {
        let mut random = Random(7);
        let runs: Vec<_> = (0..2000).map(|_| find(&mut random, 0.1, 100, 400, 50.0)).collect();
        let mean = runs.iter().map(|(tokens, _)| *tokens as f64).sum::<f64>() / runs.len() as f64;
        println!("found after {mean:.0} tokens on average");
        assert!(mean < 2500.0, "{mean}");
        // Nobody who is honest makes checks end early.
        let (mut rows, mut again) = (0, 0);
        for length in [50, 500, 5000] {
            for _ in 0..2000 {
                for session_rows in 1..=length {
                    rows += 1;
                    again += if is_chosen(0.1, 1, session_rows, true, random.next()) { session_rows } else { 0 };
                }
            }
        }
        let part = again as f64 / rows as f64;
        assert!((0.08..0.12).contains(&part), "{part}");
    }

    #[test]
    fn a_new_peer_is_checked_at_once_and_nobody_without_verify() {
        assert!(is_chosen(0.1, 100, 100, false, 0.99) && !is_chosen(0.1, 100, 100, true, 0.99));
        assert!(!is_chosen(0.1, 1, FIRST_CHECK_ROWS_MAX + 1, false, 0.5));
        assert!(!is_chosen(0.0, 1, 1, false, 0.0));
    }

    #[test]
    fn a_row_is_compared_with_its_own_size() {
        assert!(is_same(&[1.0, 1000.0], &[1.0, 1000.1]));
        assert!(!is_same(&[1.0, 1.0], &[1.0, 1.1]));
        assert!(is_same(&[0.0; 2], &[0.0; 2]) && !is_same(&[0.0; 2], &[1e-9; 2]));
        assert!(!is_same(&[1.0], &[1.0, 2.0]));
        assert!(!is_same(&[1e30, 0.0], &[1.0, 0.0]), "also if one is huge");
    }

    #[test]
    fn votes_that_agree_are_counted() {
        let votes = |rows: &[f32]| -> Vec<Vote> {
            rows.iter().map(|&value| Vote { peers: Vec::new(), row: vec![value] }).collect()
        };
        assert_eq!(most(&votes(&[2.0, 1.0, 1.0])), [1, 2]);
        assert_eq!(most(&votes(&[2.0, 1.0, 2.0, 1.0, 1.0])), [1, 3, 4]);
        assert_eq!(most(&votes(&[3.0, 2.0, 1.0])).len(), 1);
    }
}
