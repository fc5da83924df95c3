//! `Download`: receives tensors into a store, over as many connections as there are. Ranges of tensors are handed to
//! whichever connection has room for another request, so that all are busy until the end. When a connection is lost, what
//! it had not received is handed to the others, or to one that comes later.

mod connection;
mod incoming;
mod writer;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use net::MessageStream;

use self::connection::Connection;
use self::incoming::{IncomingTensor, RangeWork};
use super::TensorId;
use super::error::TransferError;
use super::part_file::{Opened, PartFile};
use super::pins::PinnedTensors;
use super::wire::FailReason;

/// How long a connection without work waits before it looks again, also for tensors that another process receives.
const TICK: Duration = Duration::from_millis(100);

/// Bytes that have come, also those of an earlier attempt, and bytes in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub received: u64,
    pub total: u64,
}

pub struct Download {
    pinned: Arc<PinnedTensors>,
    progress: Box<dyn Fn(Progress) + Send + Sync>,
    total: u64,
    received: AtomicU64,
    state: Mutex<State>,
    /// There is more work, or the end.
    changed: Condvar,
}

struct State {
    /// Not begun.
    waiting: VecDeque<TensorId>,
    /// Received by another thread or process, which may give up.
    elsewhere: Vec<TensorId>,
    looked_elsewhere_at: Instant,
    /// To be asked for.
    ranges: VecDeque<RangeWork>,
    /// Tensors that are not in the store.
    unfinished: usize,
    failure: Option<Arc<TransferError>>,
}

/// What a connection has to do next.
enum Next {
    Receive(RangeWork),
    /// Other connections have all that is left.
    Idle,
    /// Everything has come, or the download failed.
    End,
}

impl Download {
    /// Receives `ids`, which are pinned: what [`PinnedTensors::verify`] returned. `progress` is called by the threads that
    /// receive.
    pub fn new(
        pinned: Arc<PinnedTensors>,
        ids: &[TensorId],
        progress: impl Fn(Progress) + Send + Sync + 'static,
    ) -> Self {
        let state = State {
            waiting: ids.iter().copied().collect(),
            elsewhere: Vec::new(),
            looked_elsewhere_at: Instant::now(),
            ranges: VecDeque::new(),
            unfinished: ids.len(),
            failure: None,
        };
        let total = ids.iter().map(|id| id.bytes).sum();
        let (received, progress) = (AtomicU64::new(0), Box::new(progress));
        Self { pinned, progress, total, received, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Receives over a connection until everything has come, over this one and others, or the download failed. An error is
    /// this connection's; if it [is retryable](TransferError::is_retryable), the download goes on.
    pub fn receive(&self, stream: MessageStream) -> Result<(), TransferError> {
        Connection::run(self, stream)
    }

    /// Waits for the end, for `timeout` at most; `None` if it has not come.
    pub fn wait(&self, timeout: Duration) -> Option<Result<(), Arc<TransferError>>> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            if let Some(failure) = &state.failure {
                return Some(Err(Arc::clone(failure)));
            }
            if state.unfinished == 0 {
                return Some(Ok(()));
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub fn progress(&self) -> Progress {
        Progress { received: self.received.load(Relaxed), total: self.total }
    }

    pub fn cancel(&self) {
        self.fail(TransferError::Cancelled);
    }

    /// Ends the download because of `error`. If it has failed before, that is the reason that stays. Returns the error for
    /// the connection at fault.
    fn fail(&self, error: TransferError) -> TransferError {
        let reason = fail_reason(&error);
        self.state().failure.get_or_insert_with(|| Arc::new(error));
        self.changed.notify_all();
        TransferError::ReceiverFailed(reason)
    }

    fn failure(&self) -> Option<Arc<TransferError>> {
        self.state().failure.clone()
    }

    /// Work for a connection. Waits a little if there is none now and `may_wait`.
    fn next(&self, may_wait: bool) -> Result<Next, TransferError> {
        let mut state = self.state();
        loop {
            if state.failure.is_some() || state.unfinished == 0 {
                return Ok(Next::End);
            }
            if let Some(range) = state.ranges.pop_front() {
                return Ok(Next::Receive(range));
            }
            if state.waiting.is_empty() && state.looked_elsewhere_at.elapsed() >= TICK {
                state.looked_elsewhere_at = Instant::now();
                state.waiting = std::mem::take(&mut state.elsewhere).into();
            }
            match state.waiting.pop_front() {
                Some(id) => {
                    drop(state);
                    self.begin(id)?;
                    state = self.state();
                }
                None if may_wait => {
                    drop(self.changed.wait_timeout(state, TICK).unwrap_or_else(PoisonError::into_inner));
                    return Ok(Next::Idle);
                }
                None => return Ok(Next::Idle),
            }
        }
    }

    /// Opens the file of a tensor, and makes its ranges available to connections.
    fn begin(&self, id: TensorId) -> Result<(), TransferError> {
        let store = self.pinned.store();
        let opened = PartFile::open(store, id).map_err(|source| store.error(source))?;
        let mut state = self.state();
        match opened {
            Opened::Present => {
                state.unfinished -= 1;
                self.add_progress(id.bytes);
            }
            Opened::Busy => state.elsewhere.push(id),
            Opened::Part(part, counts) => {
                self.add_progress(counts.iter().sum());
                let tensor = Arc::new(IncomingTensor::new(id, part, &counts));
                state
                    .ranges
                    .extend((0..counts.len() as u64).map(|index| RangeWork { tensor: Arc::clone(&tensor), index }));
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Makes ranges available that a connection has not received.
    fn put_back(&self, ranges: impl DoubleEndedIterator<Item = RangeWork>) {
        let mut state = self.state();
        ranges.rev().for_each(|range| state.ranges.push_front(range));
        self.changed.notify_all();
    }

    /// All ranges of a tensor have come.
    fn finish(&self, tensor: &IncomingTensor) -> Result<(), TransferError> {
        let store = self.pinned.store();
        let unusable = |source| store.error(source);
        if tensor.hash() == tensor.id.hash {
            tensor.part.finish().and_then(|()| store.set_verified(&tensor.id)).map_err(unusable)?;
            self.state().unfinished -= 1;
        } else if tensor.was_resumed {
            // The bytes of an earlier attempt may be the wrong ones.
            tensor.part.discard().map_err(unusable)?;
            self.received.fetch_sub(tensor.id.bytes, Relaxed);
            self.state().waiting.push_back(tensor.id);
        } else {
            tensor.part.discard().map_err(unusable)?;
            return Err(TransferError::WrongBytes(tensor.id.hash));
        }
        self.changed.notify_all();
        Ok(())
    }

    fn add_progress(&self, bytes: u64) {
        let received = self.received.fetch_add(bytes, Relaxed) + bytes;
        (self.progress)(Progress { received, total: self.total });
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the sender is told.
fn fail_reason(error: &TransferError) -> FailReason {
    match error {
        TransferError::Store(_) | TransferError::Thread(_) => FailReason::Store,
        TransferError::WrongBytes(hash) => FailReason::WrongBytes(*hash),
        TransferError::Refused { hash, .. } => FailReason::Refused(*hash),
        TransferError::ReceiverFailed(reason) => *reason,
        TransferError::Cancelled => FailReason::Cancelled,
        _ => FailReason::Protocol,
    }
}

#[cfg(test)]
impl Download {
    /// How many tensors another thread or process receives, as far as this one has seen.
    pub fn tensors_elsewhere(&self) -> usize {
        self.state().elsewhere.len()
    }
}
