//! The framing of messages, without I/O. A message is a record with its header (a kind and the length of its body) and
//! as many records as its body takes. The body of a message longer than [`WHOLE_BYTES_MAX`] comes in pieces instead, each with
//! a header of its own, and heartbeats and short messages may come between them. A heartbeat, a piece and the declared end of
//! the messages are headers with kinds of their own. A header is checked before anything is kept, and memory grows with the
//! bytes received, not with a length that the other side stated.

use std::io::{self, ErrorKind};
use std::time::Duration;

use crate::noise::{Forged, TAG_BYTES};
use crate::record_reader::RecordReader;

pub(crate) const HEADER_BYTES: usize = 5;
/// The longest body that a header can state.
pub const BODY_BYTES_MAX: usize = u32::MAX as usize;

/// The longest body that follows its header at once. A longer one comes in pieces.
pub(crate) const WHOLE_BYTES_MAX: usize = 1 << 16;

/// Memory that a body gets before any of it has come.
const BODY_BYTES_RESERVED: usize = 1 << 16;

const HEARTBEAT: u8 = 0;
const PIECE: u8 = 254;
const END: u8 = 255;

/// Why a [`MessageStream`](crate::MessageStream) cannot be used. All but [`MessageError::Timeout`] end it.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// No message was complete before the deadline. The stream can still be used.
    #[error("no message came in time")]
    Timeout,
    #[error("nothing came from it for {0:?}")]
    Silent(Duration),
    #[error("it took no bytes for {0:?}")]
    Stalled(Duration),
    /// The connection ended, and the other side had not declared the end.
    #[error("the connection broke")]
    Broken(#[source] io::Error),
    /// This side closed the stream or declared the end of its messages.
    #[error("this side has ended the connection")]
    Closed,
    #[error(transparent)]
    Forged(#[from] Forged),
    #[error("records that are no messages")]
    Malformed,
    #[error("a message of kind {0}, which is not expected")]
    Kind(u8),
    #[error("a message of kind {kind} with {bytes} bytes, and the limit is {bytes_max}")]
    TooLong { kind: u8, bytes: usize, bytes_max: usize },
}

impl From<MessageError> for io::Error {
    fn from(error: MessageError) -> Self {
        let kind = match error {
            MessageError::Broken(error) => return error,
            MessageError::Timeout | MessageError::Silent(_) | MessageError::Stalled(_) => ErrorKind::TimedOut,
            MessageError::Closed => ErrorKind::NotConnected,
            MessageError::Forged(_)
            | MessageError::Malformed
            | MessageError::Kind(_)
            | MessageError::TooLong { .. } => ErrorKind::InvalidData,
        };
        Self::new(kind, error)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    kind: u8,
    body_bytes: u32,
}

impl Header {
    pub const HEARTBEAT: Self = Self { kind: HEARTBEAT, body_bytes: 0 };
    pub const END: Self = Self { kind: END, body_bytes: 0 };

    /// The header of a message of kind 1 to 253.
    pub fn new(kind: u8, body_bytes: usize) -> Result<Self, MessageError> {
        assert!(!matches!(kind, HEARTBEAT | PIECE | END), "{kind} is no kind of message");
        let too_long = |_| MessageError::TooLong { kind, bytes: body_bytes, bytes_max: BODY_BYTES_MAX };
        Ok(Self { kind, body_bytes: u32::try_from(body_bytes).map_err(too_long)? })
    }

    /// The header of a piece of a message.
    pub fn piece(bytes: usize) -> Self {
        Self { kind: PIECE, body_bytes: u32::try_from(bytes).expect("a piece is no longer than its message") }
    }

    pub fn bytes(self) -> [u8; HEADER_BYTES] {
        let [a, b, c, d] = self.body_bytes.to_le_bytes();
        [self.kind, a, b, c, d]
    }

    fn parse([kind, a, b, c, d]: [u8; HEADER_BYTES]) -> Self {
        Self { kind, body_bytes: u32::from_le_bytes([a, b, c, d]) }
    }
}

/// What the decoder has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A message of this kind.
    Message(u8),
    Heartbeat,
    End,
}

/// Decodes messages from bytes as they come.
#[derive(Debug)]
pub(crate) struct MessageDecoder {
    records: RecordReader,
    /// A message of which records are due.
    short: Incoming,
    /// A message that comes in pieces.
    long: Incoming,
    /// Missing bytes of a piece that has begun.
    piece: usize,
}

/// A message that has begun, or the memory of the one before.
#[derive(Debug, Default)]
struct Incoming {
    /// `None`: no message has begun.
    kind: Option<u8>,
    missing: usize,
    /// Its body, of which `received` bytes have come. What follows them is room for the next record.
    body: Vec<u8>,
    received: usize,
}

impl MessageDecoder {
    pub fn new(records: RecordReader) -> Self {
        Self { records, short: Incoming::default(), long: Incoming::default(), piece: 0 }
    }

    /// Calls `read` once. To be called when [`MessageDecoder::next`] has returned `None`.
    pub fn fill(&mut self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        self.records.fill(read)
    }

    /// The next event, if its bytes are complete. `body_bytes_max` is the limit for the body of a message of a kind;
    /// `None` if that kind is not expected. The body of a message replaces what is in `body`.
    pub fn next(
        &mut self,
        body_bytes_max: impl Fn(u8) -> Option<usize>,
        body: &mut Vec<u8>,
    ) -> Result<Option<Event>, MessageError> {
        while let Some(record_bytes) = self.records.next_bytes() {
            let incoming = if self.piece > 0 {
                let bytes = self.long.append(&mut self.records, record_bytes, self.piece)?;
                self.piece -= bytes;
                &mut self.long
            } else if self.short.kind.is_some() {
                self.short.append(&mut self.records, record_bytes, self.short.missing)?;
                &mut self.short
            } else {
                match self.read_header(record_bytes)? {
                    Header::HEARTBEAT => return Ok(Some(Event::Heartbeat)),
                    Header::END if self.long.kind.is_none() => return Ok(Some(Event::End)),
                    Header { kind: HEARTBEAT | END, .. } => return Err(MessageError::Malformed),
                    Header { kind: PIECE, body_bytes } => {
                        self.piece = body_bytes as usize;
                        if self.piece == 0 || self.piece > self.long.missing {
                            return Err(MessageError::Malformed);
                        }
                        continue;
                    }
                    Header { kind, body_bytes } => {
                        let bytes = body_bytes as usize;
                        let incoming = if bytes > WHOLE_BYTES_MAX { &mut self.long } else { &mut self.short };
                        incoming.begin(kind, bytes, &body_bytes_max)?;
                        incoming
                    }
                }
            };
            if let Some(kind) = incoming.kind.take_if(|_| incoming.missing == 0) {
                incoming.body.truncate(incoming.received);
                // The caller's buffer takes the next body, so that no message needs a new one.
                std::mem::swap(&mut incoming.body, body);
                return Ok(Some(Event::Message(kind)));
            }
        }
        Ok(None)
    }

    fn read_header(&mut self, record_bytes: usize) -> Result<Header, MessageError> {
        let mut plain = [0; HEADER_BYTES + TAG_BYTES];
        if record_bytes != plain.len() {
            return Err(MessageError::Malformed);
        }
        open(&mut self.records, &mut plain)?;
        let [kind, a, b, c, d, ..] = plain;
        Ok(Header::parse([kind, a, b, c, d]))
    }
}

impl Incoming {
    /// Begins a message. One after the other: a second long one is malformed.
    fn begin(
        &mut self,
        kind: u8,
        bytes: usize,
        body_bytes_max: impl Fn(u8) -> Option<usize>,
    ) -> Result<(), MessageError> {
        let bytes_max = body_bytes_max(kind).ok_or(MessageError::Kind(kind))?;
        if bytes > bytes_max {
            return Err(MessageError::TooLong { kind, bytes, bytes_max });
        }
        if self.kind.is_some() {
            return Err(MessageError::Malformed);
        }
        (self.kind, self.missing, self.received) = (Some(kind), bytes, 0);
        let reserved = (bytes + TAG_BYTES).min(BODY_BYTES_RESERVED);
        self.body.reserve(reserved.saturating_sub(self.body.len()));
        Ok(())
    }

    /// Decrypts the next record, of at most so many bytes, to the end of the body. Returns the number of its bytes.
    fn append(
        &mut self,
        records: &mut RecordReader,
        record_bytes: usize,
        bytes_max: usize,
    ) -> Result<usize, MessageError> {
        let bytes = record_bytes.saturating_sub(TAG_BYTES);
        if bytes == 0 || bytes > bytes_max {
            return Err(MessageError::Malformed);
        }
        let (start, end) = (self.received, self.received + record_bytes);
        if self.body.len() < end {
            self.body.resize(end, 0);
        }
        open(records, &mut self.body[start..])?;
        self.received += bytes;
        self.missing -= bytes;
        Ok(bytes)
    }
}

/// Decrypts the next record, which is complete.
fn open(records: &mut RecordReader, plain: &mut [u8]) -> Result<usize, MessageError> {
    Ok(records.open(plain).ok_or(MessageError::Malformed)??)
}

#[cfg(test)]
impl MessageDecoder {
    pub fn body_capacity(&self) -> usize {
        self.short.body.capacity() + self.long.body.capacity()
    }
}
