//! A model that is split over ranks, connected by shared memory or TCP, gives the results of the whole model. Ranks are
//! threads here, each with its own mapping, backend and shard.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use collectives::shared_memory::{Epoch, GroupLimits, Segment};
use collectives::tcp::{Encoding, TcpAbort, TcpComm, TcpCommOptions, TcpGroup};
use collectives::{EXCHANGE_ELEMENTS_MAX, GroupCollective};
use engine::{
    Capacity, Engine, Executor, ExecutorError, LocalExecutor, OpenedSession, Phase, Prefix, RequestedOutput,
    SamplingParams, StepOutput, StepPlan, inspect,
};
use kernels::StepLimits;
use kernels::cpu::{CpuBackend, CpuOptions, Level};
use model::{Checkpoint, CollectiveError, Limits, LoadOptions};
use net::ClusterKey;
use serde_json::Value;
use testing::needs;
use testing::random_model::{ODD_HEADS, PROMPT, Sizes};
use types::{DType, SessionId, TokenId, WorldSize};

const MODELS: [&str; 7] = ["llama", "qwen2", "qwen3", "mistral", "mistral_odd", "qwen3_moe", "gemma3"];
const LIMITS: Limits =
    Limits { step: StepLimits { rows: 64, sequences: 4, pages: 64 }, logit_rows: 64, kv_pages: 32, positions: 400 };
/// How far logits may differ from those of the whole model: partial sums are rounded.
const APART_MAX: f32 = 1e-3;
/// With quantised weights activations are rounded to int8, and one whose last bit differs may be rounded the other way.
const APART_INT8_MAX: f32 = 0.25;
/// How far logits may differ, relative to their size, when the terms of sums are sent as eight bits.
const Q8_APART_MAX: f32 = 0.05;
/// Far longer than a test takes.
const LONG: Duration = Duration::from_secs(120);

/// All ranks of a group, which get the same calls.
struct Group(Vec<LocalExecutor<CpuBackend>>);

impl Group {
    fn load(folder: &Path, world: WorldSize) -> Self {
        Self::load_as(folder, world, Level::detect(), None)
    }

    /// The same at a CPU level, with weights kept in a format.
    fn load_as(folder: &Path, world: WorldSize, level: Level, keep: Option<DType>) -> Self {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let limits = GroupLimits { world, elements_max: EXCHANGE_ELEMENTS_MAX };
        let (segment, fd) = Segment::create(limits).unwrap();
        let ranks = world.ranks().map(|rank| {
            let own = Segment::attach(fd.try_clone().unwrap(), limits).unwrap();
            let comm = own.join(rank, segment.epoch()).unwrap();
            let backend = CpuBackend::new(CpuOptions { threads: 1, level, ..CpuOptions::default() }).unwrap();
            let options = LoadOptions { keep, limits: LIMITS };
            let collective = Box::new(GroupCollective::over(comm));
            LocalExecutor::load_shard(backend, &checkpoint, &options, rank, collective, &mut |_| {}).unwrap()
        });
        Self(ranks.collect())
    }

    /// The same with ranks that are connected over TCP.
    fn load_over_tcp(folder: &Path, world: WorldSize, encoding: Encoding) -> Self {
        let checkpoint = Checkpoint::open(folder).unwrap();
        let key = ClusterKey::from_passphrase("the key of all tests").unwrap();
        let listeners: Vec<_> = world.ranks().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        let options = TcpCommOptions { elements_max: 1 << 14, encoding, stall_deadline: LONG, silence_deadline: LONG };
        let load = |(rank, listener)| {
            let place = TcpGroup { rank, listener, addresses: &addresses, epoch: Epoch(1) };
            let comm = TcpComm::connect(place, &key, options, &TcpAbort::default(), Instant::now() + LONG).unwrap();
            let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
            let options = LoadOptions { keep: None, limits: LIMITS };
            let collective = Box::new(GroupCollective::over(comm));
            LocalExecutor::load_shard(backend, &checkpoint, &options, rank, collective, &mut |_| {}).unwrap()
        };
        thread::scope(|scope| {
            let ranks = world.ranks().zip(&listeners).map(|place| {
                let load = &load;
                scope.spawn(move || load(place))
            });
            let ranks: Vec<_> = ranks.collect();
            Self(ranks.into_iter().map(|rank| rank.join().unwrap()).collect())
        })
    }

    /// Calls all ranks, checks that they return the same, and returns it.
    fn all<T: PartialEq + std::fmt::Debug>(&mut self, call: impl Fn(&mut LocalExecutor<CpuBackend>) -> T) -> T {
        let [first, others @ ..] = &mut self.0[..] else { panic!("a group has ranks") };
        let given = call(first);
        others.iter_mut().for_each(|rank| assert_eq!(call(rank), given));
        given
    }
}

