//! Hostile peers: a client replaces them, blames nobody else, and gets the tokens of one process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use blocks::block::{BlockHandle, BlockLimits};
use blocks::client::ClientOptions;
use blocks::wire::{FailureKind, Reply, Request, Returned, Run};
use engine::{Engine, inspect};
use types::TokenId;

use crate::attacker::guessed_key;
use crate::mangler::{Mangler, Piece, frame};
use crate::models::{Model, peer, qwen3_prompts, range};
use crate::network::Network;

const TOKENS: usize = 8;

/// Changes replies that bring rows, after some honest ones.
struct Replies<F> {
    change: F,
    seen: AtomicUsize,
}

const HONEST: usize = 3;

impl<F: Fn(u64, Returned) -> Vec<Piece> + Send + Sync> Mangler for Replies<F> {
    fn reply(&self, reply: Reply) -> Vec<Piece> {
        match reply {
            Reply::Ran { session, returned } if self.seen.fetch_add(1, Ordering::Relaxed) >= HONEST => {
                (self.change)(session, returned)
            }
            other => vec![Piece::of(&other)],
        }
    }
}

fn replies(change: impl Fn(u64, Returned) -> Vec<Piece> + Send + Sync + 'static) -> Arc<dyn Mangler> {
    Arc::new(Replies { change, seen: AtomicUsize::new(0) })
}

/// Changes rows that are passed on.
struct Pushes<F>(F);

impl<F: Fn(Request) -> Vec<Request> + Send + Sync> Mangler for Pushes<F> {
    fn push(&self, request: Request) -> Vec<Piece> {
        (self.0)(request).iter().map(Piece::of_request).collect()
    }
}

fn pushes(change: impl Fn(Request) -> Vec<Request> + Send + Sync + 'static) -> Arc<dyn Mangler> {
    Arc::new(Pushes(change))
}

/// Changes the answers to opens.
struct Opens(fn(u64) -> Vec<Reply>);

impl Mangler for Opens {
    fn reply(&self, reply: Reply) -> Vec<Piece> {
        match reply {
            Reply::Opened { session, .. } => (self.0)(session).iter().map(Piece::of).collect(),
            other => vec![Piece::of(&other)],
        }
    }
}

/// The fastest peers are hostile: 1 has the first layers, or 2 has the last ones. Others could do without them.
fn network(model: &Model) -> Arc<Network> {
    let network = Network::new(false);
    for (number, (start, end), seconds) in [
        (1, (0, 2), 1e-5),
        (2, (2, 4), 1e-5),
        (3, (0, 2), 1e-3),
        (4, (2, 4), 1e-3),
        (5, (0, 2), 1e-2),
        (6, (2, 4), 1e-2),
    ] {
        let layers = range(start, end);
        network.add(peer(number), model.digest, layers, model.block(layers, BlockLimits::default()), seconds);
    }
    network
}

struct Expected {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
}

fn expected(model: &Model) -> Expected {
    let prompt = qwen3_prompts().swap_remove(0);
    let tokens = inspect::greedy(&mut Engine::new(model.local(), 16), &prompt, TOKENS).unwrap();
    Expected { prompt, tokens }
}

/// Two clients after each other, on this network, get the right tokens. Returns how many spans were replaced.
fn check(name: &str, network: &Arc<Network>, model: &Model, expected: &Expected) -> u64 {
    let mut engine = Engine::new(model.client(network, ClientOptions::default()), 4);
    let counters = Arc::clone(engine.executor().client().counters());
    for _ in 0..2 {
        let found = inspect::greedy(&mut engine, &expected.prompt, TOKENS).unwrap();
        assert_eq!(found, expected.tokens, "{name}");
    }
    counters.replaced.load(Ordering::Relaxed)
}

