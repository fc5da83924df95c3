//! The ops, line by line: those of the neuron protocol as its documentation has them, and consort's own.

use engine::{Capacity, PageHash};
use kernels::StepLimits;
use kernels::cpu::{CpuOptions, DecodeMath, KvType, Level, PrefillMath};
use model::LoadOptions;
use ranks::protocol::join::{Activations, JoinTimeouts, Secret};
use ranks::protocol::limits::LimitError;
use ranks::protocol::output::{WireOutcome, WireOutput, WireSample, WireSampled};
use ranks::protocol::plan::{WireEntry, WirePhase, WirePlan, WireRequestedOutput};
use ranks::protocol::session::{RankStats, WirePrefix};
use ranks::protocol::shard::{ShardSpec, WireLayers};
use ranks::protocol::{
    ErrorKind, HelloMismatch, LineMessage, Lines, MESSAGE_BYTES_MAX, RankReply, RankRequest, ReadError, VERSION,
    Writer, check_hello, clean, encode,
};
use types::{DType, LayerRange, TokenId};

fn read<M: LineMessage>(line: &str) -> Result<M, ReadError> {
    Lines::new(line.as_bytes()).read().expect("there is a line")
}

fn written<M: LineMessage>(message: &M) -> String {
    let mut line = Vec::new();
    encode(message, &mut line).unwrap();
    String::from_utf8(line).unwrap()
}

