//! Compares every CPU op but `linear` (which has its own tests) on every level with a plain definition, at odd sizes.
#![allow(clippy::unwrap_used)] // test helpers

use kernels::cpu::{CpuBackend, CpuOptions, KvType, Level};
use kernels::{
    Activation, Attention, Backend, Heads, KvShape, MatrixSource, NormRope, PAGE_TOKENS, RopeLayout, Rows, Span,
    StepInputs, StepLimits,
};
use testing::needs;
use types::DType;

/// Deterministic pseudorandom numbers between -1 and 1.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn backend(level: Level, threads: usize, kv: KvType) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, level, kv, ..CpuOptions::default() }).unwrap()
}

fn filled(backend: &CpuBackend, cols: usize, values: &[f32]) -> kernels::cpu::Buffer {
    let mut buffer = backend.buffer(values.len() / cols, cols).unwrap();
    backend.write(&mut buffer, values).unwrap();
    buffer
}

fn contents(backend: &CpuBackend, buffer: &kernels::cpu::Buffer, rows: usize, cols: usize) -> Vec<f32> {
    let mut values = vec![0f32; rows * cols];
    backend.read(buffer, 0..rows, &mut values).unwrap();
    values
}

fn assert_close(what: &str, got: &[f32], want: &[f64], bound: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(*got) - want).abs() <= bound, "{what}, element {i}: {got}, not {want}");
    }
}

#[test]
fn norms_follow_their_formula_at_every_length() {
    for cols in [1, 7, 16, 31, 33, 576, 1000] {
        for rows in [1, 3, 40] {
            let (x, weight) = (noise(rows * cols, 1), noise(cols, 2));
            let want: Vec<f64> = x
                .chunks_exact(cols)
                .flat_map(|x| {
                    let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / cols as f64;
                    let scale = 1.0 / (mean + 1e-5).sqrt();
                    x.iter().zip(&weight).map(move |(x, w)| f64::from(*x) * scale * f64::from(*w)).collect::<Vec<_>>()
                })
                .collect();
            for level in needs::levels(Level::ALL, Level::detect()) {
                let backend = backend(level, 2, KvType::F32);
                let mut out = backend.buffer(rows, cols).unwrap();
                let weight = backend.vector(&weight).unwrap();
                backend.rms_norm(0..rows, &mut out, &filled(&backend, cols, &x), &weight, 1e-5);
                assert_close(&format!("{level} {cols}"), &contents(&backend, &out, rows, cols), &want, 3e-6);
            }
        }
    }
}

#[test]
fn a_sum_that_is_normed_for_its_reader_is_read_as_if_it_were_not() {
    let (cols, features) = (288, 33); // not whole superblocks, not whole tiles
    let weights: Vec<u8> = noise(features * cols, 1).into_iter().flat_map(f32::to_le_bytes).collect();
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
    for rows in [Rows::prefill(50), Rows::decode(1), Rows::decode(3), Rows { decode: 2, prefill: 20 }] {
        let all = rows.all();
        let [sums, terms, scales] = [(all * cols, 2), (all * cols, 3), (cols, 4)].map(|(len, seed)| noise(len, seed));
        let keeps = [DType::F32, DType::BF16, DType::Q8_0];
        for (level, keep) in
            needs::levels(Level::ALL, Level::detect()).into_iter().flat_map(|level| keeps.map(|keep| (level, keep)))
        {
            let backend = backend(level, 2, KvType::F32);
            let source =
                MatrixSource { dtype: DType::F32, rows: features, cols, row_stride: 4 * cols, bytes: &weights, keep };
            let (matrix, norm) = (backend.matrix(&[source]).unwrap(), backend.vector(&scales).unwrap());
            let read = |x: &kernels::cpu::Buffer| {
                let mut out = backend.output(all, features).unwrap();
                backend.linear(rows, &mut out, x, &matrix, None);
                bits(contents(&backend, &out, all, features))
            };
            let terms = filled(&backend, cols, &terms);
            let [mut want, mut got] = [&sums; 2].map(|sums| filled(&backend, cols, sums));
            let [mut plain, mut formed] = [(); 2].map(|()| backend.buffer(all, cols).unwrap());
            for y in [Some(&terms), None] {
                if let Some(y) = y {
                    backend.add(0..all, &mut want, y);
                }
                backend.rms_norm(0..all, &mut plain, &want, &norm, 1e-5);
                // In two row ranges, as ranks do.
                for made in [0..all / 2 / 16 * 16, all / 2 / 16 * 16..all] {
                    backend.add_rms_norm(rows, made, &mut formed, &mut got, y, &norm, 1e-5, Some(&matrix));
                }
                assert_eq!(read(&formed), read(&plain), "{rows:?} of {keep} on {level}, {}", y.is_some());
                let [got, want] = [&got, &want].map(|sums| bits(contents(&backend, sums, all, cols)));
                assert_eq!(got, want, "sums of {rows:?} on {level}");
            }
        }
    }
}

