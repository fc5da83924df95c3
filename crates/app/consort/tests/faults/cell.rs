//! One cell of the matrix: a group of three ranks with one fault in it, and requests before, during and after.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use engine::{
    Engine, EngineOptions, EventKind, EventSink, FinishReason, Finished, Health, LocalExecutor, Request, RequestHandle,
    Service,
};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Limits, LoadOptions};
use ranks::group::{Deadlines, Group, GroupConfig};
use ranks::protocol::shard::ShardSpec;
use types::{TokenId, WorldSize};

use crate::rank_hosts::LocalRankHosts;
use crate::traces;
use testing::bounded::{WAIT_MAX, wait_until};

/// Prompts take several prefill steps, so that a fault can happen within a prefill.
const CHUNK: usize = 8;
const PROMPT_TOKENS: usize = 30;
const ANSWER_TOKENS: usize = 24;
const REQUESTS: usize = 3;
const RANKS: usize = 3;
const LIMITS: Limits =
    Limits { step: StepLimits { rows: CHUNK, sequences: 4, pages: 64 }, logit_rows: 8, kv_pages: 32, positions: 100 };

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub action: &'static str,
    pub moment: &'static str,
    pub rank: u16,
    /// All ranks but the first are on other hosts.
    pub remote: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub problem: Option<String>,
    restarts: u64,
    replays: u64,
    drain: Duration,
    elapsed: Duration,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.remote { " remote" } else { "" };
        write!(f, "{} at {} of rank {}{place}", self.action, self.moment, self.rank)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { problem, restarts, replays, drain, elapsed } = self;
        let mark = if problem.is_some() { "FAILED " } else { "" };
        write!(f, "{mark}{restarts}/{replays}/{}/{:.1}", drain.as_millis(), elapsed.as_secs_f64())
    }
}

impl Cell {
    /// `expected`: the tokens that requests get without a fault.
    pub fn run(self, expected: &[Vec<TokenId>]) -> Outcome {
        let begun = Instant::now();
        let folder = tempfile::tempdir().unwrap();
        let mut outcome = Outcome::default();
        outcome.problem = self.try_run(expected, &folder.path().join("claimed"), &mut outcome).err();
        outcome.elapsed = begun.elapsed();
        outcome
    }

    fn try_run(self, expected: &[Vec<TokenId>], claim: &Path, outcome: &mut Outcome) -> Result<(), String> {
        let mark = claim.display().to_string();
        let mut config = self.config(&mark);
        let rank_hosts = self.remote.then(|| LocalRankHosts::start(RANKS - 1, &config.environment));
        config.hosts = rank_hosts.as_ref().map(|rank_hosts| rank_hosts.hosts.clone());
        let group = Group::start(config, &mut |_| {}).map_err(|error| format!("start: {error}"))?;
        let options = EngineOptions { chunk: CHUNK, ..EngineOptions::default() };
        let service = Service::start(Engine::with_options(group, options)).unwrap();
        // A fault that waits for steps happens during the first requests. The second requests run after the group is
        // rebuilt.
        ask(&service, expected).map_err(|problem| format!("first requests: {problem}"))?;
        self.wait_for_idle_fault(&service, claim);
        ask(&service, expected).map_err(|problem| format!("second requests: {problem}"))?;
        // The pages of a request are freed after its last event is sent.
        wait_until("no request runs", || service.stats().running == 0);
        let stats = service.stats();
        outcome.replays = stats.replays;
        for rank in service.ranks() {
            outcome.restarts += rank.restarts;
            outcome.drain = outcome.drain.max(rank.drain_max);
        }
        if stats.waiting > 0 || stats.pages_free != stats.pages_total {
            return Err(format!("something is held: {stats:?}"));
        }
        let thread_exit = service.thread_exit();
        drop(service);
        wait_until("the service has ended", || thread_exit.wait(Duration::from_secs(1)));
        wait_until("the cell's processes are gone", || traces::processes(&mark).is_empty());
        if !claim.exists() {
            return Err("the fault never happened: the cell shows nothing".to_owned());
        }
        let (meant, restarts) = (self.action != "slow" && self.moment != "unload", outcome.restarts);
        // A rank that runs out of memory in a step reports it and stays alive.
        let lives = self.action == "oom" && matches!(self.moment, "prefill" | "decode");
        if meant && (restarts == 0) != lives || !meant && restarts > 0 {
            return Err(format!("{restarts} ranks were started anew"));
        }
        Ok(())
    }

