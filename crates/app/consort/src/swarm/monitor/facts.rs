//! `Facts`: what a client knows of its last chain and of the peers of the swarm, and how it is shown.

use blocks::client::{PeerTimes, SpanReport};
use blocks::view::KnownPeer;
use chains::MeanTime;
use directory::{ChainSpan, PeerId, ServiceState};
use libp2p_node::ConnectedPeer;
use server::{HopSnapshot, HopWay, NodeUse, PeerReach, PeerRecord, StagePeer, StageSnapshot, StageTime};

use crate::executors::cluster::chain_monitor::stage_time;

/// A lower score is not worth a word.
const SCORE_MIN: f64 = 0.05;

/// What is known at one moment.
pub(super) struct Facts {
    /// The chain that was formed last.
    pub spans: Vec<Span>,
    /// The peers that are shown.
    pub peers: Vec<KnownPeer>,
    pub peers_total: usize,
    pub connected: Vec<ConnectedPeer>,
    pub tokens_min: usize,
}

pub(super) struct Span {
    pub report: SpanReport,
    pub name: String,
    pub times: PeerTimes,
    /// Between this process and the peer.
    pub round_trip_s: Option<f64>,
}

impl Facts {
    pub fn connection(&self, peer: &PeerId) -> Option<&ConnectedPeer> {
        self.connected.iter().find(|connected| connected.peer == *peer)
    }

    pub fn chain(&self) -> Vec<ChainSpan> {
        let span = |span: &Span| ChainSpan { peer: span.report.peer, layers: span.report.layers };
        self.spans.iter().map(span).collect()
    }

    /// Whether the peer of a span passes rows on to the next one.
    fn passes_on(&self, index: usize) -> bool {
        self.spans.get(index + 1).is_some_and(|next| next.report.is_fed)
    }

    /// The part of a peer's time on the way that belongs to the hop to it, and to the one from it. What a peer passes on does not
    /// come back first. Else half of the time is for the way back.
    fn ways(&self, index: usize) -> [Option<StageTime>; 2] {
        let way = self.spans[index].times.way;
        if way.count == 0 {
            return [None, None];
        }
        let part = |part: f64| Some(StageTime { mean_s: way.mean_s * part, total_s: way.total_s * part });
        if self.passes_on(index) { [part(1.0), part(0.0)] } else { [part(0.5), part(0.5)] }
    }

    /// From this process to the first peer.
    pub fn own_hop(&self) -> Option<HopSnapshot> {
        let first = self.spans.first()?;
        Some(HopSnapshot {
            time: self.ways(0)[0],
            round_trip_s: first.round_trip_s,
            bytes: first.times.sent_bytes,
            way: HopWay::Direct,
        })
    }

    /// From a peer to the next one, or back to this process.
    fn hop(&self, index: usize) -> HopSnapshot {
        let (span, next) = (&self.spans[index], self.spans.get(index + 1));
        let [_, from] = self.ways(index);
        let Some(next) = next else {
            let (round_trip_s, bytes) = (span.round_trip_s, span.times.returned_bytes);
            return HopSnapshot { time: from, round_trip_s, bytes, way: HopWay::Direct };
        };
        let [to, _] = self.ways(index + 1);
        let time = from
            .zip(to)
            .map(|(from, to)| StageTime { mean_s: from.mean_s + to.mean_s, total_s: from.total_s + to.total_s });
        let (round_trip_s, bytes, way) = match next.report.is_fed {
            true => (self.measured_between(span, next), span.times.passed_on_bytes, HopWay::Direct),
            false => (None, next.times.sent_bytes, HopWay::Coordinator),
        };
        HopSnapshot { time, round_trip_s, bytes, way }
    }

    /// The round trip that one of two peers announces.
    fn measured_between(&self, a: &Span, b: &Span) -> Option<f64> {
        let announced = |by: &Span, of: &Span| {
            let known = self.peers.iter().find(|known| known.record.peer == by.report.peer)?;
            let neighbour = known.record.neighbours.iter().find(|neighbour| neighbour.peer == of.report.peer)?;
            Some(f64::from(neighbour.round_trip_seconds))
        };
        announced(a, b).or_else(|| announced(b, a))
    }

