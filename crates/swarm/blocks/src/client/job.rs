//! `Job`: rows that a session is to run, and where the result goes.

use std::sync::{Arc, Condvar, Mutex, mpsc as sync};
use std::time::Duration;

use engine::Phase;

use super::context::lock;
use super::session::SessionLoss;
use super::session_state::JobOutput;

/// Rows that are to be run.
pub(super) struct Job {
    pub position: usize,
    pub phase: Phase,
    pub rows: Vec<f32>,
    pub state_rows: usize,
    /// The logits of the last row serve as well as its state, which is the only one that is needed.
    pub takes_logits: bool,
    pub reply: JobReply,
}

pub(super) type JobResult = Result<JobOutput, SessionLoss>;

/// Where a result goes. Whoever waits for any of several results is woken, also if there is none.
pub(super) struct JobReply {
    sender: Option<sync::Sender<JobResult>>,
    signal: Option<Arc<ReplySignal>>,
}

impl JobReply {
    pub fn new(signal: Option<&Arc<ReplySignal>>) -> (Self, sync::Receiver<JobResult>) {
        let (sender, receiver) = sync::channel();
        (Self { sender: Some(sender), signal: signal.cloned() }, receiver)
    }

    /// An error means that nobody wants the result any more.
    pub fn send(mut self, result: JobResult) -> Result<(), sync::SendError<JobResult>> {
        let sender = self.sender.take();
        sender.map_or(Ok(()), |sender| sender.send(result))
    }
}

impl Drop for JobReply {
    fn drop(&mut self) {
        // Whoever is woken finds the channel closed.
        self.sender = None;
        self.signal.iter().for_each(|signal| signal.notify());
    }
}

/// Counts replies.
#[derive(Debug, Default)]
pub(super) struct ReplySignal {
    count: Mutex<u64>,
    changed: Condvar,
}

impl ReplySignal {
    pub fn count(&self) -> u64 {
        *lock(&self.count)
    }

    fn notify(&self) {
        *lock(&self.count) += 1;
        self.changed.notify_all();
    }

    /// Waits until there are more replies than these, for `wait` at most.
    pub fn wait(&self, count: u64, wait: Duration) {
        // A poisoned lock means that a session has panicked, which its channel tells.
        drop(self.changed.wait_timeout_while(lock(&self.count), wait, |now| *now == count));
    }
}
