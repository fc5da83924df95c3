//! How a comm is formed: this rank calls all below it and is called by all above, until everyone is there or the deadline
//! has passed. Calls that fail are made again: the other rank may not have come yet, or still be in the old epoch.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use types::Rank;

use super::abort::TcpAbort;
use super::comm::{ELEMENTS_MAX, TcpComm, TcpCommOptions};
use super::door;
use super::handshake::{self, HandshakeError, Secured};
use super::hello::{Hello, Purpose, Refusal};
use super::key::ClusterKey;
use super::watch::{self, Watch};
use super::wire::Wire;
use crate::comm::CommError;
use crate::shared_memory::Epoch;

/// How long one attempt to connect may take; then there may be a better answer.
const ATTEMPT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{addresses} addresses for {ranks} ranks")]
    Addresses { addresses: usize, ranks: usize },
    #[error("exchanges of {elements_max} elements exceed the limit of {ELEMENTS_MAX}")]
    TooLarge { elements_max: usize },
    #[error("rank {rank} at {address} did not answer as it should")]
    Unreachable { rank: Rank, address: SocketAddr, source: HandshakeError },
    /// With what was wrong with one of those who called, if any.
    #[error("rank {rank} did not call")]
    Absent { rank: Rank, source: Option<HandshakeError> },
    #[error("the group was stopped while it was formed")]
    Aborted,
    #[error("rank {0} has other options")]
    Options(Rank),
    #[error("a rank left while the group was formed")]
    TcpComm(#[source] CommError),
    #[error("listen to other ranks")]
    Io(#[from] io::Error),
}

/// Where a rank stands in the group that is to be formed.
#[derive(Clone, Copy, Debug)]
pub struct TcpGroup<'a> {
    pub rank: Rank,
    /// Bound to this rank's address. It is set not to block, and can serve one epoch after the other.
    pub listener: &'a TcpListener,
    /// Of all ranks, in their order. Those of this rank and of the ranks above are not used.
    pub addresses: &'a [SocketAddr],
    pub epoch: Epoch,
}

impl TcpComm {
    /// Connects this rank with all others before the deadline, or says what kept it from doing so.
    pub fn connect(
        place: TcpGroup<'_>,
        key: &ClusterKey,
        options: TcpCommOptions,
        abort: &TcpAbort,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let (ranks, addresses) = (place.rank.world().get(), place.addresses.len());
        if addresses != ranks {
            return Err(ConnectError::Addresses { addresses, ranks });
        }
        let elements_max = options.elements_max;
        if elements_max > ELEMENTS_MAX {
            return Err(ConnectError::TooLarge { elements_max });
        }
        let wires = form(place, key, options.silence_deadline, abort, deadline)?;
        let mut comm = TcpComm::new(place.rank, options, abort.clone());
        abort.hold(wires);
        comm.greet(deadline).map_err(|error| match error {
            CommError::Aborted => ConnectError::Aborted,
            CommError::Mismatch(rank) => ConnectError::Options(rank),
            other => ConnectError::TcpComm(other),
        })?;
        Ok(comm)
    }
}

type Found = Result<(Rank, Secured), ConnectError>;

/// Wires to all other ranks, in their order.
fn form(
    place: TcpGroup<'_>,
    key: &ClusterKey,
    silence: Duration,
    abort: &TcpAbort,
    deadline: Instant,
) -> Result<Vec<Wire>, ConnectError> {
    let has_failed = AtomicBool::new(false);
    let is_over = || has_failed.load(Acquire) || abort.cause().is_some();
    let watch = &Watch::new(Some(deadline), &is_over);
    let mut secured: Vec<Option<Secured>> = place.rank.world().ranks().map(|_| None).collect();
    let formed = thread::scope(|scope| {
        let (found, finds) = channel::<Found>();
        for peer in place.rank.world().ranks().take(place.rank.index()) {
            let found = found.clone();
            scope.spawn(move || {
                // Who gave up listening has an error to tell already.
                let _ = found.send(reach(place, peer, key, silence, watch).map(|secured| (peer, secured)));
            });
        }
        if place.rank.index() + 1 < place.rank.world().get() {
            scope.spawn(move || {
                if let Err(error) = be_called(place, key, watch, &found) {
                    let _ = found.send(Err(error));
                }
            });
        } else {
            drop(found);
        }
        for find in finds {
            match find {
                // One who calls again has lost its first connection.
                Ok((peer, found)) => secured[peer.index()] = Some(found),
                Err(error) => {
                    has_failed.store(true, Release);
                    return Err(error);
                }
            }
        }
        Ok(())
    });
    if abort.cause().is_some() {
        return Err(ConnectError::Aborted);
    }
    formed?;
    let ranks = place.rank.world().ranks();
    let wires = ranks.zip(secured).filter_map(|(peer, secured)| Some(Wire::new(peer, secured?)));
    Ok(wires.collect::<Result<_, _>>()?)
}

