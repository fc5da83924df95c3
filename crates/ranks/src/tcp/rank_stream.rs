//! `RankStream`: the byte stream between a supervisor and a rank on another host, for the line protocol. Bytes arrive
//! as they were written, or reading fails: an end of the stream that the other side did not declare is an error too.
//! Between the bytes the host sends heartbeats with whether the rank is stopped.

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
use super::handshake::{HandshakeError, SILENCE_MAX, SILENCE_MIN, SecureStream};
use super::hello::{Hello, Purpose};
use super::key::ClusterKey;
use super::noise::{LENGTH_BYTES, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, RecordDecryptor, RecordEncryptor};
use super::wait_limit::{WaitLimit, is_transient};
use crate::shared_memory::Epoch;

/// How long a write waits while the peer reads nothing.
const WRITE_DEADLINE: Duration = Duration::from_secs(30);

/// The kind of a record, in its first byte. An empty record declares the end.
const BYTES: u8 = 0;
const RUNS: u8 = 1;
const STOPPED: u8 = 2;

/// Dropping it closes the connection.
#[derive(Debug)]
pub struct RankStream {
    reader: RankStreamReader,
    writer: RankStreamWriter,
}

/// Waits for bytes until the other host falls silent or a [`RankStreamHandle`] closes the stream.
pub struct RankStreamReader {
    stream: Arc<TcpStream>,
    opener: RecordDecryptor,
    message: Box<[u8]>,
    plain: Box<[u8]>,
    /// The part of `plain` that has not been read.
    unread: Range<usize>,
    is_over: bool,
    is_stopped: Arc<AtomicBool>,
}

/// Sends one record per write.
pub struct RankStreamWriter {
    stream: Arc<TcpStream>,
    sealer: RecordEncryptor,
    plain: Vec<u8>,
    record: Box<[u8; RECORD_BYTES_MAX]>,
    is_finished: bool,
}

/// Closes a stream from any thread: both halves then fail. Has the last reported state of the remote rank.
#[derive(Clone, Debug)]
pub struct RankStreamHandle {
    stream: Arc<TcpStream>,
    is_stopped: Arc<AtomicBool>,
}

/// Replaces the system's text for a read timeout.
#[derive(Debug, thiserror::Error)]
#[error("nothing came from it for {0:?}")]
struct SilenceTimeout(Duration);

/// Without the buffers, here and below.
impl fmt::Debug for RankStreamReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankStreamReader").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl fmt::Debug for RankStreamWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankStreamWriter").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl RankStream {
    /// Connects to the host at `address` and has it start `rank`. From then on reading fails when the host is silent
    /// for `silence`, which is from [`SILENCE_MIN`] to [`SILENCE_MAX`].
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        rank: Rank,
        silence: Duration,
        deadline: Instant,
    ) -> Result<Self, HandshakeError> {
        let silence = silence.clamp(SILENCE_MIN, SILENCE_MAX);
        let hello = Hello { purpose: Purpose::StartRank, from: rank, to: rank, epoch: Epoch(0), silence };
        let secured = dial(address, key, &hello, &WaitLimit::new(Some(deadline), &|| false))?;
        let stream = Self::new(secured)?;
        stream.reader.stream.set_read_timeout(Some(silence))?;
        Ok(stream)
    }

    pub(super) fn new(secured: SecureStream) -> io::Result<Self> {
        let SecureStream { stream, sealer, opener } = secured;
        stream.set_read_timeout(None)?;
        stream.set_write_timeout(Some(WRITE_DEADLINE))?;
        let stream = Arc::new(stream);
        let reader = RankStreamReader {
            stream: Arc::clone(&stream),
            opener,
            message: vec![0; RECORD_BYTES_MAX].into(),
            plain: vec![0; RECORD_BYTES_MAX].into(),
            unread: 0..0,
            is_over: false,
            is_stopped: Arc::default(),
        };
        let record = Box::new([0; RECORD_BYTES_MAX]);
        Ok(Self { reader, writer: RankStreamWriter { stream, sealer, plain: Vec::new(), record, is_finished: false } })
    }

    /// Dropping the halves closes nothing; [`RankStreamHandle::close`] does.
    pub fn split(self) -> (RankStreamReader, RankStreamWriter, RankStreamHandle) {
        let (stream, is_stopped) = (Arc::clone(&self.writer.stream), Arc::clone(&self.reader.is_stopped));
        let end = RankStreamHandle { stream, is_stopped };
        (self.reader, self.writer, end)
    }
}

impl RankStreamHandle {
    pub fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Whether the host's last heartbeat said that the rank is stopped, as by SIGSTOP.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Acquire)
    }

    /// The address of this side.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.stream.local_addr()
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl RankStreamWriter {
    /// Declares the end of the stream. Later writes fail.
    pub fn finish(&mut self) -> io::Result<()> {
        self.plain.clear();
        self.write_record()?;
        self.is_finished = true;
        self.stream.shutdown(Shutdown::Write)
    }

    /// Sends a heartbeat with whether the rank is stopped.
    pub(super) fn send_status(&mut self, is_stopped: bool) -> io::Result<()> {
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
            // Half a record may have been sent, so nothing can follow it.
            let _ = self.stream.shutdown(Shutdown::Both);
        }
        written
    }
}

impl Write for RankStreamWriter {
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

impl RankStreamReader {
    /// Decrypts the next record into `plain`.
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
        Ok(Some(silence)) if is_transient(&error) => io::Error::new(ErrorKind::TimedOut, SilenceTimeout(silence)),
        _ => error,
    })
}

impl Read for RankStreamReader {
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
