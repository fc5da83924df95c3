//! Streams that wait for a connection: a peer is dialled where it is known to be, then where a look-up finds it, then through
//! relays. A node that has just joined knows neither whom to ask nor a relay before a peer has described itself.

use std::collections::HashMap;

use libp2p_core::Multiaddr;
use libp2p_identity::PeerId;
use libp2p_kad::{PeerInfo, QueryId};
use libp2p_swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p_swarm::{ConnectionId, DialError};
use tokio::time::Instant;

use super::{Node, reason};
use crate::error::OpenError;
use crate::limits::{ADDRESSES_PER_PEER_MAX, JOIN_TIME_MAX, WAITING_OPENS_MAX};
use crate::streams::Opening;

#[derive(Default)]
pub struct Dials {
    peers: HashMap<PeerId, Dial>,
    lookups: HashMap<QueryId, PeerId>,
}

struct Dial {
    waiting: Vec<Opening>,
    step: Step,
    /// Our own attempt; none while a look-up runs, or somebody else's attempt.
    attempt: Option<ConnectionId>,
    failures: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    KnownAddresses,
    /// Until a peer has described itself, or this moment.
    Joining(Instant),
    LookUp,
    FoundAddresses,
    Relays,
}

impl Dial {
    fn failed(&mut self, reason: String) {
        if !self.failures.contains(&reason) {
            self.failures.push(reason);
        }
    }
}

impl Dials {
    /// Forgets streams that nobody waits for any more.
    pub fn forget_cancelled(&mut self) {
        for dial in self.peers.values_mut() {
            dial.waiting.retain(|opening| !opening.is_cancelled());
        }
        self.peers.retain(|_, dial| !dial.waiting.is_empty());
        self.lookups.retain(|_, peer| self.peers.contains_key(peer));
    }

    fn waiting(&self) -> usize {
        self.peers.values().map(|dial| dial.waiting.len()).sum()
    }
}

impl Node {
    pub(super) fn open(&mut self, opening: Opening, addresses: Vec<Multiaddr>) {
        let peer = opening.peer;
        for address in addresses.into_iter().take(ADDRESSES_PER_PEER_MAX) {
            self.learn(peer, address);
        }
        let Err(opening) = self.swarm.behaviour_mut().streams.open(opening) else { return };
        if self.dials.waiting() >= WAITING_OPENS_MAX {
            return opening.fail(OpenError::Busy);
        }
        if let Some(dial) = self.dials.peers.get_mut(&peer) {
            return dial.waiting.push(opening);
        }
        let dial = Dial { waiting: vec![opening], step: Step::KnownAddresses, attempt: None, failures: Vec::new() };
        self.dials.peers.insert(peer, dial);
        let known = self.known.get(&peer).collect();
        self.dial(peer, known);
    }

    /// Opens what waited for this peer.
    pub(super) fn on_connected(&mut self, peer: &PeerId) {
        for opening in self.dials.peers.remove(peer).map_or(Vec::new(), |dial| dial.waiting) {
            // It fails if the connection has ended already.
            let _ = self.swarm.behaviour_mut().streams.open(opening);
        }
    }

    pub(super) fn on_dial_failed(&mut self, peer: &PeerId, attempt: ConnectionId, error: &DialError) {
        let Some(dial) = self.dials.peers.get_mut(peer) else { return };
        let is_anothers = dial.attempt.is_some_and(|own| own != attempt);
        // A look-up asks the peer itself, if it can: this may say why it does not find it.
        if !is_anothers {
            dial.failed(reason(error));
        }
        // Before and while a look-up runs, attempts of others do not count.
        if !is_anothers && !matches!(dial.step, Step::Joining(_) | Step::LookUp) {
            self.go_on(*peer);
        }
    }

    /// A look-up of peers near another one has ended, perhaps one for a peer that is to be dialled.
    pub(super) fn on_looked_up(&mut self, query: QueryId, found: &[PeerInfo]) {
        let Some(peer) = self.dials.lookups.remove(&query) else { return };
        let found = found.iter().find(|info| info.peer_id == peer);
        let addresses = found.map(|info| info.addrs.clone()).unwrap_or_default();
        for address in addresses.into_iter().take(ADDRESSES_PER_PEER_MAX) {
            self.learn(peer, address);
        }
        if let Some(dial) = self.dials.peers.get_mut(&peer) {
            dial.step = Step::FoundAddresses;
            match found {
                Some(_) => {
                    let known = self.known.get(&peer).collect();
                    self.dial(peer, known);
                }
                None => {
                    dial.failed("a look-up does not find it".to_owned());
                    self.go_on(peer);
                }
            }
        }
    }

    fn dial(&mut self, peer: PeerId, addresses: Vec<Multiaddr>) {
        let options = DialOpts::peer_id(peer)
            .condition(PeerCondition::DisconnectedAndNotDialing)
            .addresses(addresses)
            .extend_addresses_through_behaviour()
            .build();
        let attempt = options.connection_id();
        let outcome = self.swarm.dial(options);
        let Some(dial) = self.dials.peers.get_mut(&peer) else { return };
        match outcome {
            Ok(()) => dial.attempt = Some(attempt),
            // Somebody else dials it, or its connection was made just now: an event will say how that ended.
            Err(DialError::DialPeerConditionFalse(_)) => dial.attempt = None,
            Err(error) => {
                dial.failed(reason(&error));
                self.go_on(peer);
            }
        }
    }

    /// The next step after one that failed.
    fn go_on(&mut self, peer: PeerId) {
        let Some(dial) = self.dials.peers.get_mut(&peer) else { return };
        dial.attempt = None;
        match dial.step {
            Step::KnownAddresses => {
                let now = Instant::now();
                dial.step = Step::Joining(now + JOIN_TIME_MAX);
                self.look_up_after_joining(now);
            }
            Step::Joining(_) => {
                dial.step = Step::LookUp;
                let query = self.swarm.behaviour_mut().kademlia.get_closest_peers(peer);
                self.dials.lookups.insert(query, peer);
            }
            Step::LookUp | Step::FoundAddresses => {
                dial.step = Step::Relays;
                let circuits = self.relays.circuits_to(&peer);
                match circuits.is_empty() {
                    true => self.give_up(peer),
                    false => self.dial(peer, circuits),
                }
            }
            Step::Relays => self.give_up(peer),
        }
    }

    /// Begins the look-ups that have waited until the node has joined the others.
    pub(super) fn look_up_after_joining(&mut self, now: Instant) {
        let is_joining = {
            let view = self.view();
            let has_joined = view.peers.values().any(|peer| peer.agent.is_some());
            !has_joined && (!view.peers.is_empty() || !self.bootstrap.is_empty())
        };
        let is_due = |step: Step| matches!(step, Step::Joining(until) if !is_joining || until <= now);
        let due = self.dials.peers.iter().filter(|(_, dial)| is_due(dial.step));
        let due: Vec<PeerId> = due.map(|(peer, _)| *peer).collect();
        due.into_iter().for_each(|peer| self.go_on(peer));
    }

    fn give_up(&mut self, peer: PeerId) {
        let Some(dial) = self.dials.peers.remove(&peer) else { return };
        let reason = dial.failures.join("; ");
        for opening in dial.waiting {
            opening.fail(OpenError::Unreachable { peer: peer.to_base58(), reason: reason.clone() });
        }
    }
}