    pub fn stages(&self) -> impl Iterator<Item = StageSnapshot> {
        self.spans.iter().enumerate().map(|(index, span)| {
            let (times, connected) = (&span.times, self.connection(&span.report.peer));
            StageSnapshot {
                name: span.name.clone(),
                address: connected.map(|connected| connected.address.to_string()),
                layers: Some(span.report.layers),
                compute: measured(times.compute),
                hop: Some(self.hop(index)),
                peer: Some(StagePeer {
                    id: libp2p_node::peer_text(&span.report.peer),
                    reach: connected.map(reach).unwrap_or_default(),
                    round_trip_s: span.round_trip_s,
                    queue: measured(times.queue),
                    runs: times.compute.count,
                    sent_bytes: times.sent_bytes,
                    returned_bytes: times.returned_bytes,
                    record: record(times),
                }),
                ..StageSnapshot::default()
            }
        })
    }

    pub fn usage(&self, peer: &PeerId, known: Option<&KnownPeer>) -> NodeUse {
        let Some(KnownPeer { record, score, is_excluded }) = known else {
            return NodeUse::Spare { why: "it serves no layers of this model".to_owned() };
        };
        if *is_excluded {
            let why = format!("it returned malformed messages or wrong results; it is avoided (score {score:.1})");
            return NodeUse::Failed { why };
        }
        if self.spans.iter().any(|span| span.report.peer == *peer) {
            return NodeUse::Used;
        }
        let why = match record.state {
            ServiceState::Joining => "its layers are loading".to_owned(),
            ServiceState::Draining { next: Some(next) } => format!("it leaves for layers {next}"),
            ServiceState::Draining { next: None } => "it leaves".to_owned(),
            ServiceState::Serving if (record.kv_tokens_free as usize) < self.tokens_min => {
                format!("it has room for {} tokens", record.kv_tokens_free)
            }
            ServiceState::Serving if *score >= SCORE_MIN => {
                format!("it failed lately, so a chain with it counts as slower (score {score:.1})")
            }
            ServiceState::Serving if self.spans.is_empty() => "no chain is formed yet".to_owned(),
            ServiceState::Serving => "a chain with it is not faster".to_owned(),
        };
        NodeUse::Spare { why }
    }
}

pub(super) fn reach(connected: &ConnectedPeer) -> PeerReach {
    if connected.is_relayed { PeerReach::Relayed } else { PeerReach::Direct }
}

pub(super) fn record(times: &PeerTimes) -> PeerRecord {
    PeerRecord { failures: times.failures, checks: times.checks, differences: times.differences }
}

/// `None` before the first measurement.
fn measured(mean: MeanTime) -> Option<StageTime> {
    (mean.count > 0).then(|| stage_time(mean))
}

