//! The time of one token's activations from one end of a hop to the other.

use std::collections::HashMap;

use super::{ClientView, DEFAULT_ROUND_TRIP_SECONDS, RELAY_SECONDS};
use crate::coordinate::Coordinate;
use crate::identity::PeerId;
use crate::record::{BlockRecord, Reach};

/// The client, or the index of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Endpoint {
    Client,
    Peer(usize),
}

/// What is known of an end of a hop.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub coordinate: Option<Coordinate>,
    pub reach: Reach,
    /// Seconds to send or receive one token's activations.
    pub transfer_seconds: f64,
    /// From this peer to the client and back.
    pub client_round_trip: f64,
    /// Round trips to other candidates that this peer announces, by their index.
    pub neighbours: Vec<(u32, f32)>,
}

/// A client that does not know its bandwidth: it does not decide between chains.
const CLIENT_BYTES_PER_S: f32 = 1e7;

impl Site {
    pub fn client(view: &ClientView, activation_bytes: u32) -> Self {
        let bytes_per_s = view.bytes_per_s.filter(|rate| rate.is_finite() && *rate > 0.0);
        Self {
            coordinate: view.coordinate.filter(Coordinate::is_valid),
            reach: view.reach.unwrap_or(Reach::Relayed),
            transfer_seconds: f64::from(activation_bytes) / f64::from(bytes_per_s.unwrap_or(CLIENT_BYTES_PER_S)),
            client_round_trip: 0.0,
            neighbours: Vec::new(),
        }
    }

    pub fn peer(record: &BlockRecord, view: &ClientView, client: &Self, activation_bytes: u32) -> Self {
        let measured = view.round_trips.get(&record.peer).copied().filter(|seconds| *seconds >= 0.0).map(f64::from);
        Self {
            coordinate: record.coordinate,
            reach: record.reach,
            transfer_seconds: f64::from(activation_bytes) / f64::from(record.speed.bytes_per_s),
            client_round_trip: measured.unwrap_or_else(|| estimate(client.coordinate, record.coordinate)),
            neighbours: Vec::new(),
        }
    }

    /// Keeps the announced round trips to peers that have an index.
    pub fn set_neighbours(&mut self, record: &BlockRecord, index: &HashMap<PeerId, usize>) {
        let known = record.neighbours.iter().filter_map(|neighbour| {
            index.get(&neighbour.peer).map(|index| (*index as u32, neighbour.round_trip_seconds))
        });
        self.neighbours = known.collect();
    }

    fn announced(&self, to: usize) -> Option<f64> {
        self.neighbours.iter().find(|(index, _)| *index as usize == to).map(|(_, seconds)| f64::from(*seconds))
    }
}

/// The client and the candidates.
#[derive(Clone, Debug)]
pub(super) struct Sites {
    pub client: Site,
    pub peers: Vec<Site>,
}

impl Sites {
    pub fn hop_seconds(&self, from: Endpoint, to: Endpoint) -> f64 {
        match (from, to) {
            (Endpoint::Client, Endpoint::Client) => 0.0,
            (Endpoint::Client, Endpoint::Peer(peer)) | (Endpoint::Peer(peer), Endpoint::Client) => {
                self.client_hop(peer)
            }
            // A neighbour of lost layers that takes them over has two spans next to each other.
            (Endpoint::Peer(from), Endpoint::Peer(to)) if from == to => 0.0,
            (Endpoint::Peer(from), Endpoint::Peer(to)) => self.peer_hop(from, to),
        }
    }

    fn client_hop(&self, peer: usize) -> f64 {
        let site = &self.peers[peer];
        // The peer or the client opens the connection; it stays open. So one that can be reached is enough.
        let relay = if is_relayed(site, &self.client) { RELAY_SECONDS } else { 0.0 };
        site.client_round_trip / 2.0 + site.transfer_seconds.max(self.client.transfer_seconds) + relay
    }

    fn peer_hop(&self, from: usize, to: usize) -> f64 {
        let (a, b) = (&self.peers[from], &self.peers[to]);
        // Neither can be reached: the activations go through the client, which has a connection to both.
        if is_relayed(a, b) {
            return self.client_hop(from) + self.client_hop(to);
        }
        // Of two claims the larger: a peer that wants to be in many chains claims to be near to everybody.
        let announced = match (a.announced(to), b.announced(from)) {
            (Some(one), Some(other)) => Some(one.max(other)),
            (one, other) => one.or(other),
        };
        let round_trip = announced.unwrap_or_else(|| estimate(a.coordinate, b.coordinate));
        round_trip / 2.0 + a.transfer_seconds.max(b.transfer_seconds)
    }
}

fn is_relayed(a: &Site, b: &Site) -> bool {
    a.reach == Reach::Relayed && b.reach == Reach::Relayed
}

fn estimate(a: Option<Coordinate>, b: Option<Coordinate>) -> f64 {
    match (a, b) {
        (Some(a), Some(b)) => a.round_trip_seconds(&b).into(),
        _ => DEFAULT_ROUND_TRIP_SECONDS,
    }
}
