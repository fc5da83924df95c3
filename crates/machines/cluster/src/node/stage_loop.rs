//! Runs a stage in a chain: receives session operations and steps from the stage before it, and passes them on, steps with
//! the activations that it computed. The last stage returns states to the coordinator instead.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use engine::{Executor, ExecutorError, Health, OpenedSession, Prefix, RequestedOutput, StepOutput, StepPlan};
use net::{MessageError, MessageReceiver, MessageSender, MessageStream};

#[cfg(debug_assertions)]
use super::fault::{self, FaultAction, FaultPoint};
use crate::outbox::{Message, Outbox};
use crate::wire::WireError;
use crate::wire::chain::{ChainKind, CloseMessage, OpenMessage, StatesMessage, StepMessage, TruncateMessage};
use crate::wire::control::WireFault;

/// Messages that wait for the stage, and messages that wait to be sent.
pub(crate) const MESSAGES_MAX: usize = 1024;
/// Steps among them. A coordinator has no more in flight than its chain has stages.
const STEPS_MAX: usize = 64;

/// How often an idle stage looks whether its ranks are still there.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);

/// The stage's place in its chain.
pub struct StageConnections {
    pub previous: MessageStream,
    /// The next stage, or the coordinator if this is the last one.
    pub next: MessageStream,
    pub is_last: bool,
}

/// The sizes that bound messages.
#[derive(Clone, Copy, Debug)]
pub struct StageShape {
    pub rows_max: usize,
    /// Values of one row of activations.
    pub hidden: usize,
}

#[derive(Debug, thiserror::Error)]
enum StageError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    #[error("{what} gave {found} here and {expected} at the coordinator")]
    Differs { what: &'static str, found: u64, expected: u64 },
    #[error("{0} is not a message for a stage")]
    Unexpected(u8),
    #[error("the activations of step {0} are not finite")]
    NotFinite(u64),
    #[error("the stage returned {found} values instead of {expected}")]
    States { found: usize, expected: usize },
}

impl StageError {
    fn fault(self) -> WireFault {
        let why = self.to_string();
        match self {
            Self::Executor(error) if error.is_lost() => WireFault::Lost { why },
            _ => WireFault::Stage { why },
        }
    }
}

/// Sends a message to the next stage. Fails with [`MessageError::Closed`] if something else knows why it cannot.
pub(crate) type Send<'a> = dyn Fn(Message) -> Result<(), MessageError> + 'a;

/// Runs until a connection ends or the stage fails, and says which.
pub fn run(executor: &mut dyn Executor, shape: StageShape, connections: StageConnections) -> WireFault {
    let StageConnections { previous, next, is_last } = connections;
    let (incoming, messages) = sync_channel(MESSAGES_MAX);
    let (outbox, queue) = Outbox::new(next.sender.clone(), MESSAGES_MAX);
    let steps = &AtomicUsize::new(0);
    let (previous_sender, next_sender) = (&previous.sender, &next.sender);
    let (previous_receiver, next_receiver) = (previous.receiver, next.receiver);
    thread::scope(|scope| {
        let receiving = scope.spawn(move || receive(previous_receiver, shape, &incoming, steps));
        let sending = scope.spawn(move || queue.send_all().err().and_then(cause));
        let watching = scope.spawn(move || watch(next_receiver, [next_sender, previous_sender]));
        let failed = StageLoop::new(executor, shape, is_last).run(&messages, &|message| outbox.send(message), steps);
        drop((messages, outbox));
        // The first of the threads to end has the cause; the others end because of this.
        previous_sender.close();
        let sent = sending.join().unwrap_or_else(|_| Some("a thread ended".to_owned()));
        next_sender.close();
        let received = receiving.join().unwrap_or_else(|_| Some("a thread ended".to_owned()));
        let watched = watching.join().unwrap_or_else(|_| Some("a thread ended".to_owned()));
        match (failed, sent.or(watched), received) {
            (Some(fault), ..) => fault,
            (None, Some(why), _) => WireFault::Next { why },
            (None, None, why) => WireFault::Previous { why: why.unwrap_or_else(|| "it left".to_owned()) },
        }
    })
}

