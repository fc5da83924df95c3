//! Tests the CUDA backend with whole steps: against a scalar reference, captured and replayed, alone and in batches. Without
//! a GPU each test says that it did not run.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)] // also in the helpers below

mod reference;

use kernels::cuda::{CudaBackend, CudaStep};
use kernels::{Backend, BackendError, MatrixSource, PAGE_TOKENS, Routing, Span, StepInputs, StepLimits};
use testing::decoder_stack::{Sizes, Stack, Weights, noise};
use testing::needs;
use types::DType;

const LIMITS: StepLimits = StepLimits { rows: 128, sequences: 4, pages: 64 };
const KV_PAGES: usize = 48;
const POSITIONS: usize = 512;

/// Shapes that differ in head size (each `attend` kernel), in query heads per KV head, and in odd remainders.
const SHAPES: [Sizes; 4] = [
    Sizes { layers: 2, hidden: 64, heads: 8, kv_heads: 4, head_dim: 16, inner: 96, vocab: 320, window: 40 },
    Sizes { layers: 2, hidden: 72, heads: 7, kv_heads: 1, head_dim: 40, inner: 88, vocab: 304, window: 33 },
    Sizes { layers: 3, hidden: 256, heads: 4, kv_heads: 4, head_dim: 128, inner: 512, vocab: 1000, window: 64 },
    Sizes { layers: 2, hidden: 128, heads: 12, kv_heads: 2, head_dim: 256, inner: 256, vocab: 520, window: 31 },
];

/// Difference from f64, relative to the standard deviation of the logits. It allows, with a margin, for rounding the operands
/// of products, keys and values to bf16 in these few layers. A wrong page, position or head gives about one.
const TOLERANCE: f64 = 0.08;

fn device() -> Option<CudaBackend> {
    match CudaBackend::open(0) {
        Err(error @ BackendError::NoDevice(_)) => needs::cuda(Err(error)),
        opened => Some(opened.unwrap()),
    }
}

/// One sequence: its tokens, how many have been computed, and its page table.
struct Sequence {
    tokens: Vec<u32>,
    computed: usize,
    pages: Vec<u32>,
}

impl Sequence {
    /// Takes every fourth page, backwards, so that no page table is ascending or contiguous.
    fn new(sizes: &Sizes, index: usize, len: usize) -> Self {
        let tokens = noise(len, 77 + index as u64).map(|x| ((x + 1.0) / 2.0 * (sizes.vocab - 1) as f32) as u32);
        let pages = (0..len.div_ceil(PAGE_TOKENS)).map(|page| (KV_PAGES - 1 - 4 * page - index) as u32);
        Self { tokens: tokens.collect(), computed: 0, pages: pages.collect() }
    }
}

/// A decoder stack on the device and its step.
struct Run<'a> {
    backend: &'a CudaBackend,
    stack: Stack<CudaBackend>,
    step: CudaStep,
    vocab: usize,
}

impl<'a> Run<'a> {
    fn new(backend: &'a CudaBackend, sizes: &Sizes, weights: &Weights) -> Self {
        let stack = Stack::load(backend, sizes, weights, LIMITS, KV_PAGES, POSITIONS).unwrap();
        Self { backend, stack, step: backend.step(LIMITS).unwrap(), vocab: sizes.vocab }
    }

