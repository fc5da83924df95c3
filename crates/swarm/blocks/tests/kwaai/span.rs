//! Block servers of KwaaiNet are spans of our chains.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use blocks::block::{BlockHandle, BlockRows, BlockSession, Client};
use blocks::dial::{BoxedStream, Dial, DialError, Dialled};
use blocks::kwaai::{KwaaiLimits, KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, SpanError};
use directory::PeerId;
use engine::{EmbeddingAndHead, Phase};
use kernels::cpu::CpuBackend;
use kwaai::KwaaiFailure;
use tokio::net::TcpStream;
use types::{LayerRange, TokenId};

use super::fixture::{FORMS, Form, LIMITS, Model, TOLERANCE, block, distance, kwaai_server, layers, listen};
use testing::kwaai_programs::block_server;
use testing::needs;
use testing::python::PythonServer;

const TOKENS: usize = 6;

/// Connections stand in for streams of libp2p.
struct Connections(SocketAddr);

impl Dial for Connections {
    fn open<'a>(&'a self, _: PeerId, _: &'a [String], protocol: &'static str) -> Dialled<'a> {
        assert_eq!(protocol, "/kwaai/inference/1.0.0");
        Box::pin(async {
            let stream = TcpStream::connect(self.0).await.map_err(|error| DialError(error.to_string()))?;
            Ok(Box::new(stream) as BoxedStream)
        })
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

fn route(form: Form, address: SocketAddr) -> KwaaiRoute {
    let peer = PeerId::new(b"peer").unwrap();
    match form {
        Form::Enveloped => KwaaiRoute::Peer { peer, addresses: Vec::new(), dial: Arc::new(Connections(address)) },
        Form::Local => KwaaiRoute::Local(address),
    }
}

fn span(model: &Model, range: LayerRange, form: Form, address: SocketAddr) -> KwaaiSpan {
    let output = match range.end() == model.layers() as usize {
        true => KwaaiSpanOutput::Logits { vocab: model.vocab() },
        false => KwaaiSpanOutput::States,
    };
    let limits = KwaaiSpanLimits { retry_first: Duration::from_millis(1), ..KwaaiSpanLimits::default() };
    KwaaiSpan::new(route(form, address), KwaaiSpanShape { layers: range, hidden: model.hidden(), output }, limits)
}

/// A chain: our embedding and head, a span of KwaaiNet's, and blocks of ours before and after it.
struct TestChain {
    ends: EmbeddingAndHead<CpuBackend>,
    before: Option<BlockSession>,
    span: KwaaiSpan,
    after: Option<BlockSession>,
    _blocks: Vec<BlockHandle>,
}

impl TestChain {
    async fn new(model: &Model, span: KwaaiSpan) -> Self {
        let shape = span.shape();
        let mut blocks = Vec::new();
        let mut own = async |start, end| {
            let range = LayerRange::new(start as u32, end as u32)?;
            let block = block(model, range);
            let session = block.open(Client::Address([127, 0, 0, 1].into()), range, LIMITS.positions).await.unwrap();
            blocks.push(block);
            Some(session)
        };
        let before = own(0, shape.layers.start()).await;
        let after = own(shape.layers.end(), model.layers() as usize).await;
        Self { ends: model.embedding_and_head(), before, span, after, _blocks: blocks }
    }

    /// The logits of the last of some tokens.
    async fn run(&mut self, position: usize, tokens: &[u32], phase: Phase) -> Result<Vec<f32>, SpanError> {
        let tokens: Vec<_> = tokens.iter().map(|&token| TokenId(token)).collect();
        let mut activations = self.ends.embed(&tokens).unwrap();
        let rows = |activations, state_rows| BlockRows { position, phase, activations, state_rows };
        if let Some(before) = &mut self.before {
            activations = before.run(rows(activations, tokens.len())).await.unwrap().states;
        }
        let is_last = self.after.is_none();
        let state_rows = if is_last { 1 } else { tokens.len() };
        activations = self.span.run(rows(activations, state_rows)).await?.states;
        if let Some(after) = &mut self.after {
            activations = after.run(rows(activations, 1)).await.unwrap().states;
        }
        match self.span.shape().output {
            KwaaiSpanOutput::Logits { .. } => Ok(activations),
            KwaaiSpanOutput::States => Ok(self.ends.logits(&activations).unwrap()),
        }
    }

