//! `ClientTimes`: how long steps take, in all and at each peer, and what each peer did, for people and for metrics.
//!
//! A peer tells how long rows waited and ran there. What is left of the time between two replies is the way: clocks of different
//! machines are not compared. A peer that tells more than has passed is cut to what has passed. Nothing is decided by what peers tell:
//! chains are planned with times that the client measured ([`add_layer_time`](super::context::ClientContext::add_layer_time)).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use chains::MeanTime;
use directory::PeerId;

use crate::wire::{Returned, Run};

/// Peers that are remembered. With more, the one that was used last the longest ago is forgotten.
pub(super) const PEERS_MAX: usize = 1024;

/// Steps of sessions, but for those in which a span was replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTimes {
    /// From a job to its states.
    pub step: MeanTime,
    /// Its part in which no peer computed, and rows waited at none.
    pub between: MeanTime,
    /// How long sessions looked for other peers, for each time that they replaced a span.
    pub replacing: MeanTime,
}

/// What one peer did for this client, except for spot checks of others.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PeerTimes {
    /// As the peer says.
    pub compute: MeanTime,
    /// Rows that waited there for those of others.
    pub queue: MeanTime,
    /// From the reply of the peer before, or from the start of the step, to this peer's reply, without the two above.
    pub way: MeanTime,
    /// Activations from this client to the peer, back from it, and from it to the next peer.
    pub sent_bytes: u64,
    pub returned_bytes: u64,
    pub passed_on_bytes: u64,
    /// Sessions that it did not open, or that ended by its fault.
    pub failures: u64,
    /// Spot checks of its results, and those that found a difference.
    pub checks: u64,
    pub differences: u64,
}

/// Shared by the sessions, which record, and whoever shows it.
#[derive(Debug, Default)]
pub struct ClientTimes(Mutex<Recorded>);

#[derive(Debug, Default)]
struct Recorded {
    steps: StepTimes,
    peers: HashMap<PeerId, (PeerTimes, Option<Instant>)>,
}

/// The times of a job that is not done.
#[derive(Clone, Copy, Debug)]
pub(super) struct JobTimes {
    started: Instant,
    /// When the last reply about it came.
    last: Instant,
    /// What peers computed, and what rows waited there.
    busy: Duration,
    /// A span was replaced meanwhile, so its times say nothing about the chain.
    is_disturbed: bool,
}

/// The times of one run at a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunTimes {
    pub compute: Duration,
    pub queue: Duration,
    pub way: Duration,
}

impl PeerTimes {
    fn add(&mut self, run: &RunTimes) {
        self.compute.add(run.compute);
        self.queue.add(run.queue);
        self.way.add(run.way);
    }
}

impl JobTimes {
    pub fn new(now: Instant) -> Self {
        Self { started: now, last: now, busy: Duration::ZERO, is_disturbed: false }
    }

    pub fn disturb(&mut self) {
        self.is_disturbed = true;
    }

    /// A peer returned rows of the job, and told its times. `None` if they are not to be recorded.
    pub fn returned(&mut self, now: Instant, compute: Duration, queue: Duration) -> Option<RunTimes> {
        let passed = now.saturating_duration_since(self.last);
        let compute = compute.min(passed);
        let queue = queue.min(passed - compute);
        self.last = now;
        self.busy += compute + queue;
        (!self.is_disturbed).then_some(RunTimes { compute, queue, way: passed - compute - queue })
    }
}

impl ClientTimes {
    pub(super) fn record_step(&self, job: &JobTimes, now: Instant) {
        if job.is_disturbed {
            return;
        }
        let step = now.saturating_duration_since(job.started);
        let mut recorded = self.lock();
        recorded.steps.step.add(step);
        recorded.steps.between.add(step.saturating_sub(job.busy));
    }

    pub(super) fn record_replacing(&self, time: Duration) {
        self.lock().steps.replacing.add(time);
    }

    pub(super) fn record_sent(&self, peer: PeerId, run: &Run) {
        let bytes = run.activations.bytes() as u64;
        self.change(peer, |times| times.sent_bytes += bytes);
    }

