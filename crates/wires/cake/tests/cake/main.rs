//! cake's protocol with the programs of `tests/cake` on the other side: generations with our side in each role give the tokens
//! of one process, and what hostile peers try is refused.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod chain;
mod fixture;

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::Duration;

use cake::wire::CakeVariant;
use cake::{CakeExecutor, CakeKey, CakeLayerPrefix, CakeSetupError, CakeWorkerAddress, SetupFiles, set_up_worker};
use chain::{TestChain, generate};
use engine::{
    Executor, ExecutorError, Health, LocalExecutor, Phase, Prefix, RequestedOutput, Stage, StepOutput, StepPlan,
    inspect,
};
use fixture::{Addresses, KEY, LIMITS, OPTIONS, backend, layers, with_worker};
use kernels::cpu::CpuBackend;
use model::Checkpoint;
use tempfile::{TempDir, tempdir};
use testing::cake_programs::{Prompt, TOKENS, prompts, prompts_named, python, run_master, worker};
use testing::python::PythonServer;
use testing::{needs, oracle};
use types::TokenId;

/// Values of a row of activations, in the models that are used.
const HIDDEN: usize = 64;

fn greedy(prompts: &[Prompt]) -> Vec<Vec<TokenId>> {
    prompts.iter().map(|prompt| prompt.greedy[..TOKENS].to_vec()).collect()
}

/// An independent master generates on our worker.
fn check_master(worker: &Addresses, model: &str, arithmetic: &str, arguments: &[&str]) -> String {
    let (address, folder) = (worker.worker.to_string(), oracle(model));
    let family = model.split('/').next().unwrap();
    let prompts = prompts(family, arithmetic);
    let common = ["--worker", &address, "--model", folder.to_str().unwrap()];
    let (tokens, said) = run_master(&[&common[..], arguments].concat(), &prompts);
    assert_eq!(tokens, greedy(&prompts), "{model} {arguments:?}");
    said
}

#[test]
fn a_cake_master_sets_our_worker_up_and_generates() {
    if !needs::python() {
        return;
    }
    let store = tempdir().unwrap();
    with_worker(Some(KEY), store.path(), None, |worker| {
        let check = |model, arithmetic, arguments: &[&str]| {
            check_master(worker, model, arithmetic, &[&["--key", KEY][..], arguments].concat())
        };
        let said = check("qwen3/model-f32", "f32", &["--remote", "1-2", "--setup"]);
        assert!(said.contains("needs data"), "{said}");
        // The same again, for a master that was restarted; and in other types of activations.
        for dtype in ["F32", "F16", "BF16"] {
            let said = check("qwen3/model-f32", "f32", &["--remote", "1-2", "--setup", "--dtype", dtype]);
            assert!(said.contains("has data"), "{said}");
        }
        // Other layers of the same file need no data; another model does.
        let said = check("qwen3/model-f32", "f32", &["--remote", "3-3", "--single", "--setup"]);
        assert!(said.contains("has data"), "{said}");
    });
}

/// A copy of a model with a file for each layer.
fn sharded(model: &str) -> TempDir {
    let folder = tempdir().unwrap();
    assert!(python("shard.py").arg(oracle(model)).arg(folder.path()).status().unwrap().success());
    folder
}

#[test]
fn a_worker_gets_the_files_of_its_layers_only() {
    if !needs::python() {
        return;
    }
    let (store, model) = (tempdir().unwrap(), sharded("llama/model-bf16"));
    with_worker(Some(KEY), store.path(), None, |worker| {
        let address = worker.worker.to_string();
        let common = ["--worker", &address, "--model", model.path().to_str().unwrap(), "--key", KEY, "--setup"];
        let prompts = prompts("llama", "bf16w");
        for (remote, data) in [("1-2", "needs data"), ("2-2", "has data"), ("2-3", "needs data"), ("2-3", "has data")] {
            let arguments = [&common[..], &["--compress", "--remote", remote]].concat();
            let (tokens, said) = run_master(&arguments, &prompts);
            assert_eq!(tokens, greedy(&prompts), "{remote}");
            assert!(said.contains(data), "{remote}: {said}");
            // Two layers were sent each time.
            let folders = fs::read_dir(store.path()).unwrap().map(|entry| entry.unwrap().path());
            let files = folders.filter(|path| path.is_dir()).flat_map(|folder| fs::read_dir(folder).unwrap());
            let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
            assert_eq!(names.filter(|name| name.starts_with("weights")).count(), 2);
        }
    });
}

