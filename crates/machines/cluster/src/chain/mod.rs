//! `Chain`: the executor of a model, or of a range of its layers, that runs on several machines.
//!
//! The coordinator keeps the first layers (possibly none), and of a whole model the embedding, the head and the sampler
//! ([`CoordinatorStage`]). A step runs there first; its activations go to the first stage, from stage to stage, and the last
//! stage returns the states of the rows that need logits, are pooled or are requested. Session operations take the same way, so nothing overtakes a step.
//!
//! When a machine is lost, every session is: the [`ChainBuilder`] forms another chain while [`Executor::poll_health`] reports
//! that the chain is being rebuilt.

mod deadline;
mod link;
mod times;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use engine::{
    Capacity, CoordinatorStage, Executor, ExecutorError, Health, MissingLayers, OpenedSession, Prefix, StepOutput,
    StepPlan,
};
use kernels::Backend;
use types::{LayerRange, SessionId};

use crate::wire::chain::{CloseMessage, OpenMessage, StepEntry, StepMessage, TruncateMessage};
use deadline::StepDeadline;
pub use link::{ChainLink, LinkEnd, LinkEvent, LinkHandle, OnSilence};
pub use times::{ChainTimes, StageTimes, StepTimes};

/// How long a wait for results sleeps at most before it checks the deadline of the step.
const TICK: Duration = Duration::from_millis(20);

/// Forms chains: finds machines, plans, loads layers and connects the stages. All of it happens in the background.
pub trait ChainBuilder<B: Backend>: Send {
    /// The chain was lost, or there was none yet: form another one. The coordinator's part is given back, to be used again
    /// or replaced.
    fn rebuild(&mut self, why: &str, stage: Option<Box<CoordinatorStage<B>>>);

    /// The chain that was formed, if one is ready within `wait`.
    fn poll(&mut self, wait: Duration) -> Option<FormedChain<B>>;

    /// The layers for which a machine is missing, and why, while no chain is formed; `None` if it does not know them yet.
    fn missing(&self) -> Option<(LayerRange, String)> {
        None
    }

    /// Why the current chain is to be formed again, if it is. Asked before each step, and while nothing runs.
    fn replacement(&mut self) -> Option<String> {
        None
    }
}

/// A chain that is ready to run.
pub struct FormedChain<B: Backend> {
    pub stage: Box<CoordinatorStage<B>>,
    /// `None` if the coordinator has all layers.
    pub link: Option<ChainLink>,
}

pub struct Chain<B: Backend, F: ChainBuilder<B>> {
    builder: F,
    state: State<B>,
    /// What the chain could hold when it was last formed.
    capacity: Capacity,
    flights: VecDeque<Flight>,
    next_step: u64,
    /// Memory of steps that were collected.
    spare_plans: Vec<StepPlan>,
    message: StepMessage,
    times: Arc<ChainTimes>,
    deadline: StepDeadline,
}

enum State<B: Backend> {
    Ready(FormedChain<B>),
    Forming {
        why: Arc<str>,
        since: Instant,
        /// Whether the engine knows that all sessions are gone.
        is_reported: bool,
    },
}

/// A step in flight.
struct Flight {
    number: u64,
    plan: StepPlan,
    submitted: Instant,
    /// The time that the coordinator took to compute its part.
    own_us: u32,
    /// The states, if the coordinator has all layers.
    own_states: Option<Vec<f32>>,
}

impl Flight {
    fn times<'a>(&self, compute_us: &'a [u32]) -> StepTimes<'a> {
        let (rows, state_rows) = (self.plan.rows(), self.plan.state_rows());
        StepTimes { compute_us, whole: self.submitted.elapsed(), rows, state_rows }
    }
}

impl<B: Backend, F: ChainBuilder<B>> Chain<B, F> {
    /// An executor for a chain that was formed. A step that takes longer than `step_deadline`, or much longer than
    /// those before it, means that a stage hangs.
    pub fn new(builder: F, formed: FormedChain<B>, times: Arc<ChainTimes>, step_deadline: Duration) -> Self {
        Self {
            builder,
            capacity: formed.stage.capacity(),
            state: State::Ready(formed),
            flights: VecDeque::new(),
            next_step: 0,
            spare_plans: Vec::new(),
            message: StepMessage::default(),
            times,
            deadline: StepDeadline::new(step_deadline),
        }
    }

