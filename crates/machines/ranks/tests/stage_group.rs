//! A stage of a chain whose layers are shared by two rank processes, against the same stage in one process: the same tokens,
//! logits within the tolerance of tensor parallelism, the same bits from run to run. Without a test harness: ranks are this
//! program, started again as `--worker`.
#![cfg_attr(not(target_os = "linux"), allow(unused))]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

fn main() {
    #[cfg(target_os = "linux")]
    linux::main();
}

#[cfg(target_os = "linux")]
mod linux {
    use std::path::{Path, PathBuf};
    use std::process;
    use std::{env, fs, io};

    use engine::{
        Engine, EngineOptions, Executor, ExecutorError, Health, Phase, Prefix, RequestedOutput, StepOutput, StepPlan,
        inspect,
    };
    use kernels::StepLimits;
    use kernels::cpu::CpuOptions;
    use model::{Checkpoint, CheckpointDigest, Description, Limits, LoadOptions, Manifest, ModelPart};
    use ranks::group::{Deadlines, Group, GroupConfig, StartError};
    use ranks::protocol::shard::ShardSpec;
    use ranks::worker::{self, COLLECTIVE_TIMEOUT, INIT_TIMEOUT, Options, build_id};
    use types::{LayerRange, TokenId, WorldSize};

    use testing::local_chain::{Chain, local_stage};

    const MODELS: [&str; 7] = ["llama", "qwen2", "qwen3", "mistral", "mistral_odd", "qwen3_moe", "gemma3"];
    const LIMITS: Limits =
        Limits { step: StepLimits { rows: 64, sequences: 4, pages: 64 }, logit_rows: 64, kv_pages: 32, positions: 400 };
    const OPTIONS: LoadOptions = LoadOptions { keep: None, limits: LIMITS };
    /// How far logits may differ from those of one process: see `tensor_parallel.rs`.
    const APART_MAX: f32 = 1e-3;
    const TOKENS: usize = 12;

    pub fn main() {
        let arguments: Vec<_> = env::args().collect();
        if arguments.iter().any(|argument| argument == "--worker") {
            return serve(&arguments);
        }
        let tests: [(&str, fn()); 6] = [
            ("a_stage_of_two_ranks_gives_the_tokens_of_one_process", tokens_and_logits),
            ("a_group_that_was_cleared_runs_as_a_new_one_with_the_same_processes", clearing),
            ("ranks_load_a_stage_from_a_manifest_and_a_folder_of_tensors", from_manifest),
            ("a_stage_that_cannot_be_loaded_is_refused", refusals),
            ("a_plan_that_ranks_cannot_run_never_reaches_them", wrong_plans),
            ("a_group_that_lost_a_rank_is_restored_with_the_weights_of_the_other", restoring),
        ];
        for (name, test) in tests {
            print!("test {name} ... ");
            test();
            println!("ok");
        }
    }

    /// This process is a rank.
    fn serve(arguments: &[String]) {
        let value = |name: &str| {
            let at = arguments.iter().position(|argument| argument == name).unwrap();
            arguments[at + 1].parse().unwrap()
        };
        let options = Options {
            rank: WorldSize::new(value("--tp-size")).unwrap().rank(value("--rank")).unwrap(),
            cuda_device: 0,
            build: build_id(),
            init_timeout: INIT_TIMEOUT,
            collective_timeout: COLLECTIVE_TIMEOUT,
            threads_max: None,
            #[cfg(debug_assertions)]
            fault: None,
        };
        worker::run(options, io::stdin(), io::stdout(), || process::exit(1)).unwrap();
    }

    fn fixture(inside: &str) -> PathBuf {
        testing::oracle(inside).canonicalize().unwrap()
    }

    fn model(name: &str) -> PathBuf {
        let f32 = testing::oracle(name).join("model-f32");
        if f32.exists() { f32.canonicalize().unwrap() } else { fixture(&format!("{name}/model-bf16")) }
    }

