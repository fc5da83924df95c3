//! `WaitLimit`: when a wait ends, by a deadline or a cancellation, and connect, read and write calls that obey it.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

/// How long a wait sleeps at most before it checks its limit.
pub const TICK: Duration = Duration::from_millis(20);

/// [`TICK`] for `poll`.
pub const POLL_TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };

#[derive(Clone, Copy)]
pub struct WaitLimit<'a> {
    /// `None`: only `is_over` ends the wait.
    deadline: Option<Instant>,
    is_over: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> WaitLimit<'a> {
    pub fn new(deadline: Option<Instant>, is_over: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self { deadline, is_over }
    }

    /// A wait that only `deadline` ends.
    pub fn until(deadline: Instant) -> WaitLimit<'static> {
        WaitLimit { deadline: Some(deadline), is_over: &|| false }
    }

    /// The same limit with a deadline at most `span` from now.
    pub fn within(&self, span: Duration) -> Self {
        let sooner = Instant::now() + span;
        Self { deadline: Some(self.deadline.map_or(sooner, |deadline| deadline.min(sooner))), ..*self }
    }

    /// `TimedOut` after the deadline, `ConnectionAborted` if `is_over`.
    pub fn check(&self) -> io::Result<()> {
        if (self.is_over)() {
            return Err(ErrorKind::ConnectionAborted.into());
        }
        if self.left().is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Time until the deadline, a [`TICK`] at most.
    pub fn left(&self) -> Duration {
        self.deadline.map_or(TICK, |deadline| deadline.saturating_duration_since(Instant::now()).min(TICK))
    }

    /// Connects to `address`.
    pub fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = TcpStream::from(net::socket_with(family, SocketType::STREAM, flags, None)?);
        match net::connect(&stream, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        loop {
            self.check()?;
            match poll(&mut [PollFd::new(&stream, PollFlags::OUT)], Some(&POLL_TICK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        stream.take_error()?.map_or(Ok(()), Err)?;
        stream.set_nonblocking(false)?;
        Ok(stream)
    }

    pub fn read_exact(&self, mut stream: &TcpStream, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.check()?;
            stream.set_read_timeout(Some(TICK))?;
            match stream.read(bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => bytes = &mut bytes[read..],
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    pub fn write_all(&self, mut stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.check()?;
            stream.set_write_timeout(Some(TICK))?;
            match stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if is_transient(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Whether the operation failed only because the socket was not ready.
pub fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
