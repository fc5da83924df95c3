//! An attacker with ten thousand identities among the neighbours of everybody, client included: peers that do not exist, fresh,
//! issued as late as a record may be, and faster than all others. Sixty honest peers tell each other and the client what they
//! know, as their directories have it told.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use directory::{
    AddressBlock, BlockRecord, BlockUse, CLOCK_SKEW_MS, ClientView, Directory, Offence, PeerId, RECORDS_MAX, Reach,
    Reputation, RouteLimits, RoutePlanner, ServiceState, SignedRecord, Speed, UnixTime, VerifiedRecord,
};
use testing::simulation::{Checksum, LAYERS, MODEL, Random, request};
use types::{DType, LayerRange};

const HONEST: u32 = 60;
const FAKES: u32 = 10_000;
const BLOCK_LAYERS: u32 = 12;
/// Records of one direction of an exchange, as the network has it.
const TOLD_MAX: usize = 4096;
const ROUND_MS: u64 = 5_000;
const ROUNDS: u64 = 6;
const PEERS_PER_ROUND: usize = 3;
/// A small directory suffices for sixty peers, and the attack is harder.
const SMALL: usize = 4096;

fn peer(number: u32) -> PeerId {
    PeerId::new(&[&number.to_le_bytes()[..], &[7; 30]].concat()).expect("it is short")
}

fn is_fake(peer: &PeerId) -> bool {
    u32::from_le_bytes(peer.as_bytes()[..4].try_into().expect("four bytes")) >= HONEST
}

fn record(number: u32, issued: UnixTime, layer_seconds: f32) -> VerifiedRecord {
    let start = number % (LAYERS as u32 / BLOCK_LAYERS) * BLOCK_LAYERS;
    let record = BlockRecord {
        peer: peer(number),
        sequence: issued.0,
        issued,
        lifetime_ms: 45_000,
        model: MODEL,
        layers: LayerRange::new(start, start + BLOCK_LAYERS).expect("it is not empty"),
        block_use: BlockUse::AnyRange,
        dtype: DType::Q4_K,
        state: ServiceState::Serving,
        reach: Reach::Direct,
        speed: Speed { layer_seconds, layer_tokens_per_s: 1e4, queue_seconds: 0.0, bytes_per_s: 1e9 },
        kv_tokens_free: 1 << 20,
        coordinate: None,
        neighbours: Vec::new(),
    };
    let key = Checksum(record.peer);
    let signed = SignedRecord::sign(record, &key).expect("the values are within limits");
    signed.verify(&key, issued).expect("it was signed")
}

/// The address block of an honest peer, or of one of the attacker's machines.
fn block(number: u32) -> AddressBlock {
    AddressBlock::of(IpAddr::from([203, (number >> 8) as u8, number as u8, 1]))
}

struct Node {
    directory: Directory,
    reached: HashSet<PeerId>,
}

impl Node {
    fn new(records_max: usize) -> Self {
        Self { directory: Directory::new(records_max), reached: HashSet::new() }
    }

    fn hear(&mut self, told: &[VerifiedRecord], teller: AddressBlock, now: UnixTime) {
        for record in told.iter().take(TOLD_MAX) {
            if !self.directory.tell_again(record.signed(), teller) {
                // There may be no room for it.
                let _ = self.directory.insert_told(record.clone(), teller, now);
            }
        }
    }

    fn reach(&mut self, peer: PeerId) {
        self.reached.insert(peer);
        self.directory.set_reached(&peer);
    }
}

/// Which identities the attacker's machines tell one peer about.
type Told = fn(honest: u32) -> Box<dyn Iterator<Item = u32>>;