#[test]
fn heads_are_normed_one_by_one_and_the_rest_is_left_alone() {
    let (rows, cols, heads) = (2, 100, Heads { first: 10, count: 3, dim: 24 });
    let (x, weight) = (noise(rows * cols, 3), noise(24, 4));
    for level in needs::levels(Level::ALL, Level::detect()) {
        let backend = backend(level, 1, KvType::F32);
        let mut buffer = filled(&backend, cols, &x);
        backend.rms_norm_heads(rows, &mut buffer, heads, &backend.vector(&weight).unwrap(), 1e-6);
        let got = contents(&backend, &buffer, rows, cols);
        for (got, x) in got.chunks_exact(cols).zip(x.chunks_exact(cols)) {
            assert_eq!((&got[..10], &got[82..]), (&x[..10], &x[82..]));
            for (got, x) in got[10..82].chunks_exact(24).zip(x[10..82].chunks_exact(24)) {
                let mean = x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 24.0;
                let want: Vec<f64> =
                    x.iter().zip(&weight).map(|(x, w)| f64::from(x * w) / (mean + 1e-6).sqrt()).collect();
                assert_close(level.name(), got, &want, 3e-6);
            }
        }
    }
}

#[test]
fn gates_follow_their_formula_at_every_length() {
    for inner in [1, 15, 16, 24, 100] {
        let x: Vec<f32> = noise(3 * 2 * inner, 5).iter().map(|v| v * 20.0).collect();
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let gate = |x: f64| match activation {
                Activation::Silu => x / (1.0 + (-x).exp()),
                Activation::GeluTanh => {
                    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
                }
            };
            let want: Vec<f64> = x
                .chunks_exact(2 * inner)
                .flat_map(|row| (0..inner).map(|j| gate(row[j].into()) * f64::from(row[inner + j])).collect::<Vec<_>>())
                .collect();
            for level in needs::levels(Level::ALL, Level::detect()) {
                let backend = backend(level, 2, KvType::F32);
                let mut out = backend.buffer(3, inner).unwrap();
                backend.gate(3, &mut out, &filled(&backend, 2 * inner, &x), activation);
                assert_close(&format!("{level} {activation:?}"), &contents(&backend, &out, 3, inner), &want, 1e-4);
            }
        }
    }
}

/// The `qkv` rows of one sequence, and its page table in a scattered order.
struct Sequence {
    qkv: Vec<f32>,
    pages: Vec<u32>,
}

/// Heads that are whole vectors, half a vector, and neither.
const HEAD_SIZES: [usize; 6] = [20, 24, 32, 48, 100, 120];

const KV_HEADS: usize = 2;

/// The number of query heads. For odd head sizes it is such that a row is whole quantisation blocks, though a head is not.
fn query_heads(dim: usize) -> usize {
    if dim.is_multiple_of(16) { 6 } else { 8 }
}

fn attention(dim: usize, window: Option<usize>) -> (Attention, usize) {
    let (heads, kv_heads) = (query_heads(dim), KV_HEADS);
    let query = Heads { first: 0, count: heads, dim };
    let key = Heads { first: query.columns().end, count: kv_heads, dim };
    let value = Heads { first: key.columns().end, count: kv_heads, dim };
    (Attention { query, key, value, scale: 0.3, window }, value.columns().end)
}

/// Computes output rows from the rows of `qkv`; the counts are the rows of each sequence.
type Attending<'a> =
    &'a dyn Fn(&kernels::cpu::Step, &[usize], &mut kernels::cpu::Buffer, &mut kernels::cpu::Kv) -> Vec<f32>;