    /// Who forms its chains.
    pub fn builder(&self) -> &F {
        &self.builder
    }

    /// Bytes of the weights of the coordinator's layers.
    pub fn layer_bytes(&self) -> usize {
        self.stage().map_or(0, |stage| stage.stage().weight_bytes())
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.stage().map_or(0, CoordinatorStage::head_bytes)
    }

    fn stage(&self) -> Option<&CoordinatorStage<B>> {
        match &self.state {
            State::Ready(formed) => Some(&formed.stage),
            State::Forming { .. } => None,
        }
    }

    fn formed(&mut self) -> Result<&mut FormedChain<B>, ExecutorError> {
        match &mut self.state {
            State::Ready(formed) => Ok(formed),
            State::Forming { why, is_reported, .. } => {
                *is_reported = true;
                Err(ExecutorError::Lost { why: why.clone() })
            }
        }
    }

    /// Ends the chain and has another one formed.
    fn lose(&mut self, why: &str) {
        let why: Arc<str> = why.into();
        let forming = State::Forming { why: why.clone(), since: Instant::now(), is_reported: false };
        let State::Ready(FormedChain { stage, link }) = std::mem::replace(&mut self.state, forming) else { return };
        self.spare_plans.extend(self.flights.drain(..).map(|flight| flight.plan));
        self.builder.rebuild(&why, Some(stage));
        // The builder knows of the loss before machines report that their connections have ended.
        drop(link);
    }

    fn lost<T>(&mut self, why: &str) -> Result<T, ExecutorError> {
        self.lose(why);
        self.formed().and_then(|_| Err(ExecutorError::Lost { why: why.into() }))
    }

    /// Sends a session operation along the chain.
    fn send(&mut self, encode: impl FnOnce(&mut Vec<u8>) -> crate::wire::chain::ChainKind) {
        if let State::Ready(FormedChain { link: Some(link), .. }) = &self.state {
            let mut bytes = Vec::new();
            let kind = encode(&mut bytes);
            // If the connection is gone, the next step finds out why.
            link.send(kind, bytes);
        }
    }

    /// Takes note of events that came while nobody waited for results.
    fn drain_events(&mut self) {
        let State::Ready(FormedChain { link, .. }) = &mut self.state else { return };
        let lost = link.as_mut().and_then(ChainLink::poll_lost);
        if let Some(why) = lost.or_else(|| self.builder.replacement()) {
            self.lose(&why);
        }
    }

    /// Waits for the states of the oldest step.
    fn receive(&mut self) -> Result<Vec<f32>, String> {
        let flight = self.flights.front_mut().ok_or("no step is in flight")?;
        if let Some(states) = flight.own_states.take() {
            self.times.record(flight.times(&[flight.own_us]));
            return Ok(states);
        }
        let State::Ready(FormedChain { link: Some(link), stage }) = &mut self.state else {
            return Err("the chain has no stages".to_owned());
        };
        let limit = self.deadline.of(flight.plan.rows());
        let message = loop {
            match link.receive(TICK) {
                Ok(LinkEvent::States(message)) => break message,
                Ok(LinkEvent::Lost { why }) => return Err(why),
                Err(RecvTimeoutError::Timeout) if flight.submitted.elapsed() < limit => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("a step took longer than {limit:?}"));
                }
                Err(RecvTimeoutError::Disconnected) => return Err("the last stage is gone".to_owned()),
            }
        };
        let expected = flight.plan.state_rows() * stage.stage().width();
        if message.number != flight.number {
            return Err(format!("the last stage returned step {} instead of {}", message.number, flight.number));
        }
        if message.states.len() != expected {
            return Err(format!("the last stage returned {} values instead of {expected}", message.states.len()));
        }
        if message.states.iter().any(|value| !value.is_finite()) {
            return Err("the last stage returned values that are not finite".to_owned());
        }
        let times = flight.times(&message.compute_us);
        self.deadline.record(&times);
        self.times.record(times);
        Ok(message.states)
    }
}

impl<B: Backend, F: ChainBuilder<B>> Executor for Chain<B, F> {
    fn depth(&self) -> usize {
        match &self.state {
            State::Ready(FormedChain { stage, link: Some(link) }) => {
                link.stages() + usize::from(stage.stage().layers().is_some())
            }
            _ => 1,
        }
    }

