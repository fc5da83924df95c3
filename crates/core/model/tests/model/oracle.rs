//! Compares every architecture and every variant of its files with the results of Hugging Face transformers in f32.

use kernels::Backend;
use kernels::cpu::{CpuBackend, CpuOptions, KvType, Level};
use model::Checkpoint;
use testing::driver::{Driver, Fixture, MODELS, Sequence, argmax, distance};
use testing::needs;
use testing::reference::Reference;
use types::{DType, Rank};

/// The allowed difference of logits (standard deviation about 2) when activations, too, are rounded to 8 bits for q8_0.
const QUANTISED_ACTIVATIONS: f32 = 0.25;

/// One process, with the prompt as a whole and in chunks, must give the fixture's logits and tokens.
fn check_primary<B: Backend>(backend: &B, architecture: &str) {
    let fixture = Fixture::open(architecture);
    let (folder, result) = fixture.primary();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut driver = Driver::new(backend, &checkpoint, None);
    let vocab = driver.lm_head.vocab();
    for prompt in fixture.prompts() {
        for chunk in [prompt.ids.len(), 1, 7, 64] {
            let (logits, sequence) = driver.prefill(&prompt.ids, chunk);
            driver.close(sequence);
            let (golden, positions) = fixture.logits(&prompt, result).unwrap();
            let rows: Vec<f32> = positions.iter().flat_map(|p| logits[p * vocab..][..vocab].to_vec()).collect();
            let apart = distance(&rows, &golden.values);
            let what = format!("{architecture} {} in chunks of {chunk}", prompt.name);
            assert!(apart <= fixture.tolerance(), "{what}: {apart}");
            let chosen: Vec<u32> = logits.chunks_exact(vocab).map(argmax).collect();
            assert_eq!(chosen, prompt.argmax(), "{what}");
        }
        let (tokens, taken) = driver.greedy(&prompt.ids, 32);
        assert_eq!(tokens, prompt.greedy(result), "{architecture} {}", prompt.name);
        if let Some(golden) = fixture.decode_logits(&prompt) {
            assert!(distance(&taken, &golden.values) <= fixture.tolerance(), "{architecture} decoding");
        }
    }
}

/// bf16 weights, in one file or in shards, with f32 arithmetic.
fn check_bf16<B: Backend>(backend: &B, architecture: &str, variant: &str) {
    let fixture = Fixture::open(architecture);
    let Some(folder) = fixture.variant(variant) else { return };
    let mut driver = Driver::new(backend, &Checkpoint::open(&folder).unwrap(), None);
    let vocab = driver.lm_head.vocab();
    for prompt in fixture.prompts() {
        let (logits, sequence) = driver.prefill(&prompt.ids, 64);
        driver.close(sequence);
        for result in ["bf16w", "bf16w_last"] {
            let Some((golden, positions)) = fixture.logits(&prompt, result) else { continue };
            let rows: Vec<f32> = positions.iter().flat_map(|p| logits[p * vocab..][..vocab].to_vec()).collect();
            let apart = distance(&rows, &golden.values);
            assert!(apart <= fixture.tolerance(), "{architecture} {variant} {} {result}: {apart}", prompt.name);
        }
        let (tokens, _) = driver.greedy(&prompt.ids, 32);
        assert_eq!(tokens, prompt.greedy("bf16w"), "{architecture} {variant} {}", prompt.name);
    }
}

fn check_gguf<B: Backend>(backend: &B, architecture: &str, kind: &str, keep: Option<DType>, tolerance: f32) {
    let fixture = Fixture::open(architecture);
    let entry = &fixture.manifest["gguf"][kind];
    let Some(file) = entry["file"].as_str() else { panic!("{architecture} has no {kind} GGUF") };
    let mut driver = Driver::new(backend, &Checkpoint::open(&fixture.path(file)).unwrap(), keep);
    for (name, all) in [("short", true), ("mid", false)] {
        let (logits, sequence) = driver.prefill(&fixture.prompt(name).ids, 64);
        driver.close(sequence);
        let key = if all { name.to_owned() } else { format!("{name}_last") };
        let golden = fixture.golden(&entry["logits"][key]).unwrap().values;
        let apart = distance(&logits[logits.len() - golden.len()..], &golden);
        assert!(apart <= tolerance, "{architecture} {kind} {name}: {apart}");
    }
}

