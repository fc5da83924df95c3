//! What hostile peers try on our server.

use std::net::IpAddr;
use std::time::Duration;

use blocks::block::{BlockLimits, Client};
use blocks::kwaai::{CallLimits, KwaaiLimits, KwaaiStreamError};
use tokio::io::AsyncWriteExt;
use tokio::time::sleep;

use super::fixture::{FORMS, Model, Room, kwaai_server, kwaai_server_with, layers, listen};
use testing::kwaai_programs::{python, run};
use testing::needs;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attacks_are_refused_and_an_honest_peer_is_served_after_each() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let (sessions_per_client_max, calls_per_client_max) = (32, 40);
    // The program waits until connections that say nothing are ended.
    let limits = KwaaiLimits {
        calls: CallLimits { calls_per_client_max, ..CallLimits::default() },
        call_budget: Duration::from_secs(5),
    };
    let room = Room { limits: BlockLimits { sessions_per_client_max, ..BlockLimits::default() }, ..Room::default() };
    for form in FORMS {
        let address = listen(kwaai_server_with(&model, layers(0, 2), limits, room).1, form).await.to_string();
        let mut attack = python("attack.py");
        attack.args(["--server", &address, "--hidden", &model.hidden().to_string()]).args(form.argument());
        attack.args(["--sessions", &sessions_per_client_max.to_string(), "--calls", &calls_per_client_max.to_string()]);
        println!("{form:?}\n{}", run(attack).await);
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_is_slow_is_dropped_when_its_budget_is_spent() {
    let model = Model::open("qwen3/model-f32");
    let server = kwaai_server(&model, layers(0, 1), KwaaiLimits::default());
    let client = Client::Address(IpAddr::from([127, 0, 0, 1]));
    let (mut ours, theirs) = tokio::io::duplex(64);
    let drip = async {
        // Says that a mebibyte comes, and sends a byte every few seconds.
        for byte in [0x80, 0x80, 0x40].into_iter().chain(std::iter::repeat(0)) {
            if ours.write_all(&[byte]).await.is_err() {
                return;
            }
            sleep(Duration::from_secs(3)).await;
        }
    };
    let (served, ()) = tokio::join!(server.serve_stream(client, theirs), drip);
    assert!(matches!(served, Err(KwaaiStreamError::TooSlow)), "{served:?}");
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_does_not_read_its_reply_is_dropped() {
    let model = Model::open("qwen3/model-f32");
    let server = kwaai_server(&model, layers(1, 2), KwaaiLimits::default());
    let client = Client::Address(IpAddr::from([127, 0, 0, 1]));
    // The reply does not fit into the stream.
    let (mut ours, theirs) = tokio::io::duplex(8);
    let send = async {
        let request =
            kwaai::KwaaiRequest { session: 1, position: 0, input: kwaai::KwaaiInput::Tokens(vec![types::TokenId(1)]) };
        let frame = kwaai::call_frame(kwaai::CallId([1; 16]), b"", &request).unwrap();
        ours.write_all(&frame).await.unwrap();
        std::future::pending::<()>().await;
    };
    // This block is not the first, so tokens are refused without running anything.
    tokio::select! {
        served = server.serve_stream(client, theirs) => {
            assert!(matches!(served, Err(KwaaiStreamError::TooSlow)), "{served:?}");
        }
        () = send => {}
    }
}
