//! The CPU backend: f32 activations, weights packed in panels, one thread pool, instruction sets chosen at run time.
#![allow(clippy::needless_range_loop)] // in kernels one index (row, panel or lane) often indexes several arrays

mod activations;
mod arena;
mod attention;
mod buffer;
mod experts;
mod lanes;
mod level;
mod linear;
mod matrix;
mod memory;
mod options;
mod pack;
mod packed12;
mod pool;
mod rows;
mod step;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

pub use attention::{Kv, KvType};
pub use buffer::Buffer;
pub use experts::Scratch;
pub use level::{Level, UnknownLevel};
pub use matrix::Matrix;
pub use memory::trim_allocator;
pub use options::{CpuOptions, DecodeMath, PrefillMath};
pub use pool::Pool;
pub use rows::Rope;
pub use step::Step;

use activations::TILE;
use arena::Arena;
use attention::{AttentionCall, RowNormRope};
use buffer::{ActivationLayout, ActivationLayouts, FilledRows, RowWriter};
use linear::{GatedOutput, Inputs, RequiredLayouts};
use matrix::{MatrixSegment, SendPtr};
use options::RowMath;

use crate::{
    Activation, Attention, Backend, BackendError, Gated, Heads, KvShape, MatrixSource, NormRope, PAGE_TOKENS,
    RopeLayout, Routing, Rows, StepInputs, StepLimits,
};

/// Compiles a function once per level. The generated function takes the level as its first argument and dispatches on it.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::cpu::Level, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            match level {
                // SAFETY: the CPU has the level: `CpuBackend::new` checks it.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Level::Avx512 | $crate::cpu::Level::Amx => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Level::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use per_level;

pub struct CpuBackend {
    arena: Arena,
    pool: Pool,
    level: Level,
    kv: KvType,
    /// How decode and prefill rows are multiplied with quantised weights.
    decode: RowMath,
    prefill: RowMath,
}

impl CpuBackend {
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let best = Level::detect();
        if options.level > best {
            return Err(BackendError::Device(format!("this CPU has {best}, not {}", options.level)));
        }
        let Some(kv) = options.kv.on(options.level) else {
            return Err(BackendError::Device(format!("a KV cache for tiles requires amx, not {}", options.level)));
        };
        let pool = Pool::new(options.threads)
            .map_err(|error| BackendError::Device(format!("cannot start {} threads: {error}", options.threads)))?;
        let (decode, prefill) = (options.decode_math(), options.prefill_math());
        Ok(Self { arena: Arena::default(), pool, level: options.level, kv, decode, prefill })
    }

    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    pub fn level(&self) -> Level {
        self.level
    }

    /// Whether prefill rows are rounded to bf16 for quantised weights.
    fn rounds(&self) -> bool {
        self.prefill == RowMath::Bf16
    }

    /// The most int8 parts of a row.
    fn parts(&self) -> usize {
        self.decode.parts().max(self.prefill.parts())
    }

    /// The layout in which to write rows, given the matrix of the only op that reads them.
    fn layout_for(&self, rows: Rows, consumer: Option<&Matrix>) -> ActivationLayout {
        let reads = |is_such: fn(&MatrixSegment) -> bool| consumer.is_some_and(|it| it.segments.iter().all(is_such));
        if self.rounds() && rows.decode == 0 && reads(MatrixSegment::is_quantised) {
            ActivationLayout::Rounded
        } else if self.level == Level::Amx && reads(MatrixSegment::is_bf16) {
            ActivationLayout::Split
        } else {
            ActivationLayout::Plain
        }
    }

    fn run_attention(&self, step: &Step, kv: &mut Kv, asked: AttentionCall<'_>) {
        assert!(step.pages.iter().all(|&page| (page as usize) < kv.pages));
        attention::attend(&self.pool, self.level, step, kv, asked);
    }

    /// `gated = activation(gate x) * (up x)`; `inner` is scratch memory.
    fn gate_up(
        &self,
        rows: Rows,
        gated: &mut Buffer,
        x: &Buffer,
        weights: &Gated<Matrix>,
        activation: Activation,
        inner: &mut Buffer,
    ) {
        let (stack, all) = (&weights.gate_up, rows.all());
        let math = if rows.decode == 0 { self.prefill } else { self.decode };
        let is_alike = rows.decode == 0 || rows.prefill == 0 || self.decode == self.prefill;
        let within_limit = (1..=TILE).contains(&all) && is_alike && math != RowMath::Bf16;
        if !within_limit || !linear::has_gate_up(stack) {
            self.linear(rows, inner, x, stack, None);
            self.gate(all, gated, inner, activation);
            return;
        }
        let data = x.rows(all);
        let layouts = &mut *x.layouts();
        layouts.fill(&self.pool, self.level, RequiredLayouts::of(stack, self.level, math), 0, x.cols, data);
        let ActivationLayouts { group, superblock, split, rounded, .. } = &*layouts;
        let inputs = Inputs { rows: all, x: data, group, superblock, split, rounded, rounds: false };
        let required = RequiredLayouts::of(&weights.down, self.level, math);
        let Buffer { data: values, layouts: made, cols, .. } = gated;
        let made = made.as_mut().expect("this buffer has layouts").get_mut();
        made.filled = FilledRows { group: (0, if required.group { all } else { 0 }), ..FilledRows::default() };
        let group = required.group.then(|| made.group.begin(all, math.parts(), *cols));
        let out = GatedOutput { inner: inner.rows_mut(all), gated: values, group };
        linear::gated_decode(&self.pool, self.level, stack, &inputs, activation, out);
    }
}

