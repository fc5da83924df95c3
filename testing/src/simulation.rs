//! A swarm in virtual time: peers with places, speeds and memories join, announce, move, leave and crash. The product's
//! functions decide; each peer sees the swarm as it was some time ago.

use std::collections::{HashMap, HashSet, VecDeque};

use directory::{
    BlockRecord, BlockUse, Coordinate, Coverage, Directory, LIFETIME_MS_MAX, ModelDigest, MoveDecision, Neighbour,
    PeerCapacity, PeerId, RECORDS_MAX, Reach, RouteRequest, ServedBlock, ServiceState, SignedRecord, Signer, Speed,
    UnixTime, Verifier, choose_block, consider_move,
};
use types::{DType, LayerRange};

pub const MODEL: ModelDigest = ModelDigest([7; 32]);
pub const LAYERS: usize = 48;
pub const MINUTE_MS: u64 = 60_000;

const TICK_MS: u64 = 10_000;
/// Peers announce and look for a better block this often.
const ANNOUNCE_MS: u64 = MINUTE_MS;
const LIFETIME_MS: u32 = 3 * MINUTE_MS as u32;
/// The age of what a peer knows of the others.
const VIEW_AGE_MS: (u64, u64) = (30_000, 120_000);
const LOAD_MS: (u64, u64) = (MINUTE_MS, 3 * MINUTE_MS);
const DRAIN_MS: u64 = MINUTE_MS;
/// A new peer measures the round trip to so many others before its first record.
const FIRST_ROUND_TRIPS: usize = 32;
const NEIGHBOURS: usize = 8;

/// Splitmix64.
pub struct Random(pub u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^ (bits >> 31)
    }

    /// In 0..1.
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn between(&mut self, range: (u64, u64)) -> u64 {
        range.0 + (self.uniform() * (range.1 - range.0) as f64) as u64
    }

    pub fn direction(&mut self) -> [f32; 3] {
        std::array::from_fn(|_| self.uniform() as f32 - 0.5)
    }
}

/// Stands for a key: a checksum instead of a signature. The tests of records have real ones.
pub struct Checksum(pub PeerId);

impl Signer for Checksum {
    fn peer(&self) -> PeerId {
        self.0
    }

    fn sign(&self, message: &[u8]) -> Vec<u8> {
        let fold = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3);
        message.iter().fold(0xCBF2_9CE4_8422_2325, fold).to_le_bytes().to_vec()
    }
}

impl Verifier for Checksum {
    fn verify(&self, _: &PeerId, message: &[u8], signature: &[u8]) -> bool {
        self.sign(message) == signature
    }
}

#[derive(Clone, Copy)]
enum Activity {
    Loading { until: UnixTime },
    Serving,
    Draining { until: UnixTime, next: Option<LayerRange> },
}

struct Peer {
    id: PeerId,
    site: Site,
    reach: Reach,
    capacity: PeerCapacity,
    layer_seconds: f32,
    coordinate: Coordinate,
    neighbours: VecDeque<Neighbour>,
    sequence: u64,
    block: Option<ServedBlock>,
    activity: Activity,
    next_turn: UnixTime,
    /// When its owner turns it off, and whether that drains it first.
    ends: UnixTime,
    is_polite: bool,
}

/// A chain for a session of up to 2,048 tokens.
pub fn request(excluded: &HashSet<PeerId>) -> RouteRequest<'_> {
    RouteRequest { model: MODEL, layers: LAYERS, dtype: None, kv_tokens: 2048, activation_bytes: 8192, excluded }
}

/// Where a peer really is: the round trip between two is the distance plus both access lines.
#[derive(Clone, Copy)]
pub struct Site {
    place: [f64; 2],
    access: f64,
}

impl Site {
    /// Around one of five cities, up to 200 ms apart.
    pub fn random(random: &mut Random) -> Self {
        const CITIES: [[f64; 2]; 5] = [[0.0, 0.0], [0.02, 0.01], [0.09, 0.0], [0.15, 0.05], [0.12, 0.14]];
        let city = CITIES[(random.bits() % 5) as usize];
        let place = city.map(|axis| axis + 0.01 * (random.uniform() - 0.5));
        Self { place, access: 0.001 + 0.015 * random.uniform().powi(2) }
    }

    pub fn round_trip(&self, other: &Self) -> f64 {
        let square = |axis: usize| (self.place[axis] - other.place[axis]).powi(2);
        (square(0) + square(1)).sqrt() + self.access + other.access
    }
}

pub struct Churn {
    /// The mean time that a peer stays; `None`: for ever.
    pub stay_ms: Option<u64>,
}

pub struct World {
    pub now: UnixTime,
    pub directory: Directory,
    /// Since the last [`World::reset_metrics`].
    pub moves: usize,
    /// Times at which a layer had no peer.
    pub gaps: usize,
    pub balances: Vec<f64>,
    random: Random,
    churn: Churn,
    peers: Vec<Peer>,
    views: VecDeque<(UnixTime, Coverage)>,
    ids: u64,
}