#[test]
fn a_cake_master_of_the_older_variant_finds_our_worker_and_sets_it_up() {
    if !needs::python() {
        return;
    }
    let store = tempdir().unwrap();
    let arguments = ["--key", KEY, "--remote", "1-3", "--setup", "--older"];
    with_worker(Some(KEY), store.path(), None, |worker| {
        let said = check_master(worker, "llama/model-f32", "f32", &arguments);
        assert!(said.contains("needs data"), "{said}");
    });
    // A new process has the files, and remembers which variant the master speaks.
    with_worker(Some(KEY), store.path(), None, |worker| {
        let prompts = prompts("llama", "f32");
        let (port, folder) = (worker.discovery.port().to_string(), oracle("llama/model-f32"));
        let discover = ["--discover", &port, "--model", folder.to_str().unwrap()];
        let (tokens, said) = run_master(&[&discover[..], &arguments].concat(), &prompts);
        assert_eq!(tokens, greedy(&prompts));
        assert!(said.contains("has data"), "{said}");
    });
}

#[test]
fn a_worker_with_a_model_of_its_own_takes_no_other() {
    if !needs::python() {
        return;
    }
    let (store, key) = (tempdir().unwrap(), CakeKey::new(KEY).unwrap());
    with_worker(Some(KEY), store.path(), Some(&oracle("qwen3/model-f32")), |worker| {
        let set_up = |model: &str, end| {
            let files = SetupFiles::of_folder(&oracle(model), layers(2, end), CakeLayerPrefix::Model).unwrap();
            set_up_worker(worker.worker, &key, &files, CakeVariant::Head, &mut |_, _| panic!("weights were sent"))
        };
        let refused = |result: Result<(), CakeSetupError>| result.unwrap_err().to_string();
        assert!(refused(set_up("llama/model-f32", 4)).contains("this worker has another model"));
        assert!(refused(set_up("qwen3/model-f32", 5)).contains("the model has 4"));
        check_master(worker, "qwen3/model-f32", "f32", &["--key", KEY, "--remote", "1-1"]);
        set_up("qwen3/model-f32", 4).unwrap();
        check_master(worker, "qwen3/model-f32", "f32", &["--key", KEY, "--remote", "2-3"]);
    });
}

#[test]
fn a_worker_with_a_model_of_its_own_runs_the_layers_that_a_master_names() {
    if !needs::python() {
        return;
    }
    let store = tempdir().unwrap();
    with_worker(None, store.path(), Some(&oracle("qwen3/model-f32")), |worker| {
        check_master(worker, "qwen3/model-f32", "f32", &["--remote", "0-3"]);
        // A prompt that is longer than a step.
        let prompts = prompts_named("qwen3", "f32", &["mid"]);
        assert!(prompts[0].tokens.len() > LIMITS.step.rows);
        let (address, model) = (worker.worker.to_string(), oracle("qwen3/model-f32"));
        let arguments = ["--worker", &address, "--model", model.to_str().unwrap(), "--remote", "2-2"];
        assert_eq!(run_master(&arguments, &prompts).0, greedy(&prompts));
    });
    assert_eq!(fs::read_dir(store.path()).unwrap().count(), 0);
}

fn worker_at(address: SocketAddr, start: u32, end: u32) -> CakeWorkerAddress {
    CakeWorkerAddress {
        address,
        key: CakeKey::new(KEY),
        layers: layers(start, end),
        prefix: CakeLayerPrefix::Model,
        step_timeout: Duration::from_secs(120),
    }
}

fn executor(model: &Path, worker: CakeWorkerAddress) -> CakeExecutor {
    let checkpoint = Checkpoint::open(model).unwrap();
    CakeExecutor::new(worker, checkpoint.description().hidden, checkpoint.description().vocab, &LIMITS)
}

/// A chain of the coordinator, a cake worker from layer `first` up to `end`, and a stage of our own with the rest.
fn chain(model: &Path, worker: SocketAddr, first: u32, end: u32) -> TestChain {
    let folder = model.to_owned();
    let stages = move || {
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let mut stages: Vec<Box<dyn Executor>> = vec![Box::new(executor(&folder, worker_at(worker, first, end)))];
        let count = checkpoint.description().layers.len() as u32;
        if end < count {
            let own = Stage::load(backend(), &checkpoint, &OPTIONS, layers(end, count), &mut |_| {}).unwrap();
            stages.push(Box::new(own));
        }
        stages
    };
    TestChain::new(model, first as usize, Box::new(stages))
}

