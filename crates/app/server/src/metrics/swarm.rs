//! Metrics of a swarm that runs the model: of the peers of the chain that was formed last, with the labels of their stages, and of
//! all sessions together. Peers that are not in the chain have no series: there may be thousands.
//!
//! The counters of a peer are those since the start. They go when it leaves the chain, and are there again when it comes back.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::stages::{NoLabel, Seconds, StageLabel, StageSeconds, add_seconds};
use crate::cluster::{ChainSnapshot, StagePeer, SwarmSnapshot};

type Count<L> = Family<L, Counter>;

#[derive(Default)]
pub struct SwarmMetrics {
    queue: StageSeconds,
    round_trip: Family<StageLabel, Gauge<f64, AtomicU64>>,
    sent: Count<StageLabel>,
    returned: Count<StageLabel>,
    failures: Count<StageLabel>,
    peer_checks: Count<StageLabel>,
    peer_differences: Count<StageLabel>,
    peers: Family<NoLabel, Gauge>,
    sessions: Family<NoLabel, Gauge>,
    replaced: Count<NoLabel>,
    replacing: Family<NoLabel, Seconds>,
    checks: Count<NoLabel>,
    differences: Count<NoLabel>,
    identical: Count<NoLabel>,
}

impl SwarmMetrics {
    pub fn register(&self, registry: &mut Registry) {
        let queue = "Time that rows waited at the peer for those of others";
        registry.register_with_unit("stage_queue", queue, Unit::Seconds, self.queue.clone());
        let round_trip = "Round trip between this machine and the peer, measured last";
        registry.register_with_unit("stage_round_trip", round_trip, Unit::Seconds, self.round_trip.clone());
        let sent = "Activations from this machine to the peer";
        registry.register_with_unit("stage_sent", sent, Unit::Bytes, self.sent.clone());
        let returned = "Activations from the peer to this machine";
        registry.register_with_unit("stage_returned", returned, Unit::Bytes, self.returned.clone());
        let of_peers = [
            ("stage_failures", "Sessions that the peer did not open, or that ended by its fault", &self.failures),
            ("stage_checks", "Results of the peer that others recomputed", &self.peer_checks),
            ("stage_check_differences", "Checks of the peer that found a difference", &self.peer_differences),
        ];
        for (name, help, family) in of_peers {
            registry.register(name, help, family.clone());
        }
        registry.register("swarm_peers", "Peers of the swarm that are known", self.peers.clone());
        registry.register("swarm_sessions", "Open sessions, each with a chain of peers", self.sessions.clone());
        let of_all = [
            ("swarm_replaced_spans", "Spans that other peers took over while a session went on", &self.replaced),
            ("swarm_checks", "Results that other peers recomputed", &self.checks),
            ("swarm_check_differences", "Checks that found a difference", &self.differences),
            ("swarm_identical_checks", "Checks in which every bit was the same", &self.identical),
        ];
        for (name, help, family) in of_all {
            registry.register(name, help, family.clone());
        }
        let replacing = "Time that sessions looked for peers that take over spans";
        registry.register_with_unit("swarm_replacing", replacing, Unit::Seconds, self.replacing.clone());
    }

    /// Replaces all values. No other thread may encode them meanwhile.
    pub fn update(&self, chain: &ChainSnapshot) {
        self.clear();
        for (index, stage) in chain.stages.iter().enumerate() {
            if let Some(peer) = &stage.peer {
                self.add_peer(&StageLabel::new(index, stage), peer);
            }
        }
        if let Some(swarm) = &chain.swarm {
            self.add_swarm(swarm);
        }
    }

    fn add_peer(&self, label: &StageLabel, peer: &StagePeer) {
        add_seconds(&self.queue, label, peer.queue.unwrap_or_default().total_s);
        if let Some(seconds) = peer.round_trip_s {
            self.round_trip.get_or_create(label).set(seconds);
        }
        for (family, count) in [
            (&self.sent, peer.sent_bytes),
            (&self.returned, peer.returned_bytes),
            (&self.failures, peer.record.failures),
            (&self.peer_checks, peer.record.checks),
            (&self.peer_differences, peer.record.differences),
        ] {
            family.get_or_create(label).inc_by(count);
        }
    }

    fn add_swarm(&self, swarm: &SwarmSnapshot) {
        for (family, value) in [(&self.peers, swarm.peers as u64), (&self.sessions, swarm.sessions)] {
            family.get_or_create(&NoLabel {}).set(i64::try_from(value).unwrap_or(i64::MAX));
        }
        for (family, count) in [
            (&self.replaced, swarm.replaced),
            (&self.checks, swarm.checks),
            (&self.differences, swarm.differences),
            (&self.identical, swarm.identical),
        ] {
            family.get_or_create(&NoLabel {}).inc_by(count);
        }
        add_seconds(&self.replacing, &NoLabel {}, swarm.replacing.total_s);
    }

    fn clear(&self) {
        self.queue.clear();
        self.round_trip.clear();
        for family in [&self.sent, &self.returned, &self.failures, &self.peer_checks, &self.peer_differences] {
            family.clear();
        }
        for family in [&self.peers, &self.sessions] {
            family.clear();
        }
        for family in [&self.replaced, &self.checks, &self.differences, &self.identical] {
            family.clear();
        }
        self.replacing.clear();
    }
}
