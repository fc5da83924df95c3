//! `Service`: the engine on a thread of its own, for callers on any other.
//!
//! Submissions go through a bounded channel; events come back through each request's own [`EventSink`]. A [`Ticket`] that
//! is dropped only sets a flag: while a request lives the thread is never asleep, so it sees the flag after the step that
//! is running. An error of the executor ends the requests, not the thread.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::engine::{Engine, EngineError};
use crate::executor::{Capacity, Executor, Health, RankReport};
use crate::request::{Event, EventKind, Request, RequestId};
use crate::stats::Stats;

/// Submissions that the thread has not looked at yet.
const SUBMISSIONS_MAX: usize = 256;

/// How often an idle executor gets to look after itself.
const IDLE_LOOK: Duration = Duration::from_millis(200);

/// Where the events of one request go. Called on the engine's thread: it must not wait.
pub trait EventSink: Send {
    /// False: nobody listens any more, and the request is cancelled.
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
    shared: Arc<Shared>,
}

/// The end of an engine's thread, and of all that it owned. It is no handle: it does not keep the thread.
pub struct Ending(Arc<Shared>);

impl Ending {
    /// Waits for it. False if it takes longer than `deadline`.
    pub fn wait(&self, deadline: Duration) -> bool {
        let waited = self.0.ended.wait_timeout_while(self.0.lock(), deadline, |state| !state.stopped);
        waited.unwrap_or_else(PoisonError::into_inner).0.stopped
    }
}

/// A request that was submitted. Dropping it cancels the request: its pages are free within one step.
#[derive(Debug)]
#[must_use = "dropping a ticket cancels its request"]
pub struct Ticket {
    dropped: Arc<AtomicBool>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

struct Submission {
    request: Request,
    client: Client,
}

struct Client {
    sink: Box<dyn EventSink>,
    dropped: Arc<AtomicBool>,
}

struct Shared {
    state: Mutex<State>,
    /// Told when the last request has ended, or the thread.
    ended: Condvar,
}

/// What the thread and its callers know of each other. Locked for a moment only.
struct State {
    stats: Stats,
    capacity: Capacity,
    health: Health,
    ranks: Vec<RankReport>,
    /// Requests that would be accepted, when the thread last looked.
    room: usize,
    retry_after: Duration,
    /// Submissions since then.
    submitted: usize,
    /// Requests that were submitted and have not ended.
    unfinished: usize,
    draining: bool,
    /// Whatever is unfinished is to be cancelled.
    abandoned: bool,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that holds the lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service {
    /// Moves the engine to a thread of its own.
    pub fn start<E: Executor + 'static>(engine: Engine<E>) -> io::Result<Self> {
        let state = State {
            stats: engine.stats(),
            capacity: engine.capacity(),
            health: Health::Ready,
            ranks: engine.executor().ranks(),
            room: engine.room(),
            retry_after: engine.retry_after(),
            submitted: 0,
            unfinished: 0,
            draining: false,
            abandoned: false,
            stopped: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new() });
        let (sender, submissions) = sync_channel(SUBMISSIONS_MAX);
        let thread = Loop { engine, clients: HashMap::new(), received: 0, ended: 0, stop: Stop(shared.clone()) };
        thread::Builder::new().name("engine".into()).spawn(move || thread.run(&submissions))?;
        Ok(Self { submissions: sender, shared })
    }