/// Checks that the line parses to the message and the message encodes to the line, byte for byte.
fn check<M: LineMessage + PartialEq + std::fmt::Debug>(line: &str, message: &M) {
    assert_eq!(read::<M>(line).unwrap(), *message, "{line}");
    assert_eq!(written(message), format!("{line}\n"));
    let op = format!("{{\"op\":\"{}\"", message.op());
    assert!(line.starts_with(&op), "{line}");
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn foreign_requests() -> Vec<(&'static str, RankRequest)> {
    let model_id = || text("m");
    vec![
        (r#"{"op":"ping"}"#, RankRequest::Ping),
        (r#"{"op":"init","comm_id":"deadbeef"}"#, RankRequest::Init { comm_id: text("deadbeef") }),
        (r#"{"op":"nccl_sanity_check"}"#, RankRequest::NcclSanityCheck),
        (
            r#"{"op":"load_dense_shard","model_id":"m","config_json":"{\"model_type\":\"qwen3\"}\n","safetensors_paths":["/a","/b"],"quant":"q4k"}"#,
            RankRequest::LoadDenseShard {
                model_id: model_id(),
                config_json: text("{\"model_type\":\"qwen3\"}\n"),
                safetensors_paths: vec![text("/a"), text("/b")].into(),
                quant: Some(text("q4k")),
            },
        ),
        (
            r#"{"op":"generate_step","model_id":"m","tokens":[0,4294967295],"offset":7}"#,
            RankRequest::GenerateStep { model_id: model_id(), tokens: vec![0, u32::MAX].into(), offset: 7 },
        ),
        (
            r#"{"op":"generate_step_with_images","model_id":"m","tokens":[5],"offset":0,"image_token_id":248056,"image_data_uris":["data:image/png;base64,AA=="],"chunk_size":512}"#,
            RankRequest::GenerateStepWithImages {
                model_id: model_id(),
                tokens: vec![5].into(),
                offset: 0,
                image_token_id: 248056,
                image_data_uris: vec![text("data:image/png;base64,AA==")].into(),
                chunk_size: 512,
            },
        ),
        (r#"{"op":"clear_kv_cache","model_id":"m"}"#, RankRequest::ClearKvCache { model_id: model_id() }),
        (r#"{"op":"unload_model","model_id":"m"}"#, RankRequest::UnloadModel { model_id: model_id() }),
        (r#"{"op":"shutdown"}"#, RankRequest::Shutdown),
    ]
}

fn shard() -> ShardSpec {
    let step = StepLimits { rows: 1, sequences: 2, pages: 3 };
    let limits = model::Limits { step, logit_rows: 4, kv_pages: 5, positions: 6 };
    let options = LoadOptions { keep: Some(DType::Q8_0), limits };
    let (decode, prompt) = (DecodeMath::Exact, PrefillMath::Int8);
    let cpu = CpuOptions { threads: 2, level: Level::Avx2, kv: KvType::F16, decode, prompt };
    ShardSpec::new(text("/m"), &options, cpu)
}

fn own_requests() -> Vec<(&'static str, RankRequest)> {
    let plan = WirePlan {
        entries: vec![WireEntry {
            session: 1,
            phase: WirePhase::Prefill,
            position: 32,
            tokens: vec![7, 8].into(),
            rows: 0,
            requested: WireRequestedOutput::Nothing,
            mask: None,
        }]
        .into(),
        activations: None,
    };
    let pages = [PageHash([255; 32])];
    let tokens = [TokenId(3); 32];
    let prefix = WirePrefix::from(engine::Prefix { tokens: &tokens[..], pages: &pages, reuse_max: 31 });
    vec![
        (
            r#"{"op":"hello","id":1,"protocol":7,"build":"abc"}"#,
            RankRequest::Hello { id: 1, protocol: VERSION, build: text("abc") },
        ),
        (
            r#"{"op":"attach","id":2,"segment_fd":5,"world_size":3,"rank":2,"elements_max":4096,"epoch":9}"#,
            RankRequest::Attach { id: 2, segment_fd: 5, world_size: 3, rank: 2, elements_max: 4096, epoch: 9 },
        ),
        (r#"{"op":"listen","id":12,"host":"10.0.0.7"}"#, RankRequest::Listen { id: 12, host: [10, 0, 0, 7].into() }),
        (
            r#"{"op":"join","id":13,"world_size":2,"rank":1,"epoch":9,"addresses":["10.0.0.7:81","[::1]:82"],"key":"0707070707070707070707070707070707070707070707070707070707070707","encoding":"q8","timeouts":{"connect_ms":1,"stall_ms":2,"silence_ms":3}}"#,
            RankRequest::Join {
                id: 13,
                world_size: 2,
                rank: 1,
                epoch: 9,
                addresses: vec!["10.0.0.7:81".parse().unwrap(), "[::1]:82".parse().unwrap()].into(),
                key: Secret::new([7; 32]),
                encoding: Activations::Q8,
                timeouts: JoinTimeouts { connect_ms: 1, stall_ms: 2, silence_ms: 3 },
            },
        ),
        (
            r#"{"op":"load","id":11,"model_id":"m","shard":{"path":"/m","keep":"q8_0","cpu":{"threads":2,"level":"avx2","kv":"f16","decode":"exact","prompt":"int8"},"limits":{"rows":1,"sequences":2,"pages":3,"logit_rows":4,"kv_pages":5,"positions":6}}}"#,
            RankRequest::Load { id: 11, model_id: text("m"), shard: shard() },
        ),
        (
            r#"{"op":"open","id":3,"tokens_max":64,"prefix":{"tokens":[3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3],"pages":"//////////////////////////////////////////8=","reuse_max":31}}"#,
            RankRequest::Open { id: 3, tokens_max: 64, prefix },
        ),
        (r#"{"op":"truncate","id":5,"session":1,"tokens":9}"#, RankRequest::Truncate { id: 5, session: 1, tokens: 9 }),
        (r#"{"op":"close","id":6,"session":1}"#, RankRequest::Close { id: 6, session: 1 }),
        (r#"{"op":"clear","id":14}"#, RankRequest::Clear { id: 14 }),
        (
            r#"{"op":"step","id":7,"plan":{"entries":[{"session":1,"phase":"prefill","position":32,"tokens":[7,8],"requested":"nothing"}]}}"#,
            RankRequest::Step { id: 7, plan },
        ),
        (r#"{"op":"cancel","id":8,"target":7}"#, RankRequest::Cancel { id: 8, target: 7 }),
        (r#"{"op":"abort","id":9,"epoch":2}"#, RankRequest::Abort { id: 9, epoch: 2 }),
        (r#"{"op":"stats","id":18446744073709551615}"#, RankRequest::Stats { id: u64::MAX }),
    ]
}

fn foreign_replies() -> Vec<(&'static str, RankReply)> {
    vec![
        (
            r#"{"op":"pong","rank":1,"world_size":4,"cuda_device":1}"#,
            RankReply::Pong { rank: 1, world_size: 4, cuda_device: 1 },
        ),
        (r#"{"op":"init_ok"}"#, RankReply::InitOk),
        (r#"{"op":"nccl_sanity_result","observed_sum":4}"#, RankReply::NcclSanityResult { observed_sum: 4 }),
        (r#"{"op":"load_dense_shard_ok"}"#, RankReply::LoadDenseShardOk),
        (r#"{"op":"generate_step_ok"}"#, RankReply::GenerateStepOk),
        (r#"{"op":"kv_cache_cleared"}"#, RankReply::KvCacheCleared),
        (r#"{"op":"unloaded"}"#, RankReply::Unloaded),
        (r#"{"op":"bye"}"#, RankReply::Bye),
        (
            r#"{"op":"error","kind":"unknown_op","message":"…"}"#,
            RankReply::Error { kind: ErrorKind::UnknownOp, message: text("…"), id: None },
        ),
    ]
}

fn own_replies() -> Vec<(&'static str, RankReply)> {
    let sample =
        WireSample { session: 1, position: 34, outcome: WireOutcome::Ok(WireSampled { token: 5, logprobs: None }) };
    let output = WireOutput { samples: vec![sample].into(), ..WireOutput::default() };
    let capacity = Capacity {
        vocab: 1,
        positions_max: 2,
        rows_max: 3,
        sequences_max: 4,
        logit_rows_max: 5,
        step_pages_max: 6,
        page_tokens: 7,
        pages_total: 10,
        pages_free: 9,
        pages_cached: 8,
    };
    let stats = RankStats { epoch: 1, steps: 2, capacity: Some(capacity.into()), ..RankStats::default() };
    vec![
        (
            r#"{"op":"hello_ok","id":1,"protocol":7,"build":"abc","pid":77}"#,
            RankReply::HelloOk { id: 1, protocol: VERSION, build: text("abc"), pid: 77 },
        ),
        (r#"{"op":"attach_ok","id":2}"#, RankReply::AttachOk { id: 2 }),
        (r#"{"op":"listening","id":12,"port":81}"#, RankReply::Listening { id: 12, port: 81 }),
        (r#"{"op":"loading","id":11,"layers":4}"#, RankReply::Loading { id: 11, layers: 4 }),
        (
            r#"{"op":"load_ok","id":11,"capacity":{"vocab":1,"positions_max":2,"rows_max":3,"sequences_max":4,"logit_rows_max":5,"step_pages_max":6,"page_tokens":7,"pages_total":10,"pages_free":9,"pages_cached":8},"weight_bytes":1,"head_bytes":2,"kv_bytes":3,"digest":"0a1b"}"#,
            RankReply::LoadOk {
                id: 11,
                capacity: capacity.into(),
                weight_bytes: 1,
                head_bytes: 2,
                kv_bytes: 3,
                digest: text("0a1b"),
            },
        ),
        (r#"{"op":"opened","id":3,"session":1,"computed":32}"#, RankReply::Opened { id: 3, session: 1, computed: 32 }),
        (r#"{"op":"truncated","id":5,"computed":9}"#, RankReply::Truncated { id: 5, computed: 9 }),
        (r#"{"op":"closed","id":6}"#, RankReply::Closed { id: 6 }),
        (
            r#"{"op":"step_ok","id":7,"output":{"samples":[{"session":1,"position":34,"outcome":{"ok":{"token":5}}}]}}"#,
            RankReply::StepOk { id: 7, output },
        ),
        (r#"{"op":"cancelled","id":8,"found":false}"#, RankReply::Cancelled { id: 8, found: false }),
        (r#"{"op":"aborted","id":9,"epoch":2}"#, RankReply::Aborted { id: 9, epoch: 2 }),
        (
            r#"{"op":"stats_ok","id":10,"stats":{"epoch":1,"sessions":0,"weight_bytes":0,"kv_bytes":0,"resident_bytes":0,"steps":2,"collectives":0,"step_us":0,"collective_us":0,"capacity":{"vocab":1,"positions_max":2,"rows_max":3,"sequences_max":4,"logit_rows_max":5,"step_pages_max":6,"page_tokens":7,"pages_total":10,"pages_free":9,"pages_cached":8}}}"#,
            RankReply::StatsOk { id: 10, stats },
        ),
    ]
}

#[test]
fn every_request_is_read_and_written_as_its_line() {
    let (foreign, own) = (foreign_requests(), own_requests());
    let all = foreign.iter().chain(&own);
    let ops: Vec<_> = all.clone().map(|(_, request)| request.op()).collect();
    assert_eq!(ops, RankRequest::OPS, "every op is in this table");
    all.for_each(|(line, request)| check(line, request));
}

#[test]
fn every_reply_is_read_and_written_as_its_line() {
    let (foreign, own) = (foreign_replies(), own_replies());
    let all = foreign.iter().chain(&own);
    let ops: Vec<_> = all.clone().map(|(_, reply)| reply.op()).collect();
    assert_eq!(ops, RankReply::OPS, "every op is in this table");
    all.for_each(|(line, reply)| check(line, reply));
}

#[test]
fn the_shard_of_a_stage_names_its_layers_and_its_tensors() {
    let shard = shard().with_layers(LayerRange::new(3, 7).unwrap()).with_tensors(text("/t"));
    assert_eq!(shard.layers(), Ok(LayerRange::new(3, 7)));
    let line = r#"{"op":"load","id":11,"model_id":"m","shard":{"path":"/m","tensors":"/t","layers":{"start":3,"end":7},"keep":"q8_0","cpu":{"threads":2,"level":"avx2","kv":"f16","decode":"exact","prompt":"int8"},"limits":{"rows":1,"sequences":2,"pages":3,"logit_rows":4,"kv_pages":5,"positions":6}}}"#;
    check(line, &RankRequest::Load { id: 11, model_id: text("m"), shard: shard.clone() });
    let none = ShardSpec { layers: Some(WireLayers { start: 7, end: 7 }), ..shard };
    assert_eq!(none.layers(), Err(LimitError::Zero { what: "layers" }));
}

#[test]
fn what_may_be_left_out_is_left_out() {
    let line = r#"{"op":"load_dense_shard","model_id":"m","config_json":"{}","safetensors_paths":[]}"#;
    let (model_id, config_json) = (text("m"), text("{}"));
    let request =
        RankRequest::LoadDenseShard { model_id, config_json, safetensors_paths: Vec::new().into(), quant: None };
    check(line, &request);
    assert_eq!(read::<RankRequest>(&line.replace("[]}", "[],\"quant\":null}")).unwrap(), request);
}

#[test]
fn our_own_messages_carry_an_id_and_foreign_ones_do_not() {
    assert!(foreign_requests().iter().all(|(_, request)| request.id().is_none()));
    assert!(foreign_replies().iter().all(|(_, reply)| reply.id().is_none()));
    let given = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        Some(value["id"].as_u64().expect("ours has an id"))
    };
    own_requests().iter().for_each(|(line, request)| assert_eq!(request.id(), given(line)));
    own_replies().iter().for_each(|(line, reply)| assert_eq!(reply.id(), given(line)));
    let error = RankReply::error(Some(12), ErrorKind::Stale, "epoch 3 is over");
    assert_eq!(error.id(), Some(12));
    check(r#"{"op":"error","kind":"stale","message":"epoch 3 is over","id":12}"#, &error);
}

#[test]
fn unknown_fields_and_the_order_of_fields_do_not_matter() {
    for (line, request) in foreign_requests().into_iter().chain(own_requests()) {
        let more = line.replacen('{', r#"{"later":{"op":"x","id":[1,{}]},"mood":"none","#, 1);
        assert_eq!(read::<RankRequest>(&more).unwrap(), request, "{more}");
        let op = format!("\"op\":\"{}\"", request.op());
        let rest = line[1..line.len() - 1].strip_prefix(&op).unwrap();
        let op_last =
            format!(" {{ {}{}{op} }} ", rest.trim_start_matches(','), if rest.is_empty() { "" } else { " , " });
        assert_eq!(read::<RankRequest>(&op_last).unwrap(), request, "{op_last}");
    }
    assert_eq!(read::<RankRequest>(r#"{"op":"\u0070ing","id":"not ours"}"#).unwrap(), RankRequest::Ping);
}

#[test]
fn kinds_of_errors_are_the_strings_of_the_page_and_four_more() {
    let page = "bad_request cuda_feature_not_enabled cuda_unavailable nccl_init_failed nccl_not_initialised \
        nccl_sanity_failed already_loaded load_failed unsupported_arch model_not_loaded forward_failed \
        snapshot_not_found snapshot_failed restore_failed assemble_failed extract_failed vram_query_failed";
    for name in page.split_whitespace().chain(["unknown_op", "insufficient_memory", "aborted", "stale"]) {
        let kind: ErrorKind = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        check(&format!(r#"{{"op":"error","kind":"{name}","message":"m"}}"#), &RankReply::error(None, kind, "m"));
    }
    assert!(matches!(
        read::<RankReply>(r#"{"op":"error","kind":"other","message":"m"}"#),
        Err(ReadError::Malformed { .. })
    ));
}

#[test]
fn numbers_out_of_range_and_fields_of_another_kind_are_malformed() {
    let requests = [
        r#"{"op":"generate_step","model_id":"m","tokens":[4294967296],"offset":0}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":[-1],"offset":0}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":[1.5],"offset":0}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":[1],"offset":-1}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":[1],"offset":18446744073709551616}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":[1]}"#,
        r#"{"op":"generate_step","model_id":"m","tokens":"1","offset":0}"#,
        r#"{"op":"generate_step","model_id":null,"tokens":[1],"offset":0}"#,
        r#"{"op":"generate_step","model_id":"m","model_id":"m","tokens":[1],"offset":0}"#,
        r#"{"op":"attach","id":2,"segment_fd":-1,"world_size":3,"rank":2,"elements_max":1,"epoch":9}"#,
        r#"{"op":"attach","id":2,"segment_fd":5,"world_size":65536,"rank":2,"elements_max":1,"epoch":9}"#,
        r#"{"op":"stats","id":18446744073709551616}"#,
        r#"{"op":"stats","id":-1}"#,
        r#"{"op":"stats"}"#,
        r#"{"op":7}"#,
        r#"{"op":null}"#,
        r#"{"op":"ping","op":"ping"}"#,
        r#"{}"#,
    ];
    for line in requests {
        let error = read::<RankRequest>(line).unwrap_err();
        assert!(matches!(error, ReadError::Malformed { .. }), "{line}: {error}");
        assert!(matches!(error.reply(), Some(RankReply::Error { kind: ErrorKind::BadRequest, .. })), "{line}");
    }
    let pong = r#"{"op":"pong","rank":65536,"world_size":4,"cuda_device":1}"#;
    assert!(matches!(read::<RankReply>(pong), Err(ReadError::Malformed { .. })));
}

#[test]
fn an_unknown_op_is_told_from_a_malformed_line_and_answered() {
    let answer = |line: &str| {
        let mut bytes = Vec::new();
        let reply = read::<RankRequest>(line).unwrap_err().reply().expect("the stream goes on");
        Writer::new(&mut bytes).write(&reply).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!(
        answer(r#"{"op":"explode"}"#),
        "{\"op\":\"error\",\"kind\":\"unknown_op\",\"message\":\"unknown op `explode`\"}\n"
    );
    assert_eq!(
        answer(r#"{"id":3,"op":"pong","rank":1}"#),
        "{\"op\":\"error\",\"kind\":\"unknown_op\",\"message\":\"unknown op `pong`\",\"id\":3}\n"
    );
    assert!(answer(r#"{"op":"close","id":4}"#).ends_with("\"id\":4}\n"), "the answer finds its request");
    assert!(answer(r#"{"op":"close","id":4}"#).contains("missing field `session`"));
    let long = answer(&format!(r#"{{"op":"{}"}}"#, "é ".repeat(100_000)));
    assert!(long.len() < 200, "{long}");
}

#[test]
fn an_answer_does_not_repeat_the_strings_of_a_malformed_line() {
    for line in [
        r#"{"op":"close","id":4,"session":"my secret prompt"}"#,
        r#"{"op":"close","id":4,"session":"my \"secret\" prompt"}"#,
        r#"{"op":"open","id":4,"tokens_max":1,"prefix":{"tokens":[],"pages":"secret!!","reuse_max":0}}"#,
        r#"{"op":"step","id":4,"plan":{"entries":[{"session":1,"phase":"my secret `, expected phase"}]}}"#,
        r#"{"op":"step","id":4,"plan":"secret"}"#,
        r#"{"op":"join","id":4,"world_size":2,"rank":1,"epoch":9,"addresses":[],"key":"secret","encoding":"q8"}"#,
    ] {
        let Err(ReadError::Malformed { id, detail }) = read::<RankRequest>(line) else { panic!("{line} is malformed") };
        assert_eq!(id, Some(4));
        assert!(!detail.contains("secret") && !detail.is_empty(), "{detail}");
    }
}

#[test]
fn messages_of_errors_are_one_clean_line_of_bounded_length() {
    let check = |message: &str, expected: &str| assert_eq!(clean(message), expected, "{message:?}");
    check("", "");
    check("no such file: /models/Qwen3-0.6B/model-00001-of-00002.safetensors", {
        "no such file: /models/Qwen3-0.6B/model-00001-of-00002.safetensors"
    });
    check(" two\r\n\tlines \u{2028}and\u{0} more\u{1b}[31m\n", "two lines and more [31m");
    check("Authorization: Bearer sk-proj-Ab1Cd2Ef3Gh4Ij5Kl6Mn7 sent", "Authorization: Bearer sk-proj-… sent");
    check("hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345 failed", "… failed");
    check(&"0123456789abcdef".repeat(16), "…");
    check("cuda_feature_not_enabled is a word", "cuda_feature_not_enabled is a word");
    for (part, times) in [("é", 1000), ("ab ", 1000), ("word", 10_000), ("\n", 5000), ("… ", 300)] {
        let cleaned = clean(&part.repeat(times));
        assert!(cleaned.len() <= MESSAGE_BYTES_MAX, "{} bytes of {part:?}", cleaned.len());
        assert_eq!(cleaned.is_empty(), part == "\n");
        assert_eq!(clean(&cleaned), cleaned, "clean stays clean");
    }
    let mut bytes = Vec::new();
    Writer::new(&mut bytes).write_error(None, ErrorKind::LoadFailed, "first\nsecond").unwrap();
    assert_eq!(bytes, b"{\"op\":\"error\",\"kind\":\"load_failed\",\"message\":\"first second\"}\n");
}

#[test]
fn another_version_or_build_is_refused() {
    assert_eq!(check_hello("abc", VERSION, "abc"), Ok(()));
    assert_eq!(check_hello("abc", VERSION + 1, "abc"), Err(HelloMismatch::Version { theirs: VERSION + 1 }));
    let refused = HelloMismatch::Build { ours: text("abc"), theirs: text("a bc") };
    assert_eq!(check_hello("abc", VERSION, "a\nbc"), Err(refused));
}