/// Runs a stage that gets its messages from this process, until there are no more or the next stage takes none. Returns why the
/// stage failed, if it did.
pub(crate) fn run_in_process(
    executor: &mut dyn Executor,
    shape: StageShape,
    is_last: bool,
    messages: &Receiver<Message>,
    send: &Send<'_>,
) -> Option<String> {
    // Steps are counted to limit what another machine sends.
    let fault = StageLoop::new(executor, shape, is_last).run(messages, send, &AtomicUsize::new(0))?;
    Some(fault.why().to_owned())
}

/// Receives messages from the stage before until the connection ends. Returns why, unless this side closed it.
fn receive(
    mut from: MessageReceiver,
    shape: StageShape,
    to: &SyncSender<Message>,
    steps: &AtomicUsize,
) -> Option<String> {
    let limit = |kind| Some(ChainKind::parse(kind).ok()?.bytes_max(shape.rows_max, shape.hidden));
    loop {
        let mut body = Vec::new();
        match from.receive(None, limit, &mut body) {
            Ok(Some(kind)) => {
                if kind == ChainKind::Step as u8 && steps.fetch_add(1, Ordering::Relaxed) >= STEPS_MAX {
                    return Some(format!("more than {STEPS_MAX} steps are waiting"));
                }
                if to.send((kind, body)).is_err() {
                    return None;
                }
            }
            Ok(None) => return Some("it left".to_owned()),
            Err(error) => return cause(error),
        }
    }
}

/// Why a connection ended, unless this side closed it.
fn cause(error: MessageError) -> Option<String> {
    (!matches!(error, MessageError::Closed)).then(|| error.to_string())
}

/// The next stage sends nothing but heartbeats. When its connection ends, closes both, so that all threads end. Returns why it
/// ended, unless this side closed it.
fn watch(mut from: MessageReceiver, both: [&MessageSender; 2]) -> Option<String> {
    let ended = from.receive(None, |_| None, &mut Vec::new());
    both.iter().for_each(|sender| sender.close());
    match ended {
        Err(error) => cause(error),
        Ok(_) => Some("it left".to_owned()),
    }
}

struct StageLoop<'a> {
    executor: &'a mut dyn Executor,
    shape: StageShape,
    is_last: bool,
    step: StepMessage,
    plan: StepPlan,
    output: StepOutput,
}

impl<'a> StageLoop<'a> {
    fn new(executor: &'a mut dyn Executor, shape: StageShape, is_last: bool) -> Self {
        let (step, plan, output) = (StepMessage::default(), StepPlan::new(), StepOutput::new());
        Self { executor, shape, is_last, step, plan, output }
    }

    /// Handles messages until there are no more, or until one cannot be handled; then it returns why.
    fn run(&mut self, messages: &Receiver<Message>, send: &Send<'_>, steps: &AtomicUsize) -> Option<WireFault> {
        loop {
            let (kind, body) = match messages.recv_timeout(HEALTH_INTERVAL) {
                Ok(message) => message,
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => {
                    #[cfg(debug_assertions)]
                    self.inject_idle(send);
                    match self.executor.poll_health(Duration::ZERO) {
                        Health::Ready => continue,
                        Health::Rebuilding { why } => return Some(WireFault::Lost { why: why.to_string() }),
                    }
                }
            };
            let is_step = kind == ChainKind::Step as u8;
            let reply = match self.handle(kind, body) {
                Ok(reply) => reply,
                Err(error) => return Some(error.fault()),
            };
            if is_step {
                steps.fetch_sub(1, Ordering::Relaxed);
            }
            // Only steps concern the coordinator's end of the chain.
            if (is_step || !self.is_last)
                && let Err(error) = send(reply)
            {
                return cause(error).map(|why| WireFault::Next { why });
            }
        }
    }

