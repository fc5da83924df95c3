//! `Link`: the bytes between a supervisor and a rank on another host, for the line protocol to run on. They come as they
//! were written, or an error does: an end that the other side did not declare is an error too.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use types::Rank;

use super::connect::dial;
use super::handshake::{HandshakeError, Secured};
use super::hello::{Hello, Purpose};
use super::key::ClusterKey;
use super::noise::{LENGTH_BYTES, Opener, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, Sealer};
use super::watch::Watch;
use crate::shared_memory::Generation;

/// How long a write waits for a reader that takes nothing.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

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
}

/// A record a write.
pub struct LinkWriter {
    stream: Arc<TcpStream>,
    sealer: Sealer,
    record: Box<[u8; RECORD_BYTES_MAX]>,
}

/// Closes a link, from any thread: both halves then fail.
#[derive(Clone, Debug)]
pub struct LinkEnd {
    stream: Arc<TcpStream>,
}

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
    /// Has the host at `address` start `rank`, and connects to it.
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        rank: Rank,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        let hello = Hello { purpose: Purpose::Link, from: rank, to: rank, generation: Generation(0) };
        let secured = dial(address, key, &hello, &Watch::new(Some(deadline), &|| false))?;
        Ok(Self::new(secured)?)
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
        };
        Ok(Self { reader, writer: LinkWriter { stream, sealer, record: Box::new([0; RECORD_BYTES_MAX]) } })
    }

    /// The halves close nothing when they are dropped; the end does when it is told to.
    pub fn split(self) -> (LinkReader, LinkWriter, LinkEnd) {
        let end = LinkEnd { stream: Arc::clone(&self.writer.stream) };
        (self.reader, self.writer, end)
    }
}

impl LinkEnd {
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
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
    /// Declares the end: what was written is all.
    pub fn finish(mut self) -> io::Result<()> {
        self.write_record(&[])?;
        self.stream.shutdown(Shutdown::Write)
    }

    fn write_record(&mut self, plain: &[u8]) -> io::Result<()> {
        let bytes = self.sealer.seal(plain, &mut self.record);
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
        let plain = &bytes[..bytes.len().min(PLAIN_BYTES_MAX)];
        if !plain.is_empty() {
            self.write_record(plain)?;
        }
        Ok(plain.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl LinkReader {
    /// Opens the next record into `plain`.
    fn fill(&mut self) -> io::Result<()> {
        let mut stream = &*self.stream;
        let mut length = [0; LENGTH_BYTES];
        stream.read_exact(&mut length)?;
        let message = &mut self.message[..usize::from(u16::from_le_bytes(length))];
        stream.read_exact(message)?;
        let opened = self.opener.open(message, &mut self.plain);
        let bytes = opened.map_err(|forged| io::Error::new(ErrorKind::InvalidData, forged))?;
        self.unread = 0..bytes;
        self.is_over = bytes == 0;
        Ok(())
    }
}

impl Read for LinkReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() && !self.is_over && !bytes.is_empty() {
            self.fill().inspect_err(|_| self.is_over = true)?;
        }
        let count = bytes.len().min(self.unread.len());
        bytes[..count].copy_from_slice(&self.plain[self.unread.start..][..count]);
        self.unread.start += count;
        Ok(count)
    }
}
