//! `NodeLink`: the coordinator's control connection to one node.

use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use net::{
    ClusterKey, HandshakeError, MessageError, MessageReceiver, MessageSender, MessageStream, RejectReason, WaitLimit,
};

use super::CoordinatorEvent;
use super::standing::Failure;
use crate::purpose::ConnectionId;
use crate::wire::WireError;
use crate::wire::control::{
    ControlKind, ControlReply, ControlRequest, PROBE_BYTES_MAX, UNASKED, WireFacts, decode, encode,
};
use plan::Link;

/// How long a node may take to connect, and to answer what needs no work.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Round trips that are measured; the shortest counts.
const ROUND_TRIPS: u64 = 5;
/// The id of the first request.
const DESCRIBE: u64 = UNASKED + 1;
/// Bytes that measure the bandwidth of a link.
const PROBE_BYTES: usize = 2 << 20;

/// Identifies one connection to a node. A node that comes back gets another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct NodeId(pub u64);

#[derive(Debug, thiserror::Error)]
pub(super) enum NodeError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("it left")]
    Left,
    #[error("it answered something else")]
    Answer,
    #[error("start a thread")]
    Thread(#[source] std::io::Error),
}

impl NodeError {
    pub fn failure(&self) -> Failure {
        match self {
            Self::Handshake(HandshakeError::Key | HandshakeError::RejectedByPeer(RejectReason::Key)) => {
                Failure::OtherKey
            }
            Self::Handshake(HandshakeError::Version { .. } | HandshakeError::UnknownProtocol) => Failure::OtherProtocol,
            Self::Handshake(HandshakeError::RejectedByPeer(reason)) if !reason.is_transient() => Failure::OtherProtocol,
            _ => Failure::Away,
        }
    }

    /// The message, and those of its causes.
    pub fn with_causes(&self) -> String {
        let causes = std::iter::successors(std::error::Error::source(self), |cause| cause.source());
        causes.fold(self.to_string(), |text, cause| format!("{text}: {cause}"))
    }
}

pub(super) struct NodeLink {
    pub id: NodeId,
    pub address: SocketAddr,
    pub facts: WireFacts,
    /// The way from the coordinator to the node.
    pub link: Link,
    sender: MessageSender,
    next_request: u64,
}

impl NodeLink {
    /// Connects to a node, asks what it is, and measures the way to it. From then on its replies go to `events`.
    pub fn connect(
        id: NodeId,
        address: SocketAddr,
        key: &ClusterKey,
        silence: Duration,
        events: Sender<CoordinatorEvent>,
    ) -> Result<Self, NodeError> {
        let deadline = Instant::now() + CONNECT_DEADLINE;
        let hello = ConnectionId::control().hello(silence);
        let MessageStream { sender, mut receiver } =
            MessageStream::connect(address, key, &hello, &WaitLimit::until(deadline))?;
        send(&sender, &ControlRequest::Describe { id: DESCRIBE })?;
        let ControlReply::Facts { facts, .. } = receive(&mut receiver, Some(deadline))? else {
            return Err(NodeError::Answer);
        };
        let link = measure(&sender, &mut receiver, deadline)?;
        let watch = move || {
            let why = loop {
                let reply = match receive(&mut receiver, None) {
                    Ok(reply) => reply,
                    Err(error) => break error.to_string(),
                };
                if events.send(CoordinatorEvent::Reply { node: id, reply }).is_err() {
                    return;
                }
            };
            // An error means that the coordinator has ended.
            let _ = events.send(CoordinatorEvent::Gone { node: id, why });
        };
        thread::Builder::new().name("consort-node".to_owned()).spawn(watch).map_err(NodeError::Thread)?;
        Ok(Self { id, address, facts, link, sender, next_request: DESCRIBE + 1 })
    }

    /// Sends a request and returns its id. If the node is gone, an event says so.
    pub fn request(&mut self, request: impl FnOnce(u64) -> ControlRequest) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        let _ = send(&self.sender, &request(id));
        id
    }
}

impl Drop for NodeLink {
    fn drop(&mut self) {
        self.sender.close();
    }
}

fn send(sender: &MessageSender, request: &ControlRequest) -> Result<(), MessageError> {
    sender.send(ControlKind::Json as u8, &[&encode(request)])
}

fn receive(receiver: &mut MessageReceiver, deadline: Option<Instant>) -> Result<ControlReply, NodeError> {
    let limit = |kind| (kind == ControlKind::Json as u8).then_some(ControlKind::Json.bytes_max());
    let mut body = Vec::new();
    match receiver.receive(deadline, limit, &mut body)? {
        Some(_) => Ok(decode(&body)?),
        None => Err(NodeError::Left),
    }
}

/// Measures round trips, and then how long bytes take.
fn measure(sender: &MessageSender, receiver: &mut MessageReceiver, deadline: Instant) -> Result<Link, NodeError> {
    let mut ping = |id| {
        send(sender, &ControlRequest::Ping { id })?;
        loop {
            match receive(receiver, Some(deadline))? {
                ControlReply::Pong { id: found } if found == id => return Ok::<_, NodeError>(()),
                // Its memory has just changed. It says so again if that matters.
                ControlReply::Facts { id: UNASKED, .. } => {}
                _ => return Err(NodeError::Answer),
            }
        }
    };
    let mut round_trip = Duration::MAX;
    for id in 0..ROUND_TRIPS {
        let sent = Instant::now();
        ping(id)?;
        round_trip = round_trip.min(sent.elapsed());
    }
    let (sent, probe) = (Instant::now(), vec![0; PROBE_BYTES.min(PROBE_BYTES_MAX)]);
    sender.send(ControlKind::Probe as u8, &[&probe])?;
    ping(ROUND_TRIPS)?;
    let transfer = sent.elapsed().saturating_sub(round_trip).max(Duration::from_micros(1));
    Ok(Link { round_trip_seconds: round_trip.as_secs_f64(), bytes_per_s: probe.len() as f64 / transfer.as_secs_f64() })
}
