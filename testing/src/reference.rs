//! `Reference`: the simplest backend. Every op is its formula on `Vec<f32>`, with sums in f64 and all weights dequantised.
//! It is slow, and the fast backends are compared with it.

use std::ops::Range;

use kernels::{
    Activation, Attention, Backend, BackendError, Gated, Heads, KvShape, MatrixSource, PAGE_TOKENS, RopeLayout,
    Routing, Rows, Span, StepInputs, StepLimits, quant,
};
use types::DType;

pub struct Reference;

/// `[rows, cols]`, row-major.
#[derive(Clone)]
pub struct Table {
    pub rows: usize,
    pub cols: usize,
    pub values: Vec<f32>,
}

pub struct Rope {
    inv_freq: Vec<f32>,
    scale: f32,
    positions: usize,
    layout: RopeLayout,
}

/// `[pages, PAGE_TOKENS, kv_heads * head_dim]`, twice.
pub struct Kv {
    shape: KvShape,
    keys: Vec<f32>,
    values: Vec<f32>,
}

pub struct Step {
    limits: StepLimits,
    tokens: Vec<u32>,
    spans: Vec<Span>,
    pages: Vec<u32>,
    logit_rows: Vec<u32>,
}

/// Has no memory; it only checks that it was allocated for enough rows.
pub struct Scratch {
    rows: usize,
}

impl Table {
    fn zeros(rows: usize, cols: usize) -> Self {
        Self { rows, cols, values: vec![0.0; rows * cols] }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.cols..][..self.cols]
    }

    fn times(&self, x: &[f32], out: &mut [f32]) {
        assert_eq!((self.rows, self.cols), (out.len(), x.len()));
        for (row, out) in out.iter_mut().enumerate() {
            *out = dot(self.row(row), x) as f32;
        }
    }
}

impl Step {
    /// Every row with its span and its position.
    fn rows(&self) -> impl Iterator<Item = (usize, &Span, usize)> {
        self.spans
            .iter()
            .flat_map(|span| (0..span.rows).map(move |i| ((span.row + i) as usize, span, (span.position + i) as usize)))
    }

    /// The slot of a sequence's position in a layer's pages, in tokens.
    fn slot(&self, span: &Span, position: usize) -> usize {
        let table = &self.pages[span.pages_start as usize..][..span.pages_len as usize];
        table[position / PAGE_TOKENS] as usize * PAGE_TOKENS + position % PAGE_TOKENS
    }
}

impl Backend for Reference {
    type Buffer = Table;
    type Matrix = Table;
    type Vector = Vec<f32>;
    type Rope = Rope;
    type Kv = Kv;
    type Step = Step;
    type Scratch = Scratch;

    fn buffer(&self, rows: usize, cols: usize) -> Result<Table, BackendError> {
        Ok(Table::zeros(rows, cols))
    }