    /// The layers in the middle: all but the first and the last, or the last of two.
    fn middle(checkpoint: &Checkpoint) -> LayerRange {
        let layers = checkpoint.description().layers.len() as u32;
        LayerRange::new(1, (layers - 1).max(2)).unwrap()
    }

    fn spec(path: &Path, layers: LayerRange) -> ShardSpec {
        let cpu = CpuOptions { threads: 1, ..CpuOptions::default() };
        ShardSpec::new(path.to_str().unwrap().to_owned(), &OPTIONS, cpu).with_layers(layers)
    }

    fn start(shard: ShardSpec, model: &Description, digest: CheckpointDigest) -> Result<Group, StartError> {
        let config = GroupConfig {
            world: WorldSize::new(2).unwrap(),
            program: env::current_exe().unwrap(),
            model_id: "stage".to_owned(),
            shard,
            limits: LIMITS,
            vocab: model.vocab,
            hidden: model.hidden,
            digest,
            deadlines: Deadlines::default(),
            environment: Vec::new(),
            hosts: None,
        };
        Group::start(config, &mut |_| {})
    }

    fn group(path: &Path, checkpoint: &Checkpoint) -> Group {
        start(spec(path, middle(checkpoint)), checkpoint.description(), checkpoint.digest()).unwrap()
    }

    /// A chain of the coordinator with the first layer, `stage` in the middle, and the rest.
    fn chain(checkpoint: &Checkpoint, stage: Box<dyn Executor>) -> Chain {
        let (end, layers) = (middle(checkpoint).end() as u32, checkpoint.description().layers.len() as u32);
        let last = LayerRange::new(end, layers).map(|layers| local_stage(checkpoint, &OPTIONS, layers));
        Chain::new(checkpoint, &OPTIONS, 1, [stage].into_iter().chain(last).collect())
    }

    fn prompt(checkpoint: &Checkpoint, length: u32) -> Vec<TokenId> {
        (0..length).map(|i| TokenId((i * 31 + i * i % 7 + 3) % checkpoint.description().vocab as u32)).collect()
    }

    fn logits(chain: &mut Chain, tokens: &[TokenId]) -> Vec<f32> {
        let mut all = Vec::new();
        inspect::logits::<_, ExecutorError>(chain, tokens, 16, |row| {
            all.extend_from_slice(row);
            Ok(())
        })
        .unwrap();
        all
    }

    fn tokens_and_logits() {
        for name in MODELS {
            let path = model(name);
            let checkpoint = Checkpoint::open(&path).unwrap();
            let prompt = prompt(&checkpoint, 70);
            let mut whole = chain(&checkpoint, local_stage(&checkpoint, &OPTIONS, middle(&checkpoint)));
            let mut shared = chain(&checkpoint, Box::new(group(&path, &checkpoint)));
            let (expected, found) = (logits(&mut whole, &prompt), logits(&mut shared, &prompt));
            let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(found.len() == expected.len() && apart <= APART_MAX, "{name}: {apart}");
            assert_eq!(logits(&mut shared, &prompt), found, "{name} again");
            let mut other = chain(&checkpoint, Box::new(group(&path, &checkpoint)));
            assert_eq!(logits(&mut other, &prompt), found, "{name} in another group");

            let options = EngineOptions { chunk: 24, ..EngineOptions::default() };
            let (mut whole, mut shared) = (Engine::with_options(whole, options), Engine::with_options(shared, options));
            let expected = inspect::greedy(&mut whole, &prompt, TOKENS).unwrap();
            assert_eq!(inspect::greedy(&mut shared, &prompt, TOKENS).unwrap(), expected, "{name}");
            // The second time the stage finds the pages of the prompt by their hashes, without tokens.
            assert_eq!(inspect::greedy(&mut shared, &prompt, TOKENS).unwrap(), expected, "{name} from the cache");
            assert!(shared.stats().prefix_hit_tokens > 0);
        }
    }