/// Each layer in its own block: compares the residual stream that a stage would send to the next.
fn check_layers<B: Backend>(backend: &B, architecture: &str) {
    let fixture = Fixture::open(architecture);
    let checkpoint = Checkpoint::open(&fixture.primary().0).unwrap();
    let ends: Vec<u32> = (1..=checkpoint.description().layers.len() as u32).collect();
    let mut driver = Driver::split(backend, &checkpoint, None, &ends, Rank::SINGLE);
    let golden = fixture.golden(&fixture.manifest["layer_outputs"]["residual"]).unwrap();
    let mut stream = vec![];
    let (mut sequence, ids) = (Sequence::default(), fixture.prompt("short").ids);
    driver.advance_with(&mut [(&mut sequence, &ids)], &model::SingleRank, &mut |residual| stream.push(residual));
    assert_eq!(stream.len(), golden.shape[0]);
    let each = golden.values.len() / stream.len();
    for (layer, (ours, theirs)) in stream.iter().zip(golden.values.chunks_exact(each)).enumerate() {
        let apart = distance(ours, theirs);
        assert!(apart <= fixture.tolerance(), "{architecture} before layer {layer}: {apart}");
    }
}

/// A sequence's logits are equal bit for bit alone and in a batch, prefilled as a whole and decoded token by token.
fn check_batch<B: Backend>(backend: &B, architecture: &str, variant: &str, keep: Option<DType>) {
    let fixture = Fixture::open(architecture);
    let Some(folder) = fixture.variant(variant) else { return };
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut driver = Driver::new(backend, &checkpoint, keep);
    let prompts = ["ragged0", "ragged1", "ragged2"].map(|name| fixture.prompt(name).ids);
    let next: Vec<[u32; 1]> = prompts.iter().map(|ids| [ids[0]]).collect();

    let mut alone: [Vec<f32>; 2] = [vec![], vec![]];
    for (ids, next) in prompts.iter().zip(&next) {
        let (logits, mut sequence) = driver.prefill(ids, ids.len());
        alone[0].extend(logits);
        alone[1].extend(driver.advance(&mut [(&mut sequence, next)]));
        driver.close(sequence);
    }
    let mut sequences = [Sequence::default(), Sequence::default(), Sequence::default()];
    for (alone, tokens) in alone.iter().zip([prompts.each_ref().map(|p| &p[..]), [&next[0], &next[1], &next[2]]]) {
        let mut batch: Vec<_> = sequences.iter_mut().zip(tokens).collect();
        let together = driver.advance(&mut batch);
        let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(alone) == bits(&together), "{architecture} {variant} {keep:?}: another result beside others");
    }
}

/// Weights quantised at load give logits close to the f32 result; the tolerance depends on the format.
fn check_quantised<B: Backend>(backend: &B, architecture: &str, keep: DType, tolerance: f32) {
    let fixture = Fixture::open(architecture);
    let checkpoint = Checkpoint::open(&fixture.variant("f32").unwrap()).unwrap();
    let mut driver = Driver::new(backend, &checkpoint, Some(keep));
    let prompt = fixture.prompt("mid");
    let (logits, _) = driver.prefill(&prompt.ids, 64);
    let apart = distance(&logits, &fixture.logits(&prompt, "f32").unwrap().0.values);
    assert!(apart > 1e-3, "{architecture}: {keep} had no effect");
    assert!(apart <= tolerance, "{architecture} {keep}: {apart}");
}

/// Results are equal bit for bit with any number of threads.
fn check_threads(level: Level, architecture: &str, keep: Option<DType>) {
    let fixture = Fixture::open(architecture);
    let checkpoint = Checkpoint::open(&fixture.variant("bf16").unwrap()).unwrap();
    let ids = fixture.prompt("mid").ids;
    let logits = [1, 2, 3].map(|threads| {
        let backend = CpuBackend::new(CpuOptions { threads, level, kv: KvType::F32, ..CpuOptions::default() }).unwrap();
        Driver::new(&backend, &checkpoint, keep).prefill(&ids, 64).0
    });
    assert!(logits[0] == logits[1] && logits[0] == logits[2], "{architecture} {keep:?} on {level}");
}

