//! `TcpComm`: one rank's connections to all others, and the collectives on plain slices. Each is one or two phases of: send
//! a message to some, receive one from some, all at the same time.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use types::Rank;

use super::abort::TcpAbort;
use super::encoding::Encoding;
use super::message::{Call, Cause, HEAD_BYTES, Head};
use super::watch::POLL_TICK;
use super::wire::{Wire, WireError};
use crate::comm::{CommError, Communicator};

/// Elements that every rank may send beyond what sharing the sum would have it send, to save a phase. Between two ranks
/// sharing saves nothing.
const EXTRA_ELEMENTS_MAX: usize = 1 << 13;

/// How long an exchange goes on without progress when a rank that it needs nothing more from has left of its own accord:
/// who leaves after the group's last exchange does not break it for those who are still at it.
const LEAVE_GRACE: Duration = Duration::from_millis(50);

/// What [`TcpCommOptions::elements_max`] may be at most.
pub(super) const ELEMENTS_MAX: usize = 1 << 28;

impl From<Cause> for CommError {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Aborted => Self::Aborted,
            Cause::Lost(rank) => Self::Lost(rank),
        }
    }
}

/// What all ranks of a comm agree on, except for the deadlines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpCommOptions {
    /// The most elements (rows times columns) of one exchange.
    pub elements_max: usize,
    /// Of the terms of sums. What is gathered or broadcast travels as it is: it may be logits.
    pub encoding: Encoding,
    /// How long an exchange waits for bytes from a rank that is connected. Ranks wait for each other's work: it has to
    /// be longer than the slowest step may take.
    pub stall_deadline: Duration,
    /// How long the host of a rank may show no sign of life: about that, from [`SILENCE_MIN`](super::SILENCE_MIN) to
    /// [`SILENCE_MAX`](super::SILENCE_MAX).
    pub silence_deadline: Duration,
}

/// An error ends it for all ranks.
pub struct TcpComm {
    rank: Rank,
    options: TcpCommOptions,
    abort: TcpAbort,
    /// Phases so far.
    sequence: u64,
    /// The messages of a phase, one after the other.
    outgoing: Vec<u8>,
}

/// Without the bytes that it carries.
impl fmt::Debug for TcpComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpComm").field("rank", &self.rank).field("options", &self.options).finish_non_exhaustive()
    }
}

impl TcpComm {
    /// Over connections to all others, which `abort` holds, in the order of the ranks.
    pub(super) fn new(rank: Rank, options: TcpCommOptions, abort: TcpAbort) -> Self {
        Self { rank, options, abort, sequence: 0, outgoing: Vec::new() }
    }

    /// That all ranks have the same options: the first phase of a comm.
    pub(super) fn greet(&mut self, deadline: Instant) -> Result<(), CommError> {
        let TcpCommOptions { elements_max, encoding, .. } = self.options;
        let patience = deadline.saturating_duration_since(Instant::now());
        let call = Call::Greet(encoding);
        let abort = self.abort.clone();
        let mut wires = abort.wires();
        let message = self.compose(call, elements_max, |_| {});
        self.phase_within(patience, &mut wires, call, elements_max, |_| message.clone(), |_| Some(0))
    }

    /// What ends this comm for all its ranks.
    pub fn abort(&self) -> TcpAbort {
        self.abort.clone()
    }

    /// Everyone sends everything to all.
    fn sum_all(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let (encoding, elements) = (self.options.encoding, values.len());
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut wires = abort.wires();
        let message = self.compose(Call::Sum, elements, |bytes| encoding.append(values, bytes));
        self.phase(&mut wires, Call::Sum, elements, |_| message.clone(), |_| Some(encoding.bytes(elements)))?;
        self.sum(&wires, message, values);
        Ok(())
    }