    /// States of the last rows of a prompt's chunks and of decoded rows.
    fn states(executor: &mut dyn Executor, width: usize) -> Vec<f32> {
        let session = executor.open(100, Prefix::NONE).unwrap().session;
        let (mut all, mut position, mut output) = (Vec::new(), 0, StepOutput::new());
        for (phase, rows, wanted) in
            [(Phase::Prefill, 40, 3), (Phase::Prefill, 7, 7), (Phase::Decode, 1, 1), (Phase::Decode, 1, 0)]
        {
            let mut plan = StepPlan::new();
            let requested =
                if wanted > 0 { RequestedOutput::States { rows: wanted } } else { RequestedOutput::Nothing };
            plan.push_rows(session, phase, position, rows, requested);
            let values = (position * width..(position + rows) * width).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0);
            plan.activations_mut().extend(values);
            executor.submit(&plan).unwrap();
            executor.collect(&mut output).unwrap();
            assert_eq!(output.states.len(), wanted * width);
            all.append(&mut output.states);
            position += rows;
        }
        executor.close(session);
        all
    }

    fn clearing() {
        let path = model("llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (mut group, width) = (group(&path, &checkpoint), checkpoint.description().hidden);
        let found = states(&mut group, width);
        let pids = |group: &Group| group.ranks().iter().map(|rank| (rank.pid, rank.restarts)).collect::<Vec<_>>();
        let before = pids(&group);

        let session = group.open(100, Prefix::NONE).unwrap().session;
        assert!(group.capacity().pages_free == group.capacity().pages_total);
        let mut plan = StepPlan::new();
        plan.push_rows(session, Phase::Prefill, 0, 40, RequestedOutput::States { rows: 1 });
        plan.activations_mut().extend(std::iter::repeat_n(0.5, 40 * width));
        group.submit(&plan).unwrap();
        group.clear();
        assert!(matches!(group.collect(&mut StepOutput::new()), Err(ExecutorError::NoStepInFlight)));
        assert!(group.truncate(session, 0).is_err(), "the session is closed");
        assert_eq!(group.capacity().pages_free, group.capacity().pages_total);
        assert_eq!(states(&mut group, width), found);
        assert!(group.count().unwrap().iter().all(|rank| rank.ready));
        assert_eq!(pids(&group), before);
        assert_eq!(group.poll_health(std::time::Duration::ZERO), Health::Ready);
        group.clear();
        assert_eq!(states(&mut group, width), found, "cleared twice");
    }

    fn from_manifest() {
        for path in [model("llama"), fixture("llama/gguf/tiny-llama-q8_0.gguf"), model("qwen3_moe")] {
            let checkpoint = Checkpoint::open(&path).unwrap();
            let (layers, width) = (middle(&checkpoint), checkpoint.description().hidden);
            let folder = tempfile::tempdir().unwrap();
            let (manifest_path, manifest) = stored(&checkpoint, folder.path(), layers);
            let part = ModelPart::stage(layers);
            let digest = Checkpoint::from_tensor_folder(&manifest, part, folder.path()).unwrap().digest();
            let spec = spec(&manifest_path, layers).with_tensors(folder.path().to_str().unwrap().to_owned());
            let mut group = start(spec, checkpoint.description(), digest).unwrap();
            let mut other = self::group(&path, &checkpoint);
            assert_eq!(states(&mut group, width), states(&mut other, width), "{}", path.display());
        }
    }

    /// Writes the manifest of a model and the tensors of these layers.
    fn stored(checkpoint: &Checkpoint, folder: &Path, layers: LayerRange) -> (PathBuf, Manifest) {
        let mut manifest = checkpoint.manifest().unwrap();
        let needed = manifest.tensors_of(ModelPart::stage(layers)).unwrap();
        for index in 0..manifest.tensors().len() {
            let bytes = checkpoint.tensor_bytes(&manifest.tensors()[index]).unwrap();
            manifest.set_hash(index, blake3::hash(bytes).into());
            if needed.contains(&index) {
                fs::write(folder.join(manifest.tensors()[index].file_name().unwrap()), bytes).unwrap();
            }
        }
        let path = folder.join("manifest.json");
        fs::write(&path, manifest.to_json()).unwrap();
        (path, manifest)
    }

    fn wrong_plans() {
        let path = model("llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (mut group, width) = (group(&path, &checkpoint), checkpoint.description().hidden);
        let found = states(&mut group, width);
        let session = group.open(100, Prefix::NONE).unwrap().session;
        let rows = |session, position, rows, values, requested| {
            let mut plan = StepPlan::new();
            plan.push_rows(session, Phase::Prefill, position, rows, requested);
            plan.activations_mut().extend(std::iter::repeat_n(0.5, values));
            plan
        };
        let state = || RequestedOutput::States { rows: 1 };
        let mut tokens = StepPlan::new();
        tokens.push(session, Phase::Prefill, 0, &[TokenId(1)], state());
        let mut part = rows(session, 0, 1, width, state());
        part.set_layers(Some(middle(&checkpoint)));
        for (plan, expected) in [
            (rows(session, 0, 2, width, state()), "values were given for 2 rows"),
            (rows(session, 0, 2, 2 * width + 1, state()), "values were given for 2 rows"),
            (rows(session, 0, 1, width, RequestedOutput::Logits { rows: 1 }), "does not return what the head computes"),
            (rows(session, 3, 1, width, state()), "has computed 0 tokens, the plan continues at 3"),
            (rows(types::SessionId(99), 0, 1, width, state()), "session 99 is not open"),
            (rows(session, 0, 65, 65 * width, state()), "a step of 65 rows is too large"),
            (tokens, "does not have activations"),
            (part, "always runs all of its layers"),
        ] {
            let error = group.submit(&plan).expect_err(expected).to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        group.close(session);
        assert_eq!(states(&mut group, width), found);
        assert!(group.count().unwrap().iter().all(|rank| rank.ready && rank.restarts == 0), "no rank failed");
    }

    fn restoring() {
        let path = model("llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (mut group, width) = (group(&path, &checkpoint), checkpoint.description().hidden);
        let found = states(&mut group, width);
        for lost in [1, 0] {
            let before: Vec<_> = group.ranks().iter().map(|rank| rank.pid.unwrap()).collect();
            let pid = rustix::process::Pid::from_raw(before[lost] as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            while group.poll_health(std::time::Duration::ZERO) == Health::Ready {}
            group.restore(&mut |_| {}).unwrap();
            let after: Vec<_> = group.ranks().iter().map(|rank| rank.pid.unwrap()).collect();
            assert!(after[lost] != before[lost] && after[1 - lost] == before[1 - lost], "{before:?} {after:?}");
            assert_eq!(states(&mut group, width), found);
        }
    }

    fn refusals() {
        let path = model("llama");
        let checkpoint = Checkpoint::open(&path).unwrap();
        let (description, layers) = (checkpoint.description(), middle(&checkpoint));
        let refused = |shard: ShardSpec, digest: CheckpointDigest, expected: &str| {
            let error = start(shard, description, digest).expect_err("it does not start").to_string();
            assert!(error.contains(expected), "{expected}: {error}");
        };
        refused(spec(&path, LayerRange::new(1, 99).unwrap()), checkpoint.digest(), "layers 1..99 were asked for");
        let folder = tempfile::tempdir().unwrap();
        let (manifest_path, manifest) = stored(&checkpoint, folder.path(), layers);
        let tensors = folder.path().to_str().unwrap().to_owned();
        let digest =
            Checkpoint::from_tensor_folder(&manifest, ModelPart::stage(layers), folder.path()).unwrap().digest();
        let spec = |layers| spec(&manifest_path, layers).with_tensors(tensors.clone());
        refused(spec(layers).with_tensors("tensors".to_owned()), digest, "absolute");
        // The first layer's tensors were not stored.
        refused(spec(LayerRange::new(0, 1).unwrap()), digest, "open the file of tensor model.layers.0.");
        refused(spec(layers), checkpoint.digest(), "its model files are not those of the group");
        fs::write(&manifest_path, b"{}").unwrap();
        refused(spec(layers), digest, "the manifest is not valid");
    }
}