/// The CPU backend on a level, if this machine supports it. It has one thread, because tests already run in parallel.
fn cpu(level: Level, kv: KvType) -> Option<CpuBackend> {
    let options = CpuOptions { threads: 1, level, kv, ..CpuOptions::default() };
    needs::level(level, Level::detect()).then(|| CpuBackend::new(options).unwrap())
}

macro_rules! backends {
    ($($name:ident: $make:expr;)+) => { $(mod $name {
        use super::*;

        #[test]
        fn llama_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "llama");
        }

        #[test]
        fn qwen2_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "qwen2");
        }

        #[test]
        fn qwen3_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "qwen3");
        }

        #[test]
        fn mistral_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "mistral");
        }

        #[test]
        fn mistral_of_odd_sizes_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "mistral_odd");
        }

        #[test]
        fn qwen3_moe_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "qwen3_moe");
        }

        #[test]
        fn gemma3_gives_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            check_primary(&backend, "gemma3");
        }

        #[test]
        fn bf16_weights_give_the_oracles_logits_and_tokens() {
            let Some(backend) = $make else { return };
            MODELS.iter().for_each(|architecture| check_bf16(&backend, architecture, "bf16"));
        }

        #[test]
        fn shards_are_one_model() {
            let Some(backend) = $make else { return };
            check_bf16(&backend, "llama", "bf16-sharded");
        }

        #[test]
        fn gguf_files_give_the_oracles_logits() {
            let Some(backend) = $make else { return };
            check_gguf(&backend, "llama", "f16", None, 2e-4);
            for architecture in ["llama", "qwen3"] {
                check_gguf(&backend, architecture, "q8_0", Some(DType::F32), 2e-4);
                check_gguf(&backend, architecture, "q8_0", None, QUANTISED_ACTIVATIONS);
            }
        }

        #[test]
        fn each_layer_hands_on_the_oracles_residual_stream() {
            let Some(backend) = $make else { return };
            MODELS.iter().for_each(|architecture| check_layers(&backend, architecture));
        }

        #[test]
        fn a_sequence_does_not_depend_on_what_else_is_in_the_batch() {
            let Some(backend) = $make else { return };
            for architecture in MODELS {
                check_batch(&backend, architecture, "f32", None);
                check_batch(&backend, architecture, "bf16", None);
            }
            check_batch(&backend, "llama", "f32", Some(DType::Q8_0));
        }

        #[test]
        fn weights_quantised_at_load_stay_near_the_oracle() {
            let Some(backend) = $make else { return };
            check_quantised(&backend, "llama", DType::Q8_0, 0.5);
            check_quantised(&backend, "qwen3", DType::Q8_0, 0.5);
        }
    })+ };
}

backends! {
    reference_backend: Some(Reference);
    cpu_scalar: cpu(Level::Scalar, KvType::F32);
    cpu_avx2: cpu(Level::Avx2, KvType::F32);
    cpu_avx512: cpu(Level::Avx512, KvType::F32);
    cpu_amx: cpu(Level::Amx, KvType::F32);
}

/// The KV type that bf16 models use on AMX.
#[test]
fn bf16_weights_with_split_keys_and_values_give_the_oracles_logits_and_tokens() {
    let Some(backend) = cpu(Level::Amx, KvType::Split) else { return };
    for architecture in MODELS {
        check_bf16(&backend, architecture, "bf16");
        check_batch(&backend, architecture, "bf16", None);
    }
}

#[test]
fn a_result_does_not_depend_on_the_number_of_threads() {
    for level in needs::levels(Level::ALL, Level::detect()) {
        for keep in [None, Some(DType::F32), Some(DType::Q8_0)] {
            check_threads(level, "llama", keep);
        }
        check_threads(level, "qwen3_moe", None);
        check_threads(level, "mistral_odd", None);
    }
}