impl Backend for CpuBackend {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vec<f32>;
    type Rope = Rope;
    type Kv = Kv;
    type Step = Step;
    type Scratch = Scratch;

    fn buffer(&self, rows: usize, cols: usize) -> Result<Buffer, BackendError> {
        Buffer::new(rows, cols, self.parts())
    }

    fn output(&self, rows: usize, cols: usize) -> Result<Buffer, BackendError> {
        Buffer::output(rows, cols)
    }

    fn matrix(&self, parts: &[MatrixSource<'_>]) -> Result<Matrix, BackendError> {
        Matrix::pack(parts, &self.arena, &self.pool, self.level)
    }

    fn vector(&self, values: &[f32]) -> Result<Vec<f32>, BackendError> {
        Ok(values.to_vec())
    }

    fn rope(&self, inv_freq: &[f32], scale: f32, positions: usize, layout: RopeLayout) -> Result<Rope, BackendError> {
        Rope::new(inv_freq, scale, positions, layout)
    }

    fn kv(&self, shape: KvShape, pages: usize) -> Result<Kv, BackendError> {
        Kv::new(shape, pages, self.kv)
    }

    fn step(&self, limits: StepLimits) -> Result<Step, BackendError> {
        Ok(Step::new(limits))
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.bytes()
    }

    fn packed_bytes(&self, parts: &[MatrixSource<'_>]) -> usize {
        Matrix::packed_bytes(parts, self.level)
    }

    fn buffer_bytes(&self, rows: usize, cols: usize) -> usize {
        Buffer::bytes(rows, cols, self.parts())
    }

    fn output_bytes(&self, rows: usize, cols: usize) -> usize {
        Buffer::output_bytes(rows, cols)
    }

    fn rope_bytes(&self, frequencies: usize, positions: usize) -> usize {
        2 * frequencies * positions * size_of::<f32>()
    }

    fn kv_bytes(&self, shape: KvShape, pages: usize) -> usize {
        pages.saturating_mul(PAGE_TOKENS).saturating_mul(self.kv.token_bytes(shape))
    }

    fn scratch_bytes(&self, rows: usize, hidden: usize, inner: usize, routing: Routing) -> usize {
        Scratch::bytes(rows, hidden, inner, routing, self.parts())
    }

    fn begin(&self, step: &mut Step, inputs: StepInputs<'_>) -> Result<(), BackendError> {
        step.fill(inputs)
    }

    fn columns(&self, buffer: &Buffer) -> usize {
        buffer.cols
    }

    fn write(&self, buffer: &mut Buffer, values: &[f32]) -> Result<(), BackendError> {
        assert!(values.len().is_multiple_of(buffer.cols));
        buffer.rows_mut(values.len() / buffer.cols).copy_from_slice(values);
        Ok(())
    }

    fn read(&self, buffer: &Buffer, rows: Range<usize>, out: &mut [f32]) -> Result<(), BackendError> {
        out.copy_from_slice(&buffer.data[rows.start * buffer.cols..rows.end * buffer.cols]);
        Ok(())
    }

    fn host_rows<'a>(&self, buffer: &'a Buffer, rows: usize) -> Option<&'a [f32]> {
        Some(&buffer.data[..rows * buffer.cols])
    }

