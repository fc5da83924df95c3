//! Whole models on a GPU: compared with the CPU's logits, and decoding with a captured graph. Without a GPU each test says
//! that it did not run.
#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // also in the helpers below

use std::error::Error;

use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::cuda::{CudaBackend, CudaBuffer, CudaStep};
use kernels::{Backend, BackendError, PAGE_TOKENS, Rows, Span, StepInputs, StepLimits};
use model::{Block, Checkpoint, Embedding, Limits, LmHead, LoadOptions, SingleRank};
use testing::driver::{Driver, Fixture, argmax};
use testing::needs;
use types::{DType, LayerRange, Rank};

/// All fixtures but the mixture of experts, which the CUDA backend does not support.
const DENSE: [&str; 5] = ["llama", "qwen2", "qwen3", "mistral", "gemma3"];

const LIMITS: StepLimits = StepLimits { rows: 64, sequences: 3, pages: 24 };
const SEQUENCE_PAGES: usize = 8;

fn device() -> Option<CudaBackend> {
    match CudaBackend::open(0) {
        Err(error @ BackendError::NoDevice(_)) => needs::cuda(Err(error)),
        opened => Some(opened.unwrap()),
    }
}

fn checkpoint(fixture: &Fixture) -> Checkpoint {
    Checkpoint::open(&fixture.variant("bf16").unwrap()).unwrap()
}

/// The fixtures' rule for bf16 arithmetic: the difference from f32 arithmetic on the same weights is at most twice that of
/// transformers in bf16, at the median and at the 99th percentile.
fn check(what: &str, fixture: &Fixture, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let mut apart: Vec<f32> = got.iter().zip(want).map(|(a, b)| (a - b).abs()).collect();
    assert!(apart.iter().all(|x| x.is_finite()), "{what}");
    apart.sort_by(f32::total_cmp);
    let at = |share: f64| apart[((apart.len() - 1) as f64 * share) as usize];
    println!("{what}: median {:.4}, 99th percentile {:.4}, largest {:.4}", at(0.5), at(0.99), at(1.0));
    for (share, name) in [(0.5, "bf16w_vs_bf16_p50"), (0.99, "bf16w_vs_bf16_p99")] {
        let theirs = fixture.manifest["measured"][name].as_f64().unwrap();
        assert!(f64::from(at(share)) <= 2.0 * theirs, "{what}: {} at {share}, theirs {theirs}", at(share));
    }
}

#[test]
fn logits_of_every_position_match_the_cpus() {
    let Some(backend) = device() else { return };
    let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
    for architecture in DENSE {
        let fixture = Fixture::open(architecture);
        let checkpoint = checkpoint(&fixture);
        let mut ours = Driver::new(&backend, &checkpoint, None);
        let mut theirs = Driver::new(&cpu, &checkpoint, Some(DType::F32));
        let (mut got, mut want) = (vec![], vec![]);
        for prompt in fixture.prompts() {
            let (logits, sequence) = ours.prefill(&prompt.ids, 64);
            ours.close(sequence);
            got.extend(logits);
            let (logits, sequence) = theirs.prefill(&prompt.ids, prompt.ids.len());
            theirs.close(sequence);
            want.extend(logits);
        }
        check(architecture, &fixture, &got, &want);
    }
}

/// A model on the device whose step can be captured. Sequence `i` has every third page from `i` on.
struct Decoder<'a> {
    backend: &'a CudaBackend,
    embedding: Embedding<CudaBackend>,
    lm_head: LmHead<CudaBackend>,
    block: Block<CudaBackend>,
    step: CudaStep,
    hidden: CudaBuffer,
    computed: [usize; 3],
}

impl<'a> Decoder<'a> {
    fn new(backend: &'a CudaBackend, from: &Checkpoint) -> Self {
        let description = from.description();
        let limits =
            Limits { step: LIMITS, logit_rows: 3, kv_pages: 3 * SEQUENCE_PAGES, positions: description.positions_max };
        let options = LoadOptions { keep: None, limits };
        let layers = LayerRange::new(0, description.layers.len() as u32).unwrap();
        let embedding = Embedding::load(backend, from, &options, Rank::SINGLE).unwrap();
        Self {
            backend,
            lm_head: LmHead::load(backend, from, &options, Rank::SINGLE, &embedding).unwrap(),
            embedding,
            block: Block::load(backend, from, layers, Rank::SINGLE, &options, &mut |_| {}).unwrap(),
            step: backend.step(LIMITS).unwrap(),
            hidden: backend.buffer(LIMITS.rows, description.hidden).unwrap(),
            computed: [0; 3],
        }
    }

