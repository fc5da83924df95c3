//! `SwarmMonitor`: the chains of peers that run a model, and the peers of the swarm, as the server shows them.
//!
//! Every session has a chain of its own. Shown is the one that was formed last, with what its peers did for all sessions.

mod facts;

use std::sync::atomic::{AtomicU64, Ordering};

use blocks::client::SwarmClient;
use blocks::node::SwarmNode;
use blocks::view::KnownPeer;
use directory::{BlockRecord, PeerId, Reach, ServiceState};
use facts::{Facts, Span, reach, record};
use kernels::cpu::CpuOptions;
use libp2p_node::{ConnectedPeer, Reachability};
use server::{
    ChainPrediction, ChainSnapshot, ClusterMonitor, NodePeer, NodeSnapshot, PeerBlock, PeerReach, PeerService,
    StageSnapshot, SwarmSnapshot,
};

use crate::executors::cluster::chain_monitor::stage_time;

/// Peers that are shown. A swarm may have thousands.
const PEERS_SHOWN_MAX: usize = 256;
/// Characters of an id that are a peer's name. All ids begin alike.
const NAME_CHARS: usize = 8;

#[derive(Clone)]
pub struct SwarmMonitor {
    client: SwarmClient,
    node: SwarmNode,
    cpu: CpuOptions,
    /// Tokens for which a chain has to have room.
    tokens_min: usize,
}

impl SwarmMonitor {
    pub fn new(client: SwarmClient, node: SwarmNode, cpu: CpuOptions, tokens_min: usize) -> Self {
        Self { client, node, cpu, tokens_min }
    }

    /// What stages and nodes are made of, at one moment.
    fn facts(&self) -> Facts {
        let spans = self.client.last_chain();
        let used: Vec<PeerId> = spans.iter().map(|span| span.peer).collect();
        let (peers, peers_total) = self.node.view().peers(&self.client.model(), &used, PEERS_SHOWN_MAX);
        let connected = self.node.handle().peers();
        let spans = spans.into_iter().map(|span| Span {
            times: self.client.times().peer(&span.peer),
            round_trip_s: self.round_trip_s(&span.peer, &connected),
            name: self.name(&span.peer),
            report: span,
        });
        Facts { spans: spans.collect(), peers, peers_total, connected, tokens_min: self.tokens_min }
    }

    /// To a peer, as sessions or else the network measured it.
    fn round_trip_s(&self, peer: &PeerId, connected: &[ConnectedPeer]) -> Option<f64> {
        let of_network = || connected.iter().find(|connected| connected.peer == *peer)?.round_trip;
        self.client.round_trip(peer).or_else(of_network).map(|time| time.as_secs_f64())
    }

    fn name(&self, peer: &PeerId) -> String {
        // A server that the user named is where the user said that it is.
        match (self.client.is_foreign(peer), self.client.peer_name(peer), libp2p_node::peer_text(peer)) {
            (true, name, id) if name == id => format!("KwaaiNet {}", short_name(&id)),
            (true, name, _) => format!("KwaaiNet {name}"),
            (false, _, id) => short_name(&id),
        }
    }

    fn node_snapshot(&self, facts: &Facts, peer: &PeerId, known: Option<&KnownPeer>) -> NodeSnapshot {
        let connected = facts.connection(peer);
        let announced = known.map(|known| match known.record.reach {
            Reach::Direct => PeerReach::Direct,
            Reach::Relayed => PeerReach::Relayed,
        });
        NodeSnapshot {
            name: Some(self.name(peer)),
            address: connected.map(|connected| connected.address.to_string()),
            usage: facts.usage(peer, known),
            level: None,
            threads: None,
            memory_bytes: None,
            round_trip_s: self.round_trip_s(peer, &facts.connected),
            peer: Some(NodePeer {
                id: libp2p_node::peer_text(peer),
                block: known.map(|known| peer_block(&known.record)),
                reach: connected.map(reach).or(announced).unwrap_or_default(),
                score: known.map_or(0.0, |known| known.score),
                is_avoided: known.is_some_and(|known| known.is_excluded),
                record: record(&self.client.times().peer(peer)),
            }),
        }
    }

