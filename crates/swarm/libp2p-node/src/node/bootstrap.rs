//! Keeps connections to the bootstrap peers.

use std::time::Duration;

use libp2p_core::Multiaddr;
use libp2p_identity::PeerId;
use libp2p_swarm::Swarm;
use libp2p_swarm::dial_opts::{DialOpts, PeerCondition};
use tokio::time::Instant;

use crate::behaviour::Behaviour;
use crate::limits::{BOOTSTRAP_RETRY_TIME_MAX, BOOTSTRAP_RETRY_TIME_MIN};

pub struct Bootstrap {
    peers: Vec<BootstrapPeer>,
}

struct BootstrapPeer {
    peer: PeerId,
    addresses: Vec<Multiaddr>,
    next_dial: Option<Instant>,
    wait: Duration,
}

impl Bootstrap {
    pub fn new(peers: Vec<(PeerId, Vec<Multiaddr>)>) -> Self {
        let peer =
            |(peer, addresses)| BootstrapPeer { peer, addresses, next_dial: None, wait: BOOTSTRAP_RETRY_TIME_MIN };
        Self { peers: peers.into_iter().map(peer).collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.peers.is_empty()
    }

    pub fn has(&self, peer: &PeerId) -> bool {
        self.peers.iter().any(|bootstrap| bootstrap.peer == *peer)
    }

    pub fn dial_lost(&mut self, swarm: &mut Swarm<Behaviour>, now: Instant) {
        for bootstrap in &mut self.peers {
            if swarm.is_connected(&bootstrap.peer) {
                bootstrap.wait = BOOTSTRAP_RETRY_TIME_MIN;
                bootstrap.next_dial = None;
            } else if bootstrap.next_dial.is_none_or(|next| next <= now) {
                bootstrap.next_dial = Some(now + bootstrap.wait);
                bootstrap.wait = (2 * bootstrap.wait).min(BOOTSTRAP_RETRY_TIME_MAX);
                let dial = DialOpts::peer_id(bootstrap.peer)
                    .condition(PeerCondition::DisconnectedAndNotDialing)
                    .addresses(bootstrap.addresses.clone())
                    .build();
                if let Err(error) = swarm.dial(dial) {
                    tracing::debug!(peer = %bootstrap.peer, %error, "a bootstrap peer is not dialled now");
                }
            }
        }
    }
}
