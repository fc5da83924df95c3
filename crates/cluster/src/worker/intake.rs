//! `Intake`: the reading thread. It never waits for the work at hand, so `cancel` and `abort` take effect during it.
//! It waits only where the leader does not take replies, which is for the leader to end.

use std::io::{BufReader, Read};
use std::sync::Arc;

use tracing::warn;

use super::outlet::Outlet;
use super::queue::{Queue, Work};
use crate::collective::AbortHandle;
use crate::protocol::{ErrorKind, Lines, Message as _, Reply, Request, WriteError};

pub struct Intake {
    queue: Arc<Queue>,
    outlet: Outlet,
    lifeline: AbortHandle,
}

impl Intake {
    pub fn new(queue: Arc<Queue>, outlet: Outlet, lifeline: AbortHandle) -> Self {
        Self { queue, outlet, lifeline }
    }

    /// Until the input ends, or the output: then nobody is left to work for.
    pub fn read(self, input: impl Read) {
        let mut lines = Lines::new(BufReader::new(input));
        while let Some(read) = lines.read() {
            let taken = match read {
                Ok(request) => self.take(request, lines.bytes()),
                Err(error) => match error.reply() {
                    Some(reply) => self.push(Work::Answer(reply), lines.bytes()),
                    None => {
                        warn!(%error, "the input broke");
                        break;
                    }
                },
            };
            if taken.is_err() {
                break;
            }
        }
    }

    fn take(&self, request: Request, bytes: usize) -> Result<(), WriteError> {
        match request {
            Request::Cancel { id, target } => {
                let found = self.queue.cancel(target);
                self.outlet.write(&Reply::Cancelled { id, found })
            }
            Request::Abort { id, generation } => {
                self.lifeline.abort(generation);
                self.outlet.write(&Reply::Aborted { id, generation })
            }
            request => self.push(Work::Run(request), bytes),
        }
    }

    fn push(&self, work: Work, bytes: usize) -> Result<(), WriteError> {
        let Some(work) = self.queue.push(work, bytes) else { return Ok(()) };
        self.outlet.write(&match work {
            Work::Run(request) => Reply::error(request.id(), ErrorKind::BadRequest, "too many requests are waiting"),
            Work::Answer(reply) => reply,
        })
    }
}

/// However the reading ends, nobody waits for more of it.
impl Drop for Intake {
    fn drop(&mut self) {
        self.lifeline.end();
        self.queue.end();
    }
}
