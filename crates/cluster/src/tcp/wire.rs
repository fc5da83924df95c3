//! `Wire`: the connection to one other rank, in messages. It never blocks: each call does what the socket takes or has.
//! In a phase it sends one message or none, and receives one of a known length or none; what the peer sends ahead stays
//! for the next phase.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;

use types::Rank;

use super::handshake::Secured;
use super::message::{Cause, HEAD_BYTES, Head};
use super::noise::{LENGTH_BYTES, Opener, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, Sealer, split_record};
use super::watch::is_passing;

/// Bytes read from the socket at once: a few records.
const RAW_BYTES: usize = 4 * RECORD_BYTES_MAX;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum WireError {
    /// Closed, reset, or unreachable.
    Gone,
    /// Not written by the peer, or not here.
    Forged,
    /// Records that no message consists of.
    Malformed,
    /// A message of another phase.
    Mismatch,
    /// The peer's last words.
    Farewell(Cause),
}

/// `S` is the byte stream below: a TCP connection, except where tests feed it bytes of their own.
pub(super) struct Wire<S = TcpStream> {
    peer: Rank,
    stream: S,
    sealer: Sealer,
    opener: Opener,
    record: Box<[u8; RECORD_BYTES_MAX]>,
    /// What of `record` has still to be sent.
    unsent: Range<usize>,
    /// What of the phase's message is in no record yet.
    uncut: Range<usize>,
    /// Whether any of it is in a record.
    is_begun: bool,
    raw: Box<[u8]>,
    /// What of `raw` has been read but not opened.
    unopened: Range<usize>,
    message: Vec<u8>,
    received: usize,
    due: Option<(Head, usize)>,
    is_closed: bool,
}