    fn config(self, claim: &str) -> GroupConfig {
        let (at, after) = match self.moment {
            "prefill" => ("step", 2),
            "decode" => ("step", 24),
            moment => (moment, 0),
        };
        let fault = format!("rank={},at={at},after={after},do={},once={claim}", self.rank, self.action);
        let path = model_path();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let shard = ShardSpec::new(path.to_str().unwrap().to_owned(), &load_options(), cpu());
        GroupConfig {
            world: WorldSize::new(RANKS as u16).unwrap(),
            program: env!("CARGO_BIN_EXE_consort").into(),
            model_id: "model".to_owned(),
            shard,
            limits: LIMITS,
            vocab: checkpoint.description().vocab,
            hidden: checkpoint.description().hidden,
            digest: checkpoint.digest(),
            deadlines: deadlines(),
            hosts: None,
            environment: vec![("CONSORT_FAULT".to_owned(), fault), ("CONSORT_LOG".to_owned(), "off".to_owned())],
        }
    }

    /// A fault of an idle rank happens on its own, shortly after the last request has ended.
    fn wait_for_idle_fault(self, service: &Service, claim: &Path) {
        if self.moment == "idle" {
            wait_until("the fault happens", || claim.exists());
            if self.action != "slow" {
                // No request runs, so the group has to notice the loss by polling.
                wait_until("the group notices the loss", || {
                    service.health() != Health::Ready || service.ranks().iter().any(|rank| rank.restarts > 0)
                });
            }
        }
    }
}

/// The tokens that one process without faults generates.
pub fn answers_without_faults() -> Vec<Vec<TokenId>> {
    let checkpoint = Checkpoint::open(&model_path()).unwrap();
    let backend = CpuBackend::new(cpu()).unwrap();
    let local = LocalExecutor::load(backend, &checkpoint, &load_options(), &mut |_| {}).unwrap();
    let mut engine = Engine::new(local, CHUNK);
    (0..REQUESTS).map(|index| engine::inspect::greedy(&mut engine, &prompt(index), ANSWER_TOKENS).unwrap()).collect()
}

/// Runs the requests concurrently and compares their tokens with `expected`.
fn ask(service: &Service, expected: &[Vec<TokenId>]) -> Result<(), String> {
    let asked: Vec<_> = (0..REQUESTS).map(|index| submit(service, index)).collect();
    for ((_handle, events), expected) in asked.iter().zip(expected) {
        let mut answer = Vec::new();
        loop {
            match events.recv_timeout(WAIT_MAX).map_err(|_| format!("no event within {WAIT_MAX:?}"))? {
                EventKind::Token(sampled) => answer.push(sampled.token),
                EventKind::Finished(Finished { reason: FinishReason::Length, .. }) => break,
                EventKind::Finished(Finished { reason, .. }) => return Err(format!("{reason:?}")),
                EventKind::Refused(error) => return Err(error.to_string()),
                _ => {}
            }
        }
        if answer != *expected {
            return Err(format!("{answer:?} instead of {expected:?}"));
        }
    }
    Ok(())
}

fn submit(service: &Service, index: usize) -> (RequestHandle, Receiver<EventKind>) {
    let (sender, events) = channel();
    let handle = service.submit(Request::greedy(prompt(index), ANSWER_TOKENS), Box::new(Sink(sender))).unwrap();
    (handle, events)
}

struct Sink(Sender<EventKind>);

impl EventSink for Sink {
    fn send(&mut self, event: EventKind) -> bool {
        self.0.send(event).is_ok()
    }
}

fn prompt(index: usize) -> Vec<TokenId> {
    (0..PROMPT_TOKENS).map(|place| TokenId(((place * 7 + index * 31) % 200 + 1) as u32)).collect()
}

fn deadlines() -> Deadlines {
    Deadlines { stopped: Duration::from_millis(300), shutdown: Duration::from_secs(1), ..Deadlines::default() }
}

fn load_options() -> LoadOptions {
    LoadOptions { keep: None, limits: LIMITS }
}

fn cpu() -> CpuOptions {
    CpuOptions { threads: 1, ..CpuOptions::default() }
}

fn model_path() -> PathBuf {
    testing::oracle("qwen3/model-f32")
}