/// Runs sequences in steps; each step lists how many more tokens of each sequence to run.
fn in_steps(
    backend: &CpuBackend,
    dim: usize,
    all: &[Sequence],
    steps: &[Vec<usize>],
    run: Attending<'_>,
) -> Vec<Vec<f32>> {
    let (_, cols) = attention(dim, None);
    let mut kv = backend.kv(KvShape { kv_heads: KV_HEADS, head_dim: dim }, 64).unwrap();
    let mut step = backend.step(StepLimits { rows: 256, sequences: 8, pages: 64 }).unwrap();
    let mut done = vec![0; all.len()];
    let mut results = vec![Vec::new(); all.len()];
    for counts in steps {
        let (mut spans, mut pages, mut x) = (Vec::new(), Vec::new(), Vec::new());
        let mut row = 0;
        for (s, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let used = (done[s] + count).div_ceil(PAGE_TOKENS);
            let (position, pages_start, pages_len) = (done[s] as u32, pages.len() as u32, used as u32);
            spans.push(Span { row, rows: count as u32, position, pages_start, pages_len });
            pages.extend_from_slice(&all[s].pages[..used]);
            x.extend_from_slice(&all[s].qkv[done[s] * cols..(done[s] + count) * cols]);
            row += count as u32;
        }
        let tokens = vec![0; row as usize];
        backend
            .begin(&mut step, StepInputs { tokens: &tokens, spans: &spans, pages: &pages, logit_rows: &[] })
            .unwrap();
        let out = run(&step, counts, &mut filled(backend, cols, &x), &mut kv);
        let width = out.len() / row as usize;
        let mut row = 0;
        for (s, &count) in counts.iter().enumerate() {
            results[s].extend_from_slice(&out[row * width..(row + count) * width]);
            (row, done[s]) = (row + count, done[s] + count);
        }
    }
    results
}

fn attend(
    backend: &CpuBackend,
    dim: usize,
    window: Option<usize>,
    all: &[Sequence],
    steps: &[Vec<usize>],
) -> Vec<Vec<f32>> {
    let (attention, _) = attention(dim, window);
    let width = query_heads(dim) * dim;
    in_steps(backend, dim, all, steps, &|step, counts, x, kv| {
        let rows = counts.iter().sum();
        let mut out = backend.buffer(rows, width).unwrap();
        backend.attend(step, &mut out, x, kv, &attention);
        contents(backend, &out, rows, width)
    })
}

/// Applies norm and RoPE to queries and keys, runs attention, and multiplies the result with a matrix in format `keep`: with
/// fused ops or one op after the other. The first `generated` sequences are decode rows, the others prefill.
struct Projected {
    dim: usize,
    keep: DType,
    generated: usize,
    at_once: bool,
}

impl Projected {
    const FEATURES: usize = 20;

    fn weights(&self) -> Vec<f32> {
        noise(Self::FEATURES * query_heads(self.dim) * self.dim, 5)
    }

    fn run(&self, backend: &CpuBackend, all: &[Sequence], steps: &[Vec<usize>]) -> Vec<Vec<f32>> {
        let (dim, width) = (self.dim, query_heads(self.dim) * self.dim);
        let bytes: Vec<u8> = self.weights().into_iter().flat_map(f32::to_le_bytes).collect();
        let (dtype, rows, keep) = (DType::F32, Self::FEATURES, self.keep);
        let source = MatrixSource { dtype, rows, cols: width, row_stride: 4 * width, bytes: &bytes, keep };
        let reader = backend.matrix(&[source]).unwrap();
        let freqs: Vec<f32> = (0..dim / 2).map(|i| 1.0 / 10f32.powi(i as i32)).collect();
        let rope = backend.rope(&freqs, 1.0, 512, RopeLayout::Halves).unwrap();
        let [query_norm, key_norm] = [6, 7].map(|seed| backend.vector(&noise(dim, seed)).unwrap());
        let turn = NormRope { query_norm: Some(&query_norm), key_norm: Some(&key_norm), eps: 1e-5, rope: &rope };
        let (attention, _) = attention(dim, None);
        in_steps(backend, dim, all, steps, &|step, counts, x, kv| {
            let (generated, prompt) = counts.split_at(self.generated);
            let rows = Rows { decode: generated.iter().sum(), prefill: prompt.iter().sum() };
            let mut attended = backend.buffer(rows.all(), width).unwrap();
            if self.at_once {
                backend.norm_rope_attend(step, rows, &mut attended, x, kv, &attention, &turn, &reader);
            } else {
                backend.rms_norm_heads(rows.all(), x, attention.query, &query_norm, turn.eps);
                backend.rms_norm_heads(rows.all(), x, attention.key, &key_norm, turn.eps);
                backend.rotate(step, x, attention.query_and_key(), &rope);
                backend.attend(step, &mut attended, x, kv, &attention);
            }
            let mut out = backend.output(rows.all(), Self::FEATURES).unwrap();
            backend.linear(rows, &mut out, &attended, &reader, None);
            contents(backend, &out, rows.all(), Self::FEATURES)
        })
    }
}