fn whole(model: &Path) -> LocalExecutor<CpuBackend> {
    LocalExecutor::load(backend(), &Checkpoint::open(model).unwrap(), &OPTIONS, &mut |_| {}).unwrap()
}

fn python_worker(model: &Path, arguments: &[&str]) -> PythonServer {
    worker(&[&["--key", KEY, "--model", model.to_str().unwrap()][..], arguments].concat())
}

#[test]
fn a_cake_worker_is_a_stage_of_our_chain() {
    if !needs::python() {
        return;
    }
    for (model, arithmetic, dtype, first, end) in [
        ("qwen3/model-f32", "f32", "F32", 1, 3),
        ("qwen3/model-f32", "f32", "F16", 0, 4),
        ("llama/model-bf16", "bf16w", "BF16", 3, 4),
    ] {
        let folder = oracle(model);
        let worker = python_worker(&folder, &["--dtype", dtype]);
        let mut chain = chain(&folder, worker.address, first, end);
        let prompts = prompts(model.split('/').next().unwrap(), arithmetic);
        // The second time on connections that had other sequences.
        for _ in 0..2 {
            let (generated, executor) = generate(chain.executor, &prompts, TOKENS, 0);
            assert_eq!(generated.answers, greedy(&prompts), "{model} in {dtype}");
            chain.executor = executor;
        }
        assert_eq!(chain.losses(), 0);
    }
}

#[test]
fn prefixes_and_rejected_drafts_are_sent_to_the_worker_again() {
    if !needs::python() {
        return;
    }
    let folder = oracle("qwen3/model-f32");
    let worker = python_worker(&folder, &[]);
    let mut chain = chain(&folder, worker.address, 2, 3);
    let mut whole = whole(&folder);
    // Its answer repeats itself and then does not, so drafts are made and rejected.
    let prompts = prompts_named("qwen3", "f32", &["ragged2"]);
    let mut cached = 0;
    for drafts in [0, 3] {
        let (found, executor) = generate(chain.executor, &prompts, 16, drafts);
        let (expected, local) = generate(whole, &prompts, 16, drafts);
        assert_eq!(found, expected, "{drafts} drafts");
        cached += found.cached_tokens;
        (chain.executor, whole) = (executor, local);
    }
    assert_eq!((cached, chain.losses()), (32, 0));
}

#[test]
fn a_session_that_was_truncated_continues_where_it_was() {
    if !needs::python() {
        return;
    }
    let folder = oracle("qwen3/model-f32");
    let worker = python_worker(&folder, &[]);
    let mut stage = executor(&folder, worker_at(worker.address, 1, 3));
    let run = |stage: &mut CakeExecutor, session, position: usize, rows| {
        let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
        plan.push_rows(session, Phase::Prefill, position, rows, RequestedOutput::States { rows });
        let values = position * HIDDEN..(position + rows) * HIDDEN;
        plan.activations_mut().extend(values.map(|index| (index % 17) as f32 / 17.0));
        stage.submit(&plan).unwrap();
        stage.collect(&mut output).unwrap();
        output.states
    };
    let [first, second] = [0; 2].map(|_| stage.open(100, Prefix::NONE).unwrap().session);
    let whole = run(&mut stage, first, 0, 5);
    assert_eq!(run(&mut stage, second, 0, 5), whole);
    assert_eq!(stage.truncate(second, 2).unwrap(), 2);
    assert_eq!(run(&mut stage, second, 2, 3), whole[2 * HIDDEN..]);
}

#[test]
fn a_stage_that_is_lost_once_changes_no_token() {
    if !needs::python() {
        return;
    }
    let folder = oracle("qwen3/model-f32");
    let prompts = prompts("qwen3", "f32");
    for lie in ["close", "nan", "error"] {
        let worker = python_worker(&folder, &["--lie", lie, "--lies", "1"]);
        let mut chain = chain(&folder, worker.address, 1, 2);
        let (generated, executor) = generate(chain.executor, &prompts, TOKENS, 0);
        chain.executor = executor;
        assert_eq!((generated.answers, chain.losses()), (greedy(&prompts), 1), "{lie}");
    }
}

