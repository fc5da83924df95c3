//! Accepts connections and runs their handshakes in parallel, each with a deadline. When there are more than
//! [`HANDSHAKES_MAX`], or more than [`HANDSHAKES_PER_ADDRESS_MAX`] of one address, the oldest one of the address with the
//! most is closed: a peer with the key completes its handshake in a moment.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Shutdown, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};

use crate::wait_limit::{POLL_TICK, TICK, WaitLimit};

/// Handshakes that may be in progress at once.
pub const HANDSHAKES_MAX: usize = 64;
/// Handshakes that may be in progress at once with one address.
pub const HANDSHAKES_PER_ADDRESS_MAX: usize = 32;
/// How long a handshake may take.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(5);

struct PendingHandshake {
    address: IpAddr,
    stream: TcpStream,
    /// Set by the first of two: the handshake thread when it is done, or [`PendingHandshake::reject`].
    is_decided: Arc<AtomicBool>,
}

/// Accepts connections until `limit` ends, with its error, or until `take` breaks. `answer` does the handshake, in a
/// thread per connection; `take` gets its result, in this thread. The listener is made non-blocking.
pub fn accept_all<T: Send>(
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
                let Some((stream, address)) = accept(listener)? else { continue };
                let Some((handshake, is_decided)) = PendingHandshake::new(address, &stream) else { continue };
                if let Some(index) = displaced(&pending, address) {
                    pending.remove(index).iter().for_each(PendingHandshake::reject);
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
    fn new(address: IpAddr, stream: &TcpStream) -> Option<(Self, Arc<AtomicBool>)> {
        let is_decided = Arc::<AtomicBool>::default();
        let handshake = Self { address, stream: stream.try_clone().ok()?, is_decided: Arc::clone(&is_decided) };
        Some((handshake, is_decided))
    }

    fn reject(&self) {
        if !self.is_decided.swap(true, AcqRel) {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }
}

/// The index of the handshake that a new one of `address` displaces, if any. The oldest is first.
fn displaced(pending: &VecDeque<PendingHandshake>, address: IpAddr) -> Option<usize> {
    let count = |address| pending.iter().filter(|handshake| handshake.address == address).count();
    let crowded = if count(address) >= HANDSHAKES_PER_ADDRESS_MAX {
        address
    } else if pending.len() >= HANDSHAKES_MAX {
        pending.iter().map(|handshake| handshake.address).max_by_key(|&address| count(address))?
    } else {
        return None;
    };
    pending.iter().position(|handshake| handshake.address == crowded)
}

fn take_all<T>(finished: &Receiver<T>, take: &mut impl FnMut(T) -> ControlFlow<()>) -> ControlFlow<()> {
    finished.try_iter().try_for_each(take)
}

/// The next connection, if one comes within a [`TICK`].
pub(crate) fn accept(listener: &TcpListener) -> io::Result<Option<(TcpStream, IpAddr)>> {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    match poll(&mut fds, Some(&POLL_TICK)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(None),
        Ok(_) => {}
        Err(errno) => return Err(errno.into()),
    }
    match listener.accept() {
        Ok((stream, address)) => {
            stream.set_nonblocking(false)?;
            Ok(Some((stream, address.ip().to_canonical())))
        }
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionAborted) => Ok(None),
        Err(_) => {
            // Most likely out of descriptors, until pending handshakes end.
            thread::sleep(TICK);
            Ok(None)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    /// Handshakes of these many connections of each address, one address after the other.
    fn pending(counts: &[usize]) -> VecDeque<PendingHandshake> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let handshake = |address: usize| PendingHandshake::new(nth(address), &stream).unwrap().0;
        let addresses = counts.iter().enumerate().flat_map(|(address, &count)| vec![address; count]);
        addresses.map(handshake).collect()
    }

    fn nth(address: usize) -> IpAddr {
        IpAddr::from([10, 0, 0, address as u8])
    }

    #[test]
    fn the_address_with_the_most_handshakes_loses_its_oldest() {
        assert_eq!(displaced(&pending(&[1, 5]), nth(1)), None);
        assert_eq!(displaced(&pending(&[1, HANDSHAKES_PER_ADDRESS_MAX]), nth(0)), None);
        assert_eq!(displaced(&pending(&[1, HANDSHAKES_PER_ADDRESS_MAX]), nth(1)), Some(1));
        let many = pending(&[3, HANDSHAKES_PER_ADDRESS_MAX - 1, HANDSHAKES_PER_ADDRESS_MAX - 2]);
        assert_eq!(many.len(), HANDSHAKES_MAX);
        assert_eq!(displaced(&many, nth(7)), Some(3));
        assert_eq!(displaced(&many, nth(2)), Some(3));
    }
}
