//! `Service`: the engine on a thread of its own, for callers on any other.
//!
//! Submissions go through a bounded channel; events come back through each request's own [`EventSink`]. Dropping a
//! [`RequestHandle`] only sets a flag, which the thread reads after each step: while there is a request the thread never
//! sleeps. An error of the executor ends the requests, not the thread.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::{Engine, EngineError, WaitingForModel};
use crate::executor::{Capacity, Executor, Health, RankReport};
use crate::request::{Event, EventKind, Request, RequestId};
use crate::stats::EngineStats;

/// Submissions that the thread has not received yet.
const SUBMISSIONS_MAX: usize = 256;

/// How often the health of an idle executor is polled.
const IDLE_POLL: Duration = Duration::from_millis(200);

/// How old the reports of ranks may become while the health stays the same. Ranks do not report their counters more
/// often.
const RANKS_AGE: Duration = Duration::from_secs(1);

/// Receives the events of one request. Called on the engine's thread, so it must not block.
pub trait EventSink: Send {
    /// False if there is no receiver any more: the request is cancelled.
    fn send(&mut self, event: EventKind) -> bool;
}

#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    #[error(transparent)]
    Refused(#[from] EngineError),
    #[error("the engine is shutting down")]
    Draining,
    #[error("the engine has stopped")]
    Stopped,
}

/// A handle of the engine's thread. The thread ends when the last handle is gone and the last request has ended.
#[derive(Clone)]
pub struct Service {
    submissions: SyncSender<Submission>,
    shared: Arc<ServiceShared>,
}

/// Waits for the engine's thread to exit and drop the engine. Unlike a [`Service`] it does not keep the thread alive.
pub struct ThreadExit(Arc<ServiceShared>);

impl ThreadExit {
    /// Waits for the thread to exit. False if it takes longer than `timeout`.
    pub fn wait(&self, timeout: Duration) -> bool {
        let waited = self.0.changed.wait_timeout_while(self.0.lock(), timeout, |state| !state.stopped);
        waited.unwrap_or_else(PoisonError::into_inner).0.stopped
    }
}

/// A request that was submitted. Dropping it cancels the request: its pages are free within one step.
#[derive(Debug)]
#[must_use = "dropping the handle cancels its request"]
pub struct RequestHandle {
    dropped: Arc<AtomicBool>,
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

struct Submission {
    request: Request,
    subscriber: Subscriber,
}

struct Subscriber {
    sink: Box<dyn EventSink>,
    dropped: Arc<AtomicBool>,
}

struct ServiceShared {
    state: Mutex<ServiceState>,
    /// Notified when the last request has ended, and when the thread exits.
    changed: Condvar,
}

/// What the thread and the handles share. Never locked during a step.
struct ServiceState {
    stats: EngineStats,
    capacity: Capacity,
    health: Health,
    waiting_for: Option<WaitingForModel>,
    ranks: Vec<RankReport>,
    ranks_at: Instant,
    /// [`Engine::headroom`], when the thread last published it.
    headroom: usize,
    retry_after: Duration,
    /// Submissions that `headroom` does not count yet.
    submitted: usize,
    /// Requests that were submitted and have not ended.
    unfinished: usize,
    draining: bool,
    /// The thread has to cancel all unfinished requests.
    cancel_all: bool,
    stopped: bool,
}

impl ServiceShared {
    fn lock(&self) -> MutexGuard<'_, ServiceState> {
        // No code that holds the lock can panic in the middle of a change.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service {
    /// Moves the engine to a thread of its own.
    pub fn start<E: Executor + 'static>(engine: Engine<E>) -> io::Result<Self> {
        let state = ServiceState {
            stats: engine.stats(),
            capacity: engine.capacity(),
            health: Health::Ready,
            waiting_for: None,
            ranks: engine.executor().ranks(),
            ranks_at: Instant::now(),
            headroom: engine.headroom(),
            retry_after: engine.retry_after(),
            submitted: 0,
            unfinished: 0,
            draining: false,
            cancel_all: false,
            stopped: false,
        };
        let shared = Arc::new(ServiceShared { state: Mutex::new(state), changed: Condvar::new() });
        let (sender, submissions) = sync_channel(SUBMISSIONS_MAX);
        let guard = ExitGuard(shared.clone());
        let thread = ServiceThread { engine, subscribers: HashMap::new(), received: 0, ended: 0, guard };
        thread::Builder::new().name("engine".into()).spawn(move || thread.run(&submissions))?;
        Ok(Self { submissions: sender, shared })
    }