    /// Sends what nobody has asked for, if a fault says so.
    #[cfg(debug_assertions)]
    fn inject_idle(&self, send: &Send<'_>) {
        if self.step.number == 0 {
            return;
        }
        let message = match fault::hit(FaultPoint::Idle) {
            Some(FaultAction::Garbage) => fault::garbage(),
            // The states of a step that nobody has asked for.
            Some(FaultAction::Lie) => {
                let mut bytes = Vec::new();
                StatesMessage { number: u64::MAX, ..StatesMessage::default() }.encode(&mut bytes);
                bytes
            }
            _ => return,
        };
        let _ = send((ChainKind::States as u8, message));
    }

    /// Changes the message for the next stage, if a fault says so.
    #[cfg(debug_assertions)]
    fn inject(&mut self, bytes: &mut Vec<u8>, computed: std::time::Duration) {
        let is_prefill = self.step.entries.iter().any(|entry| entry.phase == engine::Phase::Prefill);
        match fault::hit(if is_prefill { FaultPoint::Prefill } else { FaultPoint::Decode }) {
            Some(FaultAction::Garbage) => *bytes = fault::garbage(),
            // Without the last value.
            Some(FaultAction::Lie) => bytes.truncate(bytes.len() - size_of::<f32>()),
            Some(FaultAction::Slow) => fault::slow_down(computed),
            _ => {}
        }
    }

    /// Handles one message and returns the one for the next stage.
    fn handle(&mut self, kind: u8, mut body: Vec<u8>) -> Result<Message, StageError> {
        match ChainKind::parse(kind)? {
            ChainKind::Open => {
                let OpenMessage { tokens_max, reuse_max, pages, session, computed } = OpenMessage::decode(&body)?;
                let prefix = Prefix { tokens: &[], pages: &pages, reuse_max };
                let opened = self.executor.open(tokens_max, prefix)?;
                expect("the session that was opened", opened.session.0, session.0)?;
                let OpenedSession { computed: found, .. } = opened;
                expect("the tokens that were found", found as u64, computed as u64)?;
            }
            ChainKind::Truncate => {
                let TruncateMessage { session, tokens, kept } = TruncateMessage::decode(&body)?;
                let found = self.executor.truncate(session, tokens)?;
                expect("the tokens that were kept", found as u64, kept as u64)?;
            }
            ChainKind::Close => self.executor.close(CloseMessage::decode(&body)?.session),
            ChainKind::Step => return self.run_step(&mut body),
            ChainKind::States | ChainKind::Fault => return Err(StageError::Unexpected(kind)),
        }
        Ok((kind, body))
    }

    fn run_step(&mut self, body: &mut Vec<u8>) -> Result<Message, StageError> {
        let Self { executor, shape, is_last, step, plan, output } = self;
        step.decode(body, shape.hidden)?;
        if step.activations.iter().any(|value| !value.is_finite()) {
            return Err(StageError::NotFinite(step.number));
        }
        let started = Instant::now();
        plan.clear();
        for entry in &step.entries {
            let rows = if *is_last { entry.state_rows } else { entry.rows };
            plan.push_rows(entry.session, entry.phase, entry.position, entry.rows, RequestedOutput::States { rows });
        }
        std::mem::swap(plan.activations_mut(), &mut step.activations);
        executor.submit(plan)?;
        executor.collect(output)?;
        let rows = if *is_last { step.state_rows() } else { step.rows() };
        let (found, expected) = (output.states.len(), rows * shape.hidden);
        if found != expected {
            return Err(StageError::States { found, expected });
        }
        step.compute_us.push(u32::try_from(started.elapsed().as_micros()).unwrap_or(u32::MAX));
        let states = std::mem::take(&mut output.states);
        let mut bytes = std::mem::take(body);
        let kind = match is_last {
            true => {
                let message = StatesMessage { number: step.number, compute_us: step.compute_us.clone(), states };
                let kind = message.encode(&mut bytes);
                output.states = message.states;
                kind
            }
            false => {
                step.activations = states;
                step.encode(&mut bytes)
            }
        };
        #[cfg(debug_assertions)]
        self.inject(&mut bytes, started.elapsed());
        Ok((kind as u8, bytes))
    }
}

/// Checks that a session operation gave the coordinator's result.
fn expect(what: &'static str, found: u64, expected: u64) -> Result<(), StageError> {
    if found == expected { Ok(()) } else { Err(StageError::Differs { what, found, expected }) }
}
