//! How a [`TcpComm`] is formed: this rank connects to all ranks below it and accepts connections from all above it,
//! until all are connected or the deadline has passed. Failed attempts are repeated: the other rank may not listen yet,
//! or may still be in the old epoch.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use net::{ClusterKey, HandshakeError, Hello, RejectReason, SecureStream, WaitLimit, accept_all, dial, respond};
use types::Rank;

use super::abort::TcpAbort;
use super::comm::{ELEMENTS_MAX, TcpComm, TcpCommOptions};
use super::connection::Connection;
use super::rank_hello::{RankHello, RankPurpose};
use crate::comm::CommError;
use crate::shared_memory::Epoch;

/// How long one attempt to connect may take. The next one may get a more useful error.
const ATTEMPT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{addresses} addresses for {ranks} ranks")]
    Addresses { addresses: usize, ranks: usize },
    #[error("exchanges of {elements_max} elements exceed the limit of {ELEMENTS_MAX}")]
    TooLarge { elements_max: usize },
    #[error("rank {rank} at {address} did not answer as it should")]
    Unreachable { rank: Rank, address: SocketAddr, source: HandshakeError },
    /// `source`: the error of a handshake that failed meanwhile, if any.
    #[error("rank {rank} did not call")]
    NotConnected { rank: Rank, source: Option<HandshakeError> },
    #[error("the group was stopped while it was formed")]
    Aborted,
    #[error("rank {0} has other options")]
    Options(Rank),
    #[error("a rank left while the group was formed")]
    Comm(#[source] CommError),
    #[error("listen to other ranks")]
    Io(#[from] io::Error),
}

/// A rank's part in the group that is to be formed.
#[derive(Clone, Copy, Debug)]
pub struct TcpGroup<'a> {
    pub rank: Rank,
    /// Bound to this rank's address. It is made non-blocking, and can serve one epoch after the other.
    pub listener: &'a TcpListener,
    /// Addresses of all ranks, in their order. Those of this rank and of the ranks above it are not used.
    pub addresses: &'a [SocketAddr],
    pub epoch: Epoch,
}

impl TcpComm {
    /// Connects this rank with all others before the deadline.
    pub fn connect(
        group: TcpGroup<'_>,
        key: &ClusterKey,
        options: TcpCommOptions,
        abort: &TcpAbort,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let (ranks, addresses) = (group.rank.world().get(), group.addresses.len());
        if addresses != ranks {
            return Err(ConnectError::Addresses { addresses, ranks });
        }
        let elements_max = options.elements_max;
        if elements_max > ELEMENTS_MAX {
            return Err(ConnectError::TooLarge { elements_max });
        }
        let connections = connect_all(group, key, options.silence_deadline, abort, deadline)?;
        let mut comm = TcpComm::new(group.rank, options, abort.clone());
        abort.hold(connections);
        comm.check_options(deadline).map_err(|error| match error {
            CommError::Aborted => ConnectError::Aborted,
            CommError::Mismatch(rank) => ConnectError::Options(rank),
            other => ConnectError::Comm(other),
        })?;
        Ok(comm)
    }
}

type Found = Result<(Rank, SecureStream), ConnectError>;

