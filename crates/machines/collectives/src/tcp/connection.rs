//! `Connection`: the connection to one other rank, in messages. It never blocks: each call sends what the socket takes
//! and reads what it has. In a phase it sends at most one message and receives at most one, of a known length. Bytes
//! that the peer sends ahead stay for the next phase.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;

use net::{
    PLAIN_BYTES_MAX, RECORD_BYTES_MAX, RecordDecryptor, RecordEncryptor, RecordReader, SecureStream, is_transient,
};
use types::Rank;

use super::message::{HEAD_BYTES, MessageHeader, TcpAbortCause};

#[derive(Debug, PartialEq, Eq)]
pub(super) enum ConnectionError {
    /// Closed, reset, or unreachable.
    Gone,
    /// A record that the peer did not write, or not at this position.
    Forged,
    /// Records whose lengths do not fit the message.
    Malformed,
    /// A message of another phase.
    Mismatch,
    /// The peer left and sent the cause.
    Goodbye(TcpAbortCause),
}

/// `S` is the byte stream: a TCP connection, except in tests.
pub(super) struct Connection<S = TcpStream> {
    peer: Rank,
    stream: S,
    sealer: RecordEncryptor,
    records: RecordReader,
    record: Box<[u8; RECORD_BYTES_MAX]>,
    /// The part of `record` that is not sent yet.
    unsent: Range<usize>,
    /// The part of the phase's message that is in no record yet.
    uncut: Range<usize>,
    /// Whether any part of the message is in a record.
    is_begun: bool,
    message: Vec<u8>,
    received: usize,
    due: Option<(MessageHeader, usize)>,
    is_closed: bool,
}

/// Without the buffers.
impl<S: fmt::Debug> fmt::Debug for Connection<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("peer", &self.peer).field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Connection {
    pub fn new(peer: Rank, secured: SecureStream) -> io::Result<Self> {
        let SecureStream { stream, sealer, opener, .. } = secured;
        stream.set_nonblocking(true)?;
        Ok(Self::over(stream, peer, sealer, opener))
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends `cause` unless a message is half sent, and shuts down the sending side.
    pub fn goodbye(&mut self, cause: TcpAbortCause) {
        let is_between = self.unsent.is_empty() && (self.uncut.is_empty() || !self.is_begun);
        if is_between {
            let bytes = self.sealer.seal(&MessageHeader::goodbye(cause).bytes(), &mut self.record[..]);
            // If the socket's buffer is full, the peer sees the end of the stream without the cause.
            let _ = (&self.stream).write(&self.record[..bytes]);
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl<S: Read + Write> Connection<S> {
    /// `stream` must be non-blocking.
    pub fn over(stream: S, peer: Rank, sealer: RecordEncryptor, opener: RecordDecryptor) -> Self {
        Self {
            peer,
            stream,
            sealer,
            records: RecordReader::new(opener),
            record: Box::new([0; RECORD_BYTES_MAX]),
            unsent: 0..0,
            uncut: 0..0,
            is_begun: false,
            message: Vec::new(),
            received: 0,
            due: None,
            is_closed: false,
        }
    }

    pub fn peer(&self) -> Rank {
        self.peer
    }

    /// Begins a phase. `send` is the range of its message in the bytes given to [`Connection::push`]. `due` is the head
    /// of the peer's message and the number of bytes that follow it.
    pub fn begin(&mut self, send: Range<usize>, due: Option<(MessageHeader, usize)>) {
        assert!(self.is_sent() && self.is_received(), "the phase before is over");
        self.uncut = send;
        self.is_begun = false;
        self.due = due.map(|(head, bytes)| (head, HEAD_BYTES + bytes));
        self.received = 0;
        // One record more than is due: a record is decrypted before its length is checked against the message.
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

    /// The bytes after the head of the phase's message, once it is received.
    pub fn payload(&self) -> &[u8] {
        &self.message[HEAD_BYTES..self.received]
    }

    /// Whether the peer is known to have closed its sending side.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    pub fn mark_closed(&mut self) {
        self.is_closed = true;
    }

    /// Sends as much of the phase's message in `outgoing` as the socket takes. Returns whether it took any.
    pub fn push(&mut self, outgoing: &[u8]) -> Result<bool, ConnectionError> {
        let mut moved = false;
        while !self.is_sent() {
            if self.unsent.is_empty() {
                let piece = self.uncut.start..self.uncut.end.min(self.uncut.start + PLAIN_BYTES_MAX);
                self.uncut.start = piece.end;
                self.is_begun = true;
                self.unsent = 0..self.sealer.seal(&outgoing[piece], &mut self.record[..]);
            }
            match self.stream.write(&self.record[self.unsent.clone()]) {
                Ok(bytes) => {
                    self.unsent.start += bytes;
                    moved = true;
                }
                Err(error) if is_transient(&error) => break,
                Err(_) => return Err(self.reason()),
            }
        }
        Ok(moved)
    }

    /// Receives what is available of the phase's message. Returns whether there was any.
    pub fn pull(&mut self) -> Result<bool, ConnectionError> {
        let mut moved = false;
        while !self.is_received() {
            if self.open_record()? {
                moved = true;
            } else {
                match self.fill() {
                    Ok(0) => return Err(ConnectionError::Gone),
                    Ok(_) => moved = true,
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if is_transient(&error) => break,
                    Err(_) => return Err(ConnectionError::Gone),
                }
            }
        }
        Ok(moved)
    }

    /// Why the peer has closed its side. A message that it sent before the goodbye is not consumed.
    pub fn reason(&mut self) -> ConnectionError {
        if !self.is_received() {
            return self.pull().err().unwrap_or(ConnectionError::Gone);
        }
        loop {
            if let Some(plain) = self.records.peek(&mut self.message[self.received..]) {
                let head = plain.ok().and_then(|bytes| MessageHeader::parse(&self.message[self.received..][..bytes]));
                let cause = head.and_then(|head| head.cause(self.peer.world()));
                return cause.map_or(ConnectionError::Gone, ConnectionError::Goodbye);
            }
            if !matches!(self.fill(), Ok(1..)) {
                return ConnectionError::Gone;
            }
        }
    }

    /// Decrypts the next record into the message, if all of it has been read.
    fn open_record(&mut self) -> Result<bool, ConnectionError> {
        let Some((head, due)) = self.due else { return Ok(false) };
        let Some(opened) = self.records.open(&mut self.message[self.received..]) else { return Ok(false) };
        let plain = opened.map_err(|_| ConnectionError::Forged)?;
        if self.received == 0 {
            let found = MessageHeader::parse(&self.message[..plain]).ok_or(ConnectionError::Malformed)?;
            if let Some(cause) = found.cause(self.peer.world()) {
                return Err(ConnectionError::Goodbye(cause));
            }
            if found != head {
                return Err(ConnectionError::Mismatch);
            }
        }
        if plain != PLAIN_BYTES_MAX.min(due - self.received) {
            return Err(ConnectionError::Malformed);
        }
        self.received += plain;
        Ok(true)
    }

    /// Reads once from the socket.
    fn fill(&mut self) -> io::Result<usize> {
        self.records.fill(|bytes| self.stream.read(bytes))
    }

    /// Ends the connection, for a test that goes on with the encryption of its sending side.
    #[cfg(any(test, fuzzing))]
    pub fn into_sealer(self) -> RecordEncryptor {
        self.sealer
    }
}
