//! We serve blocks to KwaaiNet's coordinators.

use blocks::block::{BlockHandle, BlockLimits, Client};
use blocks::kwaai::{KwaaiLimits, KwaaiServer};
use kwaai::{
    CallId, FRAME_BYTES_MAX, KwaaiFailure, KwaaiInput, KwaaiReply, KwaaiRequest, KwaaiTensor, call_frame, frame_header,
    read_reply,
};
use std::net::IpAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use types::TokenId;

use super::fixture::{
    FORMS, Form, Model, Room, TOLERANCE, distance, kwaai_server, kwaai_server_with, layers, listen, serve_block,
};
use testing::kwaai_programs::generate;
use testing::needs;

const TOKENS: usize = 6;

/// An independent coordinator generates on our servers of these blocks. Returns the largest difference of a logit.
async fn check(name: &str, prompts: &[&str], ends: &[u32], form: Form, arguments: &[&str]) -> f32 {
    let model = Model::open(name);
    let mut shards = Vec::new();
    for (index, &end) in ends.iter().enumerate() {
        let start = if index == 0 { 0 } else { ends[index - 1] };
        shards.push(listen(kwaai_server(&model, layers(start, end), KwaaiLimits::default()), form).await);
    }
    let prompts: Vec<_> = prompts.iter().map(|name| model.prompt(name)).collect();
    let generated = generate(&shards, &[form.argument(), arguments].concat(), &prompts, TOKENS).await;
    let mut largest = 0.0_f32;
    for (prompt, generated) in prompts.iter().zip(&generated) {
        let (tokens, logits) = model.greedy(prompt, TOKENS);
        let distances = logits.iter().zip(&generated.logits).map(|(a, b)| distance(a, b));
        largest = distances.fold(largest, f32::max);
        assert_eq!(generated.tokens, tokens, "{name} as {ends:?} {form:?} {arguments:?}, off by {largest}");
    }
    assert!(largest < TOLERANCE, "{name} as {ends:?} {form:?} {arguments:?} is off by {largest}");
    largest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_generates_on_our_blocks_in_every_role() {
    if !needs::python() {
        return;
    }
    for form in FORMS {
        for ends in [&[4][..], &[2, 4], &[1, 3, 4]] {
            let found = check("qwen3/model-f32", &["len1", "short", "mid"], ends, form, &[]).await;
            println!("qwen3 as {ends:?} {form:?}: {found}");
        }
        let found = check("llama/model-bf16", &["len1", "short"], &[1, 4], form, &["--bin"]).await;
        println!("llama as [1, 4] {form:?}: {found}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_in_parts_and_calls_that_come_twice_change_no_token() {
    if !needs::python() {
        return;
    }
    for arguments in [&["--chunk", "5"][..], &["--twice"], &["--twice", "--chunk", "3", "--bin"]] {
        check("qwen3/model-f32", &["mid"], &[2, 4], Form::Enveloped, arguments).await;
    }
}

/// A coordinator begins a session for each answer and closes none. There is room for a few.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_one_after_the_other_are_never_refused() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let prompts = ["mid", "short", "len1"].map(|name| model.prompt(name));
    let expected = prompts.clone().map(|prompt| model.greedy(&prompt, TOKENS).0);
    let pages = prompts[0].len() + TOKENS;
    let room = Room { kv_pages: 4 * pages.div_ceil(32), ..Room::default() };
    for form in FORMS {
        let mut shards = Vec::new();
        for range in [layers(0, 2), layers(2, 4)] {
            shards.push(listen(kwaai_server_with(&model, range, KwaaiLimits::default(), room).1, form).await);
        }
        let answers: Vec<_> = prompts.iter().cloned().cycle().take(50).collect();
        let generated = generate(&shards, &[form.argument(), &["--bin"]].concat(), &answers, TOKENS).await;
        assert_eq!(generated.len(), 50);
        for (generated, expected) in generated.iter().zip(expected.iter().cycle()) {
            assert_eq!(generated.tokens, *expected, "{form:?}");
        }
    }
}

const CALL: CallId = CallId([7; 16]);

fn client(last: u8) -> Client {
    Client::Address(IpAddr::from([127, 0, 0, last]))
}

fn tokens(session: u64, position: u32, tokens: &[u32]) -> KwaaiRequest<'static> {
    let tokens = tokens.iter().map(|&token| TokenId(token)).collect();
    KwaaiRequest { session, position, input: KwaaiInput::Tokens(tokens) }
}

/// One call on a stream in memory: the failure, if it failed.
async fn call(server: &KwaaiServer, client: Client, request: &KwaaiRequest<'_>) -> Option<KwaaiFailure> {
    let (mut ours, theirs) = tokio::io::duplex(1 << 16);
    let serve = server.serve_stream(client, theirs);
    let exchange = async {
        ours.write_all(&call_frame(CALL, b"peer", request).unwrap()).await.unwrap();
        let mut frame = Vec::new();
        ours.read_to_end(&mut frame).await.unwrap();
        frame
    };
    let (served, frame) = tokio::join!(serve, exchange);
    served.unwrap();
    let header = frame_header(&frame, FRAME_BYTES_MAX).unwrap().unwrap();
    match read_reply(&frame[header.header_bytes..], CALL).unwrap() {
        KwaaiReply::Failed(failure) => Some(failure),
        KwaaiReply::HiddenStates { .. } | KwaaiReply::Logits { .. } => None,
    }
}

#[tokio::test]
async fn a_block_that_loads_is_warming_up() {
    let model = Model::open("qwen3/model-f32");
    let block = BlockHandle::warming_up();
    let server = KwaaiServer::new(block.clone(), 4, KwaaiLimits::default());
    let warming_up = async || call(&server, client(1), &tokens(1, 0, &[5])).await;
    assert!(matches!(warming_up().await, Some(KwaaiFailure::WarmingUp(_))));
    serve_block(&block, &model, layers(0, 2), Room::default());
    assert!(matches!(warming_up().await, Some(KwaaiFailure::WarmingUp(_))));
    // Hidden states need neither.
    let tensor = KwaaiTensor::of_rows(&[0.5; 64], 64).unwrap();
    let states = KwaaiRequest { session: 1, position: 0, input: KwaaiInput::HiddenStates(tensor) };
    assert_eq!(call(&server, client(1), &states).await, None);
    server.set_embed_and_head(model.embedding_and_head());
    assert_eq!(warming_up().await, None);
    block.drain();
    let draining = call(&server, client(1), &tokens(2, 0, &[5])).await;
    assert!(matches!(&draining, Some(KwaaiFailure::Refused(why)) if why.contains("draining")), "{draining:?}");
    // A session that is open goes on.
    assert_eq!(call(&server, client(1), &tokens(1, 1, &[5])).await, None);
}

#[tokio::test]
async fn tokens_need_the_first_block() {
    let server = kwaai_server(&Model::open("qwen3/model-f32"), layers(1, 3), KwaaiLimits::default());
    let failure = call(&server, client(1), &tokens(1, 0, &[5])).await;
    assert_eq!(failure, Some(KwaaiFailure::NoSuchBlock(KwaaiFailure::not_first(1).to_string())));
}

/// A server with room for so many pages.
fn with_room(kv_pages: usize, limits: BlockLimits) -> (BlockHandle, KwaaiServer) {
    let model = Model::open("qwen3/model-f32");
    kwaai_server_with(&model, layers(0, 1), KwaaiLimits::default(), Room { kv_pages, limits })
}

fn is_unknown(failure: Option<&KwaaiFailure>) -> bool {
    matches!(failure, Some(KwaaiFailure::Refused(why)) if why.contains("not known here"))
}

#[tokio::test]
async fn a_session_that_is_not_used_is_forgotten() {
    let (block, server) = with_room(8, BlockLimits { idle: Duration::from_secs(2), ..BlockLimits::default() });
    assert_eq!(call(&server, client(1), &tokens(1, 0, &[5])).await, None);
    while block.stats().sessions > 0 {
        tokio::task::yield_now().await;
    }
    assert!(is_unknown(call(&server, client(1), &tokens(1, 1, &[5])).await.as_ref()));
    assert_eq!(call(&server, client(1), &tokens(2, 0, &[5])).await, None);
}

#[tokio::test]
async fn a_client_that_is_full_loses_its_own_oldest_session_and_nobody_elses() {
    let limits = BlockLimits { sessions_max: 3, sessions_per_client_max: 2, ..BlockLimits::default() };
    let (_, server) = with_room(8, limits);
    for (client, session) in [(client(1), 1), (client(1), 2), (client(2), 1)] {
        assert_eq!(call(&server, client, &tokens(session, 0, &[5])).await, None);
    }
    // All were used just now, and this client has none.
    assert_eq!(call(&server, client(3), &tokens(1, 0, &[5])).await, Some(KwaaiFailure::AtCapacity));
    // Its first session is the oldest.
    assert_eq!(call(&server, client(1), &tokens(3, 0, &[5])).await, None);
    assert!(is_unknown(call(&server, client(1), &tokens(1, 1, &[5])).await.as_ref()));
    for (client, session) in [(client(1), 2), (client(2), 1), (client(1), 3)] {
        assert_eq!(call(&server, client, &tokens(session, 1, &[5])).await, None);
    }
}

#[tokio::test]
async fn a_client_without_a_session_gets_the_room_of_the_one_that_has_the_most() {
    let limits = BlockLimits { evict_after: Duration::ZERO, tokens_per_client_percent: 100, ..BlockLimits::default() };
    let (block, server) = with_room(8, limits);
    // Client 1 used its sessions after client 2 did, but it has more.
    for (client, session) in [(client(2), 1), (client(1), 1), (client(1), 2), (client(1), 3)] {
        assert_eq!(call(&server, client, &tokens(session, 0, &[5; 40])).await, None);
    }
    assert_eq!(block.stats().tokens_free, 0);
    assert_eq!(call(&server, client(3), &tokens(1, 0, &[5])).await, None);
    assert!(is_unknown(call(&server, client(1), &tokens(1, 40, &[5])).await.as_ref()));
    // One that reserves all of its tokens when it is opened gets room too.
    let native = block.open(client(4), layers(0, 1), 60).await.unwrap();
    assert!(is_unknown(call(&server, client(1), &tokens(2, 40, &[5])).await.as_ref()));
    for (client, session, position) in [(client(2), 1, 40), (client(1), 3, 40), (client(3), 1, 1)] {
        assert_eq!(call(&server, client, &tokens(session, position, &[5])).await, None, "{client:?}");
    }
    drop(native);
}

#[tokio::test]
async fn a_session_has_the_room_that_it_uses() {
    let (block, server) = with_room(8, BlockLimits::default());
    let free = || block.stats().tokens_free;
    let all = free();
    assert_eq!(call(&server, client(1), &tokens(1, 0, &[5; 32])).await, None);
    assert_eq!(free(), all - 32);
    assert_eq!(call(&server, client(1), &tokens(1, 32, &[5])).await, None);
    assert_eq!(free(), all - 64);
    // Rows that are run again need no more.
    assert_eq!(call(&server, client(1), &tokens(1, 0, &[5; 33])).await, None);
    assert_eq!(free(), all - 64);
    let other = block.open(client(2), layers(0, 1), all - 64).await.unwrap();
    assert_eq!(call(&server, client(1), &tokens(1, 33, &[5; 32])).await, Some(KwaaiFailure::AtCapacity));
    // It is as it was, and goes on when there is room.
    assert_eq!(call(&server, client(1), &tokens(1, 33, &[5; 31])).await, None);
    drop(other);
    assert_eq!(call(&server, client(1), &tokens(1, 64, &[5; 64])).await, None);
    assert_eq!(free(), all - 128);
}

#[tokio::test]
async fn sessions_that_fill_the_blocks_cache_make_room_for_new_ones_of_their_client() {
    let (block, server) = with_room(8, BlockLimits::default());
    // A client's only session may have all; of several, half.
    assert_eq!(call(&server, client(1), &tokens(0, 0, &[5; 250])).await, None);
    for session in 1..30 {
        assert_eq!(call(&server, client(1), &tokens(session, 0, &[5; 40])).await, None, "{session}");
    }
    assert_eq!((block.stats().sessions, block.stats().tokens_free), (2, 128));
    assert_eq!(call(&server, client(2), &tokens(0, 0, &[5; 128])).await, None);
    assert_eq!(call(&server, client(1), &tokens(29, 40, &[5])).await, None);
}
