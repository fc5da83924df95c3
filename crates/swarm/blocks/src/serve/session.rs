//! One session of a client: a task that runs what comes, in order, and replies. It is aborted when the client closes the session
//! or leaves.

use std::sync::Arc;

use directory::PeerId;
use tokio::sync::{Semaphore, mpsc};

use super::Server;
use super::account::WaitingPermits;
use super::client_stream::WaitingReply;
use crate::block::{BlockRows, BlockSession, Client, Refusal, RunError};
use crate::wire::{Activations, Encoding, FailureKind, Next, Open, Reply, Returned, Run};

pub(super) enum Job {
    Run {
        run: Run,
        /// Another peer passed it on.
        is_pushed: bool,
        /// Memory that is free when the reply was sent.
        waiting: WaitingPermits,
    },
    Route {
        next: Option<Next>,
    },
}

pub(super) struct SessionContext {
    pub server: Arc<Server>,
    pub peer: PeerId,
    /// Connections to next peers that the client may still cause.
    pub links: Arc<Semaphore>,
    /// What waits of the client's, in KiB.
    pub waiting: Arc<Semaphore>,
    pub replies: mpsc::Sender<WaitingReply>,
}

pub(super) async fn run(context: SessionContext, open: Open, mut jobs: mpsc::Receiver<Job>) {
    let number = open.session;
    if let Some((kind, why)) = serve(&context, open, &mut jobs).await {
        // An error means that the client has left.
        let _ = context.replies.send((Reply::Failed { session: number, kind, why }, [None, None])).await;
    }
}

/// Returns why the session ended, unless the client closed it.
async fn serve(context: &SessionContext, open: Open, jobs: &mut mpsc::Receiver<Job>) -> Option<(FailureKind, String)> {
    let SessionContext { server, peer, links, replies, .. } = context;
    let Open { session: number, model, layers, is_last, tokens_max, mut next, .. } = open;
    let blocks = server.blocks.read().unwrap_or_else(std::sync::PoisonError::into_inner).get(&model).cloned();
    let Some(block) = blocks else {
        return Some((FailureKind::Refused, "this peer does not serve the model".to_owned()));
    };
    let mut session = match block.open(Client::Peer(*peer), layers, tokens_max).await {
        Ok(session) => session,
        Err(refusal) => return Some((refused(&refusal), refusal.to_string())),
    };
    let Some(shape) = block.shape() else { return Some((FailureKind::Ended, "the block has ended".to_owned())) };
    // Only its session keeps the block's executor from being replaced.
    drop(block);
    let is_linked = match &next {
        Some(next) => server.links.connect(*peer, links, next).await,
        None => false,
    };
    let opened = Reply::Opened { session: number, rows_max: shape.rows_max, is_linked };
    replies.send((opened, [None, None])).await.ok()?;
    while let Some(job) = jobs.recv().await {
        match job {
            Job::Route { next: new } => {
                next = new;
                if let Some(next) = &next {
                    server.links.connect(*peer, links, next).await;
                }
            }
            Job::Run { run, is_pushed, waiting } => {
                let is_silent = run.is_silent;
                match run_one(context, &mut session, next.as_ref(), is_last, run).await {
                    Ok(returned) => {
                        // From now on the client carries the rows, so that they stay in order.
                        if returned.passed_on.is_none() && !is_silent {
                            next = None;
                        }
                        replies.send((Reply::Ran { session: number, returned }, waiting)).await.ok()?;
                    }
                    // Rows that were passed on may be late: the client has taken another way since.
                    Err(error) if is_pushed && error.is_misuse() => {
                        tracing::debug!(%error, "rows that were passed on do not fit");
                    }
                    Err(error) => return Some((failed(&error), error.to_string())),
                }
            }
        }
    }
    None
}

async fn run_one(
    context: &SessionContext,
    session: &mut BlockSession,
    next: Option<&Next>,
    is_last: bool,
    run: Run,
) -> Result<Returned, RunError> {
    let Run { run: number, position, phase, state_rows, is_silent, activations } = run;
    let Activations { encoding, rows, values } = activations;
    let wanted = match (is_silent, is_last) {
        (true, _) => 0,
        (false, false) => rows,
        (false, true) => state_rows,
    };
    let ran = session.run(BlockRows { position, phase, activations: values, state_rows: wanted }).await?;
    let mut states = ran.states;
    if encoding == Encoding::F16 {
        // What is passed on and what the client gets is the same.
        states.iter_mut().for_each(|value| *value = half::f16::from_f32(*value).to_f32());
        if states.iter().any(|value| !value.is_finite()) {
            return Err(RunError::Failed { why: "the states are beyond the range of f16".into() });
        }
    }
    let mut states = Activations { encoding, rows: wanted, values: states };
    let passed_on = match next.filter(|_| !is_silent) {
        Some(next) => {
            let run = Run { run: number, position, phase, state_rows, is_silent, activations: states };
            let SessionContext { server, waiting, .. } = context;
            let is_sent = server.links.send(next, &run, [&server.waiting, waiting]);
            states = run.activations;
            is_sent.then_some(next.key)
        }
        None => None,
    };
    Ok(Returned { run: number, passed_on, compute: ran.compute, queued: ran.queued, states })
}

fn refused(refusal: &Refusal) -> FailureKind {
    match refusal {
        Refusal::WarmingUp | Refusal::Rebuilding => FailureKind::WarmingUp,
        Refusal::TooLong { .. } | Refusal::Layers { .. } => FailureKind::Misuse,
        Refusal::Draining
        | Refusal::TooManySessions { .. }
        | Refusal::NoTokens { .. }
        | Refusal::Busy
        | Refusal::Ended => FailureKind::Refused,
    }
}

fn failed(error: &RunError) -> FailureKind {
    match error {
        // New sessions are refused in the same way until it is rebuilt.
        RunError::Lost => FailureKind::WarmingUp,
        RunError::Busy | RunError::NoTokens { .. } => FailureKind::Refused,
        error if error.is_misuse() => FailureKind::Misuse,
        _ => FailureKind::Ended,
    }
}
