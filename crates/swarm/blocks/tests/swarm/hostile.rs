//! Hostile clients: a server stays within its limits, and the sessions of others give the tokens of one process.

use std::sync::Arc;

use blocks::block::{BlockHandle, BlockLimits};
use blocks::client::ClientOptions;
use blocks::serve::BlockServer;
use blocks::wire::{Activations, Encoding, FailureKind, Open, Reply, Request, Run};
use engine::{Engine, inspect};
use types::TokenId;

use crate::attacker::{Attacker, guessed_key, open, rows};
use crate::mangler::frame;
use crate::models::{LIMITS, Model, peer, qwen3_prompts, range};
use crate::network::Network;
use crate::waiting::until;

const TOKENS: usize = 12;

/// A peer with the whole model, and what it is attacked with.
pub struct Target {
    pub model: Model,
    pub network: Arc<Network>,
    pub server: BlockServer,
    pub block: BlockHandle,
    pub tokens_free: usize,
    pub hidden: usize,
    pub prompt: Vec<TokenId>,
    pub expected: Vec<TokenId>,
}

impl Target {
    pub fn new(limits: BlockLimits) -> Self {
        let (model, network) = (Model::qwen3(), Network::new(false));
        let block = model.block(range(0, 4), limits);
        network.add(peer(1), model.digest, range(0, 4), block.clone(), 1e-4);
        let prompt = qwen3_prompts().swap_remove(0);
        let expected = inspect::greedy(&mut Engine::new(model.local(), 16), &prompt, TOKENS).unwrap();
        let (server, tokens_free) = (network.server(peer(1)), block.stats().tokens_free);
        let hidden = model.checkpoint.description().hidden;
        Self { model, network, server, block, tokens_free, hidden, prompt, expected }
    }

    pub async fn attacker(&self) -> Attacker {
        Attacker::client(&self.network, peer(9), peer(1)).await
    }

    pub fn open(&self, session: u64) -> Open {
        open(self.model.digest, session, range(0, 4), 64)
    }

    pub fn run(&self, session: u64, run: Run) -> Request {
        Request::Run { session, run }
    }

    /// Another client is served.
    pub fn check_honest_client(&self) {
        let client = self.model.client(&self.network, ClientOptions::default());
        let mut engine = Engine::new(client, 16);
        let found = tokio::task::block_in_place(|| inspect::greedy(&mut engine, &self.prompt, TOKENS).unwrap());
        assert_eq!(found, self.expected);
    }