#[test]
fn a_worker_that_dies_or_lies_is_lost_with_a_reason() {
    if !needs::python() {
        return;
    }
    let folder = oracle("qwen3/model-f32");
    for (lie, why) in [
        ("silent", "no answer within"),
        ("close", "closed the connection"),
        ("cut", "closed the connection"),
        ("garbage", "something else than cake's protocol"),
        ("huge", "is too long"),
        ("error", "the worker reported: out of memory"),
        ("older-error", "the worker reported: out of memory"),
        ("nan", "not finite"),
        ("rows", "2 rows for 1"),
        ("width", "not [1, 1, 63]"),
        ("shape", "does not have 256 bytes"),
        ("hello", "not due"),
    ] {
        let worker = python_worker(&folder, &["--lie", lie]);
        // The first step is answered, also on a busy machine.
        let step_timeout = Duration::from_secs(if lie == "silent" { 8 } else { 120 });
        let mut stage = executor(&folder, CakeWorkerAddress { step_timeout, ..worker_at(worker.address, 0, 1) });
        let session = stage.open(100, Prefix::NONE).unwrap().session;
        let mut run = |session, position: usize, rows| {
            let (mut plan, mut output) = (StepPlan::new(), StepOutput::new());
            plan.push_rows(session, Phase::Prefill, position, rows, RequestedOutput::States { rows: 1 });
            plan.activations_mut().resize(rows * HIDDEN, 0.25);
            stage.submit(&plan).and_then(|()| stage.collect(&mut output)).map(|()| output.states.len())
        };
        assert_eq!(run(session, 0, 3).unwrap(), HIDDEN);
        let error = run(session, 3, 1).unwrap_err();
        assert!(error.is_lost() && error.to_string().contains(why), "{lie}: {error}");
        assert!(error.to_string().contains(&worker.address.to_string()), "{error}");
        // All sessions are gone, and a new one runs.
        assert!(matches!(run(session, 4, 1), Err(ExecutorError::UnknownSession(_))));
        let session = stage.open(100, Prefix::NONE).unwrap().session;
        assert_eq!(stage.capacity().pages_free, stage.capacity().pages_total);
        stage.close(session);
    }
}

#[test]
fn a_worker_that_has_another_key_or_ends_is_lost() {
    if !needs::python() {
        return;
    }
    let folder = oracle("qwen3/model-f32");
    let mut worker = python_worker(&folder, &[]);
    let run = |stage: &mut CakeExecutor| {
        let session = stage.open(100, Prefix::NONE).unwrap().session;
        let mut plan = StepPlan::new();
        plan.push_rows(session, Phase::Prefill, 0, 1, RequestedOutput::States { rows: 1 });
        plan.activations_mut().resize(HIDDEN, 0.25);
        stage.submit(&plan).and_then(|()| stage.collect(&mut StepOutput::new()))
    };
    let other_key = CakeWorkerAddress { key: CakeKey::new("another key"), ..worker_at(worker.address, 0, 1) };
    let error = run(&mut executor(&folder, other_key)).unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("another cluster key"), "{error}");
    // A running worker of cake's takes any assignment, and has the layers that it began with: here, not a fifth one.
    let error = run(&mut executor(&folder, worker_at(worker.address, 4, 5))).unwrap_err();
    assert!(error.is_lost() && error.to_string().contains("restart it"), "{error}");
    let mut stage = executor(&folder, worker_at(worker.address, 0, 1));
    run(&mut stage).unwrap();
    assert_eq!(stage.poll_health(Duration::ZERO), Health::Ready);
    worker.kill();
    // The system reports the end of the process in a moment.
    let mut health = stage.poll_health(Duration::ZERO);
    for _ in 0..6000 {
        if health != Health::Ready {
            break;
        }
        thread::sleep(Duration::from_millis(10));
        health = stage.poll_health(Duration::ZERO);
    }
    assert!(matches!(&health, Health::Rebuilding { why } if why.contains("closed a connection")), "{health:?}");
    assert!(run(&mut stage).unwrap_err().is_lost());
}

