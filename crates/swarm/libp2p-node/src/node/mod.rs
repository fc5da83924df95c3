//! The task of a node: it drives libp2p's swarm, carries out the commands of handles, and keeps their view up to date.

mod bootstrap;
mod dials;
mod events;
mod providers;
mod relays;
mod upgrades;

use std::net::TcpListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use libp2p_core::multiaddr::Protocol;
use libp2p_core::{Multiaddr, Transport};
use libp2p_identity::PeerId;
use libp2p_swarm::{Config, PeerAddresses, Swarm};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::behaviour::Behaviour;
use crate::dial_rules::{DialRules, RuledTransport, SharedRules};
use crate::error::{FindError, NodeError};
use crate::handle::NodeHandle;
use crate::handshakes::Handshakes;
use crate::limits::{CHANGES_MAX, COMMANDS_MAX, IDLE_CONNECTION_TIME, KNOWN_PEERS_MAX, STREAM_NEGOTIATIONS_MAX};
use crate::options::NodeOptions;
use crate::streams::{self, IncomingStreams, Opening};
use crate::transport::transport;
use crate::view::{PeerChange, View, ip};
use bootstrap::Bootstrap;
use dials::Dials;
use providers::Providers;
use relays::Relays;
use upgrades::Upgrades;

/// How often relays and bootstrap peers are looked after.
const TICK: Duration = Duration::from_millis(500);

type Reply<T> = oneshot::Sender<T>;

/// What handles ask for.
pub enum Command {
    Open { opening: Opening, addresses: Vec<Multiaddr> },
    AddAddress { peer: PeerId, address: Multiaddr },
    Provide { key: Vec<u8>, reply: Reply<Result<(), FindError>> },
    StopProviding { key: Vec<u8> },
    Providers { key: Vec<u8>, reply: Reply<Result<Vec<directory::PeerId>, FindError>> },
    Disconnect { peer: PeerId },
}

struct Node {
    swarm: Swarm<Behaviour>,
    view: Arc<Mutex<View>>,
    changes: broadcast::Sender<PeerChange>,
    /// Addresses of peers, wherever they are known from.
    known: PeerAddresses,
    dials: Dials,
    providers: Providers,
    relays: Relays,
    upgrades: Upgrades,
    bootstrap: Bootstrap,
    /// Peers to join the other Kademlia network through.
    ipfs_bootstrap: Bootstrap,
    rules: SharedRules,
    /// This node's listen addresses count as tested.
    is_relay_server: bool,
}

pub fn start(options: NodeOptions) -> Result<(NodeHandle, IncomingStreams), NodeError> {
    options.check()?;
    let keypair = options.identity.keypair();
    let me = keypair.public().to_peer_id();
    let private = options.network_key.as_ref().map(|key| key.pre_shared());
    let (relay_transport, relay_client) = libp2p_relay::client::new(me);
    let handshakes = Handshakes::default();
    let rules = Arc::new(Mutex::new(DialRules::new(&options)));
    let inner = transport(keypair, private, relay_transport, handshakes.clone())?;
    let transport = RuledTransport { inner, rules: Arc::clone(&rules) }.boxed();
    let (streams, incoming) = streams::Behaviour::new(&options.accepts);
    let behaviour = Behaviour::new(&options, streams, relay_client, handshakes)?;
    let config = Config::with_tokio_executor()
        .with_idle_connection_timeout(IDLE_CONNECTION_TIME)
        .with_max_negotiating_inbound_streams(STREAM_NEGOTIATIONS_MAX)
        .with_smart_dial();
    let mut swarm = Swarm::new(transport, behaviour, me, config);
    let view = Arc::new(Mutex::new(View::default()));
    for address in &options.external {
        swarm.add_external_address(address.clone());
        view.lock().unwrap_or_else(PoisonError::into_inner).confirm(address.clone());
    }
    for address in &options.listen {
        let failed = |error: std::io::Error| {
            let reason = match error.kind() {
                std::io::ErrorKind::AddrInUse => "the port is in use, so choose another".to_owned(),
                std::io::ErrorKind::PermissionDenied => "this user may not listen on that port".to_owned(),
                _ => reason(&error),
            };
            NodeError::Listen { address: address.clone(), reason }
        };
        check_port(address).map_err(failed)?;
    }
    for address in &options.listen {
        let failed = |error| NodeError::Listen { address: address.clone(), reason: reason(&error) };
        swarm.listen_on(address.clone()).map_err(failed)?;
    }
    let bootstrap = Bootstrap::new(options.bootstrap_peers()?);
    let ipfs_bootstrap = Bootstrap::new(options.ipfs_peers()?);
    let (commands, received) = mpsc::channel(COMMANDS_MAX);
    let (changes, _) = broadcast::channel(CHANGES_MAX);
    let handle =
        NodeHandle { peer: options.identity.peer(), commands, view: Arc::clone(&view), changes: changes.downgrade() };
    let node = Node {
        swarm,
        view,
        changes,
        known: PeerAddresses::new(KNOWN_PEERS_MAX.try_into().expect("not zero")),
        dials: Dials::default(),
        providers: Providers::default(),
        relays: Relays::new(options.listen.is_empty(), Instant::now()),
        upgrades: Upgrades::default(),
        bootstrap,
        ipfs_bootstrap,
        rules,
        is_relay_server: options.relay_server,
    };
    tokio::spawn(node.run(received));
    Ok((handle, incoming))
}

impl Node {
    /// Ends when all handles are dropped.
    async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_event(event),
                command = commands.recv() => match command {
                    Some(command) => self.carry_out(command),
                    None => return,
                },
                _ = ticks.tick() => self.tick(),
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Open { opening, addresses } => self.open(opening, addresses),
            Command::AddAddress { peer, address } => self.learn(peer, address),
            Command::Provide { key, reply } => {
                let outcome = self.providers.provide(&mut self.swarm, key);
                let _ = reply.send(outcome);
            }
            Command::StopProviding { key } => self.providers.stop(&mut self.swarm, key),
            Command::Providers { key, reply } => self.providers.find(&mut self.swarm, key, reply),
            Command::Disconnect { peer } => {
                // An error says that there is no connection.
                let _ = self.swarm.disconnect_peer_id(peer);
            }
        }
    }

    fn tick(&mut self) {
        let now = Instant::now();
        self.dials.forget_cancelled();
        self.look_up_after_joining(now);
        self.bootstrap.dial_lost(&mut self.swarm, now);
        self.ipfs_bootstrap.dial_lost(&mut self.swarm, now);
        let reachability = self.view().reachability();
        self.relays.reserve(&mut self.swarm, reachability, now);
        self.providers.announce(&mut self.swarm, now);
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        self.upgrades.retry(&mut self.swarm, &view, now);
    }

    /// Remembers where a peer can be dialled.
    fn learn(&mut self, peer: PeerId, address: Multiaddr) {
        if peer != *self.swarm.local_peer_id() {
            self.known.add(peer, address);
        }
    }

    fn rules(&self) -> MutexGuard<'_, DialRules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error if another program listens there. libp2p would share the port with it, and each would get connections that are for
/// the other.
fn check_port(address: &Multiaddr) -> std::io::Result<()> {
    let mut parts = address.iter().skip(1);
    match (ip(address), parts.next()) {
        (Some(ip), Some(Protocol::Tcp(port))) if port != 0 => TcpListener::bind((ip, port)).map(drop),
        _ => Ok(()),
    }
}

/// An error with its causes.
fn reason(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
