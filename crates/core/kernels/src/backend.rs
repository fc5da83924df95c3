//! `Backend`: the small, closed set of ops that language models need, on buffers that the caller owns.
//!
//! It is not a tensor library: no graph, no autograd, no broadcasting rules. Three rules let one trait serve a CPU
//! and a GPU that replays captured graphs. An op of a step never allocates; it never waits for another op's result
//! on the host; and whatever varies from step to step (tokens, positions, page tables, lengths) is read from a
//! [`Backend::Step`] that [`Backend::begin`] fills once, before the first op. Only [`Backend::read`] waits.
//!
//! Shapes are checked with `assert!`: a mismatch is a bug, not a user error, because `model` derives every
//! shape from a checked description.

use std::ops::Range;

use types::DType;

/// Tokens in one page of the KV cache, on every backend.
pub const PAGE_TOKENS: usize = 32;

/// Elements of the largest attention head that any backend supports.
pub const HEAD_DIM_MAX: usize = 512;

#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("{rows}x{cols} weights cannot be held as {dtype}: a row must be a multiple of {} elements", dtype.block_elements())]
    Shape { rows: usize, cols: usize, dtype: DType },
    #[error("weights of {rows}x{cols} {dtype} need {needed} bytes, {got} were given")]
    ShortWeights { rows: usize, cols: usize, dtype: DType, needed: usize, got: usize },
    #[error("not enough memory for {bytes} bytes of {what}")]
    OutOfMemory { what: &'static str, bytes: usize },
    #[error("step of {rows} rows, {sequences} sequences, {pages} pages exceeds the limits {limits:?}")]
    StepTooLarge { rows: usize, sequences: usize, pages: usize, limits: StepLimits },
    #[error("token {token} is outside the vocabulary of {vocab}")]
    TokenOutOfRange { token: u32, vocab: usize },
    #[error("no CUDA device: {0}")]
    NoDevice(&'static str),
    #[error("{0}")]
    Device(String),
}

/// A matrix `[rows, cols]` in file layout: row-major, each row a whole number of `dtype` blocks.
/// Its rows are output features and its columns input features, as in `y = W x`.
#[derive(Clone, Copy)]
pub struct MatrixSource<'a> {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Bytes from the start of one row to the start of the next: more than a row's own bytes when this is a
    /// slice of columns.
    pub row_stride: usize,
    /// From the first byte of the first row to at least the last byte of the last row.
    pub bytes: &'a [u8],
    /// The format to keep it in. Differs from `dtype` when weights are quantised (or widened) at load.
    pub keep: DType,
}

impl<'a> MatrixSource<'a> {
    /// The bytes of one row. The caller has called `check`, so they are present.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let start = row * self.row_stride;
        let len = self.dtype.row_bytes(self.cols).expect("checked: whole blocks");
        &self.bytes[start..start + len]
    }

    /// Checks that `bytes` holds every row and that a row is a whole number of blocks in both formats.
    pub fn check(&self) -> Result<(), BackendError> {
        let Self { rows, cols, dtype, keep, .. } = *self;
        let row_bytes = dtype.row_bytes(cols).ok_or(BackendError::Shape { rows, cols, dtype })?;
        keep.row_bytes(cols).ok_or(BackendError::Shape { rows, cols, dtype: keep })?;
        let needed = match rows.checked_sub(1) {
            None => 0,
            Some(last) => last.saturating_mul(self.row_stride).saturating_add(row_bytes),
        };
        if self.bytes.len() < needed {
            return Err(BackendError::ShortWeights { rows, cols, dtype, needed, got: self.bytes.len() });
        }
        Ok(())
    }
}

/// Which elements of a head form a pair that RoPE rotates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// `(i, i + half)`: Hugging Face checkpoints, and most GGUF architectures.
    Halves,
    /// `(2 i, 2 i + 1)`: GGUF files of the llama family.
    Pairs,
}

/// The columns of the query, key or value heads in a row of a buffer: `count` heads of `dim` elements from column `first`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub first: usize,
    pub count: usize,
    pub dim: usize,
}

impl Heads {
    pub fn columns(&self) -> Range<usize> {
        self.first..self.first + self.count * self.dim
    }
}

/// The KV cache of one layer: `kv_heads` heads of `head_dim` for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub kv_heads: usize,
    pub head_dim: usize,
}

