//! `ReplyWriter`: writes replies from several threads. Lines are never interleaved.

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::protocol::{ErrorKind, LineMessage as _, RankReply, WriteError, Writer};

/// Not a line of the protocol, and not UTF-8.
#[cfg(debug_assertions)]
const GARBAGE: &[u8] = b"{\"op\":\xff\x00 nonsense ]]\n";

/// Clones write to the same stream.
#[derive(Clone)]
pub struct ReplyWriter(Arc<Mutex<Option<Stream>>>);

type Stream = Writer<Box<dyn Write + Send>>;

impl ReplyWriter {
    pub fn new(output: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Writer::new(Box::new(output))))))
    }

    /// A reply that is too long for a line is replaced by an error that says so.
    pub fn write(&self, reply: &RankReply) -> Result<(), WriteError> {
        self.write_after(|| (), reply)
    }

    /// Calls `before` with the stream locked, so that no other line comes between it and the reply.
    pub fn write_after(&self, before: impl FnOnce(), reply: &RankReply) -> Result<(), WriteError> {
        let mut stream = self.lock();
        before();
        let Some(writer) = &mut *stream else { return Ok(()) };
        match writer.write(reply) {
            Err(error @ WriteError::TooLong { .. }) => {
                writer.write_error(reply.id(), ErrorKind::ForwardFailed, &error.to_string())
            }
            written => written,
        }
    }

    /// Writes a malformed line, for a [`Fault`](super::Fault).
    #[cfg(debug_assertions)]
    pub fn garble(&self) -> Result<(), WriteError> {
        let mut stream = self.lock();
        let Some(stream) = stream.as_mut().map(Writer::get_mut) else { return Ok(()) };
        stream.write_all(GARBAGE)?;
        Ok(stream.flush()?)
    }

    /// Closes the stream, so that the leader sees its end. Later writes are dropped.
    #[cfg(debug_assertions)]
    pub fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Stream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
