//! `RequestReader`: the reading thread. It never waits for the running request, so `cancel` and `abort` take effect
//! during it, and `ping` gets a reply. It blocks only while the leader does not read replies.

use std::io::{BufReader, Read};
use std::sync::Arc;

use tracing::warn;

use super::queue::{QueuedLine, RequestQueue};
use super::replies::ReplyWriter;
use crate::protocol::{ErrorKind, LineMessage as _, Lines, RankReply, RankRequest, WriteError};
use collectives::AbortHandle;

pub struct RequestReader {
    queue: Arc<RequestQueue>,
    replies: ReplyWriter,
    abort: AbortHandle,
    pong: RankReply,
}

impl RequestReader {
    pub fn new(queue: Arc<RequestQueue>, replies: ReplyWriter, abort: AbortHandle, pong: RankReply) -> Self {
        Self { queue, replies, abort, pong }
    }

    /// Reads until the input ends or replies cannot be written.
    pub fn read(self, input: impl Read) {
        let mut lines = Lines::new(BufReader::new(input));
        while let Some(read) = lines.read_reusing(|| self.queue.take_spare()) {
            let taken = match read {
                Ok(request) => self.take(request, lines.bytes()),
                Err(error) => match error.reply() {
                    Some(reply) => self.push(QueuedLine::Answer(reply), lines.bytes()),
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

    fn take(&self, request: RankRequest, bytes: usize) -> Result<(), WriteError> {
        match request {
            RankRequest::Ping if self.queue.is_at_long_work() => self.replies.write(&self.pong),
            RankRequest::Cancel { id, target } => {
                let found = self.queue.cancel(target);
                self.replies.write(&RankReply::Cancelled { id, found })
            }
            RankRequest::Abort { id, epoch } => {
                self.abort.abort(epoch);
                self.replies.write(&RankReply::Aborted { id, epoch })
            }
            request => self.push(QueuedLine::Run(request), bytes),
        }
    }

    fn push(&self, work: QueuedLine, bytes: usize) -> Result<(), WriteError> {
        let Some(work) = self.queue.push(work, bytes) else { return Ok(()) };
        self.replies.write(&match work {
            QueuedLine::Run(request) => {
                RankReply::error(request.id(), ErrorKind::BadRequest, "too many requests are waiting")
            }
            QueuedLine::Answer(reply) => reply,
        })
    }
}

/// However reading ends, the epoch is aborted and the queue ends, so that no thread waits for more requests.
impl Drop for RequestReader {
    fn drop(&mut self) {
        self.abort.end();
        self.queue.end();
    }
}
