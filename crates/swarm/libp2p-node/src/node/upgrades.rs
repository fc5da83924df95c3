//! Peers that this node reaches through a relay. The two try to connect directly when the relayed connection is made, at the same
//! moment, which a busy machine may miss, and before their NATs may have told all that it takes. So this node has them try again:
//! by another relayed connection, which is closed when it has served.

use std::collections::HashMap;
use std::time::Duration;

use libp2p_core::multiaddr::Protocol;
use libp2p_identity::PeerId;
use libp2p_swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p_swarm::{ConnectionId, Swarm};
use tokio::time::Instant;

use crate::behaviour::Behaviour;
use crate::limits::{UPGRADE_RETRY_TIME_MAX, UPGRADE_RETRY_TIME_MIN, UPGRADE_TIME_MAX};
use crate::view::{Connection, Peer, View};

#[derive(Default)]
pub struct Upgrades {
    relayed: HashMap<PeerId, Upgrade>,
}

struct Upgrade {
    next: Instant,
    wait: Duration,
    /// The connection that was made for an attempt, and when that is over.
    attempt: Option<(ConnectionId, Instant)>,
}

impl Upgrades {
    pub fn retry(&mut self, swarm: &mut Swarm<Behaviour>, view: &View, now: Instant) {
        for (peer, known) in &view.peers {
            if !is_direct(known) && own_circuit(known).is_some() {
                let wait = UPGRADE_RETRY_TIME_MIN;
                self.relayed.entry(*peer).or_insert(Upgrade { next: now + wait, wait, attempt: None });
            }
        }
        self.relayed.retain(|peer, upgrade| match view.peers.get(peer) {
            Some(known) => upgrade.retry(swarm, *peer, known, now),
            None => false,
        });
    }
}

impl Upgrade {
    /// False if there is nothing more to do.
    fn retry(&mut self, swarm: &mut Swarm<Behaviour>, peer: PeerId, known: &Peer, now: Instant) -> bool {
        let is_over = |(_, end): &mut (ConnectionId, Instant)| is_direct(known) || *end <= now;
        if let Some((id, _)) = self.attempt.take_if(is_over)
            && known.connections.iter().any(|other| other.id != id)
        {
            swarm.close_connection(id);
        }
        if is_direct(known) {
            return false;
        }
        let Some(circuit) = own_circuit(known) else { return self.attempt.is_some() };
        if self.attempt.is_none() && self.next <= now {
            let dial = DialOpts::peer_id(peer)
                .condition(PeerCondition::Always)
                .addresses(vec![circuit.address.clone().with(Protocol::P2p(peer))])
                .build();
            self.attempt = Some((dial.connection_id(), now + UPGRADE_TIME_MAX));
            self.wait = (2 * self.wait).min(UPGRADE_RETRY_TIME_MAX);
            self.next = now + self.wait;
            tracing::debug!(%peer, "a direct connection is tried again");
            if let Err(error) = swarm.dial(dial) {
                tracing::debug!(%peer, %error, "it is not tried now");
            }
        }
        true
    }
}

fn is_direct(peer: &Peer) -> bool {
    peer.connections.iter().any(|connection| !connection.is_relayed)
}

/// A relayed connection that this node has made: the other peer is the one that begins an attempt.
fn own_circuit(peer: &Peer) -> Option<&Connection> {
    peer.connections.iter().find(|connection| connection.is_relayed && connection.is_own)
}
