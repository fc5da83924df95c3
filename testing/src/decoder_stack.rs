//! A small decoder with random weights on any backend. It tests a backend's ops in a whole step without the `model` crate.

use half::bf16;
use kernels::{
    Activation, Attention, Backend, BackendError, Heads, KvShape, MatrixSource, RopeLayout, Rows, StepLimits,
};
use types::DType;

#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub inner: usize,
    pub vocab: usize,
    /// The attention window of odd layers; even layers attend to all positions.
    pub window: usize,
}

impl Sizes {
    pub fn attention(&self, layer: usize) -> Attention {
        let &Self { heads, kv_heads, head_dim: dim, .. } = self;
        Attention {
            query: Heads { first: 0, count: heads, dim },
            key: Heads { first: heads * dim, count: kv_heads, dim },
            value: Heads { first: (heads + kv_heads) * dim, count: kv_heads, dim },
            scale: 1.0 / (dim as f32).sqrt(),
            window: (layer % 2 == 1).then_some(self.window),
        }
    }

    pub fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

pub const EPS: f32 = 1e-5;
pub const ROPE_BASE: f32 = 10_000.0;

/// Weights in file layout.
pub struct Table {
    pub rows: usize,
    pub cols: usize,
    pub bits: Vec<bf16>,
}

impl Table {
    /// Uniform values of the variance `1 / cols`, which keeps activations near one.
    fn noise(rows: usize, cols: usize, seed: u64) -> Self {
        let scale = (3.0 / cols as f32).sqrt();
        Self { rows, cols, bits: noise(rows * cols, seed).map(|x| bf16::from_f32(scale * x)).collect() }
    }

    fn load<B: Backend>(&self, backend: &B) -> Result<B::Matrix, BackendError> {
        let bytes: Vec<u8> = self.bits.iter().flat_map(|x| x.to_le_bytes()).collect();
        let (dtype, row_stride) = (DType::BF16, 2 * self.cols);
        let Self { rows, cols, .. } = *self;
        backend.matrix(&[MatrixSource { dtype, rows, cols, row_stride, bytes: &bytes, keep: dtype }])
    }
}

pub struct LayerWeights {
    pub norm: [Vec<f32>; 2],
    pub head_norm: [Vec<f32>; 2],
    pub qkv: Table,
    pub bias: Vec<f32>,
    pub out: Table,
    pub gate_up: Table,
    pub down: Table,
}

pub struct Weights {
    pub embedding: Table,
    /// Distinct layers; layer `i` of the stack has the weights `i % layers.len()`.
    pub layers: Vec<LayerWeights>,
    pub norm: Vec<f32>,
    pub head: Table,
}

impl Weights {
    pub fn noise(sizes: &Sizes, distinct_layers: usize) -> Self {
        let &Sizes { hidden, heads, head_dim, inner, vocab, .. } = sizes;
        let around_one = |len, seed| noise(len, seed).map(|x| 1.0 + 0.2 * x).collect::<Vec<_>>();
        let layer = |layer: usize| {
            let seed = 100 * layer as u64 + 10;
            LayerWeights {
                norm: [around_one(hidden, seed), around_one(hidden, seed + 1)],
                head_norm: [around_one(head_dim, seed + 2), around_one(head_dim, seed + 3)],
                qkv: Table::noise(sizes.qkv(), hidden, seed + 4),
                bias: noise(sizes.qkv(), seed + 5).map(|x| 0.3 * x).collect(),
                out: Table::noise(hidden, heads * head_dim, seed + 6),
                gate_up: Table::noise(2 * inner, hidden, seed + 7),
                down: Table::noise(hidden, inner, seed + 8),
            }
        };
        Self {
            embedding: Table::noise(vocab, hidden, 1),
            layers: (0..distinct_layers).map(layer).collect(),
            norm: around_one(hidden, 2),
            head: Table::noise(vocab, hidden, 3),
        }
    }
}

struct Layer<B: Backend> {
    norm: [B::Vector; 2],
    head_norm: [B::Vector; 2],
    qkv: B::Matrix,
    bias: B::Vector,
    out: B::Matrix,
    gate_up: B::Matrix,
    down: B::Matrix,
    kv: B::Kv,
    attention: Attention,
}

pub struct Stack<B: Backend> {
    embedding: B::Matrix,
    layers: Vec<Layer<B>>,
    norm: B::Vector,
    head: B::Matrix,
    rope: B::Rope,
    hidden: B::Buffer,
    normed: B::Buffer,
    qkv: B::Buffer,
    attended: B::Buffer,
    branch: B::Buffer,
    gate_up: B::Buffer,
    gated: B::Buffer,
    logit_rows: B::Buffer,
    pub logits: B::Buffer,
}

impl<B: Backend> Stack<B> {
    pub fn load(
        backend: &B,
        sizes: &Sizes,
        weights: &Weights,
        limits: StepLimits,
        pages: usize,
        positions: usize,
    ) -> Result<Self, BackendError> {
        let pair = |values: &[Vec<f32>; 2]| Ok([backend.vector(&values[0])?, backend.vector(&values[1])?]);
        let shape = KvShape { kv_heads: sizes.kv_heads, head_dim: sizes.head_dim };
        let layer = |index: usize| {
            let weights = &weights.layers[index % weights.layers.len()];
            Ok(Layer {
                norm: pair(&weights.norm)?,
                head_norm: pair(&weights.head_norm)?,
                qkv: weights.qkv.load(backend)?,
                bias: backend.vector(&weights.bias)?,
                out: weights.out.load(backend)?,
                gate_up: weights.gate_up.load(backend)?,
                down: weights.down.load(backend)?,
                kv: backend.kv(shape, pages)?,
                attention: sizes.attention(index),
            })
        };
        let buffer = |cols| backend.buffer(limits.rows, cols);
        Ok(Self {
            embedding: weights.embedding.load(backend)?,
            layers: (0..sizes.layers).map(layer).collect::<Result<_, BackendError>>()?,
            norm: backend.vector(&weights.norm)?,
            head: weights.head.load(backend)?,
            rope: backend.rope(&frequencies(sizes.head_dim), 1.0, positions, RopeLayout::Halves)?,
            hidden: buffer(sizes.hidden)?,
            normed: buffer(sizes.hidden)?,
            qkv: buffer(sizes.qkv())?,
            attended: buffer(sizes.heads * sizes.head_dim)?,
            branch: buffer(sizes.hidden)?,
            gate_up: buffer(2 * sizes.inner)?,
            gated: buffer(sizes.inner)?,
            logit_rows: buffer(sizes.hidden)?,
            logits: buffer(sizes.vocab)?,
        })
    }

