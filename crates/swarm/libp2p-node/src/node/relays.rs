//! Relays: which peers are some, and reservations at them while nobody can reach this node directly.

use std::collections::HashMap;

use libp2p_core::Multiaddr;
use libp2p_core::multiaddr::Protocol;
use libp2p_core::transport::ListenerId;
use libp2p_identity::PeerId;
use libp2p_swarm::Swarm;
use tokio::time::Instant;

use crate::behaviour::Behaviour;
use crate::limits::{RELAY_CANDIDATES_MAX, RELAY_DELAY, RELAY_RETRY_TIME, RESERVATIONS_MAX};
use crate::view::Reachability;

pub struct Relays {
    /// Without listen addresses nobody needs to try whether this node can be reached.
    listens_nowhere: bool,
    start: Instant,
    candidates: HashMap<PeerId, Relay>,
    reservations: HashMap<ListenerId, PeerId>,
}

struct Relay {
    address: Multiaddr,
    /// It refused or was lost before.
    next_try: Option<Instant>,
}

impl Relays {
    pub fn new(listens_nowhere: bool, start: Instant) -> Self {
        Self { listens_nowhere, start, candidates: HashMap::new(), reservations: HashMap::new() }
    }

    /// A connected peer is a relay at this address.
    pub fn add(&mut self, peer: PeerId, address: Multiaddr) {
        if let Some(relay) = self.candidates.get_mut(&peer) {
            relay.address = address;
            return;
        }
        if self.candidates.len() >= RELAY_CANDIDATES_MAX {
            // One that refused makes room.
            let failed = self.candidates.iter().find(|(_, relay)| relay.next_try.is_some()).map(|(peer, _)| *peer);
            match failed {
                Some(failed) => self.candidates.remove(&failed),
                None => return,
            };
        }
        self.candidates.insert(peer, Relay { address, next_try: None });
    }

    pub fn on_disconnected(&mut self, peer: &PeerId) {
        self.candidates.remove(peer);
    }

    /// A listener has ended: perhaps a reservation.
    pub fn on_listener_closed(&mut self, listener: ListenerId, now: Instant) {
        let Some(peer) = self.reservations.remove(&listener) else { return };
        if let Some(relay) = self.candidates.get_mut(&peer) {
            relay.next_try = Some(now + RELAY_RETRY_TIME);
        }
    }

    /// Takes reservations if this node seems not to be reachable, and gives them back if it is.
    pub fn reserve(&mut self, swarm: &mut Swarm<Behaviour>, reachability: Reachability, now: Instant) {
        if reachability == Reachability::Direct {
            for (listener, _) in self.reservations.drain() {
                swarm.remove_listener(listener);
            }
            return;
        }
        if !self.listens_nowhere && now < self.start + RELAY_DELAY {
            return;
        }
        for (peer, relay) in &mut self.candidates {
            let is_used = self.reservations.values().any(|used| used == peer);
            if is_used || self.reservations.len() >= RESERVATIONS_MAX || relay.next_try.is_some_and(|next| now < next) {
                continue;
            }
            let address = through(&relay.address, peer);
            match swarm.listen_on(address.clone()) {
                Ok(listener) => {
                    self.reservations.insert(listener, *peer);
                }
                Err(error) => {
                    tracing::debug!(%address, %error, "no reservation at a relay");
                    relay.next_try = Some(now + RELAY_RETRY_TIME);
                }
            }
        }
    }

    /// Addresses of a peer if it has a reservation at a relay that this node knows.
    pub fn circuits_to(&self, peer: &PeerId) -> Vec<Multiaddr> {
        let others = self.candidates.iter().filter(|(relay, _)| *relay != peer);
        others.map(|(relay, known)| through(&known.address, relay).with(Protocol::P2p(*peer))).collect()
    }
}

fn through(address: &Multiaddr, relay: &PeerId) -> Multiaddr {
    address.clone().with(Protocol::P2p(*relay)).with(Protocol::P2pCircuit)
}