    fn nodes(&self, facts: &Facts) -> Vec<NodeSnapshot> {
        let serving = facts.peers.iter().map(|known| self.node_snapshot(facts, &known.record.peer, Some(known)));
        let is_known = |peer: &PeerId| facts.peers.iter().any(|known| known.record.peer == *peer);
        let others = facts.connected.iter().map(|connected| connected.peer).filter(|peer| !is_known(peer));
        // Beyond the limit a connected peer may have a block that is not among those that were asked for.
        let others = others.filter(|_| facts.peers.len() == facts.peers_total);
        let others = others.map(|peer| self.node_snapshot(facts, &peer, None));
        serving.chain(others).take(PEERS_SHOWN_MAX).collect()
    }

    fn own_stage(&self, facts: &Facts) -> StageSnapshot {
        StageSnapshot {
            name: "this machine".to_owned(),
            is_coordinator: true,
            level: Some(self.cpu.level.name().to_owned()),
            threads: Some(self.cpu.threads),
            ranks: Some(1),
            hop: facts.own_hop(),
            ..StageSnapshot::default()
        }
    }
}

impl ClusterMonitor for SwarmMonitor {
    fn snapshot(&self) -> ChainSnapshot {
        let (facts, steps) = (self.facts(), self.client.times().steps());
        let planned = self.client.plan(self.tokens_min);
        let stages = match facts.spans.is_empty() {
            true => Vec::new(),
            false => [self.own_stage(&facts)].into_iter().chain(facts.stages()).collect(),
        };
        let token_s = match facts.spans.is_empty() {
            true => planned.as_ref().ok().map(|chain| chain.token_seconds),
            false => Some(self.client.predict(&facts.chain())),
        };
        let counters = self.client.counters();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ChainSnapshot {
            stages,
            nodes: self.nodes(&facts),
            chains: count(&counters.chains),
            waiting: planned.err().map(|error| error.to_string()),
            rebuilding: None,
            prediction: token_s
                .filter(|seconds| *seconds > 0.0)
                .map(|seconds| ChainPrediction { tokens_per_s: 1.0 / seconds, batch: None }),
            bits: None,
            steps: steps.step.count,
            step: stage_time(steps.step),
            between: stage_time(steps.between),
            swarm: Some(SwarmSnapshot {
                layers: self.client.layers(),
                peers: facts.peers_total,
                sessions: count(&counters.sessions),
                replaced: count(&counters.replaced),
                replacing: stage_time(steps.replacing),
                checks: count(&counters.checks),
                differences: count(&counters.differences),
                identical: count(&counters.identical),
                reach: match self.node.handle().reachability() {
                    Reachability::Unknown => PeerReach::Unknown,
                    Reachability::Direct => PeerReach::Direct,
                    Reachability::Relayed => PeerReach::Relayed,
                },
            }),
        }
    }
}

fn peer_block(record: &BlockRecord) -> PeerBlock {
    PeerBlock {
        layers: record.layers,
        service: match record.state {
            ServiceState::Joining => PeerService::Loading,
            ServiceState::Serving => PeerService::Serving,
            ServiceState::Draining { .. } => PeerService::Leaving,
        },
        tokens_free: record.kv_tokens_free.into(),
        layer_s: record.speed.layer_seconds.into(),
        layer_tokens_per_s: record.speed.layer_tokens_per_s.into(),
        queue_s: record.speed.queue_seconds.into(),
    }
}

/// The end of an id.
fn short_name(id: &str) -> String {
    let skipped = id.chars().count().saturating_sub(NAME_CHARS);
    id.chars().skip(skipped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_end_of_an_id() {
        assert_eq!(short_name("12D3KooWabcdefgh"), "abcdefgh");
        assert_eq!(short_name("ab"), "ab");
    }
}