    /// Everyone sums its share and sends the sums to all.
    fn sum_shares(&mut self, values: &mut [f32]) -> Result<(), CommError> {
        let (encoding, elements) = (self.options.encoding, values.len());
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut wires = abort.wires();
        let share = |rank| encoding.shard(rank, elements);
        let own = share(self.rank);

        let mut messages = Vec::with_capacity(self.rank.world().get());
        self.outgoing.clear();
        for rank in self.rank.world().ranks() {
            let start = self.outgoing.len();
            self.outgoing.extend_from_slice(&Head::new(self.sequence, Call::Scatter, elements).bytes());
            encoding.append(&values[share(rank)], &mut self.outgoing);
            messages.push(start..self.outgoing.len());
        }
        let due = |_| Some(encoding.bytes(own.len()));
        self.phase(&mut wires, Call::Scatter, elements, |rank| messages[rank.index()].clone(), due)?;
        self.sum(&wires, messages[self.rank.index()].clone(), &mut values[own.clone()]);

        let message = self.compose(Call::Summed, elements, |bytes| encoding.append(&values[own.clone()], bytes));
        let due = |rank| Some(encoding.bytes(share(rank).len()));
        self.phase(&mut wires, Call::Summed, elements, |_| message.clone(), due)?;
        encoding.round(&mut values[own]);
        wires.iter().for_each(|wire| encoding.read(wire.payload(), &mut values[share(wire.peer())]));
        Ok(())
    }