    /// The next tokens of these sequences, in this order; the last row of each is a logit row.
    fn begin(&mut self, batch: &[(usize, &[u32])]) -> (usize, usize) {
        let (mut tokens, mut spans, mut pages, mut logit_rows) = (vec![], vec![], vec![], vec![]);
        for &(sequence, more) in batch {
            let position = self.computed[sequence];
            let pages_len = (position + more.len()).div_ceil(PAGE_TOKENS) as u32;
            let (row, rows, pages_start) = (tokens.len() as u32, more.len() as u32, pages.len() as u32);
            spans.push(Span { row, rows, position: position as u32, pages_start, pages_len });
            tokens.extend(more);
            pages.extend((0..pages_len).map(|page| 3 * page + sequence as u32));
            logit_rows.push(row + rows - 1);
        }
        let inputs = StepInputs { tokens: &tokens, spans: &spans, pages: &pages, logit_rows: &logit_rows };
        self.backend.begin(&mut self.step, inputs).unwrap();
        (tokens.len(), logit_rows.len())
    }

    /// Queues a step and returns the buffer of its logits.
    fn forward(&mut self, (rows, logit_rows): (usize, usize)) -> &CudaBuffer {
        let Self { backend, embedding, lm_head, block, step, hidden, .. } = self;
        embedding.embed(backend, step, rows, hidden, &SingleRank).unwrap();
        block.forward(backend, step, Rows::decode(rows), block.layers(), hidden, &SingleRank).unwrap();
        lm_head.logits(backend, step, logit_rows, hidden, &SingleRank).unwrap().unwrap()
    }
}

#[test]
fn a_model_decodes_from_a_captured_step_as_it_does_op_by_op() {
    let Some(backend) = device() else { return };
    let cpu = CpuBackend::new(CpuOptions::default()).unwrap();
    for architecture in DENSE {
        let fixture = Fixture::open(architecture);
        let checkpoint = checkpoint(&fixture);
        let mut theirs = Driver::new(&cpu, &checkpoint, Some(DType::F32));
        let mut captured = Decoder::new(&backend, &checkpoint);
        let mut eager = Decoder::new(&backend, &checkpoint);
        let vocab = captured.lm_head.vocab();
        let read = |buffer: &CudaBuffer, rows: usize| {
            let mut out = vec![0.0; rows * vocab];
            backend.read(buffer, 0..rows, &mut out).unwrap();
            out
        };

        let mut texts = ["ragged0", "ragged1", "ragged2"].map(|name| fixture.prompt(name).ids);
        let prompts = texts.each_ref().map(Vec::len);
        let mut decoded = texts.each_ref().map(|_| Vec::<f32>::new());
        for (sequence, text) in texts.iter_mut().enumerate() {
            for decoder in [&mut captured, &mut eager] {
                let sizes = decoder.begin(&[(sequence, text)]);
                let logits = read(decoder.forward(sizes), 1);
                decoder.computed[sequence] = text.len();
                decoded[sequence] = logits;
            }
            text.push(argmax(&decoded[sequence]));
        }

        let one = |texts: &[Vec<u32>; 3], sequence: usize| (sequence, [*texts[sequence].last().unwrap()]);
        let mut graph = None;
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]].into_iter().cycle().take(40) {
            let next = order.map(|sequence| one(&texts, sequence));
            let batch = next.each_ref().map(|(sequence, token)| (*sequence, &token[..]));
            let sizes = captured.begin(&batch);
            if graph.is_none() {
                captured.forward(sizes); // chooses the products' algorithms
                let record = || {
                    captured.forward(sizes);
                };
                graph = Some(backend.capture(record).unwrap());
                captured.begin(&batch);
            }
            backend.replay(graph.as_mut().unwrap());
            let replayed = read(captured.lm_head.logits_buffer().unwrap(), 3);
            let sizes = eager.begin(&batch);
            assert_eq!(replayed, read(eager.forward(sizes), 3), "{architecture}: the same ops one by one");
            for (sequence, logits) in order.into_iter().zip(replayed.chunks_exact(vocab)) {
                decoded[sequence].extend(logits);
                texts[sequence].push(argmax(logits));
                captured.computed[sequence] += 1;
                eager.computed[sequence] += 1;
            }
        }

        let (mut got, mut want) = (vec![], vec![]);
        for ((text, prompt), decoded) in texts.iter().zip(prompts).zip(decoded) {
            let known = &text[..text.len() - 1];
            let (logits, sequence) = theirs.prefill(known, known.len());
            theirs.close(sequence);
            got.extend(decoded);
            want.extend(&logits[(prompt - 1) * vocab..]);
        }
        check(&format!("{architecture} decoding from a graph"), &fixture, &got, &want);
    }
}

#[test]
fn a_mixture_of_experts_is_refused_at_load() {
    let Some(backend) = device() else { return };
    let checkpoint = checkpoint(&Fixture::open("qwen3_moe"));
    let limits = Limits { step: LIMITS, logit_rows: 3, kv_pages: SEQUENCE_PAGES, positions: 64 };
    let options = LoadOptions { keep: None, limits };
    let layers = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
    let refused = Block::load(&backend, &checkpoint, layers, Rank::SINGLE, &options, &mut |_| {}).err().unwrap();
    let cause = refused.source().unwrap().to_string();
    assert!(cause.contains("mixtures of experts"), "{refused}: {cause}");
}
