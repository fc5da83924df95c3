//! The streams of one connection.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use libp2p_core::upgrade::{InboundUpgrade, OutboundUpgrade, UpgradeInfo};
use libp2p_swarm::handler::{ConnectionEvent, DialUpgradeError, FullyNegotiatedInbound, FullyNegotiatedOutbound};
use libp2p_swarm::{
    ConnectionHandler, ConnectionHandlerEvent, Stream, StreamProtocol, StreamUpgradeError, SubstreamProtocol,
};
use tokio::sync::Semaphore;

use super::behaviour::Opening;
use super::stream::{Path, PeerStream};
use crate::error::OpenError;
use crate::limits::{INCOMING_STREAMS_PER_CONNECTION_MAX, STREAM_NEGOTIATION_TIME_MAX};

pub struct Handler {
    path: Path,
    accepts: Arc<[StreamProtocol]>,
    /// Places for incoming streams: in this connection, and in all.
    places: [Arc<Semaphore>; 2],
    opening: VecDeque<Opening>,
    accepted: VecDeque<Accepted>,
}

/// A stream that the peer opened.
#[derive(Debug)]
pub struct Accepted {
    pub protocol: StreamProtocol,
    pub stream: PeerStream,
}

impl Handler {
    pub fn new(path: Path, accepts: Arc<[StreamProtocol]>, all_places: Arc<Semaphore>) -> Self {
        let places = Arc::new(Semaphore::new(INCOMING_STREAMS_PER_CONNECTION_MAX));
        Self { path, accepts, places: [places, all_places], opening: VecDeque::new(), accepted: VecDeque::new() }
    }

    fn accept(&mut self, stream: Stream, protocol: StreamProtocol) {
        let [here, all] = self.places.each_ref().map(|places| Arc::clone(places).try_acquire_owned());
        match (here, all) {
            (Ok(here), Ok(all)) => {
                let stream = PeerStream::new(stream, self.path, Some([here, all]));
                self.accepted.push_back(Accepted { protocol, stream });
            }
            _ => tracing::debug!(%protocol, "a stream is refused: the peer, or all peers together, have too many"),
        }
    }
}

impl ConnectionHandler for Handler {
    type FromBehaviour = Opening;
    type ToBehaviour = Accepted;
    type InboundProtocol = Protocols;
    type OutboundProtocol = Protocols;
    type InboundOpenInfo = ();
    type OutboundOpenInfo = Opening;

    fn listen_protocol(&self) -> SubstreamProtocol<Protocols> {
        SubstreamProtocol::new(Protocols(Arc::clone(&self.accepts)), ()).with_timeout(STREAM_NEGOTIATION_TIME_MAX)
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ConnectionHandlerEvent<Protocols, Opening, Accepted>> {
        if let Some(accepted) = self.accepted.pop_front() {
            return Poll::Ready(ConnectionHandlerEvent::NotifyBehaviour(accepted));
        }
        while let Some(opening) = self.opening.pop_front() {
            if opening.is_cancelled() {
                continue;
            }
            let protocols = Protocols(Arc::new([StreamProtocol::new(opening.protocol)]));
            let protocol = SubstreamProtocol::new(protocols, opening).with_timeout(STREAM_NEGOTIATION_TIME_MAX);
            return Poll::Ready(ConnectionHandlerEvent::OutboundSubstreamRequest { protocol });
        }
        Poll::Pending
    }

    fn on_behaviour_event(&mut self, opening: Opening) {
        self.opening.push_back(opening);
    }

    fn on_connection_event(&mut self, event: ConnectionEvent<'_, Protocols, Protocols, (), Opening>) {
        match event {
            ConnectionEvent::FullyNegotiatedInbound(FullyNegotiatedInbound {
                protocol: (stream, protocol), ..
            }) => {
                self.accept(stream, protocol);
            }
            ConnectionEvent::FullyNegotiatedOutbound(FullyNegotiatedOutbound { protocol: (stream, _), info }) => {
                info.succeed(PeerStream::new(stream, self.path, None));
            }
            ConnectionEvent::DialUpgradeError(DialUpgradeError { info, error }) => {
                let peer = info.peer_text();
                let error = match error {
                    StreamUpgradeError::NegotiationFailed => OpenError::Protocol { peer, protocol: info.protocol },
                    StreamUpgradeError::Timeout => {
                        OpenError::Lost { peer, reason: format!("no answer in {STREAM_NEGOTIATION_TIME_MAX:?}") }
                    }
                    StreamUpgradeError::Io(error) => OpenError::Lost { peer, reason: error.to_string() },
                    StreamUpgradeError::Apply(never) => match never {},
                };
                info.fail(error);
            }
            _ => {}
        }
    }
}

/// Negotiates one of these protocols and leaves the stream as it is.
pub struct Protocols(Arc<[StreamProtocol]>);

impl UpgradeInfo for Protocols {
    type Info = StreamProtocol;
    type InfoIter = std::vec::IntoIter<StreamProtocol>;

    fn protocol_info(&self) -> Self::InfoIter {
        Vec::from(&*self.0).into_iter()
    }
}

impl InboundUpgrade<Stream> for Protocols {
    type Output = (Stream, StreamProtocol);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_inbound(self, stream: Stream, protocol: StreamProtocol) -> Self::Future {
        ready(Ok((stream, protocol)))
    }
}

impl OutboundUpgrade<Stream> for Protocols {
    type Output = (Stream, StreamProtocol);
    type Error = Infallible;
    type Future = Ready<Result<Self::Output, Infallible>>;

    fn upgrade_outbound(self, stream: Stream, protocol: StreamProtocol) -> Self::Future {
        ready(Ok((stream, protocol)))
    }
}