    fn host_rows_mut<'a>(&self, buffer: &'a mut Buffer, rows: usize) -> Option<&'a mut [f32]> {
        Some(buffer.rows_mut(rows))
    }

    fn embed(&self, step: &Step, out: &mut Buffer, table: &Matrix, first: usize, scale: f32) {
        let cols = out.cols;
        assert_eq!(cols, table.cols);
        let start = SendPtr(out.rows_mut(step.rows()).as_mut_ptr());
        rows::for_rows(&self.pool, step.rows(), cols, &|row| {
            // SAFETY: each row is written by one worker.
            let out = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            match (step.tokens[row] as usize).checked_sub(first).filter(|&row| row < table.rows) {
                None => out.fill(0.0),
                Some(row) => {
                    table.unpack_row(row, out);
                    if scale != 1.0 {
                        out.iter_mut().for_each(|value| *value *= scale);
                    }
                }
            }
        });
    }

    fn gather_logit_rows(&self, step: &Step, out: &mut Buffer, x: &Buffer) {
        assert_eq!(out.cols, x.cols);
        let cols = x.cols;
        let out = out.rows_mut(step.logit_rows.len());
        for (out, &row) in out.chunks_exact_mut(cols).zip(&step.logit_rows) {
            out.copy_from_slice(&x.data[row as usize * cols..][..cols]);
        }
    }

    fn rms_norm(&self, rows: Range<usize>, out: &mut Buffer, x: &Buffer, weight: &Vec<f32>, eps: f32) {
        let cols = x.cols;
        assert_eq!(out.cols, cols);
        let (start, x) = (SendPtr(out.rows_mut(rows.end).as_mut_ptr()), x.rows(rows.end));
        rows::for_rows(&self.pool, rows.len(), cols, &|row| {
            let row = rows.start + row;
            // SAFETY: each row is written by one worker.
            let out = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            rows::rms_norm(self.level, out, &x[row * cols..(row + 1) * cols], weight, eps);
        });
    }

    fn rms_norm_heads(&self, rows: usize, x: &mut Buffer, heads: Heads, weight: &Vec<f32>, eps: f32) {
        let cols = x.cols;
        let start = SendPtr(x.rows_mut(rows).as_mut_ptr());
        rows::for_rows(&self.pool, rows, heads.count * heads.dim, &|row| {
            // SAFETY: each row is written by one worker.
            let row = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            rows::rms_norm_heads(self.level, row, heads, weight, eps);
        });
    }

    fn linear(&self, rows: Rows, out: &mut Buffer, x: &Buffer, weight: &Matrix, bias: Option<&Vec<f32>>) {
        assert!(x.cols == weight.cols && out.cols == weight.rows);
        let runs = match self.decode != self.prefill && weight.is_quantised() {
            true => [(0..rows.decode, self.decode), (rows.decode..rows.all(), self.prefill)],
            false => [(0..rows.all(), self.decode), (0..0, self.decode)],
        };
        let (out, x_rows) = (out.rows_mut(rows.all()), x.rows(rows.all()));
        let layouts = &mut *x.layouts();
        for (run, math) in runs.into_iter().filter(|(run, _)| !run.is_empty()) {
            let data = &x_rows[run.start * x.cols..run.end * x.cols];
            let required = RequiredLayouts::of(weight, self.level, math);
            layouts.fill(&self.pool, self.level, required, run.start, x.cols, data);
            let ActivationLayouts { group, superblock, split, rounded, .. } = &*layouts;
            let rounds = math == RowMath::Bf16;
            let inputs = Inputs { rows: run.len(), x: data, group, superblock, split, rounded, rounds };
            let out = &mut out[run.start * weight.rows..run.end * weight.rows];
            linear::linear(&self.pool, self.level, weight, &inputs, bias.map(Vec::as_slice), out);
        }
    }

    fn rotate(&self, step: &Step, x: &mut Buffer, heads: Heads, rope: &Rope) {
        let (cols, rows, angles) = (x.cols, step.rows(), rope.angles(step.end()));
        let start = SendPtr(x.rows_mut(rows).as_mut_ptr());
        rows::for_rows(&self.pool, rows, heads.count * heads.dim, &|row| {
            // SAFETY: each row is written by one worker.
            let x = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            angles.rotate(self.level, x, heads, step.positions[row] as usize);
        });
    }

    fn attend(&self, step: &Step, out: &mut Buffer, qkv: &Buffer, kv: &mut Kv, attention: &Attention) {
        let rows = step.rows();
        assert_eq!(out.cols, attention.query.count * attention.query.dim);
        let out = out.target(rows, ActivationLayout::Plain);
        self.run_attention(
            step,
            kv,
            AttentionCall { qkv: qkv.rows(rows), cols: qkv.cols, attention, turn: None, rounded: rows, out },
        );
    }

    fn norm_rope_attend(
        &self,
        step: &Step,
        rows: Rows,
        out: &mut Buffer,
        qkv: &mut Buffer,
        kv: &mut Kv,
        attention: &Attention,
        norm_rope: &NormRope<'_, Self>,
        consumer: &Matrix,
    ) {
        let (all, cols, level) = (rows.all(), qkv.cols, self.level);
        assert!(all == step.rows() && out.cols == attention.query.count * attention.query.dim);
        let [query_norm, key_norm] = [norm_rope.query_norm, norm_rope.key_norm].map(|norm| norm.map(Vec::as_slice));
        let turning =
            RowNormRope { level, query_norm, key_norm, eps: norm_rope.eps, angles: norm_rope.rope.angles(step.end()) };
        let (turn, form) = match kv.is_tiled() {
            true => (Some(turning), self.layout_for(rows, Some(consumer))),
            false => {
                let start = SendPtr(qkv.rows_mut(all).as_mut_ptr());
                rows::for_rows(&self.pool, all, attention.key.columns().end, &|row| {
                    // SAFETY: each row is written by one worker.
                    let x = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
                    turning.apply_row(x, attention, step.positions[row] as usize);
                });
                (None, ActivationLayout::Plain)
            }
        };
        let rounded = if self.rounds() && consumer.is_quantised() { rows.decode } else { all };
        let out = out.target(all, form);
        self.run_attention(step, kv, AttentionCall { qkv: qkv.rows(all), cols, attention, turn, rounded, out });
    }

    fn gate(&self, rows: usize, out: &mut Buffer, x: &Buffer, activation: Activation) {
        let cols = out.cols;
        assert_eq!(x.cols, cols * 2);
        let (start, x) = (SendPtr(out.rows_mut(rows).as_mut_ptr()), x.rows(rows));
        rows::for_rows(&self.pool, rows, cols, &|row| {
            // SAFETY: each row is written by one worker.
            let out = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            let (gate, up) = x[row * cols * 2..(row + 1) * cols * 2].split_at(cols);
            rows::gate(self.level, out, gate, up, activation);
        });
    }

    fn feed_forward(
        &self,
        rows: Rows,
        out: &mut Buffer,
        x: &Buffer,
        weights: &Gated<Matrix>,
        activation: Activation,
        inner: &mut Buffer,
        gated: &mut Buffer,
    ) {
        assert!(x.cols == weights.gate_up.cols && 2 * gated.cols == weights.gate_up.rows);
        let (decode, prefill, all) = (rows.decode, rows.prefill, rows.all());
        let stack = linear::quantised_gate_up(&weights.gate_up)
            .filter(|_| self.rounds() && prefill > 0 && weights.down.segments.iter().all(MatrixSegment::is_quantised));
        let separate = if stack.is_some() { Rows::decode(decode) } else { rows };
        self.gate_up(separate, gated, x, weights, activation, inner);
        if let Some(stack) = stack {
            // Prefill rows are written directly in the layout that the `down` multiplication reads, never as f32.
            let data = &x.rows(all)[decode * x.cols..];
            let layouts = &mut *x.layouts();
            let required = RequiredLayouts { rounded: true, ..RequiredLayouts::default() };
            layouts.fill(&self.pool, self.level, required, decode, x.cols, data);
            let ActivationLayouts { group, superblock, split, rounded, .. } = &*layouts;
            let inputs = Inputs { rows: prefill, x: data, group, superblock, split, rounded, rounds: true };
            let made = &mut *gated.layouts();
            linear::gated(&self.pool, stack, &inputs, activation, &mut made.rounded);
            made.filled.rounded = (decode, prefill);
        }
        self.linear(rows, out, gated, &weights.down, None);
    }

    fn add(&self, rows: Range<usize>, x: &mut Buffer, y: &Buffer) {
        let cols = x.cols;
        assert_eq!(cols, y.cols);
        let (start, y) = (SendPtr(x.rows_mut(rows.end).as_mut_ptr()), y.rows(rows.end));
        rows::for_rows(&self.pool, rows.len(), cols, &|row| {
            let row = rows.start + row;
            // SAFETY: each row is written by one worker.
            let x = unsafe { std::slice::from_raw_parts_mut(start.get().add(row * cols), cols) };
            rows::add_to(self.level, x, &y[row * cols..(row + 1) * cols]);
        });
    }

    fn add_rms_norm(
        &self,
        rows: Rows,
        range: Range<usize>,
        out: &mut Buffer,
        x: &mut Buffer,
        y: Option<&Buffer>,
        weight: &Vec<f32>,
        eps: f32,
        consumer: Option<&Matrix>,
    ) {
        let cols = x.cols;
        assert!(range.end <= rows.all(), "{range:?} of {rows:?}");
        assert!(cols == out.cols && cols == weight.len() && y.is_none_or(|y| cols == y.cols));
        let (x, y) = (SendPtr(x.rows_mut(range.end).as_mut_ptr()), y.map(|y| y.rows(range.end)));
        let out = out.target(rows.all(), self.layout_for(rows, consumer));
        rows::for_rows(&self.pool, range.len(), cols, &|row| {
            let row = range.start + row;
            let at = row * cols;
            // SAFETY: each row is written by one worker.
            let x = unsafe { std::slice::from_raw_parts_mut(x.get().add(at), cols) };
            if let Some(y) = y {
                rows::add_to(self.level, x, &y[at..at + cols]);
            }
            let norm = || Some((rows::norm_scale(self.level, x, eps), &weight[..]));
            match &out {
                RowWriter::Plain(out) => {
                    // SAFETY: as above.
                    let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(at), cols) };
                    rows::rms_norm(self.level, out, x, weight, eps);
                }
                // SAFETY: as above; these layouts are used only on a level with tiles, and they have space for all rows.
                RowWriter::Rounded(out) => unsafe { out.split(row, x, norm()) },
                // SAFETY: as above.
                RowWriter::Split(out) => unsafe { out.split(row, x, norm()) },
            }
        });
    }

    fn experts(
        &self,
        rows: Rows,
        out: &mut Buffer,
        x: &Buffer,
        logits: &Buffer,
        routing: Routing,
        first: usize,
        experts: &[Gated<Matrix>],
        activation: Activation,
        scratch: &mut Scratch,
    ) {
        experts::run(self, rows, out, x, logits, routing, first, experts, activation, scratch);
    }

    fn scratch(&self, rows: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Scratch, BackendError> {
        Scratch::new(rows, hidden, inner, routing, self.parts())
    }
}
