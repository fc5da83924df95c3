//! The door of a listener: many callers at once, each with a deadline for its handshake. When more come than there is
//! room for, who has stood there longest is sent away: a caller with the key is through in a moment.

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

use super::watch::{POLL_TICK, TICK, Watch};

/// Callers whose handshake is under way.
pub const HANDSHAKES_MAX: usize = 32;
/// How long a handshake may take.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

struct PendingHandshake {
    stream: TcpStream,
    /// Set by who is first: the guest that is through, or the door that wants it away.
    is_decided: Arc<AtomicBool>,
}

/// Accepts callers until `watch` ends, as its error says, or `take` breaks. `answer` runs in a thread for each, `take` in
/// this one, with what `answer` gave. The listener is set not to block.
pub(super) fn receive<T: Send>(
    listener: &TcpListener,
    watch: &Watch<'_>,
    answer: impl Fn(TcpStream, &Watch<'_>) -> Option<T> + Sync,
    mut take: impl FnMut(T) -> ControlFlow<()>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let mut guests = VecDeque::<PendingHandshake>::new();
    let (through, throughs) = channel();
    let (answer, through) = (&answer, &through);
    thread::scope(|scope| {
        let mut serve = || {
            loop {
                if admit_all(&throughs, &mut take).is_break() {
                    return Ok(());
                }
                guests.retain(|guest| !guest.is_decided.load(Acquire));
                watch.check()?;
                let Some(stream) = accept(listener)? else { continue };
                let Some((guest, is_decided)) = PendingHandshake::new(&stream) else { continue };
                if guests.len() == HANDSHAKES_MAX {
                    guests.pop_front().iter().for_each(PendingHandshake::send_away);
                }
                let through = Sender::clone(through);
                let run = move || {
                    let answered = answer(stream, &watch.within(HANDSHAKE_DEADLINE));
                    if !is_decided.swap(true, AcqRel) {
                        // The door is closed if nobody hears it.
                        let _ = answered.map(|answered| through.send(answered));
                    }
                };
                // Without a thread the caller is dropped, as if it had been refused.
                if thread::Builder::new().name("consort-door".to_owned()).spawn_scoped(scope, run).is_ok() {
                    guests.push_back(guest);
                }
            }
        };
        let served = serve();
        guests.iter().for_each(PendingHandshake::send_away);
        served
    })
}

impl PendingHandshake {
    fn new(stream: &TcpStream) -> Option<(Self, Arc<AtomicBool>)> {
        let is_decided = Arc::<AtomicBool>::default();
        let guest = Self { stream: stream.try_clone().ok()?, is_decided: Arc::clone(&is_decided) };
        Some((guest, is_decided))
    }

    fn send_away(&self) {
        if !self.is_decided.swap(true, AcqRel) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

fn admit_all<T>(throughs: &Receiver<T>, take: &mut impl FnMut(T) -> ControlFlow<()>) -> ControlFlow<()> {
    throughs.try_iter().try_for_each(take)
}

/// The next caller, if one comes within a [`TICK`].
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
            // Out of descriptors, most likely: it passes when guests leave.
            thread::sleep(TICK);
            Ok(None)
        }
    }
}
