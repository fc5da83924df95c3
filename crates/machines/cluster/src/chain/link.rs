//! `ChainLink`: the coordinator's two connections of a chain: to the first stage, and from the last one. Stages may also be
//! executors in this process, such as those that drive machines with another protocol.

use std::mem;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel, sync_channel};
use std::thread;
use std::time::Duration;

use engine::Executor;
use net::{MessageError, MessageReceiver, MessageSender, MessageStream};

use crate::node::{MESSAGES_MAX, StageShape, run_in_process};
use crate::outbox::{Message, Outbox, OutboxQueue};
use crate::wire::chain::{ChainKind, FaultMessage, StatesMessage};

/// What happens to a chain.
#[derive(Debug)]
pub enum LinkEvent {
    /// The last stage returned the states of a step.
    States(StatesMessage),
    Lost {
        why: String,
    },
}

/// Dropping it ends the chain.
pub struct ChainLink {
    stages: usize,
    outgoing: Outgoing,
    events: Receiver<LinkEvent>,
    /// An event that was found while the caller looked for a loss.
    waiting: Option<LinkEvent>,
    reporter: LinkHandle,
    /// To the first and from the last stage, if they are on other machines.
    connections: Vec<MessageSender>,
}

/// The way to the first stage.
enum Outgoing {
    Machine(Outbox),
    Process(Sender<Message>),
}

/// A connection between the coordinator and a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    First,
    Last,
}

/// Called when a stage is silent, before the executor knows of it. A connection that ends for another reason may have been
/// closed because of a loss elsewhere in the chain.
pub type OnSilence = Arc<dyn Fn(LinkEnd) + Send + Sync>;

/// Tells the executor of a chain that the chain is lost.
#[derive(Clone, Debug)]
pub struct LinkHandle(Sender<LinkEvent>);

impl LinkHandle {
    pub fn lost(&self, why: impl Into<String>) {
        // An error means that the chain is gone already.
        let _ = self.0.send(LinkEvent::Lost { why: why.into() });
    }
}

impl ChainLink {
    /// `first` leads to the first of `stages` stages, `last` comes from the last of them. `states_bytes_max` is the limit for
    /// the states of a step. `on_silence` is called at most once for each connection.
    pub fn new(
        stages: usize,
        first: MessageStream,
        last: MessageStream,
        states_bytes_max: usize,
        on_silence: OnSilence,
    ) -> std::io::Result<Self> {
        let (events_sender, events) = channel();
        let reporter = LinkHandle(events_sender.clone());
        let (first, first_receiver) = (first.sender, first.receiver);
        let (last, last_receiver) = (last.sender, last.receiver);
        let (outbox, queue) = Outbox::new(first.clone(), MESSAGES_MAX);
        let handle = reporter.clone();
        spawn("consort-steps", move || send_all(queue, &handle))?;
        let handle = reporter.clone();
        let on_silence_of_first = Arc::clone(&on_silence);
        spawn("consort-first", move || watch(first_receiver, &handle, &on_silence_of_first))?;
        spawn("consort-states", move || receive_states(last_receiver, &events_sender, states_bytes_max, &on_silence))?;
        let (outgoing, connections) = (Outgoing::Machine(outbox), vec![first, last]);
        Ok(Self { stages, outgoing, events, waiting: None, reporter, connections })
    }

    /// A link to executors in this process. Each gets a thread, and messages go from one to the next as they do between
    /// machines. When the link is dropped, a thread ends as soon as its stage has done what it is doing.
    pub fn in_process(stages: Vec<Box<dyn Executor>>, shape: StageShape) -> std::io::Result<Self> {
        let count = stages.len();
        let (events_sender, events) = channel();
        let (outgoing, mut previous) = channel();
        let reporter = LinkHandle(events_sender.clone());
        for (index, mut stage) in stages.into_iter().enumerate() {
            let (replies, next) = sync_channel(MESSAGES_MAX);
            let (messages, handle, is_last) = (mem::replace(&mut previous, next), reporter.clone(), index + 1 == count);
            let send = move |message| replies.send(message).map_err(|_| MessageError::Closed);
            spawn("consort-stage", move || {
                if let Some(why) = run_in_process(&mut *stage, shape, is_last, &messages, &send) {
                    handle.lost(format!("stage {}: {why}", index + 1));
                }
            })?;
        }
        spawn("consort-states", move || decode_states(&previous, &events_sender))?;
        let outgoing = Outgoing::Process(outgoing);
        Ok(Self { stages: count, outgoing, events, waiting: None, reporter, connections: Vec::new() })
    }