/// The client's directory after some rounds among honest peers and `machines` of the attacker.
fn client(machines: u32, told: Told) -> (Node, UnixTime) {
    let mut random = Random(5);
    let mut pick = move |count: u32| (random.uniform() * f64::from(count)) as u32;
    let mut nodes: Vec<Node> = (0..HONEST).map(|_| Node::new(SMALL)).collect();
    let mut client = Node::new(RECORDS_MAX);
    let mut now = UnixTime(1_000_000_000_000);
    for round in 0..ROUNDS {
        now = now.plus(ROUND_MS);
        let fakes: HashMap<u32, VerifiedRecord> =
            (HONEST..HONEST + FAKES).map(|number| (number, record(number, now.plus(CLOCK_SKEW_MS), 1e-6))).collect();
        let attack = |node: &mut Node, number: u32| {
            let told: Vec<_> = told(number).filter_map(|fake| fakes.get(&fake).cloned()).collect();
            for machine in 0..machines {
                node.hear(&told[..told.len().min(TOLD_MAX)], block(50_000 + machine), now);
            }
        };
        for number in 0..HONEST {
            let node = &mut nodes[number as usize];
            node.directory.expire(now);
            // The attacker is always the first.
            attack(node, number);
            let own = record(number, now, 0.01);
            node.directory.insert(own, now).expect("it is newer");
        }
        for number in 0..HONEST as usize {
            for _ in 0..PEERS_PER_ROUND {
                let other = pick(HONEST) as usize;
                if other == number {
                    continue;
                }
                let [ours, theirs] =
                    [number, other].map(|node| nodes[node].directory.to_tell(Some(&MODEL), UnixTime(0)));
                nodes[number].hear(&theirs, block(other as u32), now);
                nodes[number].reach(peer(other as u32));
                nodes[other].hear(&ours, block(number as u32), now);
            }
        }
        attack(&mut client, round as u32);
        for _ in 0..PEERS_PER_ROUND {
            let other = pick(HONEST);
            let told = nodes[other as usize].directory.to_tell(Some(&MODEL), UnixTime(0));
            client.hear(&told, block(other), now);
            client.reach(peer(other));
        }
    }
    (client, now)
}

/// Plans until a chain has peers that exist. Returns how many attempts were in vain.
fn attempts(client: &Node, now: UnixTime) -> usize {
    let (mut reputation, mut excluded) = (Reputation::new(), HashSet::new());
    let view = ClientView::default();
    for failed in 0.. {
        let limits = RouteLimits::default();
        let planner =
            RoutePlanner { directory: &client.directory, reputation: &reputation, client: &view, now, limits };
        let chain = planner.plan(&request(&excluded)).expect("honest peers serve all layers");
        let fakes: Vec<PeerId> = chain.spans.iter().map(|span| span.peer).filter(is_fake).collect();
        if fakes.is_empty() {
            return failed;
        }
        for fake in fakes {
            assert!(!client.reached.contains(&fake));
            reputation.report(fake, Offence::Lost, now);
            reputation.report_claim(now);
            excluded.insert(fake);
        }
    }
    unreachable!("it returns")
}

fn honest(client: &Node) -> usize {
    client.directory.records(&MODEL).filter(|record| !is_fake(&record.peer)).count()
}

#[test]
fn ten_thousand_identities_displace_nobody_and_no_chain_has_one() {
    // All of them to everybody.
    let (client, now) = client(1, |_| Box::new(HONEST..HONEST + FAKES));
    assert_eq!(honest(&client), HONEST as usize);
    assert!(client.directory.len() > 3 * HONEST as usize, "the attack has come through: {}", client.directory.len());
    assert_eq!(attempts(&client, now), 0);
}

#[test]
fn ten_thousand_identities_that_machines_in_three_networks_tell_of_cost_a_client_a_few_attempts() {
    let (client, now) = client(3, |_| Box::new(HONEST..HONEST + FAKES));
    assert_eq!(honest(&client), HONEST as usize);
    let failed = attempts(&client, now);
    assert!((1..=3).contains(&failed), "{failed} attempts in vain");
}

#[test]
fn a_few_identities_for_each_peer_cost_a_client_a_few_attempts() {
    // So few that nobody doubts them, and other ones to everybody.
    let share = FAKES / HONEST / 2;
    let (client, now) = client(1, |honest| {
        let share = FAKES / HONEST / 2;
        Box::new((HONEST + honest * share..).take(share as usize))
    });
    assert_eq!(honest(&client), HONEST as usize);
    assert!(client.directory.len() > 10 * share as usize, "the attack has come through: {}", client.directory.len());
    let failed = attempts(&client, now);
    assert!(failed <= 3, "{failed} attempts in vain");
}
