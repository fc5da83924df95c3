//! A client that takes all it can get, beside an honest one: what it has waiting is limited, and the other one is served.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use blocks::block::{BlockHandle, BlockLimits};
use blocks::dial::{BoxedStream, Dial, Dialled};
use blocks::serve::{BlockServer, SESSIONS_PER_STREAM_MAX, STREAMS_PER_PEER_MAX};
use blocks::wire::{FailureKind, Next, Open, Reply, Request};
use directory::PeerId;
use tokio::io::{DuplexStream, duplex};

use crate::attacker::{Attacker, guessed_key, open, rows};
use crate::gated::Gate;
use crate::models::{LIMITS, Model, peer, range};
use crate::network::Network;
use crate::waiting::until;

/// Sessions of the hoarder that have something to run.
const SESSIONS: usize = 8;

/// A block whose steps end when the test lets them, and the network of its peer.
struct Gated {
    model: Model,
    network: Arc<Network>,
    block: BlockHandle,
    gate: Arc<Gate>,
    hidden: usize,
}

impl Gated {
    fn new(limits: BlockLimits) -> Self {
        let (model, network) = (Model::qwen3(), Network::new(false));
        let (block, gate) = model.gated_block(range(0, 4), limits);
        network.add(peer(1), model.digest, range(0, 4), block.clone(), 1e-4);
        let hidden = model.checkpoint.description().hidden;
        Self { model, network, block, gate, hidden }
    }

    async fn client(&self, number: u8) -> Attacker {
        Attacker::client(&self.network, peer(number), peer(1)).await
    }

    fn open(&self, session: u64) -> Open {
        open(self.model.digest, session, range(0, 4), LIMITS.step.rows)
    }

    /// Rows that fill a step.
    fn step(&self, session: u64) -> Request {
        Request::Run { session, run: rows(0, LIMITS.step.rows, self.hidden) }
    }

    fn wait_for(&self, waiting: usize) {
        until(|| self.block.waiting() == waiting, || format!("{} wait, not {waiting}", self.block.waiting()));
    }
}

