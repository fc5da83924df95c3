//! `Peers`: the connections between the ranks of one `init`. They stay open as long as the group exists.
//!
//! Rank 0 has a connection to each of the other ranks. The connections carry no activations. They serve three purposes:
//!
//! - **Agreement.** Before a step, each rank sends rank 0 a digest of the step and whether it can run it. Rank 0
//!   replies when it has heard from all ranks. So a step that one rank rejects is rejected by all, before any of them
//!   has changed its cache, and a rank that got no step, or another one, is detected.
//! - **Loss.** A connection that ends, ends the group. A thread watches the connections, also while a collective runs.
//! - **Renewal.** A step that fails while it runs ends the epoch. When every rank has reported that it left that epoch,
//!   rank 0 begins the next one on the same segment.
//!
//! The watching thread also ends the epoch if a step completes no collective for the timeout.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use types::Rank;

use collectives::CommError;
use collectives::shared_memory::{Abort, Epoch, Segment, ShmComm};

/// How often a rank that waits for a message checks whether the epoch has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long this rank waits to see the closed connection of a rank that another rank has reported lost.
const HANG_UP_GRACE: Duration = Duration::from_millis(50);

/// How long the rest of a message may take. Ranks write a message at once.
const MESSAGE_REST_MAX: Duration = Duration::from_secs(1);

const MESSAGE_BYTES: usize = 48;

/// A hash of the request that the ranks agree on.
pub type RequestDigest = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("rank {0} refused this request, its own answer says why")]
    Refused(Rank),
    #[error("rank {rank} did not come to this request within {} s; {CLEAR}", waited.as_secs_f32())]
    Missing { rank: Rank, waited: Duration },
    #[error("rank {0} was given another request than the others; {CLEAR}")]
    OutOfStep(Rank),
    #[error("the collectives of a step did not get on for {} s; {CLEAR}", waited.as_secs_f32())]
    Stalled { waited: Duration },
    #[error("{0}; {CLEAR}")]
    Ended(CommError),
    #[error("rank {0} is gone: the group needs a new `init`")]
    Gone(Rank),
    #[error("rank {rank} was not ready for a new epoch within {} s: `clear_kv_cache` goes to all ranks", waited.as_secs_f32())]
    NotRenewed { rank: Rank, waited: Duration },
    #[error("the leader is gone")]
    NoLeader,
    #[error(transparent)]
    Group(#[from] CommError),
}

const CLEAR: &str = "`clear_kv_cache` on all ranks makes the group usable again";

/// The kinds of message on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// From another rank: it got the step `digest` and can run it.
    Ready,
    /// From another rank: it got the step `digest` and has rejected it.
    Refused,
    /// From rank 0: run the step.
    Run,
    /// From rank 0: `rank` has rejected the step.
    Rejected,
    /// From rank 0: nothing came from `rank` within the timeout. The epoch is over.
    Missing,
    /// From rank 0: `rank` got another request. The epoch is over.
    OutOfStep,
    /// From another rank: it has left `epoch`, which has ended.
    Left,
    /// From rank 0: `epoch` begins.
    Begin,
}

const KINDS: [Kind; 8] =
    [Kind::Ready, Kind::Refused, Kind::Run, Kind::Rejected, Kind::Missing, Kind::OutOfStep, Kind::Left, Kind::Begin];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerMessage {
    kind: Kind,
    rank: u16,
    epoch: u32,
    /// Number of agreements in this epoch.
    round: u64,
    digest: RequestDigest,
}

impl PeerMessage {
    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[0] = KINDS.iter().position(|&kind| kind == self.kind).expect("the list has all kinds") as u8;
        bytes[2..4].copy_from_slice(&self.rank.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.round.to_le_bytes());
        bytes[16..].copy_from_slice(&self.digest);
        bytes
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        fn part<const LEN: usize>(bytes: &[u8; MESSAGE_BYTES], start: usize) -> [u8; LEN] {
            std::array::from_fn(|index| bytes[start + index])
        }
        Some(Self {
            kind: *KINDS.get(usize::from(bytes[0]))?,
            rank: u16::from_le_bytes(part(bytes, 2)),
            epoch: u32::from_le_bytes(part(bytes, 4)),
            round: u64::from_le_bytes(part(bytes, 8)),
            digest: part(bytes, 16),
        })
    }
}