/// The bits of the logits of all positions.
fn logits(executor: &mut impl Executor, prompt: &[TokenId]) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    let row = |row: &[f32]| {
        rows.push(row.iter().map(|value| value.to_bits()).collect());
        Ok::<_, ExecutorError>(())
    };
    inspect::logits(executor, prompt, 7, row).unwrap();
    rows
}

#[test]
fn our_worker_as_a_stage_of_our_chain_changes_no_bit() {
    let store = tempdir().unwrap();
    let folder = oracle("llama/model-f32");
    let prompt = &prompts_named("llama", "f32", &["ragged1"])[0].tokens;
    let mut whole = whole(&folder);
    let want = logits(&mut whole, prompt);
    with_worker(Some(KEY), store.path(), None, |worker| {
        let files = SetupFiles::of_folder(&folder, layers(1, 4), CakeLayerPrefix::Model).unwrap();
        let key = CakeKey::new(KEY).unwrap();
        let mut sent = 0;
        set_up_worker(worker.worker, &key, &files, CakeVariant::Head, &mut |bytes, total| sent = bytes.min(total))
            .unwrap();
        assert!(sent > 0);
        let mut chain = chain(&folder, worker.worker, 1, 4);
        assert!(logits(&mut chain.executor, prompt) == want);
        // Several sequences at once, on connections of their own, with prefixes and drafts.
        let prompts = prompts_named("llama", "f32", &["len1", "short", "chat", "mid", "ragged0", "ragged1", "ragged2"]);
        for drafts in [0, 3] {
            let (found, executor) = generate(chain.executor, &prompts, 24, drafts);
            let (expected, local) = generate(whole, &prompts, 24, drafts);
            assert_eq!(found, expected, "{drafts} drafts");
            (chain.executor, whole) = (executor, local);
        }
        assert_eq!(chain.losses(), 0);
        drop(chain);
        // A second set-up sends nothing.
        set_up_worker(worker.worker, &key, &files, CakeVariant::Head, &mut |_, _| panic!("sent again")).unwrap();
    });
}

#[test]
fn we_set_up_a_cake_worker_of_either_variant() {
    if !needs::python() {
        return;
    }
    for (variant, arguments) in [(CakeVariant::Head, &[][..]), (CakeVariant::Older, &["--older"][..])] {
        let (cache, model) = (tempdir().unwrap(), sharded("llama/model-bf16"));
        let folder = model.path();
        let common = ["--key", KEY, "--dtype", "F32", "--cache", cache.path().to_str().unwrap()];
        let start = || worker(&[&common[..], arguments].concat());
        let files = SetupFiles::of_folder(folder, layers(2, 4), CakeLayerPrefix::Model).unwrap();
        let key = CakeKey::new(KEY).unwrap();
        for said in ["set up 2 needs data\n", "set up 2 has data\n"] {
            let mut worker = start();
            set_up_worker(worker.address, &key, &files, variant, &mut |_, _| {}).unwrap();
            assert_eq!(worker.line(), said);
            let prompts = &prompts("llama", "bf16w")[1..2];
            let (generated, _) = generate(chain(folder, worker.address, 2, 4).executor, prompts, TOKENS, 0);
            assert_eq!(generated.answers, greedy(prompts));
        }
    }
}

fn attack(worker: &Addresses, model: &Path, arguments: &[&str]) {
    let address = worker.worker.to_string();
    let common = ["--worker", &address, "--key", KEY, "--model", model.to_str().unwrap()];
    let output = python("attack.py").args(common).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    println!("{said}");
}

#[test]
fn hostile_masters_are_refused_and_an_honest_one_is_served_after_each() {
    if !needs::python() {
        return;
    }
    let parent = tempdir().unwrap();
    let store = parent.path().join("store");
    let folder = oracle("qwen3/model-f32");
    with_worker(Some(KEY), &store, None, |worker| {
        attack(worker, &folder, &["--setup"]);
        // Nothing was kept, and nothing was written elsewhere.
        let kept = fs::read_dir(&store).unwrap().map(|entry| entry.unwrap().path());
        assert!(kept.into_iter().all(|path| path.extension().is_some_and(|extension| extension == "lock")));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        let setup = ["--key", KEY, "--remote", "0-1", "--setup"];
        assert!(check_master(worker, "qwen3/model-f32", "f32", &setup).contains("needs data"));
        attack(worker, &folder, &[]);
        assert!(check_master(worker, "qwen3/model-f32", "f32", &setup).contains("has data"));
    });
}
