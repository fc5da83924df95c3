//! `RankStream`: the byte stream between a supervisor and a rank on another host, for the line protocol. Bytes arrive
//! as they were written, or reading fails: an end of the stream that the other side did not declare is an error too.
//! Between the bytes the host reports whether the rank is stopped.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use net::{ClusterKey, HandshakeError, MessageReceiver, MessageSender, MessageStream, WaitLimit};
use types::Rank;

use collectives::shared_memory::Epoch;
use collectives::tcp::{RankHello, RankPurpose};

/// The kinds of messages.
const BYTES: u8 = 1;
const STATUS: u8 = 2;

/// The most bytes of one message.
const PIECE_BYTES_MAX: usize = 1 << 16;

/// Dropping it closes the connection.
#[derive(Debug)]
pub struct RankStream(MessageStream);

/// Waits for bytes until the other host falls silent or a [`RankStreamHandle`] closes the stream.
#[derive(Debug)]
pub struct RankStreamReader {
    receiver: MessageReceiver,
    body: Vec<u8>,
    /// The part of `body` that has not been read.
    unread: Range<usize>,
    is_over: bool,
    is_stopped: Arc<AtomicBool>,
}

/// Sends one message per write.
#[derive(Clone, Debug)]
pub struct RankStreamWriter(MessageSender);

/// Closes a stream from any thread: both halves then fail. Has the last reported state of the remote rank.
#[derive(Clone, Debug)]
pub struct RankStreamHandle {
    sender: MessageSender,
    is_stopped: Arc<AtomicBool>,
}

impl RankStream {
    /// Connects to the host at `address` and has it start `rank`. From then on reading fails when the other side is
    /// silent for `silence`, which is from [`SILENCE_MIN`](net::SILENCE_MIN) to [`SILENCE_MAX`](net::SILENCE_MAX).
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        rank: Rank,
        silence: Duration,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        let hello = RankHello { purpose: RankPurpose::StartRank, from: rank, to: rank, epoch: Epoch(0) };
        MessageStream::connect(address, key, &hello.hello(silence), &WaitLimit::until(deadline)).map(Self)
    }

    pub(super) fn new(messages: MessageStream) -> Self {
        Self(messages)
    }

    /// Dropping all parts closes the connection, as [`RankStreamHandle::close`] does.
    pub fn split(self) -> (RankStreamReader, RankStreamWriter, RankStreamHandle) {
        let MessageStream { sender, receiver } = self.0;
        let is_stopped = Arc::<AtomicBool>::default();
        let reader = RankStreamReader {
            receiver,
            body: Vec::new(),
            unread: 0..0,
            is_over: false,
            is_stopped: Arc::clone(&is_stopped),
        };
        (reader, RankStreamWriter(sender.clone()), RankStreamHandle { sender, is_stopped })
    }
}

impl RankStreamHandle {
    pub fn close(&self) {
        self.sender.close();
    }

    /// Whether the host's last report said that the rank is stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Acquire)
    }

    /// The address of this side.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.sender.local_address()
    }

    /// Whether the other side has closed the connection. Waits for `timeout` at most.
    pub(super) fn is_hung_up(&self, timeout: Duration) -> bool {
        self.sender.wait_for_hangup(timeout)
    }
}

impl RankStreamWriter {
    /// Declares the end of the stream. Later writes fail.
    pub fn finish(&self) -> io::Result<()> {
        Ok(self.0.finish()?)
    }

    /// Reports whether the rank is stopped.
    pub(super) fn send_status(&self, is_stopped: bool) -> io::Result<()> {
        Ok(self.0.send(STATUS, &[&[is_stopped.into()]])?)
    }
}

impl Write for RankStreamWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(PIECE_BYTES_MAX)];
        if !piece.is_empty() {
            self.0.send(BYTES, &[piece])?;
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl RankStreamReader {
    /// Receives the next message.
    fn fill(&mut self) -> io::Result<()> {
        let bytes_max = |kind| match kind {
            BYTES => Some(PIECE_BYTES_MAX),
            STATUS => Some(1),
            _ => None,
        };
        // What was read before is overwritten.
        self.unread = 0..0;
        match self.receiver.receive(None, bytes_max, &mut self.body)? {
            Some(BYTES) => self.unread = 0..self.body.len(),
            Some(_) => self.is_stopped.store(self.body == [1], Release),
            None => self.is_over = true,
        }
        Ok(())
    }
}

impl Read for RankStreamReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.unread.is_empty() && !self.is_over && !bytes.is_empty() {
            self.fill().inspect_err(|_| self.is_over = true)?;
        }
        let count = bytes.len().min(self.unread.len());
        bytes[..count].copy_from_slice(&self.body[self.unread.start..][..count]);
        self.unread.start += count;
        Ok(count)
    }
}
