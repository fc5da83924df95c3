//! `TcpComm`: one rank's connections to all others, and the collectives on plain slices. A collective is one or two
//! phases. In a phase a rank sends a message to some ranks and receives one from some, all at the same time.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use net::POLL_TICK;
use rustix::event::{PollFd, PollFlags, poll};
use types::Rank;

use super::abort::TcpAbort;
use super::connection::{Connection, ConnectionError};
use super::encoding::Encoding;
use super::message::{HEAD_BYTES, MessageHeader, TcpAbortCause, TcpOp};
use crate::comm::{CommError, Communicator};

/// Elements that a rank may send in excess of reduce-scatter and all-gather, to save a phase. Between two ranks the two
/// ways send the same.
const EXTRA_ELEMENTS_MAX: usize = 1 << 13;

/// How long a collective goes on without progress after a rank that it needs nothing more from has left by itself. A
/// rank that leaves after the group's last collective must not break it for ranks that are still in it, however slow they are. If
/// another rank does need it, that one tells all at once.
const LEAVE_GRACE: Duration = Duration::from_secs(5);

/// Upper limit of [`TcpCommOptions::elements_max`].
pub(super) const ELEMENTS_MAX: usize = 1 << 28;

impl From<TcpAbortCause> for CommError {
    fn from(cause: TcpAbortCause) -> Self {
        match cause {
            TcpAbortCause::Aborted => Self::Aborted,
            TcpAbortCause::Lost(rank) => Self::Lost(rank),
        }
    }
}

/// Options of a communicator. All but the deadlines must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpCommOptions {
    /// The most elements (rows times columns) of one collective.
    pub elements_max: usize,
    /// How the terms of sums are sent. Gathered values are sent as f32: they may be logits.
    pub encoding: Encoding,
    /// How long a collective waits for bytes from a connected rank. Ranks wait for each other's computation, so this
    /// must be longer than the slowest step.
    pub stall_deadline: Duration,
    /// About how long a rank's host may be silent, from [`SILENCE_MIN`](net::SILENCE_MIN) to
    /// [`SILENCE_MAX`](net::SILENCE_MAX).
    pub silence_deadline: Duration,
}

/// A communicator over TCP. An error in a collective ends it for all ranks.
pub struct TcpComm {
    rank: Rank,
    options: TcpCommOptions,
    abort: TcpAbort,
    /// Number of phases so far.
    sequence: u64,
    /// The messages of a phase, one after the other.
    outgoing: Vec<u8>,
}

/// Without the buffers.
impl fmt::Debug for TcpComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpComm").field("rank", &self.rank).field("options", &self.options).finish_non_exhaustive()
    }
}

impl TcpComm {
    /// `abort` holds the connections to all other ranks, in the order of ranks.
    pub(super) fn new(rank: Rank, options: TcpCommOptions, abort: TcpAbort) -> Self {
        Self { rank, options, abort, sequence: 0, outgoing: Vec::new() }
    }

    /// The first phase of a communicator: checks that all ranks have the same options.
    pub(super) fn check_options(&mut self, deadline: Instant) -> Result<(), CommError> {
        let TcpCommOptions { elements_max, encoding, .. } = self.options;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let call = TcpOp::CheckOptions(encoding);
        let abort = self.abort.clone();
        let mut connections = abort.connections();
        let message = self.compose(call, elements_max, |_| {});
        self.phase_within(timeout, &mut connections, call, elements_max, |_| message.clone(), |_| Some(0))
    }

    /// Aborts this communicator on all ranks.
    pub fn abort(&self) -> TcpAbort {
        self.abort.clone()
    }

    /// Every rank sends all its values to all others.
    fn sum_all(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let (encoding, elements) = (self.options.encoding, values.len());
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut connections = abort.connections();
        let message = self.compose(TcpOp::Sum, elements, |bytes| encoding.append(values, bytes));
        self.phase(&mut connections, TcpOp::Sum, elements, |_| message.clone(), |_| Some(encoding.bytes(elements)))?;
        self.sum(&connections, message, values);
        Ok(())
    }