    /// Queues a whole step of `rows` rows. The logits of its `logit_rows` logit rows are in `logits` afterwards.
    pub fn forward(&mut self, backend: &B, step: &B::Step, rows: usize, logit_rows: usize) {
        backend.embed(step, &mut self.hidden, &self.embedding, 0, 1.0);
        for layer in &mut self.layers {
            let attention = layer.attention;
            backend.rms_norm(0..rows, &mut self.normed, &self.hidden, &layer.norm[0], EPS);
            backend.linear(Rows::decode(rows), &mut self.qkv, &self.normed, &layer.qkv, Some(&layer.bias));
            for (heads, norm) in [attention.query, attention.key].into_iter().zip(&layer.head_norm) {
                backend.rms_norm_heads(rows, &mut self.qkv, heads, norm, EPS);
                backend.rotate(step, &mut self.qkv, heads, &self.rope);
            }
            backend.attend(step, &mut self.attended, &self.qkv, &mut layer.kv, &attention);
            backend.linear(Rows::decode(rows), &mut self.branch, &self.attended, &layer.out, None);
            backend.add(0..rows, &mut self.hidden, &self.branch);
            backend.rms_norm(0..rows, &mut self.normed, &self.hidden, &layer.norm[1], EPS);
            backend.linear(Rows::decode(rows), &mut self.gate_up, &self.normed, &layer.gate_up, None);
            backend.gate(rows, &mut self.gated, &self.gate_up, Activation::Silu);
            backend.linear(Rows::decode(rows), &mut self.branch, &self.gated, &layer.down, None);
            backend.add(0..rows, &mut self.hidden, &self.branch);
        }
        backend.gather_logit_rows(step, &mut self.logit_rows, &self.hidden);
        backend.rms_norm(0..logit_rows, &mut self.normed, &self.logit_rows, &self.norm, EPS);
        backend.linear(Rows::decode(logit_rows), &mut self.logits, &self.normed, &self.head, None);
    }
}

pub fn frequencies(head_dim: usize) -> Vec<f32> {
    (0..head_dim / 2).map(|i| ROPE_BASE.powf(-2.0 * i as f32 / head_dim as f32)).collect()
}

/// Pseudorandom values in -1..1 (splitmix64).
pub fn noise(len: usize, seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len).map(move |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}