impl Executor for Group {
    fn depth(&self) -> usize {
        self.0[0].depth()
    }

    fn capacity(&self) -> Capacity {
        self.0[0].capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        Ok(self.all(|rank| rank.open(tokens_max, prefix).unwrap()))
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        Ok(self.all(|rank| rank.truncate(session, tokens).unwrap()))
    }

    fn close(&mut self, session: SessionId) {
        self.all(|rank| rank.close(session));
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        thread::scope(|scope| {
            let steps: Vec<_> = self.0.iter_mut().map(|rank| scope.spawn(move || rank.submit(plan))).collect();
            steps.into_iter().try_for_each(|step| step.join().unwrap())
        })
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let [first, others @ ..] = &mut self.0[..] else { panic!("a group has ranks") };
        thread::scope(|scope| {
            let others = others.iter_mut().map(|rank| {
                scope.spawn(move || {
                    let mut nothing = StepOutput::new();
                    rank.collect(&mut nothing)?;
                    assert!(nothing.samples.is_empty() && nothing.logits.is_empty(), "the first rank answers for all");
                    Ok(())
                })
            });
            let others: Vec<_> = others.collect();
            first.collect(output)?;
            others.into_iter().try_for_each(|rank| rank.join().unwrap())
        })
    }
}

/// The weights of a model with reference results of transformers, and the name of these results.
fn primary(model: &str) -> (PathBuf, &'static str) {
    let folder = testing::oracle(model);
    match folder.join("model-f32") {
        path if path.exists() => (path, "f32"),
        _ => (folder.join("model-bf16"), "bf16w"),
    }
}

fn path(model: &str) -> PathBuf {
    primary(model).0
}

/// Prompts and their greedy continuations by transformers.
fn prompts(model: &str) -> Vec<(Vec<TokenId>, Vec<TokenId>)> {
    let (path, result) = primary(model);
    let manifest: Value = serde_json::from_slice(&fs::read(path.with_file_name("manifest.json")).unwrap()).unwrap();
    let tokens = |ids: &Value| -> Vec<TokenId> {
        ids.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
    };
    let prompts = manifest["prompts"].as_array().unwrap().iter();
    prompts.map(|prompt| (tokens(&prompt["ids"]), tokens(&prompt["greedy"][result]["tokens"]))).collect()
}

fn logits(group: &mut Group, tokens: &[TokenId]) -> Vec<f32> {
    let mut all = Vec::new();
    inspect::logits::<_, ExecutorError>(group, tokens, 16, |row| {
        all.extend_from_slice(row);
        Ok(())
    })
    .unwrap();
    all
}

#[test]
fn greedy_tokens_are_the_oracles_with_any_number_of_ranks() {
    for model in MODELS {
        let path = path(model);
        for world in [1, 2, 3, 4] {
            let mut engine = Engine::new(Group::load(&path, WorldSize::new(world).unwrap()), 64);
            for (prompt, greedy) in prompts(model).into_iter().take(3) {
                let found = inspect::greedy(&mut engine, &prompt, greedy.len()).unwrap();
                assert_eq!(found, greedy, "{model} on {world} ranks");
            }
        }
    }
}

#[test]
fn over_tcp_the_greedy_tokens_are_the_oracles_and_the_logits_those_of_shared_memory() {
    for model in MODELS {
        let path = path(model);
        for world in [2, 3].map(|world| WorldSize::new(world).unwrap()) {
            let (prompt, greedy) = prompts(model).swap_remove(0);
            let over_tcp = || Group::load_over_tcp(&path, world, Encoding::F32);
            let found = inspect::greedy(&mut Engine::new(over_tcp(), 64), &prompt, greedy.len()).unwrap();
            assert_eq!(found, greedy, "{model} on {} ranks", world.get());
            assert_eq!(logits(&mut over_tcp(), &prompt), logits(&mut Group::load(&path, world), &prompt));
        }
    }
}

#[test]
fn over_tcp_with_eight_bits_the_logits_are_near_and_repeat_bit_for_bit() {
    let path = path("llama");
    let (prompt, _) = prompts("llama").swap_remove(0);
    let whole = logits(&mut Group::load(&path, WorldSize::ONE), &prompt);
    for world in [2, 3].map(|world| WorldSize::new(world).unwrap()) {
        let over_tcp = || logits(&mut Group::load_over_tcp(&path, world, Encoding::Q8), &prompt);
        let found = over_tcp();
        let apart: f32 = found.iter().zip(&whole).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f32 = whole.iter().map(|logit| logit.powi(2)).sum();
        let share = (apart / size).sqrt();
        println!("{} ranks: off by {share} of the size of the logits", world.get());
        assert!(share <= Q8_APART_MAX, "{} ranks: {share}", world.get());
        assert_eq!(over_tcp(), found);
    }
}