    /// The number of stages, without the coordinator.
    pub fn stages(&self) -> usize {
        self.stages
    }

    /// For others that learn of a loss.
    pub fn handle(&self) -> LinkHandle {
        self.reporter.clone()
    }

    /// Sends a message to the first stage. A failure becomes an event.
    pub fn send(&self, kind: ChainKind, bytes: Vec<u8>) {
        let message = (kind as u8, bytes);
        match &self.outgoing {
            Outgoing::Machine(outbox) => report(outbox.send(message), &self.reporter),
            // An error means that the stage has ended, and has said why.
            Outgoing::Process(stage) => drop(stage.send(message)),
        }
    }

    /// The next event.
    pub fn receive(&mut self, wait: Duration) -> Result<LinkEvent, RecvTimeoutError> {
        match self.waiting.take() {
            Some(event) => Ok(event),
            None => self.events.recv_timeout(wait),
        }
    }

    /// Why the chain is lost, if that is the next event.
    pub fn poll_lost(&mut self) -> Option<String> {
        if self.waiting.is_none() {
            self.waiting = match self.events.try_recv() {
                Ok(event) => Some(event),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(LinkEvent::Lost { why: "the chain is gone".to_owned() }),
            };
        }
        match &self.waiting {
            Some(LinkEvent::Lost { why }) => Some(why.clone()),
            _ => None,
        }
    }
}

impl Drop for ChainLink {
    fn drop(&mut self) {
        self.connections.iter().for_each(MessageSender::close);
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(run).map(drop)
}

fn send_all(queue: OutboxQueue, handle: &LinkHandle) {
    report(queue.send_all(), handle);
}

/// A connection that was closed is reported by the thread that knows why.
fn report(sent: Result<(), MessageError>, handle: &LinkHandle) {
    match sent {
        Ok(()) | Err(MessageError::Closed) => {}
        Err(error) => handle.lost(format!("send to the first stage: {error}")),
    }
}

/// Whether nothing has passed, in either direction.
fn is_silence(error: &MessageError) -> bool {
    matches!(error, MessageError::Silent(_) | MessageError::Stalled(_))
}

/// The first stage sends nothing but heartbeats.
fn watch(mut receiver: MessageReceiver, handle: &LinkHandle, on_silence: &OnSilence) {
    let why = match receiver.receive(None, |_| None, &mut Vec::new()) {
        Ok(_) => "the first stage left".to_owned(),
        Err(error) => {
            if is_silence(&error) {
                on_silence(LinkEnd::First);
            }
            format!("the first stage: {error}")
        }
    };
    handle.lost(why);
}

fn receive_states(mut receiver: MessageReceiver, events: &Sender<LinkEvent>, bytes_max: usize, on_silence: &OnSilence) {
    let limit = |kind| match ChainKind::parse(kind) {
        Ok(ChainKind::States) => Some(bytes_max),
        Ok(kind @ ChainKind::Fault) => Some(kind.bytes_max(0, 0)),
        _ => None,
    };
    let mut body = Vec::new();
    loop {
        let event = match receiver.receive(None, limit, &mut body) {
            Ok(Some(kind)) if kind == ChainKind::States as u8 => {
                let mut message = StatesMessage::default();
                match message.decode(&body) {
                    Ok(()) => LinkEvent::States(message),
                    Err(error) => LinkEvent::Lost { why: format!("the last stage: {error}") },
                }
            }
            Ok(Some(_)) => LinkEvent::Lost {
                why: match FaultMessage::decode(&body) {
                    Ok(FaultMessage { stage, why }) => format!("stage {}: {why}", stage + 1),
                    Err(error) => format!("the last stage: {error}"),
                },
            },
            Ok(None) => LinkEvent::Lost { why: "the last stage left".to_owned() },
            Err(error) => {
                if is_silence(&error) {
                    on_silence(LinkEnd::Last);
                }
                LinkEvent::Lost { why: format!("the last stage: {error}") }
            }
        };
        let is_lost = matches!(event, LinkEvent::Lost { .. });
        if events.send(event).is_err() || is_lost {
            return;
        }
    }
}

/// Makes events of the states that the last stage in this process returns.
fn decode_states(messages: &Receiver<Message>, events: &Sender<LinkEvent>) {
    for (_, body) in messages {
        let mut message = StatesMessage::default();
        let event = match message.decode(&body) {
            Ok(()) => LinkEvent::States(message),
            Err(error) => LinkEvent::Lost { why: format!("the last stage: {error}") },
        };
        if events.send(event).is_err() {
            return;
        }
    }
}