fn plain(dim: usize, window: Option<usize>, qkv: &[f32]) -> Vec<f64> {
    let (attention, cols) = attention(dim, window);
    let rows: Vec<&[f32]> = qkv.chunks_exact(cols).collect();
    let mut out = Vec::new();
    for (p, row) in rows.iter().enumerate() {
        for head in 0..query_heads(dim) {
            let kv_head = head / (query_heads(dim) / KV_HEADS);
            let q = &row[head * dim..(head + 1) * dim];
            let low = window.map_or(0, |w| (p + 1).saturating_sub(w));
            let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
            let slice = |row: &'_ [f32], heads: Heads| row[heads.first + kv_head * dim..][..dim].to_vec();
            let scores: Vec<f64> = (low..=p).map(|j| 0.3f32 as f64 * dot(&slice(rows[j], attention.key))).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dim {
                let value = |j: usize| f64::from(slice(rows[low + j], attention.value)[d]);
                out.push(weights.iter().enumerate().map(|(j, w)| w * value(j)).sum::<f64>() / total);
            }
        }
    }
    out
}

fn sequences(dim: usize, lengths: &[usize]) -> Vec<Sequence> {
    let (_, cols) = attention(dim, None);
    let mut next = 0;
    lengths
        .iter()
        .enumerate()
        .map(|(s, &len)| {
            let count = len.div_ceil(PAGE_TOKENS) as u32;
            let mut pages: Vec<u32> = (next..next + count).collect();
            pages.reverse();
            next += count;
            Sequence { qkv: noise(len * cols, s as u32 + 10).iter().map(|v| v * 2.0).collect(), pages }
        })
        .collect()
}

/// The KV types that differ on a level.
fn kv_types(level: Level) -> &'static [KvType] {
    match level {
        Level::Amx => &[KvType::F32, KvType::Bf16, KvType::Split],
        _ => &[KvType::F32, KvType::F16],
    }
}

#[test]
fn attention_follows_its_formula_with_and_without_a_window() {
    let whole =
        [(16, 5, None), (48, 70, None), (64, 100, Some(33)), (128, 33, Some(1)), (32, 64, Some(64)), (512, 40, None)];
    let odd =
        [(2, 40, None), (20, 70, Some(37)), (24, 100, None), (100, 65, None), (120, 33, Some(5)), (510, 40, None)];
    for (dim, len, window) in whole.into_iter().chain(odd) {
        let all = sequences(dim, &[len]);
        let want = plain(dim, window, &all[0].qkv);
        for level in needs::levels(Level::ALL, Level::detect()) {
            for &kv in kv_types(level) {
                let bound = match kv {
                    KvType::F32 => 1e-5,
                    KvType::F16 => 3e-3,
                    KvType::Bf16 => 2.4e-2,
                    KvType::Split => 2e-4,
                };
                let bound = bound * (dim as f64 / 128.0).max(1.0); // scores are sums of `dim` products
                let got = attend(&backend(level, 2, kv), dim, window, &all, &[vec![len]]);
                assert_close(&format!("{level} {kv:?} {dim} {window:?}"), &got[0], &want, bound);
            }
        }
    }
}

