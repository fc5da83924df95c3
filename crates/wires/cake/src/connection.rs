//! `CakeConnection`: frames over TCP. Every wait has a limit, and no memory is allocated for bytes that have not come.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use super::auth::{CakeAuthError, CakeKey, authenticate_as_master, authenticate_as_worker};
use super::frame_budget::{FrameBudget, FramePermit};
use super::wire::{CakeMessage, CakeVariant, CakeWireError, FRAME_HEADER_BYTES, payload_bytes};

/// How long authentication may take.
pub const AUTHENTICATION_DEADLINE: Duration = Duration::from_secs(5);
/// How long a peer may be silent within a frame, or leave a frame unread.
const STALL_MAX: Duration = Duration::from_secs(30);
/// TCP closes a connection whose other host has not answered for this long.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// The slowest transfer of a frame, in bytes per second. Memory is set aside for a frame while it comes.
const RATE_MIN: u64 = 1 << 20;
/// How long a frame waits for memory that other connections use.
const BUDGET_WAIT: Duration = Duration::from_secs(10 * 60);
/// How long the other side has to read the last message while it still sends.
const FINISH_WAIT: Duration = Duration::from_secs(2);
const FINISH_BYTES: usize = 64 << 10;
/// What is written at once, so that a stall is noticed within a long frame.
const WRITE_BYTES: usize = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum CakeConnectionError {
    #[error(transparent)]
    Auth(#[from] CakeAuthError),
    #[error("the other side sent something else than cake's protocol: {0}")]
    Wire(#[from] CakeWireError),
    #[error("the other side closed the connection")]
    Closed,
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("the other side sent a message that is not due")]
    Unexpected,
    #[error("too much memory is in use for messages")]
    Budget,
    #[error("talk to the other side: {0}")]
    Io(#[source] io::Error),
}

impl From<io::Error> for CakeConnectionError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

/// A connection after authentication.
#[derive(Debug)]
pub(super) struct CakeConnection {
    stream: TcpStream,
    budget: Arc<FrameBudget>,
}

/// The payload of a frame.
#[derive(Debug)]
pub(super) struct Payload {
    bytes: Vec<u8>,
    _permit: FramePermit,
}

impl Payload {
    /// The message, in `variant` unless its form tells another.
    pub fn message(&self, variant: CakeVariant) -> Result<CakeMessage<'_>, CakeWireError> {
        CakeMessage::decode(&self.bytes, CakeVariant::of(&self.bytes).unwrap_or(variant))
    }

    /// The message, in this variant.
    pub fn message_in(&self, variant: CakeVariant) -> Result<CakeMessage<'_>, CakeWireError> {
        CakeMessage::decode(&self.bytes, variant)
    }

    pub fn variant(&self) -> Option<CakeVariant> {
        CakeVariant::of(&self.bytes)
    }
}

impl CakeConnection {
    /// The side that connected.
    pub fn as_master(
        stream: TcpStream,
        key: Option<&CakeKey>,
        budget: Arc<FrameBudget>,
    ) -> Result<Self, CakeConnectionError> {
        let connection = Self::new(stream, budget)?;
        if let Some(key) = key {
            authenticate_as_master(key, &mut connection.within(AUTHENTICATION_DEADLINE))?;
        }
        Ok(connection)
    }

    /// The side that accepted.
    pub fn as_worker(
        stream: TcpStream,
        key: Option<&CakeKey>,
        budget: Arc<FrameBudget>,
    ) -> Result<Self, CakeConnectionError> {
        let connection = Self::new(stream, budget)?;
        if let Some(key) = key {
            authenticate_as_worker(key, &mut connection.within(AUTHENTICATION_DEADLINE))?;
        }
        Ok(connection)
    }

    fn new(stream: TcpStream, budget: Arc<FrameBudget>) -> Result<Self, CakeConnectionError> {
        stream.set_nodelay(true)?;
        set_keepalive(&stream)?;
        Ok(Self { stream, budget })
    }

    /// A handle that can shut the connection down while another thread waits in it.
    pub fn handle(&self) -> io::Result<ConnectionHandle> {
        Ok(ConnectionHandle(self.stream.try_clone()?))
    }

