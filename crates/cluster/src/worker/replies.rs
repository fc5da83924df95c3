//! `ReplyWriter`: where replies leave. Several threads write; a line is never broken by another.

use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::protocol::{ErrorKind, Message as _, Reply, WriteError, Writer};

/// What is no line of the protocol, in any encoding.
#[cfg(debug_assertions)]
const GARBAGE: &[u8] = b"{\"op\":\xff\x00 nonsense ]]\n";

/// Clones write to the same stream.
#[derive(Clone)]
pub struct ReplyWriter(Arc<Mutex<Option<Box<dyn Write + Send>>>>);

impl ReplyWriter {
    pub fn new(output: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(output)))))
    }

    /// A reply that is too long for a line is replaced by an error that says so.
    pub fn write(&self, reply: &Reply) -> Result<(), WriteError> {
        self.write_after(|| (), reply)
    }

    /// Calls `before` when no other line can come between that and the reply.
    pub fn write_after(&self, before: impl FnOnce(), reply: &Reply) -> Result<(), WriteError> {
        let mut stream = self.lock();
        before();
        let Some(stream) = &mut *stream else { return Ok(()) };
        let mut writer = Writer::new(stream);
        match writer.write(reply) {
            Err(error @ WriteError::TooLong { .. }) => {
                writer.write_error(reply.id(), ErrorKind::ForwardFailed, &error.to_string())
            }
            written => written,
        }
    }

    /// A line that is no reply, for a [`Fault`](super::Fault).
    #[cfg(debug_assertions)]
    pub fn garble(&self) -> Result<(), WriteError> {
        let mut stream = self.lock();
        let Some(stream) = &mut *stream else { return Ok(()) };
        stream.write_all(GARBAGE)?;
        Ok(stream.flush()?)
    }

    /// Closes the stream, so that the leader sees its end. What is written afterwards goes nowhere.
    #[cfg(debug_assertions)]
    pub fn close(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<dyn Write + Send>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