#[cfg(test)]
mod tests {
    use directory::{BlockRecord, BlockUse, ModelDigest, Neighbour, Reach, Speed, UnixTime};
    use types::{DType, LayerRange};

    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId::new(&[number]).unwrap()
    }

    fn layers(start: u32, end: u32) -> LayerRange {
        LayerRange::new(start, end).unwrap()
    }

    fn known(number: u8, state: ServiceState) -> KnownPeer {
        let speed = Speed { layer_seconds: 0.01, layer_tokens_per_s: 100.0, queue_seconds: 0.0, bytes_per_s: 1e8 };
        let record = BlockRecord {
            peer: peer(number),
            sequence: 1,
            issued: UnixTime(1),
            lifetime_ms: 1000,
            model: ModelDigest([0; 32]),
            layers: layers(0, 4),
            block_use: BlockUse::AnyRange,
            dtype: DType::F32,
            state,
            reach: Reach::Direct,
            speed,
            kv_tokens_free: 1000,
            coordinate: None,
            neighbours: Vec::new(),
        };
        KnownPeer { record, score: 0.0, is_excluded: false }
    }

    fn mean(mean_s: f64) -> MeanTime {
        MeanTime { mean_s, total_s: 10.0 * mean_s, count: 10 }
    }

    fn span(number: u8, range: LayerRange, is_fed: bool, way_s: f64) -> Span {
        let bytes = u64::from(number);
        let times = PeerTimes {
            way: mean(way_s),
            sent_bytes: 100 * bytes,
            returned_bytes: 10 * bytes,
            passed_on_bytes: bytes,
            ..PeerTimes::default()
        };
        let report = SpanReport { peer: peer(number), layers: range, is_fed, round_trip: None };
        Span { report, name: number.to_string(), times, round_trip_s: Some(0.02) }
    }

    fn facts(spans: Vec<Span>, peers: Vec<KnownPeer>) -> Facts {
        Facts { spans, peers_total: peers.len(), peers, connected: Vec::new(), tokens_min: 32 }
    }

    #[test]
    fn the_time_on_the_way_goes_to_the_hops_that_it_is_of() {
        let spans = vec![
            span(1, layers(0, 2), false, 0.004),
            span(2, layers(2, 3), true, 0.006),
            span(3, layers(3, 4), false, 0.008),
        ];
        let mut second = known(2, ServiceState::Serving);
        second.record.neighbours = vec![Neighbour { peer: peer(1), round_trip_seconds: 0.5 }];
        let facts = facts(spans, vec![second]);
        let hops: Vec<_> = [facts.own_hop().unwrap()].into_iter().chain((0..3).map(|index| facts.hop(index))).collect();
        // The first passes on. The second and the third return to the client, so half of their time is for the way back.
        let seconds: Vec<_> = hops.iter().map(|hop| (hop.time.unwrap().mean_s * 1e6).round()).collect();
        assert_eq!(seconds, [4000.0, 3000.0, 7000.0, 4000.0]);
        let total: f64 = hops.iter().map(|hop| hop.time.unwrap().total_s).sum();
        assert!((total - 0.18).abs() < 1e-9, "nothing is lost: {total}");
        let ways: Vec<_> = hops.iter().map(|hop| hop.way).collect();
        assert_eq!(ways, [HopWay::Direct, HopWay::Direct, HopWay::Coordinator, HopWay::Direct]);
        assert_eq!(hops.iter().map(|hop| hop.bytes).collect::<Vec<_>>(), [100, 1, 300, 30]);
        let round_trips: Vec<_> = hops.iter().map(|hop| hop.round_trip_s).collect();
        assert_eq!(round_trips, [Some(0.02), Some(0.5), None, Some(0.02)]);
    }

    #[test]
    fn every_peer_that_is_not_used_has_a_reason() {
        let serving = known(9, ServiceState::Serving);
        let next = Some(layers(4, 8));
        let facts = facts(vec![span(1, layers(0, 4), false, 0.0)], Vec::new());
        assert_eq!(facts.usage(&peer(1), Some(&known(1, ServiceState::Serving))), NodeUse::Used);
        let check = |known: Option<KnownPeer>, words: &str| match facts.usage(&peer(9), known.as_ref()) {
            NodeUse::Spare { why } | NodeUse::Failed { why } => assert!(why.contains(words), "{why}"),
            other => panic!("{other:?}"),
        };
        check(None, "serves no layers");
        check(Some(known(9, ServiceState::Joining)), "loading");
        check(Some(known(9, ServiceState::Draining { next })), "leaves for layers");
        check(Some(serving.clone()), "not faster");
        check(Some(KnownPeer { score: 1.0, ..serving.clone() }), "failed lately");
        let mut full = serving.clone();
        full.record.kv_tokens_free = 31;
        check(Some(full), "room for 31 tokens");
        let avoided = KnownPeer { score: 5.0, is_excluded: true, ..serving };
        assert!(
            matches!(facts.usage(&peer(1), Some(&avoided)), NodeUse::Failed { .. }),
            "even if the last chain had it"
        );
    }
}