impl Drop for Gated {
    /// The block's thread ends.
    fn drop(&mut self) {
        self.gate.allow(1 << 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hoarder_has_a_limited_part_of_what_waits_and_others_wait_for_one_of_its_runs() {
    let limits = BlockLimits { sessions_per_client_max: SESSIONS, ..BlockLimits::default() };
    let gated = Gated::new(limits);
    let mut hoarder = gated.client(9).await;
    for session in 0..SESSIONS as u64 {
        assert!(hoarder.open(gated.open(session)).await);
    }
    for session in 0..SESSIONS as u64 {
        hoarder.send(&gated.step(session)).await;
    }
    gated.wait_for(SESSIONS);
    until(|| gated.gate.begun() == 1, || "no step began".to_owned());
    // While the step runs the block answers nobody, so the hoarder's requests to open sessions pile up, on all of its streams.
    let refused = Arc::new(AtomicUsize::new(0));
    let mut floods = Vec::new();
    for _ in 1..STREAMS_PER_PEER_MAX {
        let mut stream = gated.client(9).await;
        let (refused, opens) = (Arc::clone(&refused), SESSIONS_PER_STREAM_MAX as u64);
        let requests: Vec<Request> = (0..opens).map(|session| Request::Open(gated.open(session))).collect();
        floods.push(tokio::spawn(async move {
            for request in requests {
                stream.send(&request).await;
            }
            // Those that are not refused at once are answered when the step has ended.
            for _ in 0..opens {
                assert_eq!(stream.failure().await, FailureKind::Refused);
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    let all = (STREAMS_PER_PEER_MAX - 1) * SESSIONS_PER_STREAM_MAX;
    let beyond = SESSIONS + all - limits.waiting_per_client_max;
    let is_refused = || refused.load(Ordering::Relaxed) == beyond;
    until(is_refused, || format!("{} of {beyond} are refused", refused.load(Ordering::Relaxed)));
    assert_eq!(gated.block.waiting(), limits.waiting_per_client_max);

    let mut honest = gated.client(5).await;
    honest.send(&Request::Open(gated.open(1))).await;
    gated.wait_for(limits.waiting_per_client_max + 1);
    gated.gate.allow(1);
    assert!(matches!(honest.reply().await, Some(Reply::Opened { .. })));
    for flood in floods {
        flood.await.unwrap();
    }
    assert_eq!(refused.load(Ordering::Relaxed), all, "it has its sessions already");
    // The hoarder's second step has begun, and six of its runs wait.
    until(|| gated.gate.begun() == 2, || "no second step began".to_owned());
    gated.wait_for(SESSIONS - 1);
    honest.send(&gated.step(1)).await;
    gated.wait_for(SESSIONS);
    // This step, and the next one, which is the honest client's.
    gated.gate.allow(2);
    assert!(matches!(honest.reply().await, Some(Reply::Ran { session: 1, .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hoarders_activations_that_wait_are_limited() {
    let bytes_of_run = |gated: &Gated| LIMITS.step.rows * gated.hidden * size_of::<f32>();
    let hidden = Model::qwen3().checkpoint.description().hidden;
    let waiting_bytes_per_client_max = 3 * LIMITS.step.rows * hidden * size_of::<f32>();
    let gated = Gated::new(BlockLimits { waiting_bytes_per_client_max, ..BlockLimits::default() });
    assert_eq!(3 * bytes_of_run(&gated), waiting_bytes_per_client_max);
    let mut hoarder = gated.client(9).await;
    for session in 0..SESSIONS as u64 {
        assert!(hoarder.open(gated.open(session)).await);
    }
    for session in 0..SESSIONS as u64 {
        hoarder.send(&gated.step(session)).await;
    }
    for _ in 3..SESSIONS {
        assert_eq!(hoarder.failure().await, FailureKind::Refused);
    }
    gated.wait_for(3);
    // Another client has its own part.
    let mut honest = gated.client(5).await;
    until(|| gated.gate.begun() == 1, || "no step began".to_owned());
    honest.send(&Request::Open(gated.open(1))).await;
    gated.wait_for(4);
    gated.gate.allow(1);
    assert!(matches!(honest.reply().await, Some(Reply::Opened { .. })));
    honest.send(&gated.step(1)).await;
    gated.gate.allow(3);
    assert!(matches!(honest.reply().await, Some(Reply::Ran { session: 1, .. })));
}

/// Connects to peers that never read.
#[derive(Default)]
struct Deaf {
    ends: Mutex<Vec<DuplexStream>>,
}

impl Dial for Deaf {
    fn open<'a>(&'a self, _: PeerId, _: &'a [String], _: &'static str) -> Dialled<'a> {
        let (near, far) = duplex(64);
        self.ends.lock().unwrap().push(far);
        Box::pin(async move { Ok(Box::new(near) as BoxedStream) })
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

/// Rows for peers that do not read them take the memory of the client that sent them there, and it has a limited part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_wait_to_be_passed_on_are_billed_to_their_client() {
    let (model, dial) = (Model::qwen3(), Arc::new(Deaf::default()));
    let hidden = model.checkpoint.description().hidden;
    let server = BlockServer::new(dial.clone());
    server.set_block(model.digest, model.block(range(0, 4), BlockLimits::default()));
    let (near, far) = duplex(1 << 16);
    let serving = server.clone();
    let served = tokio::spawn(async move { serving.serve_client(peer(9), Box::new(far)).await });
    let mut hoarder = Attacker::new(Box::new(near));
    let mut passed_on = 0;
    for session in 0..4 {
        let next = Next { peer: peer(100 + session as u8), key: guessed_key(1), addresses: Vec::new() };
        let open = open(model.digest, session, range(0, 4), LIMITS.step.rows);
        hoarder.send(&Request::Open(Open { is_last: false, next: Some(next), ..open })).await;
        assert!(matches!(hoarder.reply().await, Some(Reply::Opened { is_linked: true, .. })));
        // Until the stream takes no more; then the client is to carry the rows.
        loop {
            hoarder.send(&Request::Run { session, run: rows(0, LIMITS.step.rows, hidden) }).await;
            let Some(Reply::Ran { returned, .. }) = hoarder.reply().await else { panic!("the rows are run") };
            if returned.passed_on.is_none() {
                break;
            }
            passed_on += 1;
        }
    }
    // As values and as bytes.
    let kib = passed_on * 2 * LIMITS.step.rows * hidden * size_of::<f32>() / 1024;
    assert!(kib > 0);
    until(|| server.waiting_kib() == kib, || format!("{} KiB wait, not {kib}", server.waiting_kib()));
    drop(hoarder);
    served.await.unwrap();
    assert_eq!(server.waiting_kib(), kib, "they wait on when the client has left");
    dial.ends.lock().unwrap().clear();
    until(|| server.waiting_kib() == 0, || format!("{} KiB are left", server.waiting_kib()));
}