#[test]
fn attention_has_the_same_bits_in_any_chunks_company_and_threads() {
    let window = Some(40);
    for (dim, level) in HEAD_SIZES
        .into_iter()
        .flat_map(|dim| needs::levels(Level::ALL, Level::detect()).into_iter().map(move |level| (dim, level)))
    {
        let all = sequences(dim, &[90, 7, 64]);
        for &kv in kv_types(level) {
            let alone: Vec<Vec<f32>> = all
                .iter()
                .map(|s| {
                    let only = [Sequence { qkv: s.qkv.clone(), pages: s.pages.clone() }];
                    let len = s.qkv.len() / attention(dim, None).1;
                    attend(&backend(level, 1, kv), dim, window, &only, &[vec![len]]).remove(0)
                })
                .collect();
            let chunks = [vec![1, 7, 10], vec![63, 0, 1], vec![25, 0, 52], vec![1, 0, 1]];
            assert_eq!(attend(&backend(level, 3, kv), dim, window, &all, &chunks), alone, "{level} {kv:?} {dim}");
        }
    }
}

#[test]
fn attention_has_the_same_bits_for_every_head_dimension_and_offset_of_a_tile() {
    let odd = [(20, Some(70)), (24, None), (100, Some(5)), (120, None), (250, None)];
    let whole = [(16, None), (48, Some(70)), (64, None), (128, None), (256, Some(5))];
    for (dim, window) in whole.into_iter().chain(odd) {
        let all = sequences(dim, &[150]);
        for level in needs::levels(Level::ALL, Level::detect()) {
            for &kv in kv_types(level) {
                let at_once = attend(&backend(level, 2, kv), dim, window, &all, &[vec![150]]);
                let chunks: Vec<Vec<usize>> = [1, 2, 3, 5, 11, 31, 40, 56, 1].map(|count| vec![count]).into();
                let chunked = attend(&backend(level, 1, kv), dim, window, &all, &chunks);
                assert_eq!(chunked, at_once, "{level} {kv:?} {dim}");
            }
        }
    }
}

/// Every level with every KV type, and with one or more threads.
fn all_backends() -> impl Iterator<Item = (String, CpuBackend)> {
    let each = needs::levels(Level::ALL, Level::detect())
        .into_iter()
        .flat_map(|level| kv_types(level).iter().map(move |&kv| (level, kv)));
    each.flat_map(|(level, kv)| {
        [1, 3].map(|threads| (format!("{level} {kv:?} {threads}"), backend(level, threads, kv)))
    })
}

#[test]
fn attention_that_turns_and_is_left_to_its_reader_is_as_if_done_in_order() {
    let chunks = [vec![1, 7, 10], vec![63, 0, 1], vec![25, 0, 52], vec![1, 0, 1]];
    for (what, backend) in all_backends() {
        let whole = [(32, DType::F32, 0), (48, DType::BF16, 0), (16, DType::BF16, 3), (64, DType::Q8_0, 3)];
        let odd = [(20, DType::BF16, 0), (24, DType::BF16, 3), (100, DType::Q8_0, 3), (120, DType::F16, 0)];
        for (dim, keep, generated) in whole.into_iter().chain(odd) {
            let all = sequences(dim, &[90, 7, 64]);
            let [at_once, in_order] =
                [true, false].map(|at_once| Projected { dim, keep, generated, at_once }.run(&backend, &all, &chunks));
            assert_eq!(at_once, in_order, "{what}, {keep} and heads of {dim}");
        }
    }
}

#[test]
fn rounded_attention_of_prompts_is_close_and_has_the_same_bits_in_any_chunks_and_company() {
    let keep = DType::Q8_0;
    let whole = [vec![90, 70, 64]];
    let cases = all_backends().flat_map(|(what, backend)| {
        let backend = std::rc::Rc::new(backend);
        [64, 20, 100].map(|dim| (format!("{what}, heads of {dim}"), std::rc::Rc::clone(&backend), dim))
    });
    for (what, backend, dim) in cases {
        let all = sequences(dim, &[90, 70, 64]);
        let run = |at_once, generated, steps: &[Vec<usize>]| {
            Projected { dim, keep, generated, at_once }.run(&backend, &all, steps)
        };
        let alone = run(true, 0, &whole);
        // With a decode row in the batch, results are not written in the layout for prefill rows.
        let company = run(true, 1, &whole);
        assert_eq!(company[1..], alone[1..], "{what}");
        let chunks = [vec![1, 7, 10], vec![63, 1, 1], vec![25, 61, 52], vec![1, 1, 1]];
        assert_eq!(run(true, 1, &chunks)[1..], alone[1..], "{what}");
        let exact = run(false, 0, &whole);
        let most = exact.iter().flatten().fold(0f32, |most, value| most.max(value.abs()));
        for (rounded, exact) in alone.iter().flatten().zip(exact.iter().flatten()) {
            assert!((rounded - exact).abs() <= 0.01 * most, "{what}: {rounded}, not {exact}");
        }
    }
}