/// Connections to all other ranks, in their order.
fn connect_all(
    group: TcpGroup<'_>,
    key: &ClusterKey,
    silence: Duration,
    abort: &TcpAbort,
    deadline: Instant,
) -> Result<Vec<Connection>, ConnectError> {
    let has_failed = AtomicBool::new(false);
    let is_over = || has_failed.load(Acquire) || abort.cause().is_some();
    let limit = &WaitLimit::new(Some(deadline), &is_over);
    let mut secured: Vec<Option<SecureStream>> = group.rank.world().ranks().map(|_| None).collect();
    let formed = thread::scope(|scope| {
        let (found, finds) = channel::<Found>();
        for peer in group.rank.world().ranks().take(group.rank.index()) {
            let found = found.clone();
            scope.spawn(move || {
                // An error means that the receiver has returned another error already.
                let _ = found.send(connect_to_peer(group, peer, key, silence, limit).map(|secured| (peer, secured)));
            });
        }
        if group.rank.index() + 1 < group.rank.world().get() {
            scope.spawn(move || {
                if let Err(error) = accept_peers(group, key, limit, &found) {
                    let _ = found.send(Err(error));
                }
            });
        } else {
            drop(found);
        }
        for find in finds {
            match find {
                // A peer that connects again has lost its first connection.
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
    let ranks = group.rank.world().ranks();
    let connections = ranks.zip(secured).filter_map(|(peer, secured)| Some(Connection::new(peer, secured?)));
    Ok(connections.collect::<Result<_, _>>()?)
}

/// Connects to `peer`, repeatedly until it accepts.
fn connect_to_peer(
    group: TcpGroup<'_>,
    peer: Rank,
    key: &ClusterKey,
    silence: Duration,
    limit: &WaitLimit<'_>,
) -> Result<SecureStream, ConnectError> {
    let address = group.addresses[peer.index()];
    let hello = RankHello { purpose: RankPurpose::JoinComm, from: group.rank, to: peer, epoch: group.epoch };
    let hello = hello.hello(silence);
    let mut reason = None;
    loop {
        let error = match dial(address, key, &hello, &limit.within(ATTEMPT)) {
            Ok(secured) => return Ok(secured),
            Err(error) => error,
        };
        let is_transient = match &error {
            HandshakeError::RejectedByPeer(reason) => reason.is_transient(),
            HandshakeError::Key | HandshakeError::Version { .. } => false,
            // Another program at this address may still be replaced by the rank.
            HandshakeError::UnknownProtocol | HandshakeError::Rejected(_) | HandshakeError::Io(_) => true,
        };
        // An earlier error says more than the timeout of the last attempt.
        let is_silent = matches!(&error, HandshakeError::Io(error) if net::is_transient(error));
        reason = if is_silent { reason.or(Some(error)) } else { Some(error) };
        if !is_transient || limit.check().is_err() {
            let source = reason.expect("the last call failed");
            return Err(ConnectError::Unreachable { rank: peer, address, source });
        }
        thread::sleep(limit.left());
    }
}

/// Waits until all ranks above this one have connected.
fn accept_peers(
    group: TcpGroup<'_>,
    key: &ClusterKey,
    limit: &WaitLimit<'_>,
    found: &Sender<Found>,
) -> Result<(), ConnectError> {
    let mut missing: Vec<_> = group.rank.world().ranks().skip(group.rank.index() + 1).collect();
    let last_error = Mutex::new(None);
    let admit = |hello: &Hello| {
        let hello = RankHello::parse(hello)?;
        if hello.purpose != RankPurpose::JoinComm {
            Err(RejectReason::Purpose)
        } else if hello.to.world() != group.rank.world() {
            Err(RejectReason::World)
        } else if hello.to != group.rank || hello.from.index() <= group.rank.index() {
            Err(RejectReason::Rank)
        } else if hello.epoch != group.epoch {
            Err(RejectReason::Epoch)
        } else {
            Ok(hello.from)
        }
    };
    let answer = |stream, limit: &WaitLimit<'_>| match respond(stream, key, limit, admit) {
        Ok(answered) => Some(answered),
        Err(error) => {
            let mut last = last_error.lock().unwrap_or_else(PoisonError::into_inner);
            // The reason of a rejection says more than a closed connection.
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
    let received = accept_all(group.listener, limit, answer, take);
    match (received, missing.first()) {
        (_, None) => Ok(()),
        (Err(error), Some(&rank)) if error.kind() == io::ErrorKind::TimedOut => Err(ConnectError::NotConnected {
            rank,
            source: last_error.into_inner().unwrap_or_else(PoisonError::into_inner),
        }),
        (Err(error), _) => Err(error.into()),
        (Ok(()), _) => Ok(()),
    }
}
