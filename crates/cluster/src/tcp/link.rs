//! `Link`: the bytes between a supervisor and a rank on another host, for the line protocol to run on. They come as they
//! were written, or an error does: an end that the other side did not declare is an error too. Between them the host tells how the rank
//! is, which the supervisor reads beside the bytes.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use types::Rank;

use super::connect::dial;
use super::handshake::{HandshakeError, SILENCE_MAX, SILENCE_MIN, Secured};
use super::hello::{Hello, Purpose};
use super::key::ClusterKey;
use super::noise::{LENGTH_BYTES, Opener, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, Sealer};
use super::watch::{Watch, is_passing};
use crate::shared_memory::Epoch;

/// How long a write waits for a reader that takes nothing.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// What a record is, by its first byte. One of no byte at all declares the end.
const BYTES: u8 = 0;
const RUNS: u8 = 1;
const STOPPED: u8 = 2;

/// Dropped, it is closed.
#[derive(Debug)]
pub struct Link {
    reader: LinkReader,
    writer: LinkWriter,
}

/// Waits for bytes as long as the other host is there, or until a [`LinkEnd`] closes the link.
pub struct LinkReader {
    stream: Arc<TcpStream>,
    opener: Opener,
    message: Box<[u8]>,
    plain: Box<[u8]>,
    /// What of `plain` has not been read.
    unread: Range<usize>,
    is_over: bool,
    is_stopped: Arc<AtomicBool>,
}

/// A record a write.
pub struct LinkWriter {
    stream: Arc<TcpStream>,
    sealer: Sealer,
    plain: Vec<u8>,
    record: Box<[u8; RECORD_BYTES_MAX]>,
    is_finished: bool,
}

/// Closes a link, from any thread: both halves then fail. Knows what has been read of the rank at the other end.
#[derive(Clone, Debug)]
pub struct LinkEnd {
    stream: Arc<TcpStream>,
    is_stopped: Arc<AtomicBool>,
}

/// In place of what the system says.
#[derive(Debug, thiserror::Error)]
#[error("nothing came from it for {0:?}")]
struct Silent(Duration);

/// Without the bytes that it carries, here and below.
impl fmt::Debug for LinkReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkReader").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl fmt::Debug for LinkWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkWriter").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Link {
    /// Has the host at `address` start `rank`, and connects to it. From then on reading fails when the host shows no sign of life for
    /// `silence`, which is from [`SILENCE_MIN`] to [`SILENCE_MAX`].
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        rank: Rank,
        silence: Duration,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        let silence = silence.clamp(SILENCE_MIN, SILENCE_MAX);
        let hello = Hello { purpose: Purpose::Link, from: rank, to: rank, epoch: Epoch(0), silence };
        let secured = dial(address, key, &hello, &Watch::new(Some(deadline), &|| false))?;
        let link = Self::new(secured)?;
        link.reader.stream.set_read_timeout(Some(silence))?;
        Ok(link)
    }

    pub(super) fn new(secured: Secured) -> io::Result<Self> {
        let Secured { stream, sealer, opener } = secured;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(WRITE_DEADLINE))?;
        let stream = Arc::new(stream);
        let reader = LinkReader {
            stream: Arc::clone(&stream),
            opener,
            message: vec![0; RECORD_BYTES_MAX].into(),
            plain: vec![0; RECORD_BYTES_MAX].into(),
            unread: 0..0,
            is_over: false,
            is_stopped: Arc::default(),
        };
        let record = Box::new([0; RECORD_BYTES_MAX]);
        Ok(Self { reader, writer: LinkWriter { stream, sealer, plain: Vec::new(), record, is_finished: false } })
    }

    /// The halves close nothing when they are dropped; the end does when it is told to.
    pub fn split(self) -> (LinkReader, LinkWriter, LinkEnd) {
        let (stream, is_stopped) = (Arc::clone(&self.writer.stream), Arc::clone(&self.reader.is_stopped));
        let end = LinkEnd { stream, is_stopped };
        (self.reader, self.writer, end)
    }
}

impl LinkEnd {
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the host said last that the rank was stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Acquire)
    }

    /// Of this side.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl LinkWriter {
    /// Declares the end: what was written is all, and nothing can be written any more.
    pub fn finish(&mut self) -> io::Result<()> {
        self.plain.clear();
        self.write_record()?;
        self.is_finished = true;
        self.stream.shutdown(Shutdown::Write)
    }

    /// Tells that this host is there, and how the rank is.
    pub(super) fn tell(&mut self, is_stopped: bool) -> io::Result<()> {
        self.plain.clear();
        self.plain.push(if is_stopped { STOPPED } else { RUNS });
        self.write_record()
    }

    fn write_record(&mut self) -> io::Result<()> {
        if self.is_finished {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let bytes = self.sealer.seal(&self.plain, &mut self.record);
        let written = (&*self.stream).write_all(&self.record[..bytes]);
        if written.is_err() {
            // Half a record may be out: nothing can follow it.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        written
    }
}

impl Write for LinkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(PLAIN_BYTES_MAX - 1)];
        if !piece.is_empty() {
            self.plain.clear();
            self.plain.push(BYTES);
            self.plain.extend_from_slice(piece);
            self.write_record()?;
        }
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LinkReader {
    /// Opens the next record into `plain`.
    fn fill(&mut self) -> io::Result<()> {
        let mut length = [0; LENGTH_BYTES];
        read_exact(&self.stream, &mut length)?;
        let message = &mut self.message[..usize::from(u16::from_le_bytes(length))];
        read_exact(&self.stream, message)?;
        let opened = self.opener.open(message, &mut self.plain);
        let bytes = opened.map_err(|forged| io::Error::new(ErrorKind::InvalidData, forged))?;
        match self.plain[..bytes].first() {
            None => self.is_over = true,
            Some(&BYTES) => self.unread = 1..bytes,
            Some(&RUNS) => self.is_stopped.store(false, Release),
            Some(&STOPPED) => self.is_stopped.store(true, Release),
            Some(_) => return Err(ErrorKind::InvalidData.into()),
        }
        Ok(())
    }
}

fn read_exact(mut stream: &TcpStream, bytes: &mut [u8]) -> io::Result<()> {
    stream.read_exact(bytes).map_err(|error| match stream.read_timeout() {
        Ok(Some(silence)) if is_passing(&error) => io::Error::new(ErrorKind::TimedOut, Silent(silence)),
        _ => error,
    })
}

impl Read for LinkReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while self.unread.is_empty() && !self.is_over && !bytes.is_empty() {
            self.fill().inspect_err(|_| self.is_over = true)?;
        }
        let count = bytes.len().min(self.unread.len());
        bytes[..count].copy_from_slice(&self.plain[self.unread.start..][..count]);
        self.unread.start += count;
        Ok(count)
    }
}
