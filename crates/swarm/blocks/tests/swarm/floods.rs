//! Hostile clients that take as much as they can, or as long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blocks::block::BlockLimits;
use blocks::dial::{BoxedStream, Dial, DialError, Dialled};
use blocks::serve::{BlockServer, LINKS_PER_CLIENT_MAX, SESSIONS_PER_STREAM_MAX, STREAMS_PER_PEER_MAX};
use blocks::wire::{FailureKind, Next, Open, Reply, Request};
use directory::PeerId;
use tokio::io::duplex;

use crate::attacker::{Attacker, guessed_key, open, rows};
use crate::hostile::Target;
use crate::mangler::frame;
use crate::models::{Model, peer, range};
use crate::waiting::until;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_opens_meets_every_limit_and_is_released() {
    let limits = BlockLimits { sessions_max: 12, sessions_per_client_max: 4, ..BlockLimits::default() };
    let target = Target::new(limits);
    let mut streams = Vec::new();
    for number in 0..STREAMS_PER_PEER_MAX {
        let mut attacker = target.attacker().await;
        let mut opened = 0;
        for session in 0..SESSIONS_PER_STREAM_MAX as u64 + 40 {
            attacker
                .send(&Request::Open(Open { accepts: Some(guessed_key(session as u8)), ..target.open(session) }))
                .await;
            opened += usize::from(matches!(attacker.reply().await, Some(Reply::Opened { .. })));
        }
        assert_eq!(opened, if number == 0 { 4 } else { 0 });
        streams.push(attacker);
    }
    assert!(target.attacker().await.is_ended().await, "a peer has a limited number of streams");
    assert_eq!((target.block.stats().sessions, target.server.push_keys()), (4, 4));
    target.check_honest_client();
    // Others with other identities take what is left, until there is nothing.
    let mut others = Vec::new();
    for number in 20..22 {
        let mut other = Attacker::client(&target.network, peer(number), peer(1)).await;
        for session in 0..4 {
            assert!(other.open(target.open(session)).await);
        }
        others.push(other);
    }
    let mut last = Attacker::client(&target.network, peer(30), peer(1)).await;
    last.send(&Request::Open(target.open(1))).await;
    assert_eq!(last.failure().await, FailureKind::Refused);
    drop((streams, others));
    until(|| target.block.stats().sessions == 0, || format!("{:?}", target.block.stats()));
    assert!(last.open(target.open(1)).await, "what was taken is there again");
    drop(last);
    target.check_honest_client();
    target.check_nothing_is_left();
}