#[derive(Debug)]
pub struct Peers {
    rank: Rank,
    segment: Segment,
    connections: Vec<(Rank, UnixStream)>,
    timeout: Duration,
    epoch: Epoch,
    round: u64,
    /// This rank has left `epoch`, which has ended, and waits for the next.
    is_out: bool,
    /// On rank 0, by connection: which ranks have reported the same.
    are_out: Vec<bool>,
    shared: Arc<Shared>,
    /// The watching thread has the other end, and ends when this one is dropped.
    _alive: UnixStream,
}

/// Shared by the watching thread and the rank.
#[derive(Debug)]
struct Shared(Mutex<State>);

#[derive(Debug)]
struct State {
    abort: Abort,
    is_stepping: bool,
    /// A step of this epoch made no progress for longer than the timeout.
    has_stalled: bool,
    gone: Option<Rank>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Peers {
    /// Watches the connections: on rank 0 those to all others, on each other rank the one to rank 0. `progress` counts
    /// collectives.
    pub fn new(
        rank: Rank,
        segment: Segment,
        connections: Vec<(Rank, UnixStream)>,
        timeout: Duration,
        progress: impl Fn() -> u64 + Send + 'static,
    ) -> io::Result<Self> {
        let epoch = segment.epoch();
        let (alive, ended) = UnixStream::pair()?;
        let state = State { abort: segment.abort(epoch), is_stepping: false, has_stalled: false, gone: None };
        let shared = Arc::new(Shared(Mutex::new(state)));
        let mut watched = Vec::new();
        for (peer, stream) in &connections {
            stream.set_read_timeout(Some(MESSAGE_REST_MAX))?;
            stream.set_write_timeout(Some(MESSAGE_REST_MAX))?;
            watched.push((*peer, stream.try_clone()?));
        }
        let watch = PeerWatch { rank, connections: watched, shared: Arc::clone(&shared), ended, timeout };
        thread::Builder::new().name("peers".into()).spawn(move || watch.run(&progress))?;
        let are_out = vec![false; connections.len()];
        Ok(Self { rank, segment, connections, timeout, epoch, round: 0, is_out: false, are_out, shared, _alive: alive })
    }

    /// Agrees with the other ranks on the request of `digest`: all run it, or none. A rank that `is_ready` waits for
    /// the others; one that is not only sends its rejection.
    pub fn agree(&mut self, digest: RequestDigest, is_ready: bool) -> Result<(), PeerError> {
        self.check()?;
        self.round += 1;
        match self.rank.index() {
            0 if is_ready => self.collect_votes(digest),
            0 => self.broadcast(Kind::Rejected, self.rank),
            _ => self.vote(digest, is_ready),
        }
    }

    /// Until the returned value is dropped, collectives without progress end the epoch.
    pub fn stepping(&self) -> StepGuard {
        self.shared.lock().is_stepping = true;
        StepGuard(Arc::clone(&self.shared))
    }

    /// If the epoch has ended, reports that this rank has left it. Does not wait.
    pub fn leave_epoch(&mut self) {
        if self.is_out || self.shared.lock().abort.cause().is_none() {
            return;
        }
        self.is_out = true;
        if self.rank.index() != 0 {
            // If rank 0 is gone, the watching thread detects it.
            let _ = self.send(0, Kind::Left, self.rank, [0; 32]);
        }
    }

    /// This rank's communicator of the next epoch, if it has left the previous one. Waits until the others have left
    /// it.
    pub fn renew(&mut self, is_over: &dyn Fn() -> bool) -> Result<Option<ShmComm>, PeerError> {
        if !self.is_out {
            return Ok(None);
        }
        let epoch = if self.rank.index() == 0 { self.begin_epoch(is_over)? } else { self.await_epoch(is_over)? };
        (self.epoch, self.round, self.is_out) = (epoch, 0, false);
        self.are_out.fill(false);
        let mut state = self.shared.lock();
        if let Some(rank) = state.gone {
            return Err(PeerError::Gone(rank));
        }
        (state.abort, state.has_stalled) = (self.segment.abort(epoch), false);
        drop(state);
        Ok(Some(self.segment.join(self.rank, epoch)?))
    }

    fn begin_epoch(&mut self, is_over: &dyn Fn() -> bool) -> Result<Epoch, PeerError> {
        let deadline = Instant::now() + self.timeout;
        while let Some(index) = self.are_out.iter().position(|is_out| !is_out) {
            let pending: Vec<_> = (0..self.are_out.len()).filter(|&index| !self.are_out[index]).collect();
            let Some((from, message)) = self.receive(&pending, deadline, is_over)? else {
                return Err(PeerError::NotRenewed { rank: self.connections[index].0, waited: self.timeout });
            };
            self.are_out[from] |= message.kind == Kind::Left && message.epoch == self.epoch.0;
        }
        self.epoch = self.segment.begin_epoch()?;
        self.broadcast(Kind::Begin, self.rank)?;
        Ok(self.epoch)
    }

    fn await_epoch(&mut self, is_over: &dyn Fn() -> bool) -> Result<Epoch, PeerError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let Some((_, message)) = self.receive(&[0], deadline, is_over)? else {
                return Err(PeerError::NotRenewed { rank: self.connections[0].0, waited: self.timeout });
            };
            if message.kind == Kind::Begin && message.epoch > self.epoch.0 {
                return Ok(Epoch(message.epoch));
            }
        }
    }

    fn collect_votes(&mut self, digest: RequestDigest) -> Result<(), PeerError> {
        let deadline = Instant::now() + self.timeout;
        let mut pending: Vec<_> = (0..self.connections.len()).collect();
        while let Some(&first) = pending.first() {
            let Some((from, message)) = self.receive(&pending, deadline, &|| false)? else {
                let rank = self.connections[first].0;
                self.end_epoch(Kind::Missing, rank);
                return Err(PeerError::Missing { rank, waited: self.timeout });
            };
            let rank = self.connections[from].0;
            if message.epoch != self.epoch.0 || message.round < self.round {
                continue; // about a request that this rank has rejected, or that failed
            }
            match message.kind {
                Kind::Ready if message.round == self.round && message.digest == digest => {
                    pending.retain(|&index| index != from);
                }
                Kind::Refused if message.round == self.round => {
                    self.broadcast(Kind::Rejected, rank)?;
                    return Err(PeerError::Refused(rank));
                }
                _ => {
                    self.end_epoch(Kind::OutOfStep, rank);
                    return Err(PeerError::OutOfStep(rank));
                }
            }
        }
        self.broadcast(Kind::Run, self.rank)
    }

    fn vote(&mut self, digest: RequestDigest, is_ready: bool) -> Result<(), PeerError> {
        let deadline = Instant::now() + self.timeout;
        let kind = if is_ready { Kind::Ready } else { Kind::Refused };
        self.send(0, kind, self.rank, digest)?;
        if !is_ready {
            return Ok(());
        }
        loop {
            let Some((_, message)) = self.receive(&[0], deadline, &|| false)? else {
                let rank = self.connections[0].0;
                self.shared.lock().abort.stop();
                return Err(PeerError::Missing { rank, waited: self.timeout });
            };
            let rank = self.rank.world().rank(message.rank).unwrap_or(self.connections[0].0);
            match message.kind {
                _ if message.epoch != self.epoch.0 => {}
                Kind::Missing => return Err(PeerError::Missing { rank, waited: self.timeout }),
                Kind::OutOfStep => return Err(PeerError::OutOfStep(rank)),
                Kind::Run if message.round == self.round => return Ok(()),
                Kind::Rejected if message.round == self.round => return Err(PeerError::Refused(rank)),
                _ => {} // the reply to a request that this rank has rejected
            }
        }
    }

    /// Why the epoch is over. A lost rank has failed or its process is gone; the closed connection shows a little
    /// later.
    pub fn why_ended(&self) -> PeerError {
        let until = Instant::now() + HANG_UP_GRACE;
        loop {
            let state = self.shared.lock();
            let cause = state.abort.cause();
            match (state.gone, cause) {
                (Some(rank), _) => return PeerError::Gone(rank),
                (None, _) if state.has_stalled => return PeerError::Stalled { waited: self.timeout },
                (None, Some(CommError::Lost(_))) if Instant::now() < until => {}
                (None, cause) => return PeerError::Ended(cause.unwrap_or(CommError::Aborted)),
            }
            drop(state);
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Checks that no rank is gone and the epoch has not ended.
    fn check(&self) -> Result<(), PeerError> {
        let is_over = self.gone().is_some() || self.shared.lock().abort.cause().is_some();
        if is_over { Err(self.why_ended()) } else { Ok(()) }
    }

    fn gone(&self) -> Option<Rank> {
        self.shared.lock().gone
    }

    fn end_epoch(&self, kind: Kind, rank: Rank) {
        self.shared.lock().abort.stop();
        // A rank that cannot be reached sees in the segment that the epoch has ended, or is gone.
        let _ = self.broadcast(kind, rank);
    }

    fn broadcast(&self, kind: Kind, rank: Rank) -> Result<(), PeerError> {
        (0..self.connections.len()).try_for_each(|index| self.send(index, kind, rank, [0; 32]))
    }

    fn send(&self, index: usize, kind: Kind, rank: Rank, digest: RequestDigest) -> Result<(), PeerError> {
        let message = PeerMessage { kind, rank: rank.index() as u16, epoch: self.epoch.0, round: self.round, digest };
        let (peer, mut stream) = (self.connections[index].0, &self.connections[index].1);
        stream.write_all(&message.encode()).map_err(|_| PeerError::Gone(self.gone().unwrap_or(peer)))
    }

    /// The next message of one of these connections; `None` at the deadline. Unless this rank has left the epoch, the
    /// end of the epoch ends the wait.
    fn receive(
        &self,
        pending: &[usize],
        deadline: Instant,
        is_over: &dyn Fn() -> bool,
    ) -> Result<Option<(usize, PeerMessage)>, PeerError> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let flags = PollFlags::IN;
            let mut polled: Vec<_> =
                pending.iter().map(|&index| PollFd::new(&self.connections[index].1, flags)).collect();
            // An interrupted poll counts as one that ended early.
            let _ = poll(&mut polled, Some(&timespec(left.min(LOOK_EVERY))));
            if let Some(at) = polled.iter().position(|polled| !polled.revents().is_empty()) {
                return self.read(pending[at]).map(Some);
            }
            match self.gone() {
                Some(rank) => return Err(PeerError::Gone(rank)),
                // Between two epochs the old one has ended, so there is nothing to check.
                None if self.is_out => {}
                None => self.check()?,
            }
            if is_over() {
                return Err(PeerError::NoLeader);
            }
            if left.is_zero() {
                return Ok(None);
            }
        }
    }

    fn read(&self, index: usize) -> Result<(usize, PeerMessage), PeerError> {
        let (peer, mut stream) = (self.connections[index].0, &self.connections[index].1);
        let mut bytes = [0; MESSAGE_BYTES];
        let read = stream.read_exact(&mut bytes).ok().and_then(|()| PeerMessage::decode(&bytes));
        // The watching thread knows which rank was lost first.
        let gone = || match self.why_ended() {
            error @ PeerError::Gone(_) => error,
            _ => PeerError::Gone(peer),
        };
        read.map(|message| (index, message)).ok_or_else(gone)
    }
}

