//! Servers that are not there, are never ready, or send nonsense: what a client tells, and whom it uses instead.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use blocks::client::{ClientOptions, ForeignPeer, SwarmExecutor};
use blocks::dial::{Dial, DialError, Dialled};
use blocks::kwaai::{KwaaiModel, KwaaiPeer, KwaaiRoute, insert_record};
use blocks::view::SwarmView;
use directory::{PeerId, Reach};
use engine::{
    CoordinatorStage, Engine, Executor, ExecutorError, Phase, Prefix, RequestedOutput, SamplingParams, StepOutput,
    StepPlan, inspect,
};
use kernels::cpu::CpuBackend;
use model::ModelPart;
use tokio::runtime::Handle;
use types::TokenId;

use super::finder::DIGEST;
use super::fixture::{Form, Model, OPTIONS, backend, layers};
use super::span::python_server;
use testing::needs;

struct NoNetwork;

impl Dial for NoNetwork {
    fn open<'a>(&'a self, _: PeerId, _: &'a [String], _: &'static str) -> Dialled<'a> {
        Box::pin(async { Err(DialError("there is no network".to_owned())) })
    }

    fn addresses(&self, _: PeerId) -> Vec<String> {
        Vec::new()
    }
}

/// A client of these servers, which looks for peers for a moment only.
fn client(model: &Model, servers: &[([u32; 2], SocketAddr)], search: Duration) -> SwarmExecutor<CpuBackend> {
    let ends =
        CoordinatorStage::load(backend(), &model.checkpoint, &OPTIONS, ModelPart::coordinator(0), &mut |_| {}).unwrap();
    let view = Arc::<SwarmView>::default();
    let mut foreign: HashMap<PeerId, Arc<dyn ForeignPeer>> = HashMap::new();
    let kwaai_model = KwaaiModel { digest: DIGEST, layers: 4, hidden: model.hidden(), vocab: model.vocab() };
    for (number, (range, address)) in (0..).zip(servers) {
        let (peer, range) = (PeerId::new(&[0, number]).unwrap(), layers(range[0], range[1]));
        let server = KwaaiPeer::new(KwaaiRoute::Local(*address), range, &kwaai_model).unwrap();
        foreign.insert(peer, Arc::new(server));
        insert_record(&view, DIGEST, peer, range, Reach::Direct).unwrap();
        // The first one seems to be the fastest.
        if number == 0 {
            view.add_layer_time(peer, Duration::from_micros(1));
        }
    }
    let options = ClientOptions { search_time_max: search, ..ClientOptions::default() };
    SwarmExecutor::new(ends, 4, DIGEST, Arc::new(NoNetwork), view, options, foreign, Handle::current())
}

/// Why a request ends.
fn failure(mut executor: SwarmExecutor<CpuBackend>) -> String {
    tokio::task::block_in_place(|| {
        let session = loop {
            match executor.open(8, Prefix::NONE) {
                Ok(opened) => break opened.session,
                Err(ExecutorError::Opening) => {}
                Err(error) => return error.to_string(),
            }
        };
        let mut plan = StepPlan::new();
        let sample = RequestedOutput::sample(2, SamplingParams::default());
        plan.push(session, Phase::Prefill, 0, &[TokenId(1), TokenId(2)], sample);
        executor.submit(&plan).unwrap();
        executor.collect(&mut StepOutput::new()).unwrap_err().to_string()
    })
}

/// An address at which nobody listens.
fn nowhere() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_do_not_run_are_an_error_that_names_them() {
    let model = Model::open("qwen3/model-f32");
    let servers = [([0, 2], nowhere()), ([2, 4], nowhere())];
    let why = failure(client(&model, &servers, Duration::from_secs(2)));
    let first = servers[0].1.to_string();
    assert!(why.contains(&first) && why.contains("could not be reached"), "{why}");
    assert_eq!(why.matches("refused").count(), 1, "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_alone_and_never_ready_or_sends_nonsense_is_an_error_that_says_so() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let busy = python_server(&model, layers(0, 4), Form::Local, &["--warm-up", "1000000"]);
    let why = failure(client(&model, &[([0, 4], busy.address)], Duration::from_secs(3)));
    assert!(why.contains(&busy.address.to_string()) && why.contains("node warming up"), "{why}");
    // Its reply is one for a block in the middle.
    let liar = python_server(&model, layers(0, 2), Form::Local, &[]);
    let why = failure(client(&model, &[([0, 4], liar.address)], Duration::from_secs(2)));
    assert!(why.contains(&liar.address.to_string()) && why.contains("nonsense"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_is_tried_when_one_is_never_ready_or_stalls() {
    if !needs::python() {
        return;
    }
    let model = Model::open("qwen3/model-f32");
    let prompt = model.prompt("short");
    let expected = model.greedy(&prompt, 4).0;
    let tokens: Vec<_> = prompt.iter().map(|&token| TokenId(token)).collect();
    let honest = python_server(&model, layers(0, 4), Form::Local, &[]);
    let busy = python_server(&model, layers(0, 4), Form::Local, &["--warm-up", "1000000"]);
    // Takes connections, and never answers.
    let stalled = TcpListener::bind("127.0.0.1:0").unwrap();
    for bad in [busy.address, stalled.local_addr().unwrap()] {
        let executor = client(&model, &[([0, 4], bad), ([0, 4], honest.address)], Duration::from_secs(30));
        let client = executor.client();
        let mut engine = Engine::new(executor, OPTIONS.limits.step.rows);
        let found = tokio::task::block_in_place(|| inspect::greedy(&mut engine, &tokens, 4).unwrap());
        assert_eq!(found.into_iter().map(|token| token.0).collect::<Vec<_>>(), expected);
        let last = client.last_chain()[0].peer;
        assert_eq!(client.peer_name(&last), honest.address.to_string());
    }
}