    /// Sends a request to the thread. A request that could never run is refused here; otherwise the first event is
    /// [`EventKind::Accepted`] or, rarely, [`EventKind::Refused`].
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<RequestHandle, SubmitError> {
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(SubmitError::Stopped);
        }
        if state.draining {
            return Err(SubmitError::Draining);
        }
        request.check(&state.capacity)?;
        let full =
            EngineError::QueueFull { waiting: state.stats.waiting + state.submitted, retry_after: state.retry_after };
        if state.submitted >= state.headroom {
            return Err(full.into());
        }
        let dropped = Arc::new(AtomicBool::new(false));
        let subscriber = Subscriber { sink, dropped: dropped.clone() };
        match self.submissions.try_send(Submission { request, subscriber }) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(full.into()),
            Err(TrySendError::Disconnected(_)) => return Err(SubmitError::Stopped),
        }
        state.submitted += 1;
        state.unfinished += 1;
        Ok(RequestHandle { dropped })
    }

    /// Whether the thread has exited: by a panic, since it runs as long as there is a handle.
    pub fn has_stopped(&self) -> bool {
        self.shared.lock().stopped
    }

    /// As of the last step.
    pub fn stats(&self) -> EngineStats {
        self.shared.lock().stats
    }

    /// As of the last step.
    pub fn capacity(&self) -> Capacity {
        self.shared.lock().capacity
    }

    /// Whether the executor can run steps, as of the last poll.
    pub fn health(&self) -> Health {
        self.shared.lock().health.clone()
    }

    /// What requests wait for while no step can run, as of the last step.
    pub fn waiting_for(&self) -> Option<WaitingForModel> {
        self.shared.lock().waiting_for.clone()
    }

    /// The rank processes of the model, at most about a second old.
    pub fn ranks(&self) -> Vec<RankReport> {
        self.shared.lock().ranks.clone()
    }

    /// To wait for the thread after the last handle was dropped.
    pub fn thread_exit(&self) -> ThreadExit {
        ThreadExit(self.shared.clone())
    }

    /// Rejects new requests and waits for the unfinished ones to end. Returns how many were unfinished after `timeout`;
    /// these are cancelled within a step.
    pub fn drain(&self, timeout: Duration) -> usize {
        let mut state = self.shared.lock();
        state.draining = true;
        let busy = |state: &mut ServiceState| state.unfinished > 0 && !state.stopped;
        let waited = self.shared.changed.wait_timeout_while(state, timeout, busy);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.cancel_all = true;
        state.unfinished
    }
}

/// The engine's thread.
struct ServiceThread<E: Executor> {
    engine: Engine<E>,
    subscribers: HashMap<RequestId, Subscriber>,
    /// Submissions received and requests ended since the last [`ServiceThread::publish`].
    received: usize,
    ended: usize,
    guard: ExitGuard,
}

/// Reports the exit of the thread when dropped, also by a panic.
struct ExitGuard(Arc<ServiceShared>);

impl Drop for ExitGuard {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.changed.notify_all();
    }
}

impl<E: Executor> ServiceThread<E> {
    fn run(mut self, submissions: &Receiver<Submission>) {
        let mut events = Vec::new();
        loop {
            if self.engine.is_idle() {
                match submissions.recv_timeout(IDLE_POLL) {
                    Ok(submission) => self.accept(submission),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            while let Ok(submission) = submissions.try_recv() {
                self.accept(submission);
            }
            self.cancel_dropped();
            // An error has ended every request, each with an event.
            let _ = self.engine.step(&mut events);
            for event in events.drain(..) {
                self.dispatch(event);
            }
            self.publish();
        }
    }

    fn accept(&mut self, Submission { request, mut subscriber }: Submission) {
        self.received += 1;
        match self.engine.add(request) {
            Ok(id) => {
                // If there is no receiver any more, the next event cancels the request.
                let _ = subscriber.sink.send(EventKind::Accepted);
                self.subscribers.insert(id, subscriber);
            }
            Err(error) => {
                let _ = subscriber.sink.send(EventKind::Refused(error));
                self.ended += 1;
            }
        }
    }

    fn cancel_dropped(&mut self) {
        let all = self.guard.0.lock().cancel_all;
        let Self { engine, subscribers, ended, .. } = self;
        subscribers.retain(|&id, subscriber| {
            if !all && !subscriber.dropped.load(Ordering::Relaxed) {
                return true;
            }
            if let Some(finished) = engine.cancel(id) {
                let _ = subscriber.sink.send(EventKind::Finished(finished));
            }
            *ended += 1;
            false
        });
    }

    fn dispatch(&mut self, Event { request, kind }: Event) {
        let Some(subscriber) = self.subscribers.get_mut(&request) else {
            return; // cancelled by an earlier event of this step
        };
        let ends = matches!(kind, EventKind::Finished(_) | EventKind::Refused(_));
        let is_received = subscriber.sink.send(kind);
        if ends || !is_received {
            self.subscribers.remove(&request);
            self.ended += 1;
            if !ends {
                self.engine.cancel(request);
            }
        }
    }

    fn publish(&mut self) {
        let (stats, capacity) = (self.engine.stats(), self.engine.capacity());
        let (health, waiting_for) = (self.engine.health(), self.engine.waiting_for());
        let mut state = self.guard.0.lock();
        if state.health != health || state.ranks_at.elapsed() >= RANKS_AGE {
            state.ranks = self.engine.executor().ranks();
            state.ranks_at = Instant::now();
        }
        state.stats = stats;
        state.capacity = capacity;
        state.health = health;
        state.waiting_for = waiting_for;
        state.headroom = self.engine.headroom();
        state.retry_after = self.engine.retry_after();
        state.submitted -= std::mem::take(&mut self.received);
        state.unfinished -= std::mem::take(&mut self.ended);
        if state.unfinished == 0 {
            self.guard.0.changed.notify_all();
        }
    }
}