    /// Waits for a frame with a payload of at most `bytes_max`. It has to begin within `wait`; `None` waits for ever.
    pub fn receive(&self, bytes_max: usize, wait: Option<Duration>) -> Result<Payload, CakeConnectionError> {
        let mut header = [0; FRAME_HEADER_BYTES];
        self.stream.set_read_timeout(wait.map(at_least_a_tick))?;
        loop {
            match (&self.stream).read(&mut header[..1]) {
                Ok(0) => return Err(CakeConnectionError::Closed),
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => return Err(CakeConnectionError::Silent(wait.unwrap_or_default())),
                Err(error) => return Err(error.into()),
            }
        }
        self.within(frame_time(0)).read_exact(&mut header[1..]).map_err(stalled)?;
        let length = payload_bytes(header, bytes_max)?;
        let permit = self.budget.take(length, BUDGET_WAIT).ok_or(CakeConnectionError::Budget)?;
        // The buffer grows with the bytes that come.
        let mut bytes = Vec::new();
        self.within(frame_time(length)).take(length as u64).read_to_end(&mut bytes).map_err(stalled)?;
        if bytes.len() == length { Ok(Payload { bytes, _permit: permit }) } else { Err(CakeConnectionError::Closed) }
    }

    pub fn send(&self, message: &CakeMessage<'_>, variant: CakeVariant) -> Result<(), CakeConnectionError> {
        let frame = message.encode(variant)?;
        self.within(frame_time(frame.len())).write_all(&frame).map_err(stalled)
    }

    /// Closes the connection after the other side has read what was sent, or has had a moment for it: with bytes unread, closing
    /// would discard that.
    pub fn finish(self) {
        let mut bytes = vec![0; FINISH_BYTES];
        // The other side may have closed the connection already, so errors are ignored.
        let _ = self.stream.shutdown(Shutdown::Write);
        let mut stream = self.within(FINISH_WAIT);
        while stream.read(&mut bytes).is_ok_and(|count| count > 0) {}
    }

    /// The stream, for a transfer that may take this long.
    fn within(&self, span: Duration) -> LimitedStream<'_> {
        LimitedStream { stream: &self.stream, deadline: Instant::now() + span }
    }
}

pub(super) struct ConnectionHandle(TcpStream);

impl ConnectionHandle {
    pub fn shutdown(&self) {
        // The connection may be closed already, so the error is ignored.
        let _ = self.0.shutdown(Shutdown::Both);
    }

    /// Whether the other side has closed the connection.
    pub fn is_hung_up(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.0, PollFlags::RDHUP)], Some(&now)).is_ok_and(|count| count > 0)
    }
}

/// A stream whose reads and writes fail with `TimedOut` after the deadline, and if nothing moves for [`STALL_MAX`].
struct LimitedStream<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl LimitedStream<'_> {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(at_least_a_tick(left.min(STALL_MAX))) }
    }
}

impl Read for LimitedStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes).map_err(as_timeout)
    }
}

impl Write for LimitedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(&bytes[..bytes.len().min(WRITE_BYTES)]).map_err(as_timeout)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How long a frame of this length may take.
fn frame_time(bytes: usize) -> Duration {
    STALL_MAX + Duration::from_secs(bytes as u64 / RATE_MIN)
}

/// A timeout of zero would mean none.
fn at_least_a_tick(timeout: Duration) -> Duration {
    timeout.max(Duration::from_millis(1))
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Unix reports a timeout as `WouldBlock`.
fn as_timeout(error: io::Error) -> io::Error {
    if is_timeout(&error) { ErrorKind::TimedOut.into() } else { error }
}

fn stalled(error: io::Error) -> CakeConnectionError {
    if is_timeout(&error) { CakeConnectionError::Silent(STALL_MAX) } else { error.into() }
}

/// An idle connection whose other host is gone is closed by the kernel: the protocol has no signs of life.
fn set_keepalive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE / 2)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 5)?;
    Ok(sockopt::set_tcp_user_timeout(stream, KEEPALIVE.as_millis() as u32)?)
}