/// Attention of one layer. The query heads are a multiple of the KV heads.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub query: Heads,
    pub key: Heads,
    pub value: Heads,
    /// Multiplies `q . k`; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// With a window `w`, position `p` attends to the positions above `p - w` up to `p`.
    pub window: Option<usize>,
}

impl Attention {
    /// The query heads and the key heads, as one range of heads. Keys must directly follow queries.
    pub fn query_and_key(&self) -> Heads {
        assert_eq!(self.query.columns().end, self.key.first, "keys follow queries");
        Heads { count: self.query.count + self.key.count, ..self.query }
    }
}

/// What [`Backend::norm_rope_attend`] applies to queries and keys before attention: a norm within each head, if the model
/// has one, and RoPE.
pub struct NormRope<'a, B: Backend> {
    pub query_norm: Option<&'a B::Vector>,
    pub key_norm: Option<&'a B::Vector>,
    pub eps: f32,
    pub rope: &'a B::Rope,
}

/// The activation function of the gate in a gated feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// The size limits of one step. Buffers and step inputs are allocated once, for these limits.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    pub rows: usize,
    pub sequences: usize,
    /// Entries in all page tables together.
    pub pages: usize,
}

/// One sequence's rows in a step: consecutive rows, at consecutive positions from `position`.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub row: u32,
    pub rows: u32,
    pub position: u32,
    /// This sequence's page table is a range of [`StepInputs::pages`]. It covers the positions up to the last row.
    pub pages_start: u32,
    pub pages_len: u32,
}

/// Everything that varies from step to step. Row `i` is token `tokens[i]`, of the span that contains row `i`.
#[derive(Clone, Copy)]
pub struct StepInputs<'a> {
    /// Empty if the rows are activations from elsewhere, written by [`Backend::write`]: then nothing is embedded.
    pub tokens: &'a [u32],
    /// Spans in row order; together they cover all rows.
    pub spans: &'a [Span],
    pub pages: &'a [u32],
    /// Rows whose logits are computed, ascending.
    pub logit_rows: &'a [u32],
}

impl StepInputs<'_> {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        let rows = self.spans.iter().map(|span| span.rows as usize).sum();
        assert!(self.tokens.is_empty() || self.tokens.len() == rows, "spans cover all tokens");
        rows
    }
}

/// How many rows an op works on: decode rows (generated tokens) first, then prefill rows (prompt tokens).
///
/// A backend may multiply the two with quantised weights in different arithmetic, because prefill is compute-bound and
/// decode is memory-bound. A token's phase in its own sequence selects the arithmetic, so results do not depend on the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rows {
    pub decode: usize,
    pub prefill: usize,
}

impl Rows {
    pub fn decode(rows: usize) -> Self {
        Self { decode: rows, prefill: 0 }
    }

    pub fn prefill(rows: usize) -> Self {
        Self { decode: 0, prefill: rows }
    }

    pub fn all(self) -> usize {
        self.decode + self.prefill
    }
}

/// The router parameters of a mixture of experts.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    pub experts: usize,
    pub chosen: usize,
    /// Whether the weights of the chosen experts are scaled to sum to one.
    pub normalise: bool,
}

/// A gated feed-forward, of a layer or of one expert: `gate_up` has the gate's rows first, then the up projection's.
pub struct Gated<M> {
    pub gate_up: M,
    pub down: M,
}