    fn matrix(&self, parts: &[MatrixSource<'_>]) -> Result<Table, BackendError> {
        let cols = parts[0].cols;
        let mut values = Vec::new();
        for part in parts {
            part.check()?;
            assert_eq!(part.cols, cols);
            for row in 0..part.rows {
                let mut row_values = vec![0.0; cols];
                quant::dequantise(part.dtype, part.row(row), &mut row_values);
                if part.keep != part.dtype && part.keep != DType::F32 {
                    let mut kept = vec![0; part.keep.row_bytes(cols).expect("checked")];
                    quant::quantise(part.keep, &row_values, &mut kept);
                    quant::dequantise(part.keep, &kept, &mut row_values);
                }
                values.extend_from_slice(&row_values);
            }
        }
        Ok(Table { rows: parts.iter().map(|part| part.rows).sum(), cols, values })
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(values.to_vec())
    }

    fn rope(&self, inv_freq: &[f32], scale: f32, positions: usize, layout: RopeLayout) -> Result<Rope, BackendError> {
        Ok(Rope { inv_freq: inv_freq.to_vec(), scale, positions, layout })
    }

    fn kv(&self, shape: KvShape, pages: usize) -> Result<Kv, BackendError> {
        let len = pages * PAGE_TOKENS * shape.kv_heads * shape.head_dim;
        // Initialised with NaN, so that reading beyond a sequence is detected.
        Ok(Kv { shape, keys: vec![f32::NAN; len], values: vec![f32::NAN; len] })
    }

    fn step(&self, limits: StepLimits) -> Result<Step, BackendError> {
        Ok(Step { limits, tokens: vec![], spans: vec![], pages: vec![], logit_rows: vec![] })
    }

    fn scratch(&self, rows: usize, _: usize, _: usize, _: Routing) -> Result<Scratch, BackendError> {
        Ok(Scratch { rows })
    }

    fn matrix_bytes(&self, matrix: &Table) -> usize {
        size_of_val(matrix.values.as_slice())
    }

    fn packed_bytes(&self, parts: &[MatrixSource<'_>]) -> usize {
        parts.iter().map(|part| part.rows * part.cols * size_of::<f32>()).sum()
    }

    fn buffer_bytes(&self, rows: usize, cols: usize) -> usize {
        rows * cols * size_of::<f32>()
    }

    fn rope_bytes(&self, frequencies: usize, _: usize) -> usize {
        frequencies * size_of::<f32>()
    }

    fn kv_bytes(&self, shape: KvShape, pages: usize) -> usize {
        2 * pages * PAGE_TOKENS * shape.kv_heads * shape.head_dim * size_of::<f32>()
    }

    fn scratch_bytes(&self, _: usize, _: usize, _: usize, _: Routing) -> usize {
        0
    }

    fn begin(&self, step: &mut Step, inputs: StepInputs<'_>) -> Result<(), BackendError> {
        let limits = step.limits;
        let (rows, sequences, pages) = (inputs.rows(), inputs.spans.len(), inputs.pages.len());
        if rows > limits.rows || sequences > limits.sequences || pages > limits.pages {
            return Err(BackendError::StepTooLarge { rows, sequences, pages, limits });
        }
        let mut next = 0;
        for span in inputs.spans {
            assert_eq!(span.row, next, "spans cover the rows in order");
            next += span.rows;
            assert!((span.position + span.rows) as usize <= span.pages_len as usize * PAGE_TOKENS);
        }
        step.tokens = inputs.tokens.to_vec();
        step.spans = inputs.spans.to_vec();
        step.pages = inputs.pages.to_vec();
        step.logit_rows = inputs.logit_rows.to_vec();
        Ok(())
    }

    fn write(&self, buffer: &mut Table, values: &[f32]) -> Result<(), BackendError> {
        buffer.values[..values.len()].copy_from_slice(values);
        Ok(())
    }

    fn columns(&self, buffer: &Table) -> usize {
        buffer.cols
    }

    fn read(&self, buffer: &Table, rows: Range<usize>, out: &mut [f32]) -> Result<(), BackendError> {
        out.copy_from_slice(&buffer.values[rows.start * buffer.cols..rows.end * buffer.cols]);
        Ok(())
    }

    fn embed(&self, step: &Step, out: &mut Table, table: &Table, first: usize, scale: f32) {
        for (row, token) in step.tokens.iter().enumerate() {
            out.row_mut(row).fill(0.0);
            let Some(held) = (*token as usize).checked_sub(first).filter(|row| *row < table.rows) else { continue };
            for (out, value) in out.row_mut(row).iter_mut().zip(table.row(held)) {
                *out = scale * value;
            }
        }
    }

    fn gather_logit_rows(&self, step: &Step, out: &mut Table, x: &Table) {
        for (row, logit_rows) in step.logit_rows.iter().enumerate() {
            out.row_mut(row).copy_from_slice(x.row(*logit_rows as usize));
        }
    }

    fn rms_norm(&self, rows: Range<usize>, out: &mut Table, x: &Table, weight: &Vec<f32>, eps: f32) {
        for row in rows {
            out.row_mut(row).copy_from_slice(x.row(row));
            normalise(out.row_mut(row), weight, eps);
        }
    }

    fn rms_norm_heads(&self, rows: usize, x: &mut Table, heads: Heads, weight: &Vec<f32>, eps: f32) {
        for row in 0..rows {
            for head in x.row_mut(row)[heads.columns()].chunks_exact_mut(heads.dim) {
                normalise(head, weight, eps);
            }
        }
    }

    fn linear(&self, rows: Rows, out: &mut Table, x: &Table, weight: &Table, bias: Option<&Vec<f32>>) {
        for row in 0..rows.all() {
            weight.times(x.row(row), out.row_mut(row));
            if let Some(bias) = bias {
                sum(out.row_mut(row), bias);
            }
        }
    }

    fn rotate(&self, step: &Step, x: &mut Table, heads: Heads, rope: &Rope) {
        let half = rope.inv_freq.len();
        assert_eq!(2 * half, heads.dim);
        for (row, _, position) in step.rows() {
            assert!(position < rope.positions);
            for head in x.row_mut(row)[heads.columns()].chunks_exact_mut(heads.dim) {
                for (i, inv_freq) in rope.inv_freq.iter().enumerate() {
                    let (a, b) = match rope.layout {
                        RopeLayout::Halves => (i, i + half),
                        RopeLayout::Pairs => (2 * i, 2 * i + 1),
                    };
                    let (sin, cos) = (position as f64 * f64::from(*inv_freq)).sin_cos();
                    let (sin, cos) = (sin as f32 * rope.scale, cos as f32 * rope.scale);
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
                }
            }
        }
    }

    fn attend(&self, step: &Step, out: &mut Table, qkv: &Table, kv: &mut Kv, attention: &Attention) {
        let (dim, width) = (kv.shape.head_dim, kv.shape.kv_heads * kv.shape.head_dim);
        for (row, span, position) in step.rows() {
            let at = step.slot(span, position) * width;
            kv.keys[at..][..width].copy_from_slice(&qkv.row(row)[attention.key.columns()]);
            kv.values[at..][..width].copy_from_slice(&qkv.row(row)[attention.value.columns()]);
        }
        let group = attention.query.count / kv.shape.kv_heads;
        for (row, span, position) in step.rows() {
            let first = attention.window.map_or(0, |window| (position + 1).saturating_sub(window));
            for head in 0..attention.query.count {
                let query = &qkv.row(row)[attention.query.columns()][head * dim..][..dim];
                let at = |position| step.slot(span, position) * width + head / group * dim;
                let scores = (first..=position)
                    .map(|seen| f64::from(attention.scale) * dot(query, &kv.keys[at(seen)..][..dim]))
                    .collect::<Vec<_>>();
                let most = scores.iter().copied().fold(f64::MIN, f64::max);
                let weights = scores.iter().map(|score| (score - most).exp()).collect::<Vec<_>>();
                let total: f64 = weights.iter().sum();
                for i in 0..dim {
                    let seen = (first..=position).zip(&weights);
                    let mixed: f64 = seen.map(|(seen, w)| w * f64::from(kv.values[at(seen) + i])).sum();
                    out.row_mut(row)[head * dim + i] = (mixed / total) as f32;
                }
            }
        }
    }

    fn gate(&self, rows: usize, out: &mut Table, x: &Table, activation: Activation) {
        assert_eq!(2 * out.cols, x.cols);
        for row in 0..rows {
            gated(out.row_mut(row), x.row(row), activation);
        }
    }

    fn add(&self, rows: Range<usize>, x: &mut Table, y: &Table) {
        for row in rows {
            sum(x.row_mut(row), y.row(row));
        }
    }

    fn experts(
        &self,
        rows: Rows,
        out: &mut Table,
        x: &Table,
        logits: &Table,
        routing: Routing,
        first: usize,
        experts: &[Gated<Table>],
        activation: Activation,
        scratch: &mut Scratch,
    ) {
        assert!(rows.all() <= scratch.rows);
        for row in 0..rows.all() {
            out.row_mut(row).fill(0.0);
            for (expert, weight) in route(&logits.row(row)[..routing.experts], routing) {
                let Some(expert) = expert.checked_sub(first).and_then(|own| experts.get(own)) else { continue };
                let mut gate_up = vec![0.0; expert.gate_up.rows];
                let mut inner = vec![0.0; expert.down.cols];
                let mut result = vec![0.0; expert.down.rows];
                expert.gate_up.times(x.row(row), &mut gate_up);
                gated(&mut inner, &gate_up, activation);
                expert.down.times(&inner, &mut result);
                result.iter_mut().for_each(|value| *value *= weight);
                sum(out.row_mut(row), &result);
            }
        }
    }
}

/// The chosen experts and their weights, best first; on ties the lower expert number first.
fn route(logits: &[f32], routing: Routing) -> Vec<(usize, f32)> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let weights = logits.iter().map(|logit| f64::from(logit - most).exp()).collect::<Vec<_>>();
    let mut order = (0..logits.len()).collect::<Vec<_>>();
    order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
    order.truncate(routing.chosen);
    let among = |all: &mut dyn Iterator<Item = f64>| all.sum::<f64>();
    let total = match routing.normalise {
        true => among(&mut order.iter().map(|expert| weights[*expert])),
        false => among(&mut weights.iter().copied()),
    };
    order.into_iter().map(|expert| (expert, (weights[expert] / total) as f32)).collect()
}

fn gated(out: &mut [f32], x: &[f32], activation: Activation) {
    let (gate, up) = x.split_at(x.len() / 2);
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        let g = f64::from(*gate);
        let active = match activation {
            Activation::Silu => g / (1.0 + (-g).exp()),
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
                0.5 * g * (1.0 + inner.tanh())
            }
        };
        *out = active as f32 * up;
    }
}

fn normalise(x: &mut [f32], weight: &[f32], eps: f32) {
    assert_eq!(x.len(), weight.len());
    let mean = dot(x, x) / x.len() as f64;
    let scale = (mean + f64::from(eps)).sqrt().recip();
    for (value, weight) in x.iter_mut().zip(weight) {
        *value = (f64::from(*value) * scale) as f32 * weight;
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn sum(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
