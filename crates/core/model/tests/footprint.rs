//! Checks that `Footprint` predicts the memory that loading allocates. It runs in its own process, and its tests one after
//! another, because the counting allocator counts all threads.
#![allow(clippy::unwrap_used)] // also in test helpers

use std::alloc::System;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use cap::Cap;
use kernels::cpu::{CpuBackend, CpuOptions, KvType, Level};
use kernels::{Backend, KvShape, PAGE_TOKENS, StepLimits};
use model::{Block, Checkpoint, Embedding, Footprint, Limits, LmHead, LoadError, LoadOptions, ModelPart};
use testing::driver::{Fixture, MODELS};
use types::{DType, LayerRange, Rank, WorldSize};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Held by the test that runs.
static COUNTING: Mutex<()> = Mutex::new(());

const LIMITS: Limits =
    Limits { step: StepLimits { rows: 200, sequences: 4, pages: 64 }, logit_rows: 70, kv_pages: 50, positions: 300 };

/// Bytes per layer that `Footprint` does not count: norms, names, lists, alignment. Relatively large in tiny models.
const UNCOUNTED_PER_LAYER: usize = 9 << 10;

/// The whole model, a stage in the middle of a chain, and the coordinator of a chain with and without layers.
fn check(backend: &CpuBackend, kv: KvType, path: &Path, keep: Option<DType>, rank: Rank) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let middle = LayerRange::new(1, checkpoint.description().layers.len() as u32).unwrap();
    let whole = ModelPart::whole(checkpoint.description());
    let parts = [whole, ModelPart::stage(middle), ModelPart::coordinator(1), ModelPart::coordinator(0)];
    let [whole, middle, coordinator, no_layers] =
        parts.map(|part| check_part(backend, kv, (&checkpoint, path), keep, part, rank));
    assert_eq!(whole.weights, middle.weights + coordinator.weights, "{}", path.display());
    assert_eq!((whole.kv, no_layers.kv), (middle.kv + coordinator.kv, 0));
    let none = ModelPart::stage(LayerRange::new(1, 1000).unwrap());
    let options = LoadOptions { keep, limits: LIMITS };
    assert!(matches!(Footprint::new(backend, &checkpoint, &options, none, rank), Err(LoadError::Layers { .. })));
}

fn check_part(
    backend: &CpuBackend,
    kv: KvType,
    (checkpoint, path): (&Checkpoint, &Path),
    keep: Option<DType>,
    part: ModelPart,
    rank: Rank,
) -> Footprint {
    let description = checkpoint.description();
    let options = LoadOptions { keep, limits: LIMITS };
    let what = format!("{} as {keep:?} with {kv:?}, {part:?}, rank {rank}", path.display());
    let footprint = Footprint::new(backend, checkpoint, &options, part, rank).unwrap();

    let before = MEMORY.allocated();
    let embedding_and_head = part.has_embedding_and_head.then(|| {
        let embedding = Embedding::load(backend, checkpoint, &options, rank).unwrap();
        let lm_head = LmHead::load(backend, checkpoint, &options, rank, &embedding).unwrap();
        (embedding, lm_head)
    });
    let block =
        part.layers.map(|layers| Block::load(backend, checkpoint, layers, rank, &options, &mut |_| {}).unwrap());
    let hidden = backend.output(LIMITS.step.rows, description.hidden).unwrap();
    let allocated = MEMORY.allocated() - before;
    drop(hidden);

    let outer_bytes =
        embedding_and_head.map_or(0, |(embedding, lm_head)| embedding.weight_bytes() + lm_head.weight_bytes());
    let weights = (outer_bytes + block.map_or(0, |block| block.weight_bytes())) as u64;
    // With tiles, bf16 weights take 12 or 16 bits; which is known only after packing.
    let is_bf16 = keep.is_none() && path.ends_with("model-bf16") && backend.level() == Level::Amx;
    let unknown = if is_bf16 { weights / 4 } else { 0 };
    assert!(footprint.weights.abs_diff(weights) <= unknown, "{what}: {weights} bytes, {footprint:?}");
    let (world, kv_heads) = (rank.world().get(), description.kv_heads);
    let own = if world > kv_heads { 1 } else { rank.shard(kv_heads).len() };
    let token = kv.token_bytes(KvShape { kv_heads: own, head_dim: description.head_dim });
    let layers = part.layers.map_or(0, LayerRange::count);
    assert_eq!(footprint.kv, (layers * LIMITS.kv_pages * PAGE_TOKENS * token) as u64, "{what}");
    let uncounted = (allocated as u64).checked_sub(footprint.total() - footprint.weights + weights);
    let uncounted_max = (UNCOUNTED_PER_LAYER * (layers + 1)) as u64;
    assert!(uncounted.is_some_and(|bytes| bytes <= uncounted_max), "{what}: {allocated} bytes, {footprint:?}");
    assert!(uncounted_max < footprint.working / 10, "{what}: nothing is shown by this tolerance");
    footprint
}

#[test]
fn a_load_takes_what_its_footprint_says() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let kinds = [KvType::F32, KvType::F16].into_iter().filter_map(|kv| {
        let backend = CpuBackend::new(CpuOptions { threads: 1, kv, ..CpuOptions::default() }).ok()?;
        Some((kv.on(backend.level())?, backend))
    });
    for (kv, backend) in kinds {
        for world in (1..=4).filter_map(WorldSize::new) {
            for rank in world.ranks() {
                for model in MODELS {
                    let fixture = Fixture::open(model);
                    for path in ["f32", "bf16"].into_iter().filter_map(|variant| fixture.variant(variant)) {
                        check(&backend, kv, &path, None, rank);
                    }
                }
                for (architecture, file) in
                    [("llama", "gguf/tiny-llama-q8_0.gguf"), ("qwen3", "gguf/tiny-qwen3-q8_0.gguf")]
                {
                    let fixture = Fixture::open(architecture);
                    check(&backend, kv, &fixture.path(file), None, rank);
                    check(&backend, kv, &fixture.variant("bf16").unwrap(), Some(DType::Q8_0), rank);
                }
            }
        }
    }
}

#[test]
fn an_embedding_can_stay_as_stored_while_the_rest_is_quantised() {
    let _counting = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let weights = |path: &Path, as_stored: bool| {
        let checkpoint = Checkpoint::open(path).unwrap();
        let checkpoint = if as_stored { checkpoint.with_embedding_as_stored() } else { checkpoint };
        let options = LoadOptions { keep: Some(DType::Q8_0), limits: LIMITS };
        let whole = ModelPart::whole(checkpoint.description());
        Footprint::new(&backend, &checkpoint, &options, whole, Rank::SINGLE).unwrap().weights
    };
    // One model with a separate head, and one whose head is tied to the embedding.
    for name in ["llama", "qwen3"] {
        let path = Fixture::open(name).variant("f32").unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let elements = (checkpoint.description().vocab * checkpoint.description().hidden) as u64;
        let saved = elements * 4 - elements / 32 * 34;
        assert_eq!(weights(&path, true) - weights(&path, false), saved, "{name}");
    }
}