#[test]
fn scores_that_rise_and_fall_by_far_are_weighed_as_the_formula_says() {
    let (dim, len) = (16, 400);
    let (attention, cols) = attention(dim, None);
    let mut all = sequences(dim, &[len]);
    for (position, row) in all[0].qkv.chunks_exact_mut(cols).enumerate() {
        // Keys grow up to the middle, several pages on, and shrink again; every eighth has the opposite sign. By then the
        // contribution of the first pages must have been rescaled to almost nothing.
        let size = 0.06 * position.min(len - position) as f32 * if position % 8 == 7 { -1.0 } else { 1.0 };
        row[attention.key.columns()].fill(size);
        row[attention.query.columns()].fill(1.0);
    }
    let want = plain(dim, None, &all[0].qkv);
    for level in needs::levels(Level::ALL, Level::detect()) {
        for &kv in kv_types(level) {
            // Scores reach 58 and have the relative error of their type; values reach 2.
            let bound = match kv {
                KvType::Bf16 => 0.8,
                KvType::F16 => 0.1,
                KvType::F32 | KvType::Split => 4e-3,
            };
            let got = attend(&backend(level, 1, kv), dim, None, &all, &[vec![len / 2], vec![len / 2]]);
            assert_close(&format!("{level} {kv:?}"), &got[0], &want, bound);
        }
    }
}

#[test]
fn what_a_former_owner_left_in_a_page_reaches_no_result() {
    [48, 20, 100].into_iter().for_each(check_what_a_former_owner_left);
}

fn check_what_a_former_owner_left(dim: usize) {
    let (_, cols) = attention(dim, None);
    let mut all = sequences(dim, &[64, 40]);
    all[1].pages = vec![1, 0];
    for (i, value) in all[0].qkv.iter_mut().enumerate() {
        *value = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX][i % 4];
    }
    let fresh = Sequence { qkv: all[1].qkv.clone(), pages: vec![1, 0] };
    assert_eq!(fresh.qkv.len(), 40 * cols);
    // The first sequence fills both pages; then the second reuses them, in one chunk and in several.
    for pieces in [vec![40], vec![1, 6, 24, 1, 1, 7]] {
        for level in needs::levels(Level::ALL, Level::detect()) {
            for &kv in kv_types(level) {
                let alone: Vec<Vec<usize>> = pieces.iter().map(|&count| vec![count]).collect();
                let want = attend(&backend(level, 2, kv), dim, None, std::slice::from_ref(&fresh), &alone);
                let after: Vec<Vec<usize>> =
                    [vec![64, 0]].into_iter().chain(pieces.iter().map(|&count| vec![0, count])).collect();
                let got = attend(&backend(level, 2, kv), dim, None, &all, &after);
                assert_eq!(got[1], want[0], "{level} {kv:?} {dim}");
                assert!(got[1].iter().all(|value| value.is_finite()), "{level} {kv:?} {dim}");
            }
        }
    }
}

#[test]
fn a_cache_for_tiles_is_refused_without_them() {
    for level in needs::levels(Level::ALL, Level::detect()) {
        for kv in [KvType::Bf16, KvType::Split] {
            let made = CpuBackend::new(CpuOptions { threads: 1, level, kv, ..CpuOptions::default() });
            assert_eq!(made.is_ok(), level == Level::Amx);
        }
    }
}

#[test]
fn heads_of_an_odd_or_too_large_size_are_refused() {
    let backend = backend(Level::Scalar, 1, KvType::F32);
    let kv = |head_dim| backend.kv(KvShape { kv_heads: 1, head_dim }, 1);
    assert!([2, 20, 512].into_iter().all(|size| kv(size).is_ok()));
    for size in [0, 15, 514] {
        let refused = kv(size).err().unwrap().to_string();
        assert!(refused.contains(&format!("heads of {size} elements")), "{refused}");
    }
}

