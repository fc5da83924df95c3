//! Embedding and head with the vocabulary split over ranks give the same bits as one process.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use collectives::shared_memory::ShmComm;
use collectives::{Communicator as _, GroupCollective};
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{Backend, Span, StepInputs, StepLimits};
use model::{Checkpoint, Collective, Embedding, Limits, LmHead, LoadOptions, SingleRank};
use serde_json::{Value, json};
use types::{DType, Rank, WorldSize};

use testing::shared_memory_group::{Group, bits, numbers};
use testing::watchdog::watched;

const HIDDEN: usize = 256;
const ROWS: usize = 5;
const LIMITS: Limits =
    Limits { step: StepLimits { rows: ROWS, sequences: 1, pages: 1 }, logit_rows: ROWS, kv_pages: 1, positions: 32 };

/// Writes a model folder without layers, which no test here needs.
fn write(folder: &Path, vocab: usize, tied: bool) {
    let config = json!({
        "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 256, "vocab_size": vocab, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let tables = ["model.embed_tokens.weight", "lm_head.weight"].map(|name| (name, vec![vocab, HIDDEN]));
    let (mut header, mut data) = (BTreeMap::<&str, Value>::new(), Vec::<u8>::new());
    for (seed, (name, shape)) in tables.into_iter().chain([("model.norm.weight", vec![HIDDEN])]).enumerate() {
        let start = data.len();
        let values = numbers(Rank::SINGLE, seed, shape.iter().product());
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        header.insert(name, json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] }));
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
}

/// Embedded tokens, and their logits without layers.
fn run(
    checkpoint: &Checkpoint,
    keep: Option<DType>,
    rank: Rank,
    collective: &dyn Collective<CpuBackend>,
) -> (Vec<f32>, Option<Vec<f32>>) {
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let options = LoadOptions { keep, limits: LIMITS };
    let embedding = Embedding::load(&backend, checkpoint, &options, rank).unwrap();
    let mut lm_head = LmHead::load(&backend, checkpoint, &options, rank, &embedding).unwrap();
    let mut step = backend.step(LIMITS.step).unwrap();
    let width = checkpoint.description().hidden;
    let mut hidden = backend.buffer(ROWS, width).unwrap();
    let last = lm_head.vocab() as u32 - 1;
    let tokens = [0, last, last / 2, last / 3, 0];
    let spans = [Span { row: 0, rows: ROWS as u32, position: 0, pages_start: 0, pages_len: 1 }];
    backend
        .begin(&mut step, StepInputs { tokens: &tokens, spans: &spans, pages: &[0], logit_rows: &[0, 1, 2, 3, 4] })
        .unwrap();
    embedding.embed(&backend, &step, ROWS, &mut hidden, collective).unwrap();
    let mut states = vec![0.0; ROWS * width];
    backend.read(&hidden, 0..ROWS, &mut states).unwrap();
    let vocab = lm_head.vocab();
    let logits = lm_head.logits(&backend, &step, ROWS, &hidden, collective).unwrap().map(|buffer| {
        let mut logits = vec![0.0; ROWS * vocab];
        backend.read(buffer, 0..ROWS, &mut logits).unwrap();
        logits
    });
    (states, logits)
}

fn check(checkpoint: &Checkpoint, keep: Option<DType>, world: u16) {
    let (states, logits) = run(checkpoint, keep, Rank::SINGLE, &SingleRank);
    let logits = logits.unwrap();
    let vocab = checkpoint.description().vocab;
    let what = format!("{vocab} tokens as {keep:?} on {world} ranks");
    // The segment holds two rows of logits, or one of the hidden states.
    let group = Group::new(world, HIDDEN.max(2 * vocab));
    let run = |comm: ShmComm| (comm.rank(), run(checkpoint, keep, comm.rank(), &GroupCollective::over(comm)));
    let comms: Vec<_> = (0..world).map(|index| group.comm(index)).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| run(comm))).collect();
        for rank in ranks {
            let (rank, (found, gathered)) = rank.join().unwrap();
            assert!(found == states, "{what}: the embedding of rank {rank}");
            let expected = (rank.index() == 0).then(|| bits(&logits));
            assert!(gathered.map(|logits| bits(&logits)) == expected, "{what}: the logits on rank {rank}");
        }
    });
}

#[test]
fn a_vocabulary_sharded_over_ranks_gives_the_bits_of_a_whole_one() {
    watched(|| {
        for tied in [true, false] {
            // Fewer tokens than ranks, uneven shards, more than a panel per rank.
            for vocab in [1, 2, 3, 33, 1003] {
                let folder = tempfile::tempdir().unwrap();
                write(folder.path(), vocab, tied);
                let checkpoint = Checkpoint::open(folder.path()).unwrap();
                for keep in [None, Some(DType::Q8_0), Some(DType::Q4_K), Some(DType::Q6_K)] {
                    [2, 3, 4].into_iter().for_each(|world| check(&checkpoint, keep, world));
                }
            }
        }
    });
}

#[test]
fn the_vocabulary_of_stored_formats_is_sharded_too() {
    watched(|| {
        let oracle = testing::oracle("");
        for path in ["gemma3/model-bf16", "qwen3_moe/model-bf16", "llama/gguf/tiny-llama-q8_0.gguf"] {
            let checkpoint = Checkpoint::open(&oracle.join(path)).unwrap();
            [3, 4].into_iter().for_each(|world| check(&checkpoint, None, world));
        }
    });
}

#[test]
fn the_vocabulary_is_held_once_by_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 960, false);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
    let bytes = |rank| {
        let options = LoadOptions { keep: None, limits: LIMITS };
        let embedding = Embedding::load(&backend, &checkpoint, &options, rank).unwrap();
        let lm_head = LmHead::load(&backend, &checkpoint, &options, rank, &embedding).unwrap();
        embedding.weight_bytes() + lm_head.weight_bytes()
    };
    for world in [2, 3, 4] {
        let each: Vec<usize> = WorldSize::new(world).unwrap().ranks().map(bytes).collect();
        assert_eq!(each, vec![bytes(Rank::SINGLE) / usize::from(world); usize::from(world)]);
    }
}