impl World {
    /// `count` peers that join within the first ten minutes.
    pub fn new(count: usize, churn: Churn, seed: u64) -> Self {
        let mut world = Self {
            now: UnixTime(1_000_000_000_000),
            directory: Directory::new(RECORDS_MAX),
            moves: 0,
            gaps: 0,
            balances: Vec::new(),
            random: Random(seed),
            churn,
            peers: Vec::new(),
            views: VecDeque::new(),
            ids: 0,
        };
        for _ in 0..count {
            let joins = world.now.plus(world.random.between((0, 10 * MINUTE_MS)));
            let peer = world.peer(joins);
            world.peers.push(peer);
        }
        world
    }

    pub fn reset_metrics(&mut self) {
        (self.moves, self.gaps) = (0, 0);
        self.balances.clear();
    }

    pub fn run(&mut self, milliseconds: u64) {
        let end = self.now.plus(milliseconds);
        while self.now < end {
            self.now = self.now.plus(TICK_MS);
            self.directory.expire(self.now);
            let coverage = self.directory.coverage(&MODEL, LAYERS, self.now);
            self.gaps += usize::from(coverage.first_gap().is_some());
            self.balances.push(coverage.balance());
            self.views.push_back((self.now, coverage));
            while self.views.front().is_some_and(|view| self.now.since(view.0) > VIEW_AGE_MS.1) {
                self.views.pop_front();
            }
            for index in 0..self.peers.len() {
                self.act(index);
            }
        }
    }

    pub fn mean_balance(&self) -> f64 {
        self.balances.iter().sum::<f64>() / self.balances.len() as f64
    }