#[test]
fn logits_are_near_those_of_the_whole_model_and_repeat_bit_for_bit() {
    for model in MODELS {
        let path = path(model);
        let (prompt, _) = prompts(model).swap_remove(0);
        let whole = logits(&mut Group::load(&path, WorldSize::ONE), &prompt);
        for world in [2, 3, 4] {
            let world = WorldSize::new(world).unwrap();
            let found = logits(&mut Group::load(&path, world), &prompt);
            let apart = found.iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(apart <= APART_MAX, "{model} on {} ranks: {apart}", world.get());
            assert_eq!(logits(&mut Group::load(&path, world), &prompt), found, "{model} again");
        }
    }
}

#[test]
fn heads_of_odd_sizes_give_ranks_the_logits_of_the_whole_model_at_every_level() {
    let prompt: Vec<TokenId> = PROMPT.map(TokenId).into();
    let formats = [None, Some(DType::Q8_0)];
    for (size, keep) in ODD_HEADS.into_iter().flat_map(|size| formats.map(|keep| (size, keep))) {
        let folder = tempfile::tempdir().unwrap();
        Sizes::of_heads(size).write(folder.path(), DType::F32);
        for level in needs::levels(Level::ALL, Level::detect()) {
            let logits = |world| {
                logits(&mut Group::load_as(folder.path(), WorldSize::new(world).unwrap(), level, keep), &prompt)
            };
            let whole = logits(1);
            for world in [2, 3] {
                let apart = logits(world).iter().zip(&whole).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let apart_max = if keep.is_some() { APART_INT8_MAX } else { APART_MAX };
                assert!(apart <= apart_max, "heads of {size} as {keep:?} on {world} ranks with {level}: {apart}");
            }
        }
    }
}

/// Sessions, positions and tokens that one step of several sequences samples greedily.
fn sampled(group: &mut Group, logprobs: Option<usize>) -> Vec<(SessionId, usize, TokenId)> {
    let sampling = SamplingParams { logprobs, ..SamplingParams::default() };
    let requested =
        |rows| RequestedOutput::Sample { rows, prompt_tokens: 1, sampling: sampling.clone(), suppressed: None };
    let sessions = [3, 1, 4, 2].map(|rows| (rows, group.open(8, Prefix::NONE).unwrap().session));
    let mut plan = StepPlan::new();
    for (rows, session) in sessions {
        let tokens: Vec<_> = (0..5).map(|index| TokenId((session.0 as u32 * 31 + index * 7 + 1) % 64)).collect();
        plan.push(
            session,
            Phase::Prefill,
            0,
            &tokens,
            if rows == 1 { RequestedOutput::Nothing } else { requested(rows) },
        );
    }
    group.submit(&plan).unwrap();
    let mut output = StepOutput::new();
    group.collect(&mut output).unwrap();
    let found = output.samples.iter().map(|sample| {
        let chosen = sample.outcome.as_ref().unwrap();
        assert_eq!(chosen.logprobs.is_some(), logprobs.is_some());
        (sample.session, sample.position, chosen.token)
    });
    found.collect()
}

/// Greedy tokens are the same whether log probabilities are requested or not.
#[test]
fn the_best_token_is_that_of_whole_rows_however_many_a_step_samples() {
    for model in MODELS {
        let path = path(model);
        for world in [2, 3, 4].map(|world| WorldSize::new(world).unwrap()) {
            let whole = sampled(&mut Group::load(&path, world), Some(0));
            assert_eq!(whole.len(), 9);
            assert_eq!(sampled(&mut Group::load(&path, world), None), whole, "{model}");
        }
        let world = WorldSize::new(2).unwrap();
        let over_tcp = |logprobs| sampled(&mut Group::load_over_tcp(&path, world, Encoding::Q8), logprobs);
        assert_eq!(over_tcp(None), over_tcp(Some(0)), "{model} over TCP");
    }
}

#[test]
fn a_rank_that_is_lost_before_the_head_is_an_error_of_the_others() {
    for requested in [RequestedOutput::Logits { rows: 1 }, RequestedOutput::sample(2, SamplingParams::default())] {
        let mut group = Group::load(&path("llama"), WorldSize::new(3).unwrap());
        let session = group.open(8, Prefix::NONE).unwrap().session;
        let mut plan = StepPlan::new();
        plan.push(session, Phase::Prefill, 0, &[TokenId(1), TokenId(2)], requested);
        group.submit(&plan).unwrap();
        drop(group.0.remove(1));
        for mut rank in group.0 {
            let error = rank.collect(&mut StepOutput::new()).unwrap_err();
            let lost = matches!(&error, ExecutorError::Collective(CollectiveError::Lost(rank)) if rank.index() == 1);
            assert!(lost, "{error:?}");
        }
    }
}