    /// A peer's reply, and the job that it is about, if that is not done.
    pub(super) fn record_reply(&self, peer: PeerId, returned: &Returned, job: Option<&mut JobTimes>) {
        let run = job.and_then(|job| job.returned(Instant::now(), returned.compute, returned.queued));
        let bytes = returned.states.bytes() as u64;
        self.change(peer, |times| {
            times.returned_bytes += bytes;
            times.passed_on_bytes += returned.passed_on.map_or(0, |_| bytes);
            run.iter().for_each(|run| times.add(run));
        });
    }

    /// Changes what is known of a peer, which is used now.
    pub(super) fn change(&self, peer: PeerId, change: impl FnOnce(&mut PeerTimes)) {
        let mut recorded = self.lock();
        if recorded.peers.len() >= PEERS_MAX && !recorded.peers.contains_key(&peer) {
            let oldest = recorded.peers.iter().min_by_key(|(_, (_, used))| *used).map(|(peer, _)| *peer);
            oldest.map(|oldest| recorded.peers.remove(&oldest));
        }
        let (times, used) = recorded.peers.entry(peer).or_default();
        *used = Some(Instant::now());
        change(times);
    }

    pub fn steps(&self) -> StepTimes {
        self.lock().steps
    }

    pub fn peer(&self, peer: &PeerId) -> PeerTimes {
        self.lock().peers.get(peer).map(|(times, _)| *times).unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn peer(number: u16) -> PeerId {
        PeerId::new(&number.to_le_bytes()).unwrap()
    }

    #[test]
    fn a_step_is_what_peers_computed_what_waited_and_the_way() {
        let (times, start) = (ClientTimes::default(), Instant::now());
        let mut job = JobTimes::new(start);
        let first = job.returned(start + 10 * MS, 3 * MS, 2 * MS).unwrap();
        assert_eq!(first, RunTimes { compute: 3 * MS, queue: 2 * MS, way: 5 * MS });
        let second = job.returned(start + 14 * MS, 3 * MS, Duration::ZERO).unwrap();
        assert_eq!(second, RunTimes { compute: 3 * MS, queue: Duration::ZERO, way: MS });
        times.change(peer(1), |times| times.add(&first));
        times.change(peer(2), |times| times.add(&second));
        times.record_step(&job, start + 16 * MS);
        let StepTimes { step, between, .. } = times.steps();
        assert_eq!((step.count, step.mean_s, step.total_s), (1, 0.016, 0.016));
        assert_eq!(between.mean_s, 0.008, "6 ms before the replies, 2 ms after the last one");
        assert_eq!((times.peer(&peer(1)).way.mean_s, times.peer(&peer(2)).compute.mean_s), (0.005, 0.003));
        assert_eq!(times.peer(&peer(3)), PeerTimes::default());
    }

    #[test]
    fn a_peer_cannot_tell_more_time_than_has_passed() {
        let start = Instant::now();
        let mut job = JobTimes::new(start);
        let run = job.returned(start + 10 * MS, Duration::from_secs(4000), Duration::from_secs(4000)).unwrap();
        assert_eq!(run, RunTimes { compute: 10 * MS, queue: Duration::ZERO, way: Duration::ZERO });
    }

    #[test]
    fn a_step_in_which_a_span_was_replaced_is_not_counted() {
        let (times, start) = (ClientTimes::default(), Instant::now());
        let mut job = JobTimes::new(start);
        job.disturb();
        assert_eq!(job.returned(start + MS, MS, MS), None);
        times.record_step(&job, start + 2 * MS);
        assert_eq!(times.steps(), StepTimes::default());
    }

    #[test]
    fn no_more_peers_are_remembered_than_the_limit() {
        let times = ClientTimes::default();
        for number in 0..PEERS_MAX as u16 + 10 {
            times.change(peer(number), |times| times.checks += 1);
        }
        assert_eq!(times.lock().peers.len(), PEERS_MAX);
        assert_eq!(times.peer(&peer(PEERS_MAX as u16 + 9)).checks, 1, "the latest is there");
        assert_eq!(times.peer(&peer(0)).checks, 0, "the oldest is not");
    }
}
