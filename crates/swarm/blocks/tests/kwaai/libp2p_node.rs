//! A node of KwaaiNet's kind, built on libp2p alone: identify, Kademlia under libp2p's default name, and calls of a block. As in
//! KwaaiNet, a peer gets into the routing table if identify lists that Kademlia, and not otherwise.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::iter::{Once, once};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt;
use kwaai::INFERENCE_PROTOCOL;
use kwaai::dht::KADEMLIA_PROTOCOL;
use libp2p_core::transport::{PortUse, Transport};
use libp2p_core::upgrade::{DeniedUpgrade, OutboundUpgrade, UpgradeInfo, Version};
use libp2p_core::{Endpoint, Multiaddr};
use libp2p_identify as identify;
use libp2p_identity::{Keypair, PeerId};
use libp2p_kad::store::MemoryStore;
use libp2p_kad::{self as kad, Mode, QueryResult};
use libp2p_swarm::dial_opts::DialOpts;
use libp2p_swarm::{
    Config, ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, NotifyHandler, OneShotHandler,
    OneShotHandlerConfig, Stream, StreamProtocol, SubstreamProtocol, Swarm, SwarmEvent, THandler, THandlerInEvent,
    THandlerOutEvent, ToSwarm,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::compat::FuturesAsyncReadCompatExt;

#[derive(NetworkBehaviour)]
#[behaviour(prelude = "libp2p_swarm::derive_prelude")]
pub struct Behaviour {
    identify: identify::Behaviour,
    kademlia: kad::Behaviour<MemoryStore>,
    calls: Calls,
}

pub struct KwaaiNode(Swarm<Behaviour>);

impl KwaaiNode {
    pub fn new() -> Self {
        let key = Keypair::generate_ed25519();
        let me = key.public().to_peer_id();
        let identify = identify::Config::new("ipfs/0.1.0".to_owned(), key.public())
            .with_agent_version("kwaainet/0.4.0".to_owned())
            .with_push_listen_addr_updates(true);
        let kademlia = kad::Config::new(StreamProtocol::new(KADEMLIA_PROTOCOL));
        let mut kademlia = kad::Behaviour::with_config(me, MemoryStore::new(me), kademlia);
        kademlia.set_mode(Some(Mode::Server));
        let behaviour = Behaviour { identify: identify::Behaviour::new(identify), kademlia, calls: Calls::default() };
        let tcp = libp2p_tcp::tokio::Transport::new(libp2p_tcp::Config::new().nodelay(true));
        let noise = libp2p_noise::Config::new(&key).unwrap();
        let transport = tcp.upgrade(Version::V1Lazy).authenticate(noise).multiplex(libp2p_yamux::Config::default());
        let config = Config::with_tokio_executor().with_idle_connection_timeout(Duration::from_secs(30));
        Self(Swarm::new(transport.boxed(), behaviour, me, config))
    }

    /// Listens on loopback. Returns the address with the node's id.
    pub async fn listen(&mut self) -> Multiaddr {
        self.0.listen_on("/ip4/127.0.0.1/tcp/0".parse().unwrap()).unwrap();
        loop {
            if let SwarmEvent::NewListenAddr { address, .. } = self.0.select_next_some().await {
                return address.with_p2p(*self.0.local_peer_id()).unwrap();
            }
        }
    }

    /// Runs until this peer has described itself. Returns whether it got into the routing table.
    pub async fn until_identified(&mut self, peer: PeerId) -> bool {
        loop {
            if let Some((identified, is_listed)) = self.next_identified().await
                && identified == peer
            {
                return is_listed;
            }
        }
    }

    /// Serves look-ups for ever.
    pub async fn run(mut self) {
        loop {
            self.next_identified().await;
        }
    }

    async fn next_identified(&mut self) -> Option<(PeerId, bool)> {
        let event = self.0.select_next_some().await;
        self.on_identified(&event)
    }

    fn on_identified(&mut self, event: &SwarmEvent<BehaviourEvent>) -> Option<(PeerId, bool)> {
        let SwarmEvent::Behaviour(BehaviourEvent::Identify(identify::Event::Received { peer_id, info, .. })) = event
        else {
            return None;
        };
        let is_listed = info.protocols.iter().any(|protocol| protocol.as_ref() == KADEMLIA_PROTOCOL);
        for address in info.listen_addrs.iter().filter(|_| is_listed) {
            self.0.behaviour_mut().kademlia.add_address(peer_id, address.clone());
        }
        Some((*peer_id, is_listed))
    }

    pub fn dial(&mut self, address: Multiaddr) {
        self.0.dial(address).unwrap();
    }

    /// Where a look-up finds a peer.
    pub async fn look_up(&mut self, peer: PeerId) -> Vec<Multiaddr> {
        let query = self.0.behaviour_mut().kademlia.get_closest_peers(peer);
        loop {
            let event = self.0.select_next_some().await;
            self.on_identified(&event);
            if let SwarmEvent::Behaviour(BehaviourEvent::Kademlia(kad::Event::OutboundQueryProgressed {
                id,
                result: QueryResult::GetClosestPeers(result),
                ..
            })) = event
                && id == query
            {
                let found = result.unwrap().peers.into_iter().find(|found| found.peer_id == peer);
                return found.map_or(Vec::new(), |found| found.addrs);
            }
        }
    }

    /// Dials a peer by its id, at what a look-up found.
    pub async fn connect(&mut self, peer: PeerId, addresses: Vec<Multiaddr>) {
        // The look-up may have connected it.
        let _ = self.0.dial(DialOpts::peer_id(peer).addresses(addresses).build());
        while !self.0.is_connected(&peer) {
            let event = self.0.select_next_some().await;
            self.on_identified(&event);
            if let SwarmEvent::OutgoingConnectionError { peer_id: Some(failed), error, .. } = event {
                assert_ne!(failed, peer, "{error}");
            }
        }
    }

    /// Sends the frame of a call, and returns the payload of the reply.
    pub async fn call(&mut self, peer: PeerId, frame: Vec<u8>) -> Vec<u8> {
        let event = Call(frame);
        let event = ToSwarm::NotifyHandler { peer_id: peer, handler: NotifyHandler::Any, event };
        self.0.behaviour_mut().calls.0.push_back(event);
        loop {
            let event = self.0.select_next_some().await;
            self.on_identified(&event);
            if let SwarmEvent::Behaviour(BehaviourEvent::Calls(reply)) = event {
                return reply.unwrap().0;
            }
        }
    }
}

/// One call: its frame, behind its length already.
#[derive(Debug)]
pub struct Call(Vec<u8>);

#[derive(Debug)]
pub struct Reply(Vec<u8>);

impl From<Infallible> for Reply {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

impl UpgradeInfo for Call {
    type Info = &'static str;
    type InfoIter = Once<&'static str>;

    fn protocol_info(&self) -> Self::InfoIter {
        once(INFERENCE_PROTOCOL)
    }
}

impl OutboundUpgrade<Stream> for Call {
    type Output = Reply;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Reply>> + Send>>;

    fn upgrade_outbound(self, stream: Stream, _: &'static str) -> Self::Future {
        Box::pin(async move {
            let mut stream = stream.compat();
            stream.write_all(&self.0).await?;
            stream.flush().await?;
            let (mut bytes, mut shift) = (0, 0);
            loop {
                let byte = stream.read_u8().await?;
                bytes |= usize::from(byte & 0x7f) << shift;
                shift += 7;
                if byte & 0x80 == 0 {
                    break;
                }
            }
            let mut payload = vec![0; bytes];
            stream.read_exact(&mut payload).await?;
            stream.shutdown().await?;
            Ok(Reply(payload))
        })
    }
}

type Handler = OneShotHandler<DeniedUpgrade, Call, Reply>;
type Action = ToSwarm<Result<Reply, String>, Call>;

/// The calls of a coordinator.
#[derive(Default)]
pub struct Calls(VecDeque<Action>);

fn handler() -> Handler {
    OneShotHandler::new(SubstreamProtocol::new(DeniedUpgrade, ()), OneShotHandlerConfig::default())
}

impl NetworkBehaviour for Calls {
    type ConnectionHandler = Handler;
    type ToSwarm = Result<Reply, String>;

    fn handle_established_inbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(handler())
    }

    fn handle_established_outbound_connection(
        &mut self,
        _: ConnectionId,
        _: PeerId,
        _: &Multiaddr,
        _: Endpoint,
        _: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(handler())
    }

    fn on_swarm_event(&mut self, _: FromSwarm) {}

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: THandlerOutEvent<Self>) {
        self.0.push_back(ToSwarm::GenerateEvent(event.map_err(|error| error.to_string())));
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        self.0.pop_front().map_or(Poll::Pending, Poll::Ready)
    }
}