    /// Fills the step with the next `rows` tokens of each sequence, all of them logit rows. Returns the number of rows.
    fn begin(&mut self, sequences: &[(&Sequence, usize)]) -> usize {
        let (mut tokens, mut spans, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        for &(sequence, rows) in sequences {
            spans.push(Span {
                row: tokens.len() as u32,
                rows: rows as u32,
                position: sequence.computed as u32,
                pages_start: pages.len() as u32,
                pages_len: sequence.pages.len() as u32,
            });
            tokens.extend(&sequence.tokens[sequence.computed..sequence.computed + rows]);
            pages.extend(&sequence.pages);
        }
        let logit_rows: Vec<u32> = (0..tokens.len() as u32).collect();
        let inputs = StepInputs { tokens: &tokens, spans: &spans, pages: &pages, logit_rows: &logit_rows };
        self.backend.begin(&mut self.step, inputs).unwrap();
        tokens.len()
    }

    fn forward(&mut self, rows: usize) {
        self.stack.forward(self.backend, &self.step, rows, rows);
    }

    fn logits(&self, rows: usize) -> Vec<Vec<f32>> {
        let mut out = vec![0.0; rows * self.vocab];
        self.backend.read(&self.stack.logits, 0..rows, &mut out).unwrap();
        out.chunks(self.vocab).map(<[f32]>::to_vec).collect()
    }

    /// Overwrites the logits with NaN, so that the next read can only pass with values computed after this.
    fn poison(&mut self, rows: usize) {
        self.backend.write(&mut self.stack.logits, &vec![f32::NAN; rows * self.vocab]).unwrap();
    }

    fn eager(&mut self, sequences: &[(&Sequence, usize)]) -> Vec<Vec<f32>> {
        let rows = self.begin(sequences);
        self.forward(rows);
        self.logits(rows)
    }
}

/// The largest difference, in units of the standard deviation of `want`.
fn distance(got: &[f32], want: &[f64]) -> f64 {
    let deviation = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let worst = |worst: f64, (got, want): (&f32, &f64)| match (f64::from(*got) - want).abs() {
        difference if difference.is_nan() => f64::INFINITY,
        difference => worst.max(difference),
    };
    got.iter().zip(want).fold(0.0, worst) / deviation
}

#[test]
fn ragged_chunks_on_scattered_pages_match_the_scalar_reference() {
    let Some(backend) = device() else { return };
    for sizes in SHAPES {
        let weights = Weights::noise(&sizes, sizes.layers);
        let mut run = Run::new(&backend, &sizes, &weights);
        let mut sequences = [Sequence::new(&sizes, 0, 70), Sequence::new(&sizes, 1, 37), Sequence::new(&sizes, 2, 300)];
        let logit_rows = sequences.each_ref().map(|sequence| reference::logits(&sizes, &weights, &sequence.tokens));
        let mut worst = 0f64;
        for chunks in [[1, 30, 63], [7, 6, 100], [62, 1, 64], [0, 0, 73]] {
            let batch: Vec<_> = sequences.iter().zip(chunks).filter(|(_, rows)| *rows > 0).collect();
            let mut got = run.eager(&batch).into_iter();
            for ((sequence, want), rows) in sequences.iter_mut().zip(&logit_rows).zip(chunks) {
                for _ in 0..rows {
                    let distance = distance(&got.next().unwrap(), &want[sequence.computed]);
                    assert!(distance < TOLERANCE, "dim {} position {}: {distance}", sizes.head_dim, sequence.computed);
                    worst = worst.max(distance);
                    sequence.computed += 1;
                }
            }
        }
        println!("head_dim {}: largest distance from f64 {worst:.4}", sizes.head_dim);
    }
}

#[test]
fn a_captured_decode_step_replays_with_other_tokens_positions_and_pages() {
    let Some(backend) = device() else { return };
    for sizes in SHAPES {
        let weights = Weights::noise(&sizes, sizes.layers);
        let mut run = Run::new(&backend, &sizes, &weights);
        let mut sequences: Vec<_> = (0..4).map(|index| Sequence::new(&sizes, index, 24 + 20 * index)).collect();
        let logit_rows: Vec<_> = sequences.iter().map(|s| reference::logits(&sizes, &weights, &s.tokens)).collect();
        for (index, sequence) in sequences.iter_mut().enumerate() {
            let rows = 10 + 20 * index;
            run.eager(&[(sequence, rows)]);
            sequence.computed = rows;
        }
        let rows = run.begin(&sequences[..3].iter().map(|s| (s, 1)).collect::<Vec<_>>());
        run.forward(rows); // chooses the products' algorithms
        let (stack, step) = (&mut run.stack, &run.step);
        let mut graph = backend.capture(|| stack.forward(&backend, step, rows, rows)).unwrap();
        // Sequences join, leave and change rows with one graph of three rows.
        let batches: [&[usize]; 6] = [&[0, 1, 2], &[3, 0, 1], &[2, 3, 1], &[1], &[3, 2], &[0, 2, 3]];
        for batch in batches {
            let chosen: Vec<_> = batch.iter().map(|&index| (&sequences[index], 1)).collect();
            run.poison(rows);
            let used = run.begin(&chosen);
            backend.replay(&mut graph);
            let replayed = run.logits(used);
            for (&index, got) in batch.iter().zip(&replayed) {
                let distance = distance(got, &logit_rows[index][sequences[index].computed]);
                assert!(distance < TOLERANCE, "dim {} sequence {index}: {distance}", sizes.head_dim);
            }
            assert_eq!(run.eager(&chosen), replayed, "the same ops one by one");
            batch.iter().for_each(|&index| sequences[index].computed += 1);
        }
    }
}

#[test]
fn a_decoded_row_does_not_depend_on_the_others_of_its_step() {
    let Some(backend) = device() else { return };
    for sizes in SHAPES {
        let weights = Weights::noise(&sizes, sizes.layers);
        let mut run = Run::new(&backend, &sizes, &weights);
        let mut sequences: Vec<_> = (0..4).map(|index| Sequence::new(&sizes, index, 64)).collect();
        for sequence in &mut sequences {
            run.eager(&[(sequence, 40)]);
            sequence.computed = 40;
        }
        let alone: Vec<_> = sequences.iter().map(|sequence| run.eager(&[(sequence, 1)]).remove(0)).collect();
        for others in [0, 7, 20] {
            // The last sequence has more than one row, as when a prefill chunk shares a step with decode rows.
            let mut batch: Vec<_> = sequences.iter().map(|sequence| (sequence, 1)).collect();
            batch[3].1 += others;
            let together = run.eager(&batch);
            assert_eq!(alone, together[..4], "head_dim {} beside {others} more rows", sizes.head_dim);
        }
    }
}

#[test]
fn a_graph_keeps_what_it_uses_alive() {
    let Some(backend) = device() else { return };
    let sizes = SHAPES[0];
    let weights = Weights::noise(&sizes, sizes.layers);
    let mut run = Run::new(&backend, &sizes, &weights);
    let sequence = Sequence::new(&sizes, 0, 4);
    let rows = run.begin(&[(&sequence, 4)]);
    run.forward(rows);
    let (stack, step) = (&mut run.stack, &run.step);
    let mut graph = backend.capture(|| stack.forward(&backend, step, rows, rows)).unwrap();
    drop(run);
    let _reused = backend.buffer(1024, 1024).unwrap();
    backend.replay(&mut graph);
    backend.synchronise().unwrap();
}

#[test]
fn a_page_that_does_not_exist_spoils_its_own_row_only_and_a_token_that_does_not_is_a_row_of_zeros() {
    let Some(backend) = device() else { return };
    let sizes = SHAPES[0];
    let weights = Weights::noise(&sizes, sizes.layers);
    let mut run = Run::new(&backend, &sizes, &weights);
    let mut sequences = [0, 1, 2].map(|index| Sequence::new(&sizes, index, 1));
    let logit_rows = reference::logits(&sizes, &weights, &sequences[1].tokens);
    sequences[0].tokens[0] = sizes.vocab as u32;
    sequences[2].pages[0] = KV_PAGES as u32;
    let got = run.eager(&sequences.each_ref().map(|sequence| (sequence, 1)));
    assert!(got[0].iter().all(|x| x.is_finite()));
    assert!(got[2].iter().all(|x| x.is_nan()));
    assert!(distance(&got[1], &logit_rows[0]) < TOLERANCE);
}

#[test]
fn what_is_not_there_yet_is_refused_at_load() {
    let Some(backend) = device() else { return };
    let routing = Routing { experts: 8, chosen: 2, normalise: true };
    assert!(backend.scratch(1, 64, 64, routing).is_err());
    let (bytes, dtype) = ([0; 4 * 256], DType::F32);
    let source = MatrixSource { dtype, rows: 1, cols: 256, row_stride: 1024, bytes: &bytes, keep: DType::Q4_K };
    assert!(backend.matrix(&[source]).is_err());
}
