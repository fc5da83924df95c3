//! Messages are read as they were written; damaged ones are errors.

use std::time::Duration;

use directory::{ModelDigest, PeerId};
use engine::Phase;
use types::LayerRange;

use super::*;

fn run(encoding: Encoding) -> Run {
    let activations = Activations { encoding, rows: 2, values: vec![0.5, -1.0, 2.0, 0.25, 8.0, 0.0] };
    Run { run: 7, position: 12, phase: Phase::Prefill, state_rows: 1, is_silent: false, activations }
}

fn next() -> Next {
    let peer = PeerId::new(&[1, 2, 3]).unwrap();
    Next { peer, key: PushKey([9; 16]), addresses: vec!["/ip4/10.0.0.1/tcp/4001".to_owned(), String::new()] }
}

fn requests() -> Vec<Request> {
    let layers = LayerRange::new(3, 8).unwrap();
    let open = Open {
        session: 5,
        model: ModelDigest([4; 32]),
        layers,
        is_last: true,
        tokens_max: 900,
        accepts: None,
        next: None,
    };
    vec![
        Request::Open(open.clone()),
        Request::Open(Open { accepts: Some(PushKey([1; 16])), next: Some(next()), ..open }),
        Request::Run { session: 5, run: run(Encoding::F32) },
        Request::Run { session: 5, run: Run { phase: Phase::Decode, is_silent: true, ..run(Encoding::F16) } },
        Request::Route { session: 5, accepts: None, next: Some(next()) },
        Request::Close { session: 5 },
        Request::Ping { number: u64::MAX },
        Request::Push { key: PushKey([3; 16]), run: run(Encoding::F32) },
    ]
}

fn replies() -> Vec<Reply> {
    let times = (Duration::from_micros(1500), Duration::from_micros(3));
    let returned = Returned {
        run: 7,
        passed_on: Some(PushKey([2; 16])),
        compute: times.0,
        queued: times.1,
        states: Activations { encoding: Encoding::F32, rows: 0, values: Vec::new() },
    };
    vec![
        Reply::Opened { session: 5, rows_max: 512, is_linked: true },
        Reply::Ran { session: 5, returned: returned.clone() },
        Reply::Ran {
            session: 5,
            returned: Returned { passed_on: None, states: run(Encoding::F16).activations, ..returned },
        },
        Reply::Failed { session: 5, kind: FailureKind::WarmingUp, why: "weights".to_owned() },
        Reply::Pong { number: 3 },
    ]
}

#[test]
fn messages_are_read_as_they_were_written() {
    let mut body = Vec::new();
    for request in requests() {
        let kind = request.encode(&mut body);
        assert_eq!(Request::decode(kind, &body), Ok(request));
        for length in 0..body.len() {
            assert!(Request::decode(kind, &body[..length]).is_err(), "kind {kind}, {length} bytes");
        }
        body.push(0);
        assert!(Request::decode(kind, &body).is_err(), "kind {kind} with a byte too many");
    }
    for reply in replies() {
        let kind = reply.encode(&mut body);
        assert_eq!(Reply::decode(kind, &body), Ok(reply));
        for length in 0..body.len() {
            assert!(Reply::decode(kind, &body[..length]).is_err(), "kind {kind}, {length} bytes");
        }
    }
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let mut body = Vec::new();
    let why = "é".repeat(TEXT_BYTES_MAX);
    let kind = Reply::Failed { session: 1, kind: FailureKind::Ended, why }.encode(&mut body);
    let Ok(Reply::Failed { why, .. }) = Reply::decode(kind, &body) else { panic!("it is a failure") };
    assert_eq!(why, "é".repeat(TEXT_BYTES_MAX / 2));
}

#[tokio::test]
async fn frames_are_bounded_and_whole() {
    let mut stream = Vec::new();
    write_frame(&mut stream, 3, &[7; 100]).await.unwrap();
    let (mut body, mut from) = (Vec::new(), stream.as_slice());
    assert_eq!(read_frame(&mut from, 100, &mut body).await.unwrap(), 3);
    assert_eq!(body, [7; 100]);
    assert!(matches!(read_frame(&mut from, 100, &mut body).await, Err(FrameError::Closed)));
    let long = read_frame(&mut stream.as_slice(), 99, &mut body).await;
    assert!(matches!(long, Err(FrameError::TooLong { bytes: 100, max: 99 })), "{long:?}");
    let cut = read_frame(&mut &stream[..50], 100, &mut body).await;
    assert!(matches!(cut, Err(FrameError::Io(_))), "{cut:?}");
}