/// Without the bytes that it carries.
impl<S: fmt::Debug> fmt::Debug for Wire<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("peer", &self.peer).field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Wire {
    pub fn new(peer: Rank, secured: Secured) -> io::Result<Self> {
        let Secured { stream, sealer, opener } = secured;
        stream.set_nonblocking(true)?;
        Ok(Self::over(stream, peer, sealer, opener))
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Says `cause` if the peer can still make it out, and closes this side.
    pub fn farewell(&mut self, cause: Cause) {
        let is_between = self.unsent.is_empty() && (self.uncut.is_empty() || !self.is_begun);
        if is_between {
            let bytes = self.sealer.seal(&Head::farewell(cause).bytes(), &mut self.record);
            // If the peer is so far behind that there is no room, it sees the end without the reason.
            let _ = (&self.stream).write(&self.record[..bytes]);
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl<S: Read + Write> Wire<S> {
    /// `stream` never blocks.
    pub fn over(stream: S, peer: Rank, sealer: Sealer, opener: Opener) -> Self {
        Self {
            peer,
            stream,
            sealer,
            opener,
            record: Box::new([0; RECORD_BYTES_MAX]),
            unsent: 0..0,
            uncut: 0..0,
            is_begun: false,
            raw: vec![0; RAW_BYTES].into(),
            unopened: 0..0,
            message: Vec::new(),
            received: 0,
            due: None,
            is_closed: false,
        }
    }

    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// Begins a phase. `send` is the place of its message in what [`Wire::push`] is given; `due` are the head of what
    /// comes from the peer and how many bytes follow it.
    pub fn begin(&mut self, send: Range<usize>, due: Option<(Head, usize)>) {
        assert!(self.is_sent() && self.is_received(), "the phase before is over");
        self.uncut = send;
        self.is_begun = false;
        self.due = due.map(|(head, bytes)| (head, HEAD_BYTES + bytes));
        self.received = 0;
        // Room for a record more than is due: it is opened before it is known to be none of the message's.
        let capacity = self.due.map_or(0, |(_, bytes)| bytes) + RECORD_BYTES_MAX;
        if self.message.len() < capacity {
            self.message.resize(capacity, 0);
        }
    }

    pub fn is_sent(&self) -> bool {
        self.unsent.is_empty() && self.uncut.is_empty()
    }

    pub fn is_received(&self) -> bool {
        self.due.is_none_or(|(_, bytes)| self.received == bytes)
    }

    /// What followed the head of the phase's message, once it is received.
    pub fn payload(&self) -> &[u8] {
        &self.message[HEAD_BYTES..self.received]
    }

    /// Whether the peer is known to send nothing more than what has come.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub fn mark_closed(&mut self) {
        self.is_closed = true;
    }

    /// Sends of the phase's message in `outgoing` what the socket takes. Whether it took any.
    pub fn push(&mut self, outgoing: &[u8]) -> Result<bool, WireError> {
        let mut moved = false;
        while !self.is_sent() {
            if self.unsent.is_empty() {
                let piece = self.uncut.start..self.uncut.end.min(self.uncut.start + PLAIN_BYTES_MAX);
                self.uncut.start = piece.end;
                self.is_begun = true;
                self.unsent = 0..self.sealer.seal(&outgoing[piece], &mut self.record);
            }
            match self.stream.write(&self.record[self.unsent.clone()]) {
                Ok(bytes) => {
                    self.unsent.start += bytes;
                    moved = true;
                }
                Err(error) if is_passing(&error) => break,
                Err(_) => return Err(self.reason()),
            }
        }
        Ok(moved)
    }

    /// Receives of the phase's message what is there. Whether there was any.
    pub fn pull(&mut self) -> Result<bool, WireError> {
        let mut moved = false;
        while !self.is_received() {
            if self.open_record()? {
                moved = true;
            } else {
                match self.fill() {
                    Ok(0) => return Err(WireError::Gone),
                    Ok(_) => moved = true,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if is_passing(&error) => break,
                    Err(_) => return Err(WireError::Gone),
                }
            }
        }
        Ok(moved)
    }

    /// Why the peer has closed its side. What it sent ahead of that stays where it is.
    pub fn reason(&mut self) -> WireError {
        if !self.is_received() {
            return self.pull().err().unwrap_or(WireError::Gone);
        }
        loop {
            if let Some(record) = split_record(&self.raw[self.unopened.clone()]) {
                let plain = self.opener.peek(record, &mut self.message[self.received..]);
                let head = plain.ok().and_then(|bytes| Head::parse(&self.message[self.received..][..bytes]));
                let cause = head.and_then(|head| head.cause(self.peer.world()));
                return cause.map_or(WireError::Gone, WireError::Farewell);
            }
            if !matches!(self.fill(), Ok(1..)) {
                return WireError::Gone;
            }
        }
    }

    /// Opens the next record into the message, if all of it has been read.
    fn open_record(&mut self) -> Result<bool, WireError> {
        let Some((head, due)) = self.due else { return Ok(false) };
        let Some(record) = split_record(&self.raw[self.unopened.clone()]) else { return Ok(false) };
        let bytes = record.len() + LENGTH_BYTES;
        let plain = self.opener.open(record, &mut self.message[self.received..]).map_err(|_| WireError::Forged)?;
        self.unopened.start += bytes;
        if self.received == 0 {
            let found = Head::parse(&self.message[..plain]).ok_or(WireError::Malformed)?;
            if let Some(cause) = found.cause(self.peer.world()) {
                return Err(WireError::Farewell(cause));
            }
            if found != head {
                return Err(WireError::Mismatch);
            }
        }
        if plain != PLAIN_BYTES_MAX.min(due - self.received) {
            return Err(WireError::Malformed);
        }
        self.received += plain;
        Ok(true)
    }

    /// Reads once from the socket.
    fn fill(&mut self) -> io::Result<usize> {
        if self.unopened.start > 0 {
            self.raw.copy_within(self.unopened.clone(), 0);
            self.unopened = 0..self.unopened.len();
        }
        let bytes = self.stream.read(&mut self.raw[self.unopened.end..])?;
        self.unopened.end += bytes;
        Ok(bytes)
    }
}