    /// Generates, and compares logits with those of one process. Returns the largest difference.
    async fn check(&mut self, model: &Model, prompt: &[u32]) -> f32 {
        let (tokens, expected) = model.greedy(prompt, TOKENS);
        let (mut position, mut largest) = (0, 0.0_f32);
        let mut logits = Vec::new();
        // A prompt in parts that a step has room for.
        for part in prompt.chunks(LIMITS.step.rows) {
            logits = self.run(position, part, Phase::Prefill).await.unwrap();
            position += part.len();
        }
        for (token, expected) in tokens.iter().zip(&expected) {
            largest = largest.max(distance(expected, &logits));
            assert_eq!(super::fixture::greedy(&logits), *token, "off by {largest}");
            logits = self.run(position, &[*token], Phase::Decode).await.unwrap();
            position += 1;
        }
        assert!(largest < TOLERANCE, "off by {largest}");
        largest
    }
}

fn blocks(range: LayerRange) -> String {
    format!("{}-{}", range.start(), range.end())
}

pub fn python_server(model: &Model, range: LayerRange, form: Form, arguments: &[&str]) -> PythonServer {
    let common = ["--model", model.path.to_str().unwrap(), "--blocks", &blocks(range)];
    block_server(&[&common[..], form.argument(), arguments].concat())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_server_is_a_span_in_every_role() {
    if !needs::python() {
        return;
    }
    for (name, prompts) in [("qwen3/model-f32", ["len1", "short"]), ("llama/model-bf16", ["len1", "short"])] {
        let model = Model::open(name);
        for form in FORMS {
            for range in [layers(0, 2), layers(1, 3), layers(2, 4), layers(0, 4)] {
                let server = python_server(&model, range, form, &[]);
                let mut chain = TestChain::new(&model, span(&model, range, form, server.address)).await;
                for prompt in prompts {
                    // Each begins at position 0, in a session of its own.
                    let found = chain.check(&model, &model.prompt(prompt)).await;
                    println!("{name} {range} {form:?} {prompt}: {found}");
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_server_is_a_span_of_our_chain() {
    let model = Model::open("qwen3/model-f32");
    for form in FORMS {
        let server = kwaai_server(&model, layers(1, 3), KwaaiLimits::default());
        let address = listen(server, form).await;
        let mut chain = TestChain::new(&model, span(&model, layers(1, 3), form, address)).await;
        chain.check(&model, &model.prompt("mid")).await;
    }
}

fn rows(model: &Model, position: usize, count: usize) -> BlockRows {
    let values = (0..count * model.hidden()).map(|index| (index % 17) as f32 / 17.0);
    BlockRows { position, phase: Phase::Prefill, activations: values.collect(), state_rows: 1 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_warms_up_or_has_no_room_is_called_again() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    for form in FORMS {
        let server = python_server(&model, layers(1, 3), form, &["--warm-up", "3", "--busy", "2"]);
        let mut span = span(&model, layers(1, 3), form, server.address);
        span.run(rows(&model, 0, 3)).await.unwrap();
        // It was run once only: the next rows are in their place.
        span.run(rows(&model, 3, 1)).await.unwrap();
    }
    let server = python_server(&model, layers(1, 3), Form::Local, &["--warm-up", "1000"]);
    let shape = KwaaiSpanShape { layers: layers(1, 3), hidden: model.hidden(), output: KwaaiSpanOutput::States };
    let limits = KwaaiSpanLimits { retry_max: Duration::ZERO, ..KwaaiSpanLimits::default() };
    let mut span = KwaaiSpan::new(route(Form::Local, server.address), shape, limits);
    let error = span.run(rows(&model, 0, 3)).await.unwrap_err();
    assert!(matches!(&error, SpanError::NotReady(KwaaiFailure::WarmingUp(_))) && error.is_retryable(), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_do_not_follow_have_to_be_replayed() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let server = python_server(&model, layers(1, 3), Form::Enveloped, &[]);
    let mut span = span(&model, layers(1, 3), Form::Enveloped, server.address);
    let first = span.run(rows(&model, 0, 4)).await.unwrap();
    for position in [3, 5] {
        let error = span.run(rows(&model, position, 1)).await.unwrap_err();
        assert!(matches!(error, SpanError::Replay { computed: 4, .. }) && error.is_retryable(), "{error}");
        // The session is gone; a replay gives the same, in a fresh one.
        assert!(matches!(span.run(rows(&model, 4, 1)).await, Err(SpanError::Replay { computed: 0, .. })));
        assert_eq!(span.run(rows(&model, 0, 4)).await.unwrap().states, first.states);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lies_or_dies_is_told_from_one_that_is_slow() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    for (lie, is_misbehaviour, why) in [
        ("silent", false, "no answer within"),
        ("close", false, "connection to the server broke"),
        ("cut", true, "connection to the server broke"),
        ("garbage", true, "nonsense"),
        ("huge", true, "connection to the server broke"),
        ("nan", true, "not finite"),
        ("rows", true, "2 rows, not 1"),
        ("width", true, "not [1, 1, 63]"),
        ("shape", true, "does not have 0 bytes"),
        ("session", true, "another call"),
        ("call", true, "another call"),
        ("logits", true, "response type"),
        ("error", false, "out of memory"),
        ("panicked", false, "forward pass panicked"),
    ] {
        for form in FORMS.into_iter().filter(|&form| form == Form::Enveloped || lie != "call") {
            let server = python_server(&model, layers(1, 3), form, &["--lie", lie]);
            let shape =
                KwaaiSpanShape { layers: layers(1, 3), hidden: model.hidden(), output: KwaaiSpanOutput::States };
            // The first call is answered, also on a busy machine.
            let call_timeout = Duration::from_secs(if lie == "silent" { 8 } else { 120 });
            let limits = KwaaiSpanLimits { call_timeout, ..KwaaiSpanLimits::default() };
            let mut span = KwaaiSpan::new(route(form, server.address), shape, limits);
            span.run(rows(&model, 0, 3)).await.unwrap();
            let error = span.run(rows(&model, 3, 1)).await.unwrap_err();
            assert!(error.to_string().contains(why), "{lie}: {error}");
            assert_eq!(error.is_misbehaviour(), is_misbehaviour, "{lie}: {error}");
            assert!(!error.is_retryable(), "{lie}: {error}");
            assert!(matches!(span.run(rows(&model, 4, 1)).await, Err(SpanError::Replay { computed: 0, .. })));
        }
    }
}

#[tokio::test]
async fn what_cannot_be_sent_is_an_error() {
    let model = Model::open("qwen3/model-f32");
    let nowhere = SocketAddr::from(([127, 0, 0, 1], 1));
    let mut middle = span(&model, layers(1, 3), Form::Local, nowhere);
    let with = |change: fn(&mut BlockRows)| {
        let mut rows = rows(&model, 0, 2);
        change(&mut rows);
        rows
    };
    for wrong in [
        with(|rows| rows.activations.clear()),
        with(|rows| rows.activations.truncate(rows.activations.len() - 1)),
        with(|rows| rows.state_rows = 3),
    ] {
        assert!(matches!(middle.run(wrong).await, Err(SpanError::Shape { .. })));
    }
    for value in [f32::NAN, 1e6] {
        let mut rows = rows(&model, 0, 2);
        rows.activations[5] = value;
        assert!(matches!(middle.run(rows).await, Err(SpanError::Unsendable { .. })));
    }
    assert!(matches!(middle.run(rows(&model, 0, 2)).await, Err(SpanError::Unreachable(_))));
    let mut last = span(&model, layers(2, 4), Form::Local, nowhere);
    let two = with(|rows| rows.state_rows = 2);
    assert!(matches!(last.run(two).await, Err(SpanError::Output { rows: 2, max: 1 })));
}
