//! Models whose head size is not a multiple of the vector size, on every level, with every weight format and KV type.

use kernels::cpu::{CpuBackend, CpuOptions, DecodeMath, KvType, Level, PrefillMath};
use model::Checkpoint;
use testing::driver::{Driver, distance};
use testing::needs;
use testing::random_model::{ODD_HEADS, PROMPT, Sizes};
use testing::reference::Reference;
use types::DType;

/// The allowed difference of logits, whose standard deviation is about 1, from those of the reference.
fn tolerance(keep: Option<DType>, kv: KvType) -> f32 {
    let cache = match kv {
        KvType::F32 => 2e-5,
        KvType::Split => 2e-4,
        KvType::F16 => 5e-3,
        KvType::Bf16 => 5e-2,
    };
    let activations = if keep.is_some_and(DType::is_quantised) { 0.25 } else { 0.0 };
    cache + activations
}

/// Logits on every level are close to the reference's. They are equal bit for bit for any chunking and, except with tiles,
/// on all levels.
fn check(sizes: Sizes, stored: DType, keep: Option<DType>) {
    let folder = tempfile::tempdir().unwrap();
    sizes.write(folder.path(), stored);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let (want, _) = Driver::new(&Reference, &checkpoint, keep).prefill(&PROMPT, PROMPT.len());
    for kv in [KvType::F32, KvType::F16, KvType::Bf16, KvType::Split] {
        let mut first: Option<Vec<f32>> = None;
        for level in needs::levels(Level::ALL, Level::detect()).into_iter().filter(|level| kv.on(*level) == Some(kv)) {
            let (decode, prompt) = (DecodeMath::Int8, PrefillMath::Int8);
            let backend = CpuBackend::new(CpuOptions { threads: 2, level, kv, decode, prompt }).unwrap();
            let mut driver = Driver::new(&backend, &checkpoint, keep);
            let what = format!("{sizes:?}, {stored} as {keep:?}, {level} with {kv:?}");
            let (logits, sequence) = driver.prefill(&PROMPT, PROMPT.len());
            driver.close(sequence);
            let apart = distance(&logits, &want);
            // Tiles multiply bf16 weights with activations in two bf16 parts, of 16 bits together.
            let tiles = if level == Level::Amx && stored == DType::BF16 { 2e-4 } else { 0.0 };
            assert!(apart <= tolerance(keep, kv) + tiles, "{what}: {apart}");
            assert!(driver.prefill(&PROMPT, 7).0 == logits, "{what}: another result in chunks");
            if level < Level::Amx {
                assert!(first.get_or_insert_with(|| logits.clone()) == &logits, "{what}: not as at other levels");
            }
        }
    }
}

#[test]
fn plain_weights() {
    for size in ODD_HEADS {
        for stored in [DType::F32, DType::F16, DType::BF16] {
            check(Sizes::of_heads(size), stored, None);
        }
    }
}

#[test]
fn weights_in_blocks_that_heads_cut() {
    for size in ODD_HEADS {
        check(Sizes::of_heads(size), DType::F32, Some(DType::Q8_0));
    }
    check(Sizes::of_heads(20), DType::F32, Some(DType::Q4_0));
    for keep in [DType::Q4_K, DType::Q6_K] {
        check(Sizes::of_heads_in_superblocks(20), DType::F32, Some(keep));
    }
}