/// Calls `peer` until it accepts.
fn reach(
    place: TcpGroup<'_>,
    peer: Rank,
    key: &ClusterKey,
    silence: Duration,
    watch: &Watch<'_>,
) -> Result<Secured, ConnectError> {
    let address = place.addresses[peer.index()];
    let hello = Hello { purpose: Purpose::TcpComm, from: place.rank, to: peer, epoch: place.epoch, silence };
    let mut reason = None;
    loop {
        let error = match dial(address, key, &hello, &watch.within(ATTEMPT)) {
            Ok(secured) => return Ok(secured),
            Err(error) => error,
        };
        let is_passing = match &error {
            HandshakeError::Refused(refusal) => refusal.is_passing(),
            HandshakeError::Key | HandshakeError::Version { .. } => false,
            // A stranger at this address may yet be replaced by the rank.
            HandshakeError::Stranger | HandshakeError::Refusing(_) | HandshakeError::Io(_) => true,
        };
        // That the last call ran out of time says less than why those before failed.
        let is_silent = matches!(&error, HandshakeError::Io(error) if watch::is_passing(error));
        reason = if is_silent { reason.or(Some(error)) } else { Some(error) };
        if !is_passing || watch.check().is_err() {
            let source = reason.expect("the last call failed");
            return Err(ConnectError::Unreachable { rank: peer, address, source });
        }
        thread::sleep(watch.left());
    }
}

/// One call.
pub(super) fn dial(
    address: SocketAddr,
    key: &ClusterKey,
    hello: &Hello,
    watch: &Watch<'_>,
) -> Result<Secured, HandshakeError> {
    handshake::call(watch.connect(address)?, key, hello, watch)
}

/// Waits until all ranks above have called.
fn be_called(
    place: TcpGroup<'_>,
    key: &ClusterKey,
    watch: &Watch<'_>,
    found: &Sender<Found>,
) -> Result<(), ConnectError> {
    let mut missing: Vec<_> = place.rank.world().ranks().skip(place.rank.index() + 1).collect();
    let last_error = Mutex::new(None);
    let admit = |hello: &Hello| {
        if hello.purpose != Purpose::TcpComm {
            Err(Refusal::Purpose)
        } else if hello.to.world() != place.rank.world() {
            Err(Refusal::World)
        } else if hello.to != place.rank || hello.from.index() <= place.rank.index() {
            Err(Refusal::Rank)
        } else if hello.epoch != place.epoch {
            Err(Refusal::Epoch)
        } else {
            Ok(hello.from)
        }
    };
    let answer = |stream, watch: &Watch<'_>| match handshake::answer(stream, key, watch, admit) {
        Ok(answered) => Some(answered),
        Err(error) => {
            let mut last = last_error.lock().unwrap_or_else(PoisonError::into_inner);
            // That one hung up says less than why another was refused.
            if last.is_none() || !matches!(error, HandshakeError::Io(_)) {
                *last = Some(error);
            }
            None
        }
    };
    let take = |(peer, secured)| {
        missing.retain(|&rank| rank != peer);
        let heard = found.send(Ok((peer, secured)));
        if heard.is_err() || missing.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let received = door::receive(place.listener, watch, answer, take);
    match (received, missing.first()) {
        (_, None) => Ok(()),
        (Err(error), Some(&rank)) if error.kind() == io::ErrorKind::TimedOut => {
            Err(ConnectError::Absent { rank, source: last_error.into_inner().unwrap_or_else(PoisonError::into_inner) })
        }
        (Err(error), _) => Err(error.into()),
        (Ok(()), _) => Ok(()),
    }
}