/// A client that opens and closes sessions, and reads no reply, makes no tasks pile up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_were_closed_leave_no_tasks_behind() {
    let target = Target::new(BlockLimits { sessions_per_client_max: 1, ..BlockLimits::default() });
    let mut attacker = target.attacker().await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let (most, sent) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let flood = async {
        for session in 0..4000 {
            attacker.send(&Request::Open(target.open(session))).await;
            attacker.send(&Request::Close { session }).await;
            most.fetch_max(tasks(), Ordering::Relaxed);
            sent.fetch_add(1, Ordering::Relaxed);
        }
    };
    // When the pipes are full the flood stops; until then much more came than there may be tasks.
    let stops = async {
        let mut before = 0;
        while before < 4 * SESSIONS_PER_STREAM_MAX || before != sent.load(Ordering::Relaxed) {
            before = sent.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::select! {
        () = flood => {}
        () = stops => {}
    }
    let most = most.load(Ordering::Relaxed) - before;
    assert!(most <= SESSIONS_PER_STREAM_MAX + 8, "{most} tasks");
    target.check_honest_client();
    drop(attacker);
    target.check_nothing_is_left();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_many_runs_that_wait_does_not_keep_others_from_theirs() {
    let target = Target::new(BlockLimits::default());
    let mut attackers = Vec::new();
    for number in 0..4 {
        let mut attacker = target.attacker().await;
        for session in 0..2 {
            assert!(attacker.open(target.open(session)).await, "{number}");
        }
        attackers.push(attacker);
    }
    let is_over = Arc::new(AtomicBool::new(false));
    let hidden = target.hidden;
    let floods: Vec<_> = attackers
        .into_iter()
        .map(|mut attacker| {
            let is_over = Arc::clone(&is_over);
            tokio::spawn(async move {
                while !is_over.load(Ordering::Relaxed) {
                    for session in 0..2 {
                        attacker.send(&Request::Run { session, run: rows(0, 64, hidden) }).await;
                    }
                    for _ in 0..2 {
                        assert!(matches!(attacker.reply().await, Some(Reply::Ran { .. })));
                    }
                }
            })
        })
        .collect();
    target.check_honest_client();
    is_over.store(true, Ordering::Relaxed);
    for flood in floods {
        flood.await.unwrap();
    }
    target.check_nothing_is_left();
}

/// Connects to nobody, and counts who tries.
#[derive(Default)]
struct NoWay {
    dials: AtomicUsize,
}

impl Dial for NoWay {
    fn open<'a>(&'a self, _: PeerId, _: &'a [String], _: &'static str) -> Dialled<'a> {
        self.dials.fetch_add(1, Ordering::Relaxed);
        Box::pin(std::future::pending::<Result<BoxedStream, DialError>>())
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_has_a_server_dial_a_limited_number_of_peers() {
    let (model, dial) = (Model::qwen3(), Arc::new(NoWay::default()));
    let server = BlockServer::new(dial.clone());
    let limits = BlockLimits { tokens_per_client_percent: 100, ..BlockLimits::default() };
    server.set_block(model.digest, model.block(range(0, 4), limits));
    let (near, far) = duplex(1 << 16);
    let serving = server.clone();
    let served = tokio::spawn(async move { serving.serve_client(peer(9), Box::new(far)).await });
    let mut attacker = Attacker::new(Box::new(near));
    let open = |session: u64| {
        let next = Next { peer: peer(100 + session as u8), key: guessed_key(1), addresses: Vec::new() };
        Request::Open(Open { next: Some(next), ..open(model.digest, session, range(0, 4), 8) })
    };
    let count = 2 * LINKS_PER_CLIENT_MAX as u64 - 4;
    for session in 0..count {
        attacker.send(&open(session)).await;
    }
    for _ in 0..count {
        // The session is open all the same: its client carries the rows.
        assert!(matches!(attacker.reply().await, Some(Reply::Opened { is_linked: false, .. })));
    }
    assert_eq!(dial.dials.load(Ordering::Relaxed), LINKS_PER_CLIENT_MAX);
    assert_eq!(server.links(), LINKS_PER_CLIENT_MAX);
    drop(attacker);
    served.await.unwrap();
}

/// The server's clock runs on while it waits.
#[tokio::test(start_paused = true)]
async fn a_client_that_drips_bytes_or_does_not_read_is_dropped() {
    let server = BlockServer::new(Arc::new(NoWay::default()));
    for is_dripping in [true, false] {
        let (near, far) = duplex(64);
        let mut attacker = Attacker::new(Box::new(near));
        let attack = async {
            for _ in 0..200 {
                match is_dripping {
                    true => {
                        attacker.send_bytes(&[1]).await;
                        tokio::time::sleep(Duration::from_secs(1)).await;
                    }
                    false => attacker.send_bytes(&frame(8, 5, &[0; 8])).await,
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = server.serve_client(peer(9), Box::new(far)) => {}
            () = attack => {}
        }
        assert_eq!(server.streams(), 0);
    }
}

/// Streams on which a message never ends stay open beside a client that is served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_that_send_no_whole_message_keep_nobody_waiting() {
    let target = Target::new(BlockLimits::default());
    let mut attackers = Vec::new();
    for number in 0..STREAMS_PER_PEER_MAX {
        let mut attacker = match number % 2 {
            0 => target.attacker().await,
            _ => Attacker::pusher(&target.network, peer(9), peer(1)).await,
        };
        attacker.send_bytes(&frame(5000, 2, &[0; 4000])).await;
        attackers.push(attacker);
    }
    target.check_honest_client();
    drop(attackers);
    target.check_nothing_is_left();
}
