//! `RunningChain`: a stage at work in a chain, in a thread of its own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use net::{MessageSender, MessageStream};
use tracing::info;

use super::expected::Expectation;
use super::loaded_stage::{LoadedStage, StageLabel};
use super::stage_loop::{self, StageConnections};
use crate::wire::control::WireFault;

pub(super) struct RunningChain {
    thread: JoinHandle<LoadedStage>,
    is_stopped: Arc<AtomicBool>,
    /// The connections, once they are there, to be closed.
    connections: Arc<Mutex<Vec<MessageSender>>>,
}

impl RunningChain {
    /// Waits for the connections until `deadline`, and then runs the stage until one of them ends. `next` is the connection to
    /// the next stage, or, for the last stage, the expectation of the coordinator's. `report` gets the reason for the end,
    /// unless it was stopped.
    pub fn start(
        stage: LoadedStage,
        previous: Expectation,
        next: Result<MessageStream, Expectation>,
        is_last: bool,
        deadline: Instant,
        report: impl FnOnce(WireFault) + Send + 'static,
    ) -> io::Result<Self> {
        let (is_stopped, connections) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<MessageSender>>>::default());
        let (stopped, held) = (Arc::clone(&is_stopped), Arc::clone(&connections));
        let run = move || {
            let mut stage = stage;
            let is_over = || stopped.load(Ordering::Acquire);
            let late = |what: &str| format!("{what} did not connect in time");
            let fault = match previous.next(deadline, &is_over) {
                None => WireFault::Previous { why: late("the stage before") },
                Some(previous) => match connect(next, deadline, &is_over) {
                    None => WireFault::Next { why: late("the coordinator") },
                    Some((next, _slot)) => {
                        hold(&held, [&previous.stream, &next]);
                        let StageLabel { model, layers } = stage.label();
                        info!(model, %layers, is_last, "layers run in a chain");
                        if is_over() {
                            return stage;
                        }
                        let connections = StageConnections { previous: previous.stream, next, is_last };
                        let shape = stage.shape();
                        stage_loop::run(stage.executor(), shape, connections)
                    }
                },
            };
            if !is_over() {
                info!("the chain has ended: {}", fault.why());
                report(fault);
            }
            stage
        };
        let thread = thread::Builder::new().name("consort-stage".to_owned()).spawn(run)?;
        Ok(Self { thread, is_stopped, connections })
    }

    /// Ends the chain and returns the stage.
    pub fn stop(self) -> Option<LoadedStage> {
        self.is_stopped.store(true, Ordering::Release);
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(MessageSender::close);
        // A thread that panicked has lost its stage.
        self.thread.join().ok()
    }
}

fn connect(
    next: Result<MessageStream, Expectation>,
    deadline: Instant,
    is_over: &dyn Fn() -> bool,
) -> Option<(MessageStream, Option<net::ConnectionSlot>)> {
    match next {
        Ok(stream) => Some((stream, None)),
        Err(expected) => expected.next(deadline, is_over).map(|found| (found.stream, Some(found.slot))),
    }
}

fn hold(held: &Mutex<Vec<MessageSender>>, streams: [&MessageStream; 2]) {
    let senders = streams.map(|stream| stream.sender.clone());
    held.lock().unwrap_or_else(PoisonError::into_inner).extend(senders);
}