    pub fn least_balance(&self) -> f64 {
        self.balances.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// What a client at this site measures: coordinates, and the round trips to some peers.
    pub fn client(&mut self, site: &Site) -> directory::ClientView {
        let (mut coordinate, mut round_trips) = (Coordinate::ORIGIN, HashMap::new());
        for _ in 0..FIRST_ROUND_TRIPS {
            let other = self.pick();
            let seconds = site.round_trip(&self.peers[other].site) as f32;
            coordinate = coordinate.adjusted(&self.peers[other].coordinate, seconds, self.random.direction());
            round_trips.insert(self.peers[other].id, seconds);
        }
        directory::ClientView { coordinate: Some(coordinate), round_trips, ..Default::default() }
    }

    /// The median relative error of round trips estimated from coordinates.
    pub fn coordinate_error(&mut self) -> f64 {
        let mut errors: Vec<f64> = (0..1000)
            .map(|_| {
                let (a, b) = (self.pick(), self.pick());
                let (a, b) = (&self.peers[a], &self.peers[b]);
                let real = a.site.round_trip(&b.site);
                (f64::from(a.coordinate.round_trip_seconds(&b.coordinate)) - real).abs() / real
            })
            .collect();
        errors.sort_by(f64::total_cmp);
        errors[errors.len() / 2]
    }

    fn pick(&mut self) -> usize {
        (self.random.bits() % self.peers.len() as u64) as usize
    }

    fn peer(&mut self, joins: UnixTime) -> Peer {
        let random = &mut self.random;
        self.ids += 1;
        // The same memory per machine, more or less, and speeds that differ by a factor of ten.
        let layer_seconds = 0.002 * 10f64.powf(random.uniform());
        let stay =
            self.churn.stay_ms.map_or(u64::MAX / 2, |mean| (-(1.0 - random.uniform()).ln() * mean as f64) as u64);
        Peer {
            id: PeerId::new(&[&self.ids.to_le_bytes()[..], &[5; 30]].concat()).expect("it is short"),
            site: Site::random(random),
            reach: if random.uniform() < 0.3 { Reach::Relayed } else { Reach::Direct },
            capacity: PeerCapacity {
                layers_max: 4 + (random.bits() % 13) as usize,
                layer_tokens_per_s: 8.0 / layer_seconds,
            },
            layer_seconds: layer_seconds as f32,
            coordinate: Coordinate::ORIGIN,
            neighbours: VecDeque::new(),
            sequence: 0,
            block: None,
            activity: Activity::Serving,
            next_turn: joins,
            ends: joins.plus(stay.max(5 * MINUTE_MS)),
            is_polite: random.uniform() < 0.5,
        }
    }

    fn act(&mut self, index: usize) {
        let now = self.now;
        let peer = &self.peers[index];
        if now >= peer.ends {
            return self.end(index);
        }
        match peer.activity {
            Activity::Loading { until } if now >= until => self.become_active(index, Activity::Serving),
            Activity::Draining { until, next } if now >= until => match next {
                Some(layers) => self.load(index, layers),
                None => self.replace(index),
            },
            _ if now >= peer.next_turn => self.turn(index),
            _ => {}
        }
    }

    /// Half of the peers say that they leave.
    fn end(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        peer.ends = UnixTime(u64::MAX);
        let serves = peer.block.is_some() && matches!(peer.activity, Activity::Serving);
        match peer.is_polite && serves {
            true => {
                let until = self.now.plus(DRAIN_MS);
                self.become_active(index, Activity::Draining { until, next: None });
            }
            false => self.replace(index),
        }
    }

    /// Another machine joins for each that left. The record of the old one stays until it expires.
    fn replace(&mut self, index: usize) {
        let joins = self.now.plus(self.random.between((0, 2 * MINUTE_MS)));
        self.peers[index] = self.peer(joins);
    }

    fn turn(&mut self, index: usize) {
        let view = self.view();
        self.measure(index);
        let (first, second) = (self.random.uniform(), self.random.uniform());
        let peer = &self.peers[index];
        let Some(block) = peer.block else {
            let layers = choose_block(&view, peer.capacity, first).expect("the model has layers");
            return self.load(index, layers);
        };
        let decision = match peer.activity {
            Activity::Serving => consider_move(&view, block, peer.capacity, self.now, [first, second]),
            _ => MoveDecision::Stay,
        };
        match decision {
            MoveDecision::Stay => self.announce(index),
            MoveDecision::Move(layers) => {
                self.moves += 1;
                let until = self.now.plus(DRAIN_MS);
                self.become_active(index, Activity::Draining { until, next: Some(layers) });
            }
        }
    }

    fn view(&mut self) -> Coverage {
        let age = self.random.between(VIEW_AGE_MS);
        let old = self.views.iter().rev().find(|(time, _)| self.now.since(*time) >= age);
        old.or(self.views.front()).expect("a tick has passed").1.clone()
    }

    fn load(&mut self, index: usize, layers: LayerRange) {
        let until = self.now.plus(self.random.between(LOAD_MS));
        self.peers[index].block = Some(ServedBlock { layers, since: self.now });
        self.become_active(index, Activity::Loading { until });
    }

    fn become_active(&mut self, index: usize, activity: Activity) {
        self.peers[index].activity = activity;
        self.announce(index);
    }

    /// Measures the round trip to some peers; to one for each record after the first.
    fn measure(&mut self, index: usize) {
        let count = if self.peers[index].sequence == 0 { FIRST_ROUND_TRIPS } else { 1 };
        for _ in 0..count {
            let (other, direction) = (self.pick(), self.random.direction());
            if other == index {
                continue;
            }
            let other = &self.peers[other];
            let (id, coordinate) = (other.id, other.coordinate);
            let seconds = self.peers[index].site.round_trip(&other.site) * (1.0 + 0.1 * self.random.uniform());
            let peer = &mut self.peers[index];
            peer.coordinate = peer.coordinate.adjusted(&coordinate, seconds as f32, direction);
            peer.neighbours.retain(|neighbour| neighbour.peer != id);
            peer.neighbours.push_back(Neighbour { peer: id, round_trip_seconds: seconds as f32 });
            if peer.neighbours.len() > NEIGHBOURS {
                peer.neighbours.pop_front();
            }
        }
    }

    fn announce(&mut self, index: usize) {
        let peer = &mut self.peers[index];
        peer.sequence += 1;
        peer.next_turn = self.now.plus(ANNOUNCE_MS - TICK_MS + self.random.between((0, 2 * TICK_MS)));
        let block = peer.block.expect("a peer announces a block");
        let record = BlockRecord {
            peer: peer.id,
            sequence: peer.sequence,
            issued: self.now,
            lifetime_ms: LIFETIME_MS.min(LIFETIME_MS_MAX),
            model: MODEL,
            layers: block.layers,
            block_use: BlockUse::AnyRange,
            dtype: DType::Q4_K,
            state: match peer.activity {
                Activity::Loading { .. } => ServiceState::Joining,
                Activity::Serving => ServiceState::Serving,
                Activity::Draining { next, .. } => ServiceState::Draining { next },
            },
            reach: peer.reach,
            speed: Speed {
                layer_seconds: peer.layer_seconds,
                layer_tokens_per_s: peer.capacity.layer_tokens_per_s as f32,
                queue_seconds: (0.02 * self.random.uniform()) as f32,
                bytes_per_s: 5e6,
            },
            kv_tokens_free: 1 << (10 + self.random.bits() % 6),
            coordinate: Some(peer.coordinate),
            neighbours: peer.neighbours.iter().copied().collect(),
        };
        let key = Checksum(peer.id);
        let bytes = SignedRecord::sign(record, &key).expect("the values are within limits").encode();
        let record = SignedRecord::decode(&bytes).and_then(|record| record.verify(&key, self.now));
        self.directory.insert(record.expect("it was signed"), self.now).expect("it is new, and there is room");
    }
}