pub trait Backend: Send + Sync + Sized + 'static {
    /// Activations `[rows, cols]`, row-major.
    type Buffer: Send;
    /// Weights of a linear layer, packed once into the layout that the backend's kernels read.
    type Matrix: Send + Sync;
    /// A short f32 vector: a norm's weight, a bias.
    type Vector: Send + Sync;
    /// RoPE angles of every position.
    type Rope: Send + Sync;
    /// The KV pages of one layer.
    type Kv: Send;
    /// The inputs of one step, in memory that the ops can read.
    type Step: Send;

    // Set-up. These functions allocate and may fail.

    fn buffer(&self, rows: usize, cols: usize) -> Result<Self::Buffer, BackendError>;
    /// A buffer that no linear layer reads. It may need less memory.
    fn output(&self, rows: usize, cols: usize) -> Result<Self::Buffer, BackendError> {
        self.buffer(rows, cols)
    }
    /// Packs `parts`, stacked along their rows; all have the same columns. Formats may differ between parts.
    fn matrix(&self, parts: &[MatrixSource<'_>]) -> Result<Self::Matrix, BackendError>;
    fn vector(&self, values: &[f32]) -> Result<Self::Vector, BackendError>;
    /// Angles `position * inv_freq[i]`, sines and cosines multiplied by `scale`, for positions below `positions`.
    fn rope(
        &self,
        inv_freq: &[f32],
        scale: f32,
        positions: usize,
        layout: RopeLayout,
    ) -> Result<Self::Rope, BackendError>;
    fn kv(&self, shape: KvShape, pages: usize) -> Result<Self::Kv, BackendError>;
    fn step(&self, limits: StepLimits) -> Result<Self::Step, BackendError>;

    /// Bytes that a packed matrix occupies.
    fn matrix_bytes(&self, matrix: &Self::Matrix) -> usize;

    // Bytes that set-up would allocate. These functions allocate nothing and do not read the sources' bytes.

    fn packed_bytes(&self, parts: &[MatrixSource<'_>]) -> usize;
    fn buffer_bytes(&self, rows: usize, cols: usize) -> usize;
    fn output_bytes(&self, rows: usize, cols: usize) -> usize {
        self.buffer_bytes(rows, cols)
    }
    fn rope_bytes(&self, frequencies: usize, positions: usize) -> usize;
    fn kv_bytes(&self, shape: KvShape, pages: usize) -> usize;
    fn scratch_bytes(&self, rows: usize, hidden: usize, inner: usize, routing: Routing) -> usize;

    // Before and after a step.

    /// Fills `step`. Page ids and token ids must be in range; `begin` does only cheap checks.
    fn begin(&self, step: &mut Self::Step, inputs: StepInputs<'_>) -> Result<(), BackendError>;
    /// The number of columns of a buffer.
    fn columns(&self, buffer: &Self::Buffer) -> usize;
    /// Overwrites the first rows of `buffer` with activations from elsewhere (an earlier stage, other ranks).
    fn write(&self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<(), BackendError>;
    /// Waits for all ops on `buffer` and copies rows to `out`.
    fn read(&self, buffer: &Self::Buffer, rows: Range<usize>, out: &mut [f32]) -> Result<(), BackendError>;

    /// The first rows of `buffer`, without a copy, if the backend keeps buffers in host memory.
    fn host_rows<'a>(&self, buffer: &'a Self::Buffer, rows: usize) -> Option<&'a [f32]> {
        let _ = (buffer, rows);
        None
    }
    /// The same, mutable.
    fn host_rows_mut<'a>(&self, buffer: &'a mut Self::Buffer, rows: usize) -> Option<&'a mut [f32]> {
        let _ = (buffer, rows);
        None
    }

    // Ops of a step. `rows` is the number of rows that an op works on. On an asynchronous backend all ops are asynchronous.

    /// `out[i] = scale * table[tokens[i] - first]` for every row of the step: `table` holds this rank's shard of the
    /// vocabulary, from token `first` on. A token in another rank's shard gives a row of zeros.
    fn embed(&self, step: &Self::Step, out: &mut Self::Buffer, table: &Self::Matrix, first: usize, scale: f32);
    /// `out[i] = x[logit_rows[i]]`.
    fn gather_logit_rows(&self, step: &Self::Step, out: &mut Self::Buffer, x: &Self::Buffer);
    /// `out = weight * x / sqrt(mean(x * x) + eps)`, row by row.
    fn rms_norm(&self, rows: Range<usize>, out: &mut Self::Buffer, x: &Self::Buffer, weight: &Self::Vector, eps: f32);
    /// The same within each head, in place.
    fn rms_norm_heads(&self, rows: usize, x: &mut Self::Buffer, heads: Heads, weight: &Self::Vector, eps: f32);
    /// `out = W x + bias`.
    fn linear(
        &self,
        rows: Rows,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        bias: Option<&Self::Vector>,
    );
    /// Applies RoPE to the heads of every row, in place.
    fn rotate(&self, step: &Self::Step, x: &mut Self::Buffer, heads: Heads, rope: &Self::Rope);
    /// Writes the step's keys and values, from `qkv`, to the sequences' KV pages. Then computes
    /// `out = softmax(scale * q k^T) v` for each query head; `out` is `[rows, heads * head_dim]`. No sequence reads a page
    /// that another sequence writes in the same step.
    fn attend(
        &self,
        step: &Self::Step,
        out: &mut Self::Buffer,
        qkv: &Self::Buffer,
        kv: &mut Self::Kv,
        attention: &Attention,
    );
    /// Applies norm and RoPE to the queries and keys in `qkv`, then runs [`Backend::attend`]. Keys directly follow queries.
    /// `qkv` is undefined afterwards. `consumer` is the matrix of the only op that reads `out`, so the backend may write
    /// `out` in the layout that this op needs.
    #[expect(clippy::too_many_arguments, reason = "four fused ops, to save memory traffic")]
    fn norm_rope_attend(
        &self,
        step: &Self::Step,
        rows: Rows,
        out: &mut Self::Buffer,
        qkv: &mut Self::Buffer,
        kv: &mut Self::Kv,
        attention: &Attention,
        norm_rope: &NormRope<'_, Self>,
        consumer: &Self::Matrix,
    ) {
        let _ = consumer;
        if let Some(norm) = norm_rope.query_norm {
            self.rms_norm_heads(rows.all(), qkv, attention.query, norm, norm_rope.eps);
        }
        if let Some(norm) = norm_rope.key_norm {
            self.rms_norm_heads(rows.all(), qkv, attention.key, norm, norm_rope.eps);
        }
        self.rotate(step, qkv, attention.query_and_key(), norm_rope.rope);
        self.attend(step, out, qkv, kv, attention);
    }
    /// `out[j] = activation(x[j]) * x[n + j]`, where a row of `x` has `2 n` columns.
    fn gate(&self, rows: usize, out: &mut Self::Buffer, x: &Self::Buffer, activation: Activation);
    /// `out = down(activation(gate x) * (up x))`. `inner` (`[rows, 2 n]`) and `gated` (`[rows, n]`) are scratch memory; their
    /// contents are undefined afterwards.
    #[allow(clippy::too_many_arguments)]
    fn feed_forward(
        &self,
        rows: Rows,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        weights: &Gated<Self::Matrix>,
        activation: Activation,
        inner: &mut Self::Buffer,
        gated: &mut Self::Buffer,
    ) {
        self.linear(rows, inner, x, &weights.gate_up, None);
        self.gate(rows.all(), gated, inner, activation);
        self.linear(rows, out, gated, &weights.down, None);
    }
    /// `x += y`.
    fn add(&self, rows: Range<usize>, x: &mut Self::Buffer, y: &Self::Buffer);
    /// `x += y` if there is a `y`, and then `out = weight * x / sqrt(mean(x * x) + eps)`, for the rows in `range`. If only
    /// one op reads `out`, `consumer` is its matrix, and the backend may write all rows of `out` in the layout that this op
    /// needs.
    #[expect(clippy::too_many_arguments, reason = "three fused ops, to save memory traffic")]
    fn add_rms_norm(
        &self,
        rows: Rows,
        range: Range<usize>,
        out: &mut Self::Buffer,
        x: &mut Self::Buffer,
        y: Option<&Self::Buffer>,
        weight: &Self::Vector,
        eps: f32,
        consumer: Option<&Self::Matrix>,
    ) {
        let _ = (rows, consumer);
        if let Some(y) = y {
            self.add(range.clone(), x, y);
        }
        self.rms_norm(range, out, x, weight, eps);
    }
    /// A mixture of experts: softmax over the router's `logits` `[rows, experts]`, the best `chosen` of them, and the
    /// weighted sum of their feed-forwards of `x`. `experts[i]` is expert `first + i`. Other ranks hold the other experts,
    /// which contribute nothing here.
    #[allow(clippy::too_many_arguments)]
    fn experts(
        &self,
        rows: Rows,
        out: &mut Self::Buffer,
        x: &Self::Buffer,
        logits: &Self::Buffer,
        routing: Routing,
        first: usize,
        experts: &[Gated<Self::Matrix>],
        activation: Activation,
        scratch: &mut Self::Scratch,
    );
    /// Scratch memory of [`Backend::experts`] for up to `rows` rows.
    type Scratch: Send;
    fn scratch(
        &self,
        rows: usize,
        hidden: usize,
        inner: usize,
        routing: Routing,
    ) -> Result<Self::Scratch, BackendError>;
}