    /// Every rank sums its shard and sends the sums to all others.
    fn sum_shards(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let (encoding, elements) = (self.options.encoding, values.len());
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut connections = abort.connections();
        let shard = |rank| encoding.shard(rank, elements);
        let own = shard(self.rank);

        let mut messages = Vec::with_capacity(self.rank.world().get());
        self.outgoing.clear();
        for rank in self.rank.world().ranks() {
            let start = self.outgoing.len();
            self.outgoing.extend_from_slice(&MessageHeader::new(self.sequence, TcpOp::Scatter, elements).bytes());
            encoding.append(&values[shard(rank)], &mut self.outgoing);
            messages.push(start..self.outgoing.len());
        }
        let due = |_| Some(encoding.bytes(own.len()));
        self.phase(&mut connections, TcpOp::Scatter, elements, |rank| messages[rank.index()].clone(), due)?;
        self.sum(&connections, messages[self.rank.index()].clone(), &mut values[own.clone()]);

        let message = self.compose(TcpOp::GatherSums, elements, |bytes| encoding.append(&values[own.clone()], bytes));
        let due = |rank| Some(encoding.bytes(shard(rank).len()));
        self.phase(&mut connections, TcpOp::GatherSums, elements, |_| message.clone(), due)?;
        encoding.round(&mut values[own]);
        connections
            .iter()
            .for_each(|connection| encoding.read(connection.payload(), &mut values[shard(connection.peer())]));
        Ok(())
    }

    /// Sums the payloads of all other ranks and the own `message`, in the order of ranks.
    fn sum(&self, connections: &[Connection], message: Range<usize>, sums: &mut [f32]) {
        let (encoding, mut connections) = (self.options.encoding, connections.iter());
        for rank in self.rank.world().ranks() {
            let terms = if rank == self.rank {
                &self.outgoing[message.start + HEAD_BYTES..message.end]
            } else {
                connections.next().expect("a connection to every other rank").payload()
            };
            if rank.index() == 0 {
                encoding.read(terms, sums);
            } else {
                encoding.add(terms, sums);
            }
        }
    }

    fn check(&self, elements: usize) -> Result<(), CommError> {
        let elements_max = self.options.elements_max;
        if elements > elements_max {
            return Err(CommError::TooLarge { elements, elements_max });
        }
        self.abort.check()
    }

    /// Writes a message of the next phase as the only one in `outgoing`. Returns its range.
    fn compose(&mut self, call: TcpOp, elements: usize, append: impl FnOnce(&mut Vec<u8>)) -> Range<usize> {
        self.outgoing.clear();
        self.outgoing.extend_from_slice(&MessageHeader::new(self.sequence, call, elements).bytes());
        append(&mut self.outgoing);
        0..self.outgoing.len()
    }

    fn phase(
        &mut self,
        connections: &mut [Connection],
        call: TcpOp,
        elements: usize,
        send: impl Fn(Rank) -> Range<usize>,
        due: impl Fn(Rank) -> Option<usize>,
    ) -> Result<(), CommError> {
        self.phase_within(self.options.stall_deadline, connections, call, elements, send, due)
    }

    /// Sends to each rank the bytes of `outgoing` that `send` gives, and receives from each as many as are `due`. An
    /// error ends the communicator.
    fn phase_within(
        &mut self,
        timeout: Duration,
        connections: &mut [Connection],
        call: TcpOp,
        elements: usize,
        send: impl Fn(Rank) -> Range<usize>,
        due: impl Fn(Rank) -> Option<usize>,
    ) -> Result<(), CommError> {
        self.abort.check()?;
        let head = MessageHeader::new(self.sequence, call, elements);
        self.sequence += 1;
        for connection in connections.iter_mut() {
            connection.begin(send(connection.peer()), due(connection.peer()).map(|bytes| (head, bytes)));
        }
        let run = self.run(timeout, connections);
        if let Err(error) = run {
            let cause = match error {
                CommError::Lost(rank)
                | CommError::Stalled { rank, .. }
                | CommError::Forged(rank)
                | CommError::Malformed(rank) => TcpAbortCause::Lost(rank),
                _ => TcpAbortCause::Aborted,
            };
            self.abort.end_with(connections, cause);
        }
        run
    }

    fn run(&self, timeout: Duration, connections: &mut [Connection]) -> Result<(), CommError> {
        let mut moved_at = Instant::now();
        loop {
            self.abort.check()?;
            let mut moved = false;
            for connection in connections.iter_mut() {
                let pushed = connection.push(&self.outgoing);
                let pulled = pushed.and_then(|pushed| connection.pull().map(|pulled| pushed | pulled));
                moved |= pulled.map_err(|error| blame(connection.peer(), error))?;
            }
            let Some(open) = connections.iter().find(|connection| !(connection.is_sent() && connection.is_received()))
            else {
                return Ok(());
            };
            if moved {
                moved_at = Instant::now();
                continue;
            }
            let waited = moved_at.elapsed();
            if waited >= timeout {
                return Err(CommError::Stalled { rank: open.peer(), waited });
            }
            for connection in connections.iter_mut().filter(|connection| connection.is_closed()) {
                let error = blame(connection.peer(), connection.reason());
                if error != CommError::Lost(connection.peer()) || waited >= LEAVE_GRACE {
                    return Err(error);
                }
            }
            wait(connections);
        }
    }
}

