//! `Lines` and `Writer`: read and write messages on byte streams, one per line, and after it what is attached to it.
//!
//! After a malformed line, the next line is read normally.

use std::borrow::Cow;
use std::io::{self, BufRead, Read, Write};

use serde::Deserialize;

use super::attached::Attached;
use super::error::{ErrorKind, clean};
use super::message::{LineMessage, RankReply};

/// The longest line, without its end: the logits of a step fit, or one or two images.
pub const LINE_BYTES_MAX: usize = 64 << 20;

/// Bytes of an unknown op's name in an error message.
pub const OP_BYTES_MAX: usize = 64;

/// Memory that is kept from line to line: enough for steps, not for the largest lines.
const LINE_BYTES_KEPT: usize = 1 << 20;

/// Why a line could not be read as a message. The stream stays usable after all but `Io`.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("read a line")]
    Io(#[from] io::Error),
    #[error("a line is longer than {max} bytes")]
    TooLong { max: usize },
    /// `id` is the line's id, if it can be parsed.
    #[error("{detail}")]
    Malformed { id: Option<u64>, detail: String },
    #[error("unknown op `{op}`")]
    UnknownOp { id: Option<u64>, op: String },
}

impl ReadError {
    /// The rank's reply; `None`: nothing more can be read.
    pub fn reply(&self) -> Option<RankReply> {
        let (id, kind) = match *self {
            Self::Io(_) => return None,
            Self::TooLong { .. } => (None, ErrorKind::BadRequest),
            Self::Malformed { id, .. } => (id, ErrorKind::BadRequest),
            Self::UnknownOp { id, .. } => (id, ErrorKind::UnknownOp),
        };
        Some(RankReply::error(id, kind, &self.to_string()))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    #[error("write a line")]
    Io(#[from] io::Error),
    #[error("a message of {bytes} bytes is too long for a line, the limit is {LINE_BYTES_MAX}")]
    TooLong { bytes: usize },
}

/// Reads messages.
#[derive(Debug)]
pub struct Lines<R> {
    reader: R,
    line: Vec<u8>,
    bytes_max: usize,
    /// Bytes after the line.
    attached: usize,
}

impl<R: BufRead> Lines<R> {
    pub fn new(reader: R) -> Self {
        Self::with_limit(reader, LINE_BYTES_MAX)
    }

    /// For lines of at most `bytes_max` bytes.
    pub fn with_limit(reader: R, bytes_max: usize) -> Self {
        Self { reader, line: Vec::new(), bytes_max, attached: 0 }
    }

    /// The next message; `None` at the end of the input. Blank lines are skipped. A last line without an end counts.
    pub fn read<M: LineMessage>(&mut self) -> Option<Result<M, ReadError>> {
        self.read_reusing(|| None)
    }

    /// As [`Lines::read`]. When a line has been read, `spare` is called for a message whose memory is reused if it has
    /// the same op.
    pub fn read_reusing<M: LineMessage>(&mut self, spare: impl FnOnce() -> Option<M>) -> Option<Result<M, ReadError>> {
        loop {
            match self.read_line() {
                Ok(false) => return None,
                Ok(true) if self.line.trim_ascii().is_empty() => {}
                Ok(true) => {
                    let message = decode_reusing(&self.line, &mut spare());
                    return Some(message.and_then(|message| self.read_attached(message)));
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    fn read_attached<M: LineMessage>(&mut self, mut message: M) -> Result<M, ReadError> {
        if let Some(attached) = message.attached_mut() {
            self.attached = attached.missing();
            attached.read(&mut self.reader)?;
        }
        Ok(message)
    }

    /// Bytes of the line that was read last, with what was attached to it; 0 if it was too long.
    pub fn bytes(&self) -> usize {
        self.line.len() + self.attached
    }

    /// Reads a line into `line`. False at the end of the input.
    fn read_line(&mut self) -> Result<bool, ReadError> {
        self.attached = 0;
        self.line.clear();
        self.line.shrink_to(LINE_BYTES_KEPT);
        let limit = self.bytes_max as u64 + 1;
        let bytes = self.reader.by_ref().take(limit).read_until(b'\n', &mut self.line)?;
        if bytes > self.bytes_max && self.line.last() != Some(&b'\n') {
            self.line = Vec::new();
            self.reader.skip_until(b'\n')?;
            return Err(ReadError::TooLong { max: self.bytes_max });
        }
        Ok(bytes > 0)
    }
}

/// Writes messages.
#[derive(Debug)]
pub struct Writer<W> {
    writer: W,
    line: Vec<u8>,
}

impl<W: Write> Writer<W> {
    pub fn new(writer: W) -> Self {
        Self { writer, line: Vec::new() }
    }

    /// The stream itself, between two lines.
    #[cfg(debug_assertions)]
    pub fn get_mut(&mut self) -> &mut W {
        &mut self.writer
    }

    /// Writes one line and flushes it. After `TooLong` nothing was written.
    pub fn write<M: LineMessage>(&mut self, message: &M) -> Result<(), WriteError> {
        self.line.clear();
        self.line.shrink_to(LINE_BYTES_KEPT);
        encode(message, &mut self.line)?;
        self.writer.write_all(&self.line)?;
        Ok(self.writer.flush()?)
    }

    /// Writes an `error` reply to the request with this id, or to one that has none.
    pub fn write_error(&mut self, id: Option<u64>, kind: ErrorKind, message: &str) -> Result<(), WriteError> {
        self.write(&RankReply::error(id, kind, message))
    }
}

/// Appends a message to `line`, with its end and what is attached to it. A message to several ranks is encoded once.
pub fn encode<M: LineMessage>(message: &M, line: &mut Vec<u8>) -> Result<(), WriteError> {
    let start = line.len();
    serde_json::to_writer(&mut *line, message).expect("a message has no keys but names, and memory takes all bytes");
    let attached = message.attached().map_or(&[][..], Attached::bytes);
    let bytes = (line.len() - start).max(attached.len());
    if bytes > LINE_BYTES_MAX {
        line.truncate(start);
        return Err(WriteError::TooLong { bytes });
    }
    line.push(b'\n');
    line.extend_from_slice(attached);
    Ok(())
}

#[derive(Deserialize)]
struct Op<'a> {
    #[serde(borrow)]
    op: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Id {
    id: u64,
}

/// A message from a line, without its end and what is attached to it.
pub fn decode<M: LineMessage>(line: &[u8]) -> Result<M, ReadError> {
    decode_reusing(line, &mut None)
}

/// As [`decode`]. A `spare` message of the same op is taken, and its memory is reused.
pub fn decode_reusing<M: LineMessage>(line: &[u8], spare: &mut Option<M>) -> Result<M, ReadError> {
    let malformed = |detail: &str| ReadError::Malformed { id: None, detail: detail.to_owned() };
    let line = str::from_utf8(line).map_err(|_| malformed("a line is not UTF-8"))?;
    // Otherwise serde would accept a list as an object whose fields are in order.
    if !line.trim_ascii_start().starts_with('{') {
        return Err(malformed("a line is not a JSON object"));
    }
    // To find the op anywhere, the whole line is read twice. Ours stands first.
    if let Some(op) = leading_op(line)
        && let Ok(Some(message)) = M::parse(op, line, spare)
    {
        return Ok(message);
    }
    let Op { op } = serde_json::from_str(line).map_err(|error| malformed(&describe(&error)))?;
    let id = || serde_json::from_str(line).ok().map(|Id { id }| id);
    match M::parse(&op, line, spare) {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err(ReadError::UnknownOp { id: id(), op: shorten(&clean(&op)) }),
        Err(error) => Err(ReadError::Malformed { id: id(), detail: describe(&error) }),
    }
}

/// The op of a line that begins with it, as those of [`encode`] do.
fn leading_op(line: &str) -> Option<&str> {
    let (op, _) = line.strip_prefix(r#"{"op":""#)?.split_once('"')?;
    (!op.contains('\\')).then_some(op)
}

/// The error's text without the strings of the line, which serde repeats: they may be prompts or keys.
fn describe(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let unknown = text.strip_prefix("unknown variant `").and_then(|rest| rest.rsplit_once("`, expected "));
    if let Some((_, expected)) = unknown {
        return clean(&format!("unknown variant, expected {expected}"));
    }
    let Some((before, quoted)) = text.split_once('"') else { return clean(&text) };
    let after = quoted.rsplit_once('"').map_or("", |(_, after)| after);
    clean(&format!("{before}\"…\"{after}"))
}

fn shorten(op: &str) -> String {
    op[..op.floor_char_boundary(OP_BYTES_MAX)].to_owned()
}