#[test]
fn a_rotation_turns_pairs_by_the_angle_of_their_position() {
    let (rows, cols, heads) = (3, 40, Heads { first: 4, count: 2, dim: 16 });
    let freqs: Vec<f32> = (0..8).map(|i| 1.0 / 10f32.powi(i)).collect();
    for layout in [RopeLayout::Halves, RopeLayout::Pairs] {
        for level in needs::levels(Level::ALL, Level::detect()) {
            let backend = backend(level, 1, KvType::F32);
            let x = noise(rows * cols, 8);
            let mut buffer = filled(&backend, cols, &x);
            let mut step = backend.step(StepLimits { rows: 8, sequences: 2, pages: 8 }).unwrap();
            let spans = [Span { row: 0, rows: 3, position: 100, pages_start: 0, pages_len: 4 }];
            let inputs = StepInputs { tokens: &[0; 3], spans: &spans, pages: &[0, 1, 2, 3], logit_rows: &[] };
            backend.begin(&mut step, inputs).unwrap();
            let rope = backend.rope(&freqs, 1.5, 200, layout).unwrap();
            backend.rotate(&step, &mut buffer, heads, &rope);
            let got = contents(&backend, &buffer, rows, cols);
            let mut want: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
            for row in 0..rows {
                for head in 0..2 {
                    for (i, freq) in freqs.iter().enumerate() {
                        let at = row * cols + 4 + head * 16;
                        let (a, b) = match layout {
                            RopeLayout::Halves => (at + i, at + i + 8),
                            RopeLayout::Pairs => (at + 2 * i, at + 2 * i + 1),
                        };
                        let (sin, cos) = f64::from((100 + row) as f32 * freq).sin_cos();
                        let (p, q) = (f64::from(x[a]), f64::from(x[b]));
                        (want[a], want[b]) = (1.5 * (p * cos - q * sin), 1.5 * (q * cos + p * sin));
                    }
                }
            }
            assert_close(&format!("{level} {layout:?}"), &got, &want, 1e-6);
        }
    }
}

#[test]
fn rows_are_embedded_gathered_and_added() {
    let backend = backend(Level::detect(), 2, KvType::F32);
    let table: Vec<u8> =
        (0..6u8).flat_map(|row| [f32::from(row), f32::from(row) + 0.5].map(f32::to_le_bytes)).flatten().collect();
    let dtype = types::DType::F32;
    let source = MatrixSource { dtype, rows: 6, cols: 2, row_stride: 8, bytes: &table, keep: dtype };
    let table = backend.matrix(&[source]).unwrap();
    let mut step = backend.step(StepLimits { rows: 4, sequences: 1, pages: 1 }).unwrap();
    let spans = [Span { row: 0, rows: 3, position: 0, pages_start: 0, pages_len: 1 }];
    backend
        .begin(&mut step, StepInputs { tokens: &[5, 0, 2], spans: &spans, pages: &[0], logit_rows: &[0, 2] })
        .unwrap();
    let (mut x, mut y) = (backend.buffer(4, 2).unwrap(), backend.buffer(4, 2).unwrap());
    backend.embed(&step, &mut x, &table, 0, 2.0);
    backend.gather_logit_rows(&step, &mut y, &x);
    backend.add(0..2, &mut x, &y);
    assert_eq!(contents(&backend, &x, 3, 2), [20.0, 22.0, 4.0, 6.0, 4.0, 5.0]);
    // The same six table rows as the shard of tokens 2 to 7.
    backend.embed(&step, &mut x, &table, 2, 2.0);
    assert_eq!(contents(&backend, &x, 3, 2), [6.0, 7.0, 0.0, 0.0, 0.0, 1.0]);
    backend.embed(&step, &mut x, &backend.matrix(&[MatrixSource { rows: 0, bytes: &[], ..source }]).unwrap(), 0, 2.0);
    assert_eq!(contents(&backend, &x, 3, 2), [0.0; 6]);
}

#[test]
fn a_step_beyond_its_limits_is_refused() {
    let backend = backend(Level::detect(), 1, KvType::F32);
    let mut step = backend.step(StepLimits { rows: 2, sequences: 1, pages: 1 }).unwrap();
    let spans = [Span { row: 0, rows: 3, position: 0, pages_start: 0, pages_len: 1 }];
    assert!(
        backend.begin(&mut step, StepInputs { tokens: &[0; 3], spans: &spans, pages: &[0], logit_rows: &[] }).is_err()
    );
}
