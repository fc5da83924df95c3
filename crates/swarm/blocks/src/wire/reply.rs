//! `Reply`: what a peer answers to its client.

use std::time::Duration;

use super::activations::Activations;
use super::request::{PushKey, flag, put_text, text};
use super::{TEXT_BYTES_MAX, WireError};
use chains::{ByteReader, ByteWriter};

#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The session is open, at a peer that takes so many rows in a run.
    Opened {
        session: u64,
        rows_max: usize,
        /// There is a stream to the next peer.
        is_linked: bool,
    },
    Ran {
        session: u64,
        returned: Returned,
    },
    /// The session was not opened, or has ended.
    Failed {
        session: u64,
        kind: FailureKind,
        why: String,
    },
    Pong {
        number: u64,
    },
}

/// Rows that a peer has run.
#[derive(Clone, Debug, PartialEq)]
pub struct Returned {
    pub run: u64,
    /// The rows are on their way to the session with this key.
    pub passed_on: Option<PushKey>,
    pub compute: Duration,
    pub queued: Duration,
    pub states: Activations,
}

/// What the client is to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FailureKind {
    /// The block is loading: try again soon.
    WarmingUp = 0,
    /// No new sessions, or not this one: take another peer.
    Refused = 1,
    /// The session is gone: open another one.
    Ended = 2,
    /// The client's request was wrong.
    Misuse = 3,
}

mod kind {
    pub const OPENED: u8 = 65;
    pub const RAN: u8 = 66;
    pub const FAILED: u8 = 67;
    pub const PONG: u8 = 68;
}

impl Reply {
    /// Replaces `body`, and returns the kind.
    pub fn encode(&self, body: &mut Vec<u8>) -> u8 {
        body.clear();
        match self {
            Self::Opened { session, rows_max, is_linked } => {
                body.put_u64(*session);
                body.put_u32(u32::try_from(*rows_max).unwrap_or(u32::MAX));
                body.put_u8((*is_linked).into());
                kind::OPENED
            }
            Self::Ran { session, returned } => {
                body.put_u64(*session);
                body.put_u64(returned.run);
                body.put_u8(returned.passed_on.is_some().into());
                returned.passed_on.iter().for_each(|key| body.extend_from_slice(&key.0));
                body.put_u32(micros(returned.compute));
                body.put_u32(micros(returned.queued));
                returned.states.encode(body);
                kind::RAN
            }
            Self::Failed { session, kind, why } => {
                body.put_u64(*session);
                body.put_u8(*kind as u8);
                put_text(body, shortened(why).as_bytes());
                kind::FAILED
            }
            Self::Pong { number } => {
                body.put_u64(*number);
                kind::PONG
            }
        }
    }

    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(body);
        match kind {
            kind::OPENED => {
                let session = reader.u64("a session")?;
                let rows_max = reader.u32("the number of rows")? as usize;
                let is_linked = flag(&mut reader, "whether there is a stream")?;
                reader.finish()?;
                Ok(Self::Opened { session, rows_max, is_linked })
            }
            kind::RAN => {
                let (session, run) = (reader.u64("a session")?, reader.u64("a run")?);
                let passed_on = match flag(&mut reader, "whether rows are passed on")? {
                    true => Some(PushKey(reader.array("a key")?)),
                    false => None,
                };
                let compute = Duration::from_micros(reader.u32("a time")?.into());
                let queued = Duration::from_micros(reader.u32("a time")?.into());
                let states = Activations::decode(reader)?;
                Ok(Self::Ran { session, returned: Returned { run, passed_on, compute, queued, states } })
            }
            kind::FAILED => {
                let session = reader.u64("a session")?;
                let kind = FailureKind::parse(reader.u8("a failure")?)?;
                let why = text(&mut reader, "a reason", TEXT_BYTES_MAX)?;
                reader.finish()?;
                Ok(Self::Failed { session, kind, why: String::from_utf8_lossy(&why).into_owned() })
            }
            kind::PONG => {
                let number = reader.u64("a number")?;
                reader.finish()?;
                Ok(Self::Pong { number })
            }
            _ => Err(WireError::Unknown { what: "the kind of a reply", found: kind.into() }),
        }
    }
}

impl FailureKind {
    fn parse(byte: u8) -> Result<Self, WireError> {
        let all = [Self::WarmingUp, Self::Refused, Self::Ended, Self::Misuse];
        let unknown = WireError::Unknown { what: "a failure", found: byte.into() };
        all.into_iter().find(|&kind| kind as u8 == byte).ok_or(unknown)
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// A text that fits into a message.
fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}