    fn capacity(&self) -> Capacity {
        match &self.state {
            State::Ready(formed) => formed.stage.capacity(),
            State::Forming { .. } => {
                Capacity { pages_free: self.capacity.pages_total, pages_cached: 0, ..self.capacity }
            }
        }
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.formed()?.stage.open(tokens_max, prefix)?;
        self.send(|bytes| {
            let OpenedSession { session, computed } = opened;
            let pages = prefix.pages.to_vec();
            OpenMessage { tokens_max, reuse_max: prefix.reuse_max, pages, session, computed }.encode(bytes)
        });
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.formed()?.stage.truncate(session, tokens)?;
        self.send(|bytes| TruncateMessage { session, tokens, kept }.encode(bytes));
        Ok(kept)
    }

    fn close(&mut self, session: SessionId) {
        let State::Ready(formed) = &mut self.state else { return };
        if formed.stage.sessions().is_open(session) {
            formed.stage.close(session);
            self.send(|bytes| CloseMessage { session }.encode(bytes));
        }
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.drain_events();
        let depth = self.depth();
        if self.flights.len() == depth {
            return Err(ExecutorError::PipelineFull { depth });
        }
        let mut states = std::mem::take(&mut self.message.activations);
        let started = Instant::now();
        let formed = self.formed()?;
        formed.stage.start(plan, &mut states)?;
        let number = self.next_step;
        self.next_step += 1;
        let own_us = micros(started.elapsed());
        let plan_copy = self.spare_plans.pop().unwrap_or_default();
        let mut flight = Flight { number, plan: plan_copy, submitted: started, own_us, own_states: None };
        flight.plan.clone_from(plan);
        match &self.state {
            State::Ready(FormedChain { link: Some(link), .. }) => {
                let message = &mut self.message;
                message.number = number;
                message.compute_us.clear();
                message.compute_us.push(own_us);
                message.entries.clear();
                message.entries.extend(plan.entries().iter().map(|entry| StepEntry {
                    session: entry.session,
                    phase: entry.phase,
                    position: entry.position,
                    rows: entry.rows(),
                    state_rows: entry.state_rows().len(),
                }));
                message.activations = states;
                let mut bytes = Vec::new();
                let kind = message.encode(&mut bytes);
                link.send(kind, bytes);
            }
            _ => {
                let width = states.len() / plan.rows().max(1);
                let rows = plan.entries().iter().flat_map(|entry| entry.state_rows());
                flight.own_states = Some(rows.flat_map(|row| &states[row * width..][..width]).copied().collect());
                self.message.activations = states;
            }
        }
        self.flights.push_back(flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        if self.flights.is_empty() {
            return self.formed().and_then(|_| Err(ExecutorError::NoStepInFlight));
        }
        let states = match self.receive() {
            Ok(states) => states,
            Err(why) => return self.lost(&why),
        };
        let Some(Flight { plan, .. }) = self.flights.pop_front() else { return Err(ExecutorError::NoStepInFlight) };
        let started = Instant::now();
        let finished = self.formed()?.stage.finish(&plan, &states, output);
        self.times.record_head(started.elapsed());
        self.spare_plans.push(plan);
        finished.or_else(|error| self.lost(&error.to_string()))
    }

    fn missing(&self) -> Option<MissingLayers> {
        let State::Forming { since, .. } = &self.state else { return None };
        let (layers, why) = self.builder.missing()?;
        Some(MissingLayers { layers, since: *since, why: why.into() })
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        self.drain_events();
        match &mut self.state {
            State::Ready(_) => return Health::Ready,
            State::Forming { why, is_reported: is_reported @ false, .. } => {
                *is_reported = true;
                return Health::Rebuilding { why: why.clone() };
            }
            State::Forming { .. } => {}
        }
        match (self.builder.poll(wait), &self.state) {
            (Some(mut formed), _) => {
                formed.stage.clear();
                self.times.restart();
                self.deadline.restart();
                self.capacity = formed.stage.capacity();
                self.state = State::Ready(formed);
                Health::Ready
            }
            (None, State::Forming { why, .. }) => Health::Rebuilding { why: why.clone() },
            (None, State::Ready(_)) => Health::Ready,
        }
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