    /// The sum of what came from all others and of the own `message`, in the order of the ranks.
    fn sum(&self, wires: &[Wire], message: Range<usize>, sums: &mut [f32]) {
        let (encoding, mut wires) = (self.options.encoding, wires.iter());
        for rank in self.rank.world().ranks() {
            let terms = if rank == self.rank {
                &self.outgoing[message.start + HEAD_BYTES..message.end]
            } else {
                wires.next().expect("a wire to every other rank").payload()
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

    /// Makes a message of the coming phase the only one. Returns its place.
    fn compose(&mut self, call: Call, elements: usize, append: impl FnOnce(&mut Vec<u8>)) -> Range<usize> {
        self.outgoing.clear();
        self.outgoing.extend_from_slice(&Head::new(self.sequence, call, elements).bytes());
        append(&mut self.outgoing);
        0..self.outgoing.len()
    }

    fn phase(
        &mut self,
        wires: &mut [Wire],
        call: Call,
        elements: usize,
        send: impl Fn(Rank) -> Range<usize>,
        due: impl Fn(Rank) -> Option<usize>,
    ) -> Result<(), CommError> {
        self.phase_within(self.options.stall_deadline, wires, call, elements, send, due)
    }

    /// Sends to each rank the bytes of `outgoing` that `send` gives, and receives from each as many as are `due`. An
    /// error ends the comm.
    fn phase_within(
        &mut self,
        patience: Duration,
        wires: &mut [Wire],
        call: Call,
        elements: usize,
        send: impl Fn(Rank) -> Range<usize>,
        due: impl Fn(Rank) -> Option<usize>,
    ) -> Result<(), CommError> {
        self.abort.check()?;
        let head = Head::new(self.sequence, call, elements);
        self.sequence += 1;
        for wire in wires.iter_mut() {
            wire.begin(send(wire.peer()), due(wire.peer()).map(|bytes| (head, bytes)));
        }
        let run = self.run(patience, wires);
        if let Err(error) = run {
            let cause = match error {
                CommError::Lost(rank)
                | CommError::Stalled { rank, .. }
                | CommError::Forged(rank)
                | CommError::Malformed(rank) => Cause::Lost(rank),
                _ => Cause::Aborted,
            };
            self.abort.end_with(wires, cause);
        }
        run
    }

    fn run(&self, patience: Duration, wires: &mut [Wire]) -> Result<(), CommError> {
        let mut moved_at = Instant::now();
        loop {
            self.abort.check()?;
            let mut moved = false;
            for wire in wires.iter_mut() {
                let pushed = wire.push(&self.outgoing);
                let pulled = pushed.and_then(|pushed| wire.pull().map(|pulled| pushed | pulled));
                moved |= pulled.map_err(|error| blame(wire.peer(), error))?;
            }
            let Some(open) = wires.iter().find(|wire| !(wire.is_sent() && wire.is_received())) else { return Ok(()) };
            if moved {
                moved_at = Instant::now();
                continue;
            }
            let waited = moved_at.elapsed();
            if waited >= patience {
                return Err(CommError::Stalled { rank: open.peer(), waited });
            }
            for wire in wires.iter_mut().filter(|wire| wire.is_closed()) {
                let error = blame(wire.peer(), wire.reason());
                if error != CommError::Lost(wire.peer()) || waited >= LEAVE_GRACE {
                    return Err(error);
                }
            }
            wait(wires);
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

    /// With [`Encoding::Q8`] the terms are rounded, and with more than two ranks the sums too, whichever way they are taken.
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
            self.sum_shares(values)
        }
    }

    /// Sums all rows on every rank: to gather them afterwards would cost a second round trip.
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
        let (exact, call, elements, own) = (Encoding::F32, Call::Columns, rows * cols, self.rank.shard(cols));
        let is_first = self.rank.index() == 0;
        assert_eq!(part.len(), rows * own.len(), "{rows} rows of {own:?}");
        assert_eq!(whole.is_some(), is_first, "the first rank, and no other, receives all columns");
        self.check(elements)?;
        let abort = self.abort.clone();
        let mut wires = abort.wires();
        let message = self.compose(call, elements, |bytes| exact.append(part, bytes));
        let send = |rank: Rank| if rank.index() == 0 { message.clone() } else { 0..0 };
        let due = |rank: Rank| is_first.then(|| exact.bytes(rows * rank.shard(cols).len()));
        self.phase(&mut wires, call, elements, send, due)?;
        if let Some(whole) = whole {
            read_columns(&self.outgoing[HEAD_BYTES..], own, cols, whole);
            wires.iter().for_each(|wire| read_columns(wire.payload(), wire.peer().shard(cols), cols, whole));
        }
        Ok(())
    }
}

impl Drop for TcpComm {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Fills the columns `share` of rows of `cols` with the values that `bytes` hold.
fn read_columns(bytes: &[u8], share: Range<usize>, cols: usize, rows: &mut [f32]) {
    let (exact, width) = (Encoding::F32, share.len());
    let parts = bytes.chunks_exact(exact.bytes(width).max(1));
    rows.chunks_exact_mut(cols).zip(parts).for_each(|(row, part)| exact.read(part, &mut row[share.clone()]));
}

/// Sleeps until a wire can go on, a tick at most. One whose other side is closed shows all that came when it is used:
/// there is nothing to wait for.
fn wait(wires: &mut [Wire]) {
    let logit_rows = |wire: &Wire| {
        let mut flags = PollFlags::RDHUP;
        flags.set(PollFlags::OUT, !wire.is_sent());
        flags.set(PollFlags::IN, !wire.is_received());
        flags
    };
    let waiting = || wires.iter().filter(|wire| !wire.is_closed());
    let mut fds: Vec<_> = waiting().map(|wire| PollFd::new(wire.stream(), logit_rows(wire))).collect();
    // Whatever is wrong shows when the wires are used.
    let _ = poll(&mut fds, Some(&POLL_TICK));
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let closed: Vec<_> =
        waiting().zip(&fds).filter(|(_, fd)| fd.revents().intersects(closed)).map(|(wire, _)| wire.peer()).collect();
    wires.iter_mut().filter(|wire| closed.contains(&wire.peer())).for_each(Wire::mark_closed);
}

fn blame(peer: Rank, error: WireError) -> CommError {
    match error {
        WireError::Gone => CommError::Lost(peer),
        WireError::Forged => CommError::Forged(peer),
        WireError::Malformed => CommError::Malformed(peer),
        WireError::Mismatch => CommError::Mismatch(peer),
        WireError::Farewell(cause) => cause.into(),
    }
}