    /// Hands a request over. What can be seen to be impossible is refused here; the first event is
    /// [`EventKind::Accepted`] or, rarely, [`EventKind::Refused`].
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<Ticket, SubmitError> {
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
        if state.submitted >= state.room {
            return Err(full.into());
        }
        let dropped = Arc::new(AtomicBool::new(false));
        let client = Client { sink, dropped: dropped.clone() };
        match self.submissions.try_send(Submission { request, client }) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => return Err(full.into()),
            Err(TrySendError::Disconnected(_)) => return Err(SubmitError::Stopped),
        }
        state.submitted += 1;
        state.unfinished += 1;
        Ok(Ticket { dropped })
    }

    /// Whether the thread is gone: by a panic, since it lives as long as there is a handle.
    pub fn has_stopped(&self) -> bool {
        self.shared.lock().stopped
    }

    /// As of the last step.
    pub fn stats(&self) -> Stats {
        self.shared.lock().stats
    }

    /// As of the last step.
    pub fn capacity(&self) -> Capacity {
        self.shared.lock().capacity
    }

    /// Whether the executor can run, as of the last look.
    pub fn health(&self) -> Health {
        self.shared.lock().health.clone()
    }

    /// The processes that share the model, as of the last look.
    pub fn ranks(&self) -> Vec<RankReport> {
        self.shared.lock().ranks.clone()
    }

    /// To be waited for when the handles are gone.
    pub fn ending(&self) -> Ending {
        Ending(self.shared.clone())
    }

    /// Accepts nothing more and waits for what runs or waits. Returns how many requests were unfinished at the deadline;
    /// these are cancelled within a step.
    pub fn drain(&self, deadline: Duration) -> usize {
        let mut state = self.shared.lock();
        state.draining = true;
        let busy = |state: &mut State| state.unfinished > 0 && !state.stopped;
        let waited = self.shared.ended.wait_timeout_while(state, deadline, busy);
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.abandoned = true;
        state.unfinished
    }
}

/// What the thread owns.
struct Loop<E: Executor> {
    engine: Engine<E>,
    clients: HashMap<RequestId, Client>,
    /// Submissions that were received, and requests that have ended, since the last publication.
    received: usize,
    ended: usize,
    stop: Stop,
}

/// Says that the thread is gone, even if it went by a panic.
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.lock().stopped = true;
        self.0.ended.notify_all();
    }
}

impl<E: Executor> Loop<E> {
    fn run(mut self, submissions: &Receiver<Submission>) {
        let mut events = Vec::new();
        loop {
            if self.engine.is_idle() {
                match submissions.recv_timeout(IDLE_LOOK) {
                    Ok(submission) => self.accept(submission),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
            }
            while let Ok(submission) = submissions.try_recv() {
                self.accept(submission);
            }
            self.cancel_the_dropped();
            // An error has ended every request, and each of them is told by an event.
            let _ = self.engine.step(&mut events);
            for event in events.drain(..) {
                self.dispatch(event);
            }
            self.publish();
        }
    }

    fn accept(&mut self, Submission { request, mut client }: Submission) {
        self.received += 1;
        match self.engine.add(request) {
            Ok(id) => {
                // Whether anybody listens is seen with the first event that matters.
                let _ = client.sink.send(EventKind::Accepted);
                self.clients.insert(id, client);
            }
            Err(error) => {
                let _ = client.sink.send(EventKind::Refused(error));
                self.ended += 1;
            }
        }
    }

    fn cancel_the_dropped(&mut self) {
        let all = self.stop.0.lock().abandoned;
        let Self { engine, clients, ended, .. } = self;
        clients.retain(|&id, client| {
            if !all && !client.dropped.load(Ordering::Relaxed) {
                return true;
            }
            if let Some(finished) = engine.cancel(id) {
                let _ = client.sink.send(EventKind::Finished(finished));
            }
            *ended += 1;
            false
        });
    }

    fn dispatch(&mut self, Event { request, kind }: Event) {
        let Some(client) = self.clients.get_mut(&request) else {
            return; // it hung up in this very step
        };
        let ends = matches!(kind, EventKind::Finished(_) | EventKind::Refused(_));
        let listens = client.sink.send(kind);
        if ends || !listens {
            self.clients.remove(&request);
            self.ended += 1;
            if !ends {
                self.engine.cancel(request);
            }
        }
    }

    fn publish(&mut self) {
        let (stats, capacity) = (self.engine.stats(), self.engine.capacity());
        let (health, ranks) = (self.engine.health(), self.engine.executor().ranks());
        let mut state = self.stop.0.lock();
        state.stats = stats;
        state.capacity = capacity;
        state.health = health;
        state.ranks = ranks;
        state.room = self.engine.room();
        state.retry_after = self.engine.retry_after();
        state.submitted -= std::mem::take(&mut self.received);
        state.unfinished -= std::mem::take(&mut self.ended);
        if state.unfinished == 0 {
            self.stop.0.ended.notify_all();
        }
    }
}