/// Runs all attacks at once, since most of them wait for something. `blames` tells whether the peer is known as hostile then.
async fn attack(attacks: Vec<(&'static str, u8, Arc<dyn Mangler>)>, is_replaced: bool, is_blamed: bool) {
    let model = Arc::new(Model::qwen3());
    let expected = Arc::new(expected(&model));
    let mut running = Vec::new();
    for (name, number, mangler) in attacks {
        let (model, expected, runtime) = (Arc::clone(&model), Arc::clone(&expected), tokio::runtime::Handle::current());
        running.push(tokio::task::spawn_blocking(move || {
            let _runtime = runtime.enter();
            let network = network(&model);
            network.mangle(peer(number), mangler);
            let replaced = check(name, &network, &model, &expected);
            assert_eq!(replaced > 0, is_replaced, "{name}: {replaced} spans were replaced");
            assert_eq!(network.view().score(&peer(number)) > 0.0, is_blamed, "{name}");
            for other in (1..=6).filter(|other| *other != number) {
                assert_eq!(network.view().score(&peer(other)), 0.0, "{name}: {other} is blamed");
            }
        }));
    }
    for attack in running {
        attack.await.unwrap();
    }
}

fn ran(session: u64, returned: Returned) -> Piece {
    Piece::of(&Reply::Ran { session, returned })
}

fn with_values(session: u64, mut returned: Returned, change: impl Fn(&mut Vec<f32>)) -> Vec<Piece> {
    change(&mut returned.states.values);
    vec![ran(session, returned)]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_returns_nonsense_is_replaced_and_remembered() {
    let nan = |value: f32| {
        replies(move |session, returned| {
            with_values(session, returned, |values| values.iter_mut().take(1).for_each(|first| *first = value))
        })
    };
    let huge = |session, _| vec![Piece::Bytes(frame(u32::MAX, 66, &u64::to_le_bytes(session)))];
    let garbage = |_, _| vec![Piece::frame(66, &[7; 40])];
    let unknown = |_, _| vec![Piece::frame(9, &[])];
    let short = |session, returned: Returned| {
        let rows = returned.states.rows.max(2) - 1;
        with_values(session, returned, |values| values.truncate(values.len() / (rows + 1) * rows))
    };
    let fewer = |session, mut returned: Returned| {
        (returned.states.rows, returned.states.values) = (0, Vec::new());
        vec![ran(session, returned)]
    };
    let more = |session, mut returned: Returned| {
        returned.states.rows *= 2;
        with_values(session, returned, |values| values.extend(values.clone()))
    };
    let mut attacks = Vec::new();
    for number in [1, 2] {
        attacks.extend([
            ("not a number", number, nan(f32::NAN)),
            ("infinite", number, nan(f32::NEG_INFINITY)),
            ("an oversize frame", number, replies(huge)),
            ("garbage", number, replies(garbage)),
            ("an unknown kind", number, replies(unknown)),
            ("short rows", number, replies(short)),
            ("too few rows", number, replies(fewer)),
            ("too many rows", number, replies(more)),
        ]);
    }
    attack(attacks, true, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_answers_slowly_or_in_part_is_replaced() {
    let truncated = |_, _| vec![Piece::Bytes(frame(1000, 66, &[0; 10])), Piece::Silence];
    let dripped = |session, returned| {
        let Piece::Bytes(bytes) = ran(session, returned) else { return Vec::new() };
        let drip = |byte| [Piece::Bytes(vec![byte]), Piece::Wait(Duration::from_millis(300))];
        bytes.into_iter().flat_map(drip).collect()
    };
    let other_session =
        |session: u64, returned| vec![ran(session + 1, returned), ran(session + 1000, Returned { ..returned_none() })];
    let other_run = |session, returned: Returned| vec![ran(session, Returned { run: returned.run + 1000, ..returned })];
    let mut attacks = Vec::new();
    for number in [1, 2] {
        attacks.extend([
            ("a truncated frame", number, replies(truncated)),
            ("a frame byte by byte", number, replies(dripped)),
            ("replies of another session", number, replies(other_session)),
            ("replies of another run", number, replies(other_run)),
        ]);
    }
    attack(attacks, true, true).await;
}

fn returned_none() -> Returned {
    let states = blocks::wire::Activations::default();
    Returned { run: 1, passed_on: None, compute: Duration::ZERO, queued: Duration::ZERO, states }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_that_come_twice_or_unasked_are_left_out() {
    let twice = |session, returned: Returned| vec![ran(session, returned.clone()), ran(session, returned)];
    let unasked = |session, returned: Returned| {
        let invented = (0..500).map(|number| Returned { run: 1_000_000 + number, ..returned.clone() });
        let mut pieces: Vec<Piece> = invented.map(|invented| ran(session, invented)).collect();
        pieces.extend((0..100).map(|number| ran(session + 1 + number, returned.clone())));
        pieces.push(Piece::of(&Reply::Pong { number: 5 }));
        pieces.push(Piece::of(&Reply::Opened { session, rows_max: 1, is_linked: false }));
        pieces.push(Piece::of(&Reply::Failed { session: session + 7, kind: FailureKind::Ended, why: "no".to_owned() }));
        pieces.push(ran(session, returned));
        pieces
    };
    let mut attacks = Vec::new();
    for number in [1, 2] {
        attacks.extend([("twice", number, replies(twice)), ("unasked", number, replies(unasked))]);
    }
    attack(attacks, false, false).await;
}

/// What is passed on is not what the client gets a copy of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_a_peer_passes_on_wrongly_are_sent_by_the_client() {
    let with_run = |change: fn(&mut Run)| {
        pushes(move |request| match request {
            Request::Push { key, mut run } => {
                change(&mut run);
                vec![Request::Push { key, run }]
            }
            other => vec![other],
        })
    };
    let attacks = vec![
        ("passed on: not a number", 1, with_run(|run| run.activations.values[0] = f32::NAN)),
        ("passed on: infinite", 1, with_run(|run| run.activations.values[0] = f32::INFINITY)),
        ("passed on: a gap", 1, with_run(|run| run.position += 1)),
        ("passed on: short rows", 1, with_run(|run| drop(run.activations.values.split_off(1)))),
        ("passed on: nothing", 1, pushes(|_| Vec::new())),
        (
            "passed on: another key",
            1,
            pushes(|request| match request {
                Request::Push { run, .. } => vec![Request::Push { key: guessed_key(1), run }],
                other => vec![other],
            }),
        ),
        ("passed on: another message", 1, pushes(|_| vec![Request::Ping { number: 1 }])),
    ];
    attack(attacks, false, false).await;
}

/// A peer that is told off for what another one passed on to it would be avoided by everybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_no_layer_computes_with_do_not_stop_a_session() {
    let model = Model::qwen3();
    let expected = expected(&model);
    let network = network(&model);
    network.mangle(
        peer(1),
        pushes(|request| match request {
            Request::Push { key, mut run } => {
                run.activations.values.iter_mut().for_each(|value| *value = f32::MAX.copysign(*value));
                vec![Request::Push { key, run }]
            }
            other => vec![other],
        }),
    );
    // Wrong rows that are finite are found by spot checks only: the session goes on, whatever its tokens are.
    let mut engine = Engine::new(model.client(&network, ClientOptions::default()), 4);
    let found = tokio::task::block_in_place(|| inspect::greedy(&mut engine, &expected.prompt, TOKENS).unwrap());
    assert_eq!(found.len(), TOKENS);
    assert!(network.view().score(&peer(2)) < directory::EXCLUDED_AT, "the honest peer may be used again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_announce_what_they_do_not_do_are_left_out() {
    let model = Model::qwen3();
    let expected = expected(&model);
    for lie in 0..5 {
        let network = Network::new(false);
        let add = |number, (start, end), block: BlockHandle, seconds| {
            network.add(peer(number), model.digest, range(start, end), block, seconds);
        };
        let block = |start, end| model.block(range(start, end), BlockLimits::default());
        add(1, (0, 2), block(0, 2), 1e-3);
        add(2, (2, 4), block(2, 4), 1e-3);
        // Impossibly fast, and with all layers.
        match lie {
            0 => add(3, (0, 4), block(0, 2), 1e-6),
            1 => add(3, (0, 4), block(3, 4), 1e-6),
            2 => add(3, (0, 4), BlockHandle::warming_up(), 1e-6),
            _ => add(3, (0, 4), block(0, 4), 1e-6),
        }
        match lie {
            3 => network.mangle(peer(3), Arc::new(Opens(|_| Vec::new()))),
            4 => network.mangle(
                peer(3),
                Arc::new(Opens(|session| {
                    vec![Reply::Failed { session, kind: FailureKind::WarmingUp, why: "wait".to_owned() }]
                })),
            ),
            _ => {}
        }
        let mut engine = Engine::new(model.client(&network, ClientOptions::default()), 16);
        let client = engine.executor().client();
        let found = tokio::task::block_in_place(|| inspect::greedy(&mut engine, &expected.prompt, TOKENS).unwrap());
        assert_eq!(found, expected.tokens, "lie {lie}");
        let used: Vec<_> = client.last_chain().iter().map(|span| span.peer).collect();
        assert_eq!(used, [peer(1), peer(2)], "lie {lie}");
        assert!(network.view().score(&peer(3)) > 0.0, "lie {lie}");
    }
}

/// A peer that takes any number of rows at once, and says that it passes them on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_peer_promises_at_the_open_is_bounded() {
    let opened: fn(u64) -> Vec<Reply> =
        |session| vec![Reply::Opened { session, rows_max: u32::MAX as usize, is_linked: true }];
    attack(vec![("promises", 1, Arc::new(Opens(opened)) as _), ("promises", 2, Arc::new(Opens(opened)))], false, false)
        .await;
}
