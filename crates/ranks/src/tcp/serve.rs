//! Starts rank processes for supervisors on other hosts. A supervisor that has the key gets a rank process, and a
//! stream that carries its lines. When one of the two ends, the other is ended. The supervisor is informed when the
//! process is stopped.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use tracing::info;
use types::Rank;

use super::accept;
use super::handshake;
use super::hello::{Hello, Purpose, RejectReason};
use super::key::ClusterKey;
use super::rank_stream::{RankStream, RankStreamHandle, RankStreamWriter};
use super::refusal_log::RefusalLog;
use super::wait_limit::{POLL_TICK, WaitLimit};
use crate::stopped::is_stopped;

/// Ranks that one host runs at once.
pub const RANKS_MAX: usize = 64;

/// How often a host sends a heartbeat: several times within the shortest [silence](super::SILENCE_MIN).
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(250);

const PUMP_BYTES: usize = 1 << 16;

/// A rank process that was started.
pub struct RankProcess {
    pub pid: u32,
    pub stdin: Box<dyn Write + Send>,
    pub stdout: Box<dyn Read + Send>,
    /// Kills the process, if it still runs, and reaps it. Called once the stream or the process has ended.
    pub kill: Box<dyn FnOnce() + Send>,
}

/// Starts a rank by `spawn` for each supervisor that connects, until `is_over`; then kills them all. If a rank cannot
/// be started, the supervisor's stream is closed.
pub fn serve_ranks(
    listener: &TcpListener,
    key: &ClusterKey,
    spawn: impl Fn(Rank) -> io::Result<RankProcess> + Sync,
    is_over: impl Fn() -> bool + Sync,
) -> io::Result<()> {
    let running = &AtomicUsize::new(0);
    let refusals = Mutex::new(RefusalLog::default());
    let (spawn, is_over) = (&spawn, &is_over);
    let admit = |hello: &Hello| {
        if hello.purpose != Purpose::StartRank {
            return Err(RejectReason::Purpose);
        }
        Ok((RankSlot::take(running).ok_or(RejectReason::Busy)?, hello.from))
    };
    let answer = |stream: TcpStream, limit: &WaitLimit<'_>| {
        let caller = stream.peer_addr().ok();
        let answered = handshake::respond(stream, key, limit, admit);
        answered
            .inspect_err(|error| {
                let count = refusals.lock().unwrap_or_else(PoisonError::into_inner).count(Instant::now());
                if let Some(count) = count {
                    info!(?caller, count, "callers were not let in, the last one because: {error}");
                }
            })
            .ok()
    };
    thread::scope(|scope| {
        let take = |((slot, rank), secured)| {
            let run = move || {
                let _slot = slot;
                if let (Ok(stream), Ok(process)) = (RankStream::new(secured), spawn(rank)) {
                    serve_rank(stream, process, is_over);
                }
            };
            // If no thread can be started, there is no rank, and the stream is closed.
            let _ = thread::Builder::new().name("consort-stream".to_owned()).spawn_scoped(scope, run);
            ControlFlow::Continue(())
        };
        match accept::accept_all(listener, &WaitLimit::new(None, is_over), answer, take) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            received => received,
        }
    })
}

/// A slot of the [`RANKS_MAX`].
struct RankSlot<'a>(&'a AtomicUsize);

impl<'a> RankSlot<'a> {
    fn take(running: &'a AtomicUsize) -> Option<Self> {
        let more = |count: usize| (count < RANKS_MAX).then_some(count + 1);
        running.fetch_update(AcqRel, Acquire, more).is_ok().then_some(Self(running))
    }
}

impl Drop for RankSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// Copies bytes both ways until one side ends; then ends the other.
fn serve_rank(stream: RankStream, process: RankProcess, is_over: &(dyn Fn() -> bool + Sync)) {
    let RankProcess { pid, mut stdin, mut stdout, kill } = process;
    let (mut reader, writer, end) = stream.split();
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
                // The supervisor may have disconnected already, so the error is ignored.
                let _ = lock(writer).finish();
            }
            has_ended.store(true, Release);
        });
        scope.spawn(move || {
            while over.recv_timeout(HEARTBEAT_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if lock(writer).send_status(is_stopped(pid)).is_err() {
                    break;
                }
            }
        });
        // A copying thread that is blocked on one side does not see the other side end.
        while !has_ended.load(Acquire) && !is_over() && !is_hung_up(end.stream()) {}
        kill();
        RankStreamHandle::close(&end);
        drop(running);
    });
}

/// The stream's writer, shared by several threads.
struct Shared<'a>(&'a Mutex<RankStreamWriter>);

impl Write for Shared<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(self.0).flush()
    }
}

fn lock(writer: &Mutex<RankStreamWriter>) -> MutexGuard<'_, RankStreamWriter> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Copies bytes until input or output ends. Returns whether the input ended.
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