impl Communicator for TcpComm {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn elements_max(&self) -> usize {
        self.options.elements_max
    }

    fn leave(&self) {
        self.abort.lost(self.rank);
    }

    /// With [`Encoding::Q8`] the terms are rounded, and with more than two ranks the sums too, in both algorithms.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let world = self.rank.world().get();
        if world == 1 {
            return self.check(values.len());
        }
        if (world - 2).saturating_mul(values.len()) <= EXTRA_ELEMENTS_MAX {
            self.sum_all(values)?;
            if world > 2 {
                self.options.encoding.round(values);
            }
            Ok(())
        } else {
            self.sum_shards(values)
        }
    }

    /// Sums all rows on every rank: gathering them afterwards would cost a second round trip.
    fn reduce_scatter_rows(&mut self, cols: usize, values: &mut [f32]) -> Result<Range<usize>, CommError> {
        self.all_reduce(values)?;
        Ok(0..values.len().checked_div(cols).unwrap_or(0))
    }

    /// Every rank has computed all rows.
    fn all_gather_rows(&mut self, _: usize, _: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }

    fn gather_columns(
        &mut self,
        [rows, cols]: [usize; 2],
        part: &[f32],
        whole: Option<&mut [f32]>,
    ) -> Result<(), CommError> {
        let (exact, call, elements, own) = (Encoding::F32, TcpOp::Columns, rows * cols, self.rank.shard(cols));
        let is_first = self.rank.index() == 0;
        assert_eq!(part.len(), rows * own.len(), "{rows} rows of {own:?}");
        assert_eq!(whole.is_some(), is_first, "the first rank, and no other, receives all columns");
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut connections = abort.connections();
        let message = self.compose(call, elements, |bytes| exact.append(part, bytes));
        let send = |rank: Rank| if rank.index() == 0 { message.clone() } else { 0..0 };
        let due = |rank: Rank| is_first.then(|| exact.bytes(rows * rank.shard(cols).len()));
        self.phase(&mut connections, call, elements, send, due)?;
        if let Some(whole) = whole {
            read_columns(&self.outgoing[HEAD_BYTES..], own, cols, whole);
            connections
                .iter()
                .for_each(|connection| read_columns(connection.payload(), connection.peer().shard(cols), cols, whole));
        }
        Ok(())
    }
}

impl Drop for TcpComm {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Fills the columns `shard` of rows of `cols` with the values that `bytes` hold.
fn read_columns(bytes: &[u8], shard: Range<usize>, cols: usize, rows: &mut [f32]) {
    let (exact, width) = (Encoding::F32, shard.len());
    let parts = bytes.chunks_exact(exact.bytes(width).max(1));
    rows.chunks_exact_mut(cols).zip(parts).for_each(|(row, part)| exact.read(part, &mut row[shard.clone()]));
}

/// Sleeps until a connection is ready, a tick at most. Connections that the peer has closed are left out: reading them
/// returns at once.
fn wait(connections: &mut [Connection]) {
    let events = |connection: &Connection| {
        let mut flags = PollFlags::RDHUP;
        flags.set(PollFlags::OUT, !connection.is_sent());
        flags.set(PollFlags::IN, !connection.is_received());
        flags
    };
    let waiting = || connections.iter().filter(|connection| !connection.is_closed());
    let mut fds: Vec<_> = waiting().map(|connection| PollFd::new(connection.stream(), events(connection))).collect();
    // Errors show when the connections are used.
    let _ = poll(&mut fds, Some(&POLL_TICK));
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let closed: Vec<_> = waiting()
        .zip(&fds)
        .filter(|(_, fd)| fd.revents().intersects(closed))
        .map(|(connection, _)| connection.peer())
        .collect();
    connections.iter_mut().filter(|connection| closed.contains(&connection.peer())).for_each(Connection::mark_closed);
}

fn blame(peer: Rank, error: ConnectionError) -> CommError {
    match error {
        ConnectionError::Gone => CommError::Lost(peer),
        ConnectionError::Forged => CommError::Forged(peer),
        ConnectionError::Malformed => CommError::Malformed(peer),
        ConnectionError::Mismatch => CommError::Mismatch(peer),
        ConnectionError::Goodbye(cause) => cause.into(),
    }
}