    /// Everything is released soon after those who used it have left.
    pub fn check_nothing_is_left(&self) {
        let used = || {
            let (stats, server) = (self.block.stats(), &self.server);
            [
                stats.sessions,
                stats.clients,
                self.tokens_free - stats.tokens_free,
                server.streams(),
                server.push_keys(),
                server.waiting_kib(),
                server.links(),
            ]
        };
        let left = || format!("sessions, clients, tokens, streams, keys, KiB and links are left: {:?}", used());
        until(|| used() == [0; 7], left);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_no_message_cost_their_own_stream() {
    let target = Target::new(BlockLimits::default());
    let values = target.hidden * LIMITS.step.rows;
    let garbage = [
        frame(u32::MAX, 2, b"much too long"),
        // A little more than the longest message.
        frame((64 << 10) + 4 * values as u32, 2, &[]),
        frame(3, 77, b"abc"),
        frame(0, 1, b""),
        frame(9, 4, &[0; 9]),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ];
    for bytes in garbage {
        let mut attacker = target.attacker().await;
        assert!(attacker.open(target.open(1)).await);
        attacker.send_bytes(&bytes).await;
        assert!(attacker.is_ended().await, "{bytes:?}");
    }
    // A message that is not whole when the stream ends.
    let mut attacker = target.attacker().await;
    assert!(attacker.open(target.open(1)).await);
    attacker.send_bytes(&frame(1000, 2, &[0; 10])).await;
    attacker.finish().await;
    assert!(attacker.is_ended().await);
    target.check_honest_client();
    target.check_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_of_wrong_shapes_and_numbers_end_their_session() {
    let target = Target::new(BlockLimits::default());
    let hidden = target.hidden;
    let with = |values: Vec<f32>, rows: usize| {
        let activations = Activations { encoding: Encoding::F32, rows, values };
        Run { activations, state_rows: 1, ..self::rows(0, 1, 1) }
    };
    let one = |value: f32| with([&vec![0.5; hidden - 1][..], &[value]].concat(), 1);
    let mut attacker = target.attacker().await;
    let wrong = [
        one(f32::NAN),
        one(f32::INFINITY),
        one(f32::NEG_INFINITY),
        with(vec![0.5; hidden - 1], 1),
        with(vec![0.5; hidden + 1], 1),
        with(vec![0.5; 3], 3),
        with(Vec::new(), 0),
        rows(1, 1, hidden),
        rows((1 << 24) - 1, 1, hidden),
        rows(0, LIMITS.step.rows + 1, hidden),
    ];
    for (session, run) in (1..).zip(wrong) {
        let text = format!("{} rows of {} values", run.activations.rows, run.activations.values.len());
        assert!(attacker.open(target.open(session)).await);
        let run = Run { state_rows: run.state_rows.min(run.activations.rows), ..run };
        attacker.send(&target.run(session, run)).await;
        assert_eq!(attacker.failure().await, FailureKind::Misuse, "{text}");
    }
    // More tokens than were asked for.
    assert!(attacker.open(open(target.model.digest, 100, range(0, 4), 4)).await);
    attacker.send(&target.run(100, rows(0, 5, hidden))).await;
    assert_eq!(attacker.failure().await, FailureKind::Misuse);
    // Finite, but no layer computes with it: the peer does not return what its client would blame it for.
    assert!(attacker.open(target.open(101)).await);
    attacker.send(&target.run(101, one(f32::MAX))).await;
    attacker.send(&target.run(101, Run { position: 1, ..one(f32::MAX) })).await;
    loop {
        match attacker.reply().await {
            Some(Reply::Ran { returned, .. }) => {
                assert!(returned.states.values.iter().all(|value| value.is_finite()));
                if returned.run == 1 {
                    break;
                }
            }
            Some(Reply::Failed { kind, .. }) => {
                assert_eq!(kind, FailureKind::Ended);
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    // More states than rows are no message.
    attacker.send(&target.run(101, Run { state_rows: 9, ..rows(0, 1, hidden) })).await;
    while attacker.reply().await.is_some() {}
    target.check_honest_client();
    target.check_nothing_is_left();
}

/// What rows leave behind in the pages of the cache does not reach sessions that get these pages later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_values_of_one_session_do_not_reach_the_next() {
    let target = Target::new(BlockLimits::default());
    let mut attacker = target.attacker().await;
    // All pages of the block, one session after the other.
    let tokens = 400;
    for session in 0..2 {
        assert!(attacker.open(open(target.model.digest, session, range(0, 4), tokens)).await);
        for position in (0..tokens - 50).step_by(50) {
            let mut run = rows(position, 50, target.hidden);
            run.activations.values.iter_mut().for_each(|value| *value *= f32::MAX);
            attacker.send(&target.run(session, run)).await;
            if matches!(attacker.reply().await, Some(Reply::Failed { .. })) {
                break;
            }
        }
        attacker.send(&Request::Close { session }).await;
    }
    target.check_honest_client();
    drop(attacker);
    target.check_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_others_cannot_be_used_guessed_or_closed() {
    let target = Target::new(BlockLimits::default());
    let hidden = target.hidden;
    let mut victim = Attacker::client(&target.network, peer(5), peer(1)).await;
    let key = guessed_key(7);
    assert!(victim.open(Open { accepts: Some(key), ..target.open(3) }).await);
    // Another client, and another stream of the same one.
    for from in [peer(9), peer(5)] {
        let mut attacker = Attacker::client(&target.network, from, peer(1)).await;
        for session in 0..6 {
            attacker.send(&target.run(session, rows(0, 1, hidden))).await;
            assert_eq!(attacker.failure().await, FailureKind::Ended);
            attacker.send(&Request::Route { session, accepts: Some(key), next: None }).await;
            assert_eq!(attacker.failure().await, FailureKind::Ended);
            attacker.send(&Request::Close { session }).await;
        }
        // A number that is in use, and the key of another session.
        assert!(attacker.open(Open { accepts: Some(key), ..target.open(3) }).await);
        attacker.send(&Request::Open(target.open(3))).await;
        assert_eq!(attacker.failure().await, FailureKind::Misuse);
    }
    let mut pusher = Attacker::pusher(&target.network, peer(9), peer(1)).await;
    for guess in 0..7 {
        pusher.send(&Request::Push { key: guessed_key(guess), run: rows(0, 1, hidden) }).await;
    }
    // Whoever knows the key can still send nothing that does not fit.
    for run in [rows(1, 1, hidden), rows(0, 1, hidden + 1), rows(0, LIMITS.step.rows + 1, hidden)] {
        pusher.send(&Request::Push { key, run }).await;
    }
    pusher.send(&Request::Push { key, run: Run { run: 77, ..rows(0, 2, hidden) } }).await;
    let Some(Reply::Ran { session: 3, returned }) = victim.reply().await else { panic!("the rows did not arrive") };
    assert_eq!(returned.run, 77, "only what fits was run");
    // A key that is told again stays, another one replaces it.
    for (accepts, is_accepted) in [(Some(key), true), (Some(guessed_key(8)), false), (None, false)] {
        victim.send(&Request::Route { session: 3, accepts, next: None }).await;
        victim.send(&Request::Ping { number: 1 }).await;
        assert_eq!(victim.reply().await, Some(Reply::Pong { number: 1 }));
        assert_eq!(target.server.push_keys(), usize::from(accepts.is_some()));
        pusher.send(&Request::Push { key, run: Run { run: 78, ..rows(0, 1, hidden) } }).await;
        if is_accepted {
            assert!(matches!(victim.reply().await, Some(Reply::Ran { .. })));
        }
    }
    victim.send(&target.run(3, Run { run: 79, ..rows(0, 1, hidden) })).await;
    let Some(Reply::Ran { returned, .. }) = victim.reply().await else { panic!("the session goes on") };
    assert_eq!(returned.run, 79);
    // A pusher asks for nothing.
    pusher.send(&Request::Ping { number: 1 }).await;
    assert!(pusher.is_ended().await);
    target.check_honest_client();
    drop((victim, pusher));
    target.check_nothing_is_left();
}
