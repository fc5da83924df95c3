//! Anything that a client or a peer of the swarm sends is a message or is refused, within memory in proportion to its size; a
//! message is written and read again without a change. The crate `blocks` would bring all of libp2p; its messages need none of it.
#![no_main]

#[path = "../../crates/swarm/blocks/src/wire/mod.rs"]
mod wire;

use std::cell::RefCell;
use std::time::Duration;

use directory::{ModelDigest, PeerId};
use engine::Phase;
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};
use types::LayerRange;
use wire::{
    Activations, Encoding, FailureKind, FrameError, HIDDEN_MAX, Next, Open, PushKey, ROWS_MAX, Reply, Request,
    Returned, Run, body_bytes_max, read_frame, write_frame,
};

/// The longest body that a stream of frames has here.
const BODY_BYTES_MAX: usize = 1 << 12;

thread_local! {
    static RUNTIME: RefCell<Runtime> = RefCell::new(Builder::new_current_thread().enable_time().build().expect("it starts"));
}

fuzz_target!(
    init: fuzz::plant("peers_wire", &seeds()),
    |input: &[u8]| {
        // It allocates when it is made, which is not for the input.
        RUNTIME.with(|_| ());
        fuzz::within_memory(input, read_any);
    }
);

/// The input is a kind and a body, and also a stream of frames.
fn read_any(input: &[u8]) {
    if let Some((kind, body)) = input.split_first() {
        read_message(*kind, body);
    }
    RUNTIME.with_borrow(|runtime| runtime.block_on(read_frames(input)));
}

async fn read_frames(mut input: &[u8]) {
    let (mut body, mut written) = (Vec::new(), Vec::new());
    let whole = input;
    let error = loop {
        match read_frame(&mut input, BODY_BYTES_MAX, &mut body).await {
            Ok(kind) => {
                assert!(body.len() <= BODY_BYTES_MAX);
                write_frame(&mut written, kind, &body).await.expect("memory takes everything");
                read_message(kind, &body);
            }
            Err(error) => break error,
        }
    };
    assert!(!matches!(error, FrameError::TooSlow | FrameError::Wire(_)), "{error}");
    assert!(whole.starts_with(&written), "the frames were the beginning of the stream");
}

/// Values may not be numbers, which equal nothing, so bytes are compared.
fn read_message(kind: u8, body: &[u8]) {
    let (mut bytes, mut again) = (Vec::new(), Vec::new());
    if let Ok(request) = Request::decode(kind, body) {
        let kind = request.encode(&mut bytes);
        assert!(bytes.len() <= body_bytes_max(ROWS_MAX, HIDDEN_MAX));
        let read = Request::decode(kind, &bytes).expect("what was read is written as a message");
        assert_eq!((read.encode(&mut again), &again), (kind, &bytes));
    }
    if let Ok(reply) = Reply::decode(kind, body) {
        let kind = reply.encode(&mut bytes);
        let read = Reply::decode(kind, &bytes).expect("what was read is written as a message");
        assert_eq!((read.encode(&mut again), &again), (kind, &bytes));
    }
}

/// Each message as a kind and a body, and two as frames.
fn seeds() -> Vec<Vec<u8>> {
    let (mut body, mut seeds) = (Vec::new(), Vec::new());
    for request in requests() {
        let kind = request.encode(&mut body);
        seeds.push([&[kind], body.as_slice()].concat());
    }
    for reply in replies() {
        let kind = reply.encode(&mut body);
        seeds.push([&[kind], body.as_slice()].concat());
    }
    let frame = |message: &[u8]| [&(message.len() as u32 - 1).to_le_bytes(), message].concat();
    seeds.push([frame(&seeds[0]), frame(&seeds[4])].concat());
    seeds
}

fn run(encoding: Encoding) -> Run {
    let activations = Activations { encoding, rows: 2, values: vec![0.5, -1.0, 2.0, f32::NAN] };
    Run { run: 7, position: 12, phase: Phase::Prefill, state_rows: 1, is_silent: false, activations }
}

fn requests() -> Vec<Request> {
    let layers = LayerRange::new(3, 8).expect("it is not empty");
    let peer = PeerId::new(&[1, 2, 3]).expect("it is short");
    let next = Next { peer, key: PushKey([9; 16]), addresses: vec!["/ip4/10.0.0.1/tcp/4001".to_owned()] };
    let (model, accepts) = (ModelDigest([4; 32]), Some(PushKey([1; 16])));
    let open = Open { session: 5, model, layers, is_last: true, tokens_max: 900, accepts, next: Some(next.clone()) };
    vec![
        Request::Open(open),
        Request::Run { session: 5, run: run(Encoding::F32) },
        Request::Run { session: 5, run: Run { phase: Phase::Decode, is_silent: true, ..run(Encoding::F16) } },
        Request::Route { session: 5, accepts: None, next: Some(next) },
        Request::Close { session: 5 },
        Request::Ping { number: u64::MAX },
        Request::Push { key: PushKey([3; 16]), run: run(Encoding::F32) },
    ]
}

fn replies() -> Vec<Reply> {
    let passed_on = Some(PushKey([2; 16]));
    let (compute, queued) = (Duration::from_micros(1500), Duration::from_micros(3));
    let returned = Returned { run: 7, passed_on, compute, queued, states: run(Encoding::F16).activations };
    vec![
        Reply::Opened { session: 5, rows_max: 512, is_linked: true },
        Reply::Ran { session: 5, returned: returned.clone() },
        Reply::Ran { session: 5, returned: Returned { passed_on: None, states: Activations::default(), ..returned } },
        Reply::Failed { session: 5, kind: FailureKind::WarmingUp, why: "weights".to_owned() },
        Reply::Pong { number: 3 },
    ]
}
