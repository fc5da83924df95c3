//! The host of ranks that supervisors elsewhere drive: who has the key gets a rank process, with its lines at the other end
//! of the link. Neither outlives the other, and the supervisor is told if the process is stopped.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use tracing::info;
use types::Rank;

use super::door;
use super::handshake;
use super::hello::{Hello, Purpose, Refusal};
use super::key::ClusterKey;
use super::link::{Link, LinkEnd, LinkWriter};
use super::watch::{POLL_TICK, Watch};
use crate::stopped::is_stopped;

/// Ranks that one host runs at once.
pub const RANKS_MAX: usize = 64;

/// How often a supervisor is told that the host is there, and how the rank is. It is several times in the shortest
/// [silence](super::SILENCE_MIN).
const BEAT: Duration = Duration::from_millis(250);

const PUMP_BYTES: usize = 1 << 16;

/// A rank process that was started.
pub struct RankProcess {
    pub pid: u32,
    pub stdin: Box<dyn Write + Send>,
    pub stdout: Box<dyn Read + Send>,
    /// Ends it, if it still runs, and reaps it. Called once the link or the process has ended.
    pub kill: Box<dyn FnOnce() + Send>,
}

/// Starts a rank by `spawn` for each supervisor that calls, until `is_over`; then ends them all. A supervisor whose rank
/// cannot be started finds its link closed.
pub fn serve_ranks(
    listener: &TcpListener,
    key: &ClusterKey,
    spawn: impl Fn(Rank) -> io::Result<RankProcess> + Sync,
    is_over: impl Fn() -> bool + Sync,
) -> io::Result<()> {
    let running = &AtomicUsize::new(0);
    let (spawn, is_over) = (&spawn, &is_over);
    let admit = |hello: &Hello| {
        if hello.purpose != Purpose::Link {
            return Err(Refusal::Purpose);
        }
        Ok((ShmComm::take(running).ok_or(Refusal::Busy)?, hello.from))
    };
    let answer = |stream: TcpStream, watch: &Watch<'_>| {
        let caller = stream.peer_addr().ok();
        let answered = handshake::answer(stream, key, watch, admit);
        answered.inspect_err(|error| info!(?caller, "a caller was not let in: {error}")).ok()
    };
    thread::scope(|scope| {
        let take = |((comm, rank), secured)| {
            let run = move || {
                let _seat = comm;
                if let (Ok(link), Ok(process)) = (Link::new(secured), spawn(rank)) {
                    attend(link, process, is_over);
                }
            };
            // Without a thread there is no rank, and the link is closed.
            let _ = thread::Builder::new().name("consort-link".to_owned()).spawn_scoped(scope, run);
            ControlFlow::Continue(())
        };
        match door::receive(listener, &Watch::new(None, is_over), answer, take) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            received => received,
        }
    })
}

/// One of the [`RANKS_MAX`].
struct ShmComm<'a>(&'a AtomicUsize);

impl<'a> ShmComm<'a> {
    fn take(running: &'a AtomicUsize) -> Option<Self> {
        let more = |count: usize| (count < RANKS_MAX).then_some(count + 1);
        running.fetch_update(AcqRel, Acquire, more).is_ok().then_some(Self(running))
    }
}

impl Drop for ShmComm<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// Carries bytes both ways until one side ends; then ends the other.
fn attend(link: Link, process: RankProcess, is_over: &(dyn Fn() -> bool + Sync)) {
    let RankProcess { pid, mut stdin, mut stdout, kill } = process;
    let (mut reader, writer, end) = link.split();
    let writer = &Mutex::new(writer);
    let (running, over) = channel::<()>();
    let has_ended = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(move || {
            pump(&mut reader, &mut stdin);
            has_ended.store(true, Release);
        });
        scope.spawn(move || {
            if pump(&mut stdout, &mut Shared(writer)) {
                // If the supervisor has gone there is nobody to tell.
                let _ = lock(writer).finish();
            }
            has_ended.store(true, Release);
        });
        scope.spawn(move || {
            while over.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                if lock(writer).tell(is_stopped(pid)).is_err() {
                    break;
                }
            }
        });
        // A pump that is stuck on one side does not see the other side end.
        while !has_ended.load(Acquire) && !is_over() && !is_hung_up(end.stream()) {}
        kill();
        LinkEnd::close(&end);
        drop(running);
    });
}

/// The link's writer, which several threads have.
struct Shared<'a>(&'a Mutex<LinkWriter>);

impl Write for Shared<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(self.0).flush()
    }
}

fn lock(writer: &Mutex<LinkWriter>) -> MutexGuard<'_, LinkWriter> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Carries bytes until either end is. Whether it was that of the input.
fn pump(input: &mut dyn Read, output: &mut dyn Write) -> bool {
    let mut bytes = vec![0; PUMP_BYTES];
    loop {
        match input.read(&mut bytes) {
            Ok(0) => return true,
            Ok(count) => {
                if output.write_all(&bytes[..count]).and_then(|()| output.flush()).is_err() {
                    return false;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return true,
        }
    }
}

/// Whether the other side has closed the connection. Sleeps a tick at most.
fn is_hung_up(stream: &TcpStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut fds, Some(&POLL_TICK)).is_ok_and(|count| count > 0)
}