/// See [`Peers::stepping`].
#[derive(Debug)]
pub struct StepGuard(Arc<Shared>);

impl Drop for StepGuard {
    fn drop(&mut self) {
        self.0.lock().is_stepping = false;
    }
}

/// The state of the watching thread.
struct PeerWatch {
    rank: Rank,
    connections: Vec<(Rank, UnixStream)>,
    shared: Arc<Shared>,
    ended: UnixStream,
    timeout: Duration,
}

impl PeerWatch {
    fn run(self, progress: &dyn Fn() -> u64) {
        // A stall is detected at most a quarter of the timeout late.
        let look_every = (self.timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let (mut seen, mut since) = (progress(), Instant::now());
        loop {
            let hang_up = |stream| PollFd::new(stream, PollFlags::RDHUP);
            let mut polled: Vec<_> = self.connections.iter().map(|(_, stream)| hang_up(stream)).collect();
            polled.push(hang_up(&self.ended));
            let _ = poll(&mut polled, Some(&timespec(look_every)));
            let is_over = |polled: &PollFd<'_>| !polled.revents().is_empty();
            if polled.last().is_some_and(is_over) {
                return; // `Peers` was dropped
            }
            if let Some(at) = polled.iter().position(is_over) {
                return self.lose(self.connections[at].0);
            }
            let (now, mut state) = (progress(), self.shared.lock());
            if now != seen || !state.is_stepping {
                (seen, since) = (now, Instant::now());
            } else if since.elapsed() >= self.timeout {
                state.has_stalled |= state.abort.cause().is_none();
                state.abort.stop();
            }
        }
    }

    /// A rank's process is gone. Closes all connections, so that the others detect it. They read from the segment which
    /// rank it was.
    fn lose(&self, peer: Rank) {
        let mut state = self.shared.lock();
        state.abort.lost(peer);
        state.gone = Some(match state.abort.cause() {
            Some(CommError::Lost(rank)) if self.rank.index() != 0 && rank != self.rank => rank,
            _ => peer,
        });
        drop(state);
        for (_, stream) in &self.connections {
            // An error means that the connection is closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
mod tests;
