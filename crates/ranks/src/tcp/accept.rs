//! Accepts connections and runs their handshakes in parallel, each with a deadline. When there are more than
//! [`HANDSHAKES_MAX`], the oldest one is closed: a peer with the key completes its handshake in a moment.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use super::wait_limit::{POLL_TICK, TICK, WaitLimit};

/// Handshakes that may be in progress at once.
pub const HANDSHAKES_MAX: usize = 32;
/// How long a handshake may take.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

struct PendingHandshake {
    stream: TcpStream,
    /// Set by the first of two: the handshake thread when it is done, or [`PendingHandshake::reject`].
    is_decided: Arc<AtomicBool>,
}

/// Accepts connections until `limit` ends, with its error, or until `take` breaks. `answer` does the handshake, in a
/// thread per connection; `take` gets its result, in this thread. The listener is made non-blocking.
pub(super) fn accept_all<T: Send>(
    listener: &TcpListener,
    limit: &WaitLimit<'_>,
    answer: impl Fn(TcpStream, &WaitLimit<'_>) -> Option<T> + Sync,
    mut take: impl FnMut(T) -> ControlFlow<()>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut pending = VecDeque::<PendingHandshake>::new();
    let (done, finished) = channel();
    let (answer, done) = (&answer, &done);
    thread::scope(|scope| {
        let mut serve = || {
            loop {
                if take_all(&finished, &mut take).is_break() {
                    return Ok(());
                }
                pending.retain(|handshake| !handshake.is_decided.load(Acquire));
                limit.check()?;
                let Some(stream) = accept(listener)? else { continue };
                let Some((handshake, is_decided)) = PendingHandshake::new(&stream) else { continue };
                if pending.len() == HANDSHAKES_MAX {
                    pending.pop_front().iter().for_each(PendingHandshake::reject);
                }
                let done = Sender::clone(done);
                let run = move || {
                    let answered = answer(stream, &limit.within(HANDSHAKE_DEADLINE));
                    if !is_decided.swap(true, AcqRel) {
                        // An error means that the receiver is gone: nothing is accepted any more.
                        let _ = answered.map(|answered| done.send(answered));
                    }
                };
                // If no thread can be started, the connection is dropped, as if it had been rejected.
                if thread::Builder::new().name("consort-accept".to_owned()).spawn_scoped(scope, run).is_ok() {
                    pending.push_back(handshake);
                }
            }
        };
        let served = serve();
        pending.iter().for_each(PendingHandshake::reject);
        served
    })
}

impl PendingHandshake {
    fn new(stream: &TcpStream) -> Option<(Self, Arc<AtomicBool>)> {
        let is_decided = Arc::<AtomicBool>::default();
        let handshake = Self { stream: stream.try_clone().ok()?, is_decided: Arc::clone(&is_decided) };
        Some((handshake, is_decided))
    }

    fn reject(&self) {
        if !self.is_decided.swap(true, AcqRel) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

fn take_all<T>(finished: &Receiver<T>, take: &mut impl FnMut(T) -> ControlFlow<()>) -> ControlFlow<()> {
    finished.try_iter().try_for_each(take)
}

/// The next connection, if one comes within a [`TICK`].
fn accept(listener: &TcpListener) -> io::Result<Option<TcpStream>> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    match poll(&mut fds, Some(&POLL_TICK)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    match listener.accept() {
        Ok((stream, _)) => {
            stream.set_nonblocking(false)?;
            Ok(Some(stream))
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => Ok(None),
        Err(_) => {
            // Most likely out of descriptors, until pending handshakes end.
            thread::sleep(TICK);
            Ok(None)
        }
    }
}
