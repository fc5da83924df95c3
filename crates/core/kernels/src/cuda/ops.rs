//! The ops. Each checks shapes, chooses a grid and queues a kernel.

use std::ops::Range;

use half::bf16;

use super::device::Arg;
use super::gemm::Shape;
use super::{
    CudaBackend, CudaBuffer, CudaKv, CudaMatrix, CudaRope, CudaStep, CudaVector, Element, UnsupportedExperts, weights,
};
use crate::{
    Activation, Attention, Backend, BackendError, Gated, Heads, KvShape, MatrixSource, PAGE_TOKENS, RopeLayout,
    Routing, Rows, StepInputs, StepLimits,
};

/// The default number of threads in a block.
const THREADS: usize = 256;
/// `GROUP` and `WARPS` of `attend` in `kernels.cu`.
const ATTEND_GROUP: usize = 4;
const ATTEND_WARPS: usize = 8;
/// The largest head size of the `attend` kernels.
const HEAD_DIM_MAX: usize = 256;

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Matrix = CudaMatrix;
    type Vector = CudaVector;
    type Rope = CudaRope;
    type Kv = CudaKv;
    type Step = CudaStep;
    type Scratch = UnsupportedExperts;

    fn buffer(&self, rows: usize, cols: usize) -> Result<CudaBuffer, BackendError> {
        let memory = self.device.allocate("activations", self.buffer_bytes(rows, cols))?;
        Ok(CudaBuffer { memory, rows, cols, element: Element::F32 })
    }

    fn matrix(&self, parts: &[MatrixSource<'_>]) -> Result<CudaMatrix, BackendError> {
        weights::pack(&self.device, parts)
    }

    fn vector(&self, values: &[f32]) -> Result<CudaVector, BackendError> {
        let memory = self.device.allocate("weights", 4 * values.len())?;
        self.device.upload(&memory, 0, values)?;
        Ok(CudaVector { memory, len: values.len() })
    }

    fn rope(
        &self,
        inv_freq: &[f32],
        scale: f32,
        positions: usize,
        layout: RopeLayout,
    ) -> Result<CudaRope, BackendError> {
        let half = inv_freq.len();
        let mut angles = Vec::with_capacity(2 * positions * half);
        for position in 0..positions {
            for frequency in inv_freq {
                let (sine, cosine) = f64::from(position as f32 * frequency).sin_cos();
                angles.extend([scale * cosine as f32, scale * sine as f32]);
            }
        }
        let memory = self.device.allocate("rotation angles", 4 * angles.len())?;
        self.device.upload(&memory, 0, &angles)?;
        Ok(CudaRope { memory, half, positions, layout })
    }

    fn kv(&self, shape: KvShape, pages: usize) -> Result<CudaKv, BackendError> {
        let head_dim = shape.head_dim;
        if head_dim > HEAD_DIM_MAX || !head_dim.is_multiple_of(8) {
            let reason = format!("attention heads of {head_dim} elements are not supported on a CUDA device");
            return Err(BackendError::Device(reason));
        }
        let memory = self.device.allocate("KV pages", self.kv_bytes(shape, pages))?;
        Ok(CudaKv { memory, shape, pages })
    }

    fn step(&self, limits: StepLimits) -> Result<CudaStep, BackendError> {
        CudaStep::new(&self.device, limits)
    }

    fn scratch(&self, _: usize, _: usize, _: usize, _: Routing) -> Result<UnsupportedExperts, BackendError> {
        Err(BackendError::Device("mixtures of experts are not supported on a CUDA device yet".into()))
    }

    fn matrix_bytes(&self, matrix: &CudaMatrix) -> usize {
        matrix.memory.bytes()
    }

    fn begin(&self, step: &mut CudaStep, inputs: StepInputs<'_>) -> Result<(), BackendError> {
        self.device.healthy()?;
        step.fill(&self.device, inputs)
    }

    fn write(&self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<(), BackendError> {
        assert!(values.len().is_multiple_of(buffer.cols) && values.len() <= buffer.rows * buffer.cols);
        buffer.element = Element::F32;
        self.device.upload(&buffer.memory, 0, values)
    }

    fn columns(&self, buffer: &CudaBuffer) -> usize {
        buffer.cols
    }

    fn read(&self, buffer: &CudaBuffer, rows: Range<usize>, out: &mut [f32]) -> Result<(), BackendError> {
        assert!(rows.end <= buffer.rows && out.len() == rows.len() * buffer.cols);
        let from = rows.start * buffer.cols;
        match buffer.element {
            Element::F32 => self.device.download(&buffer.memory, from, out),
            Element::Bf16 => {
                let mut narrow = vec![0u16; out.len()];
                self.device.download(&buffer.memory, from, &mut narrow)?;
                for (out, bits) in out.iter_mut().zip(narrow) {
                    *out = bf16::from_bits(bits).to_f32();
                }
                Ok(())
            }
        }
    }

    fn packed_bytes(&self, parts: &[MatrixSource<'_>]) -> usize {
        parts.iter().map(|part| 2 * part.rows * part.cols).sum()
    }

    fn buffer_bytes(&self, rows: usize, cols: usize) -> usize {
        4 * rows * cols
    }

    fn rope_bytes(&self, frequencies: usize, positions: usize) -> usize {
        2 * 4 * frequencies * positions
    }

    fn kv_bytes(&self, KvShape { kv_heads, head_dim }: KvShape, pages: usize) -> usize {
        2 * 2 * pages * kv_heads * PAGE_TOKENS * head_dim
    }

    fn scratch_bytes(&self, _: usize, _: usize, _: usize, _: Routing) -> usize {
        0 // experts are refused
    }

    fn embed(&self, step: &CudaStep, out: &mut CudaBuffer, table: &CudaMatrix, first: usize, scale: f32) {
        out.written(step.rows, table.cols, Element::F32);
        let args = [
            Arg::Memory(&step.memory),
            Arg::Memory(&out.memory),
            Arg::Memory(&table.memory),
            Arg::Count(first),
            Arg::Count(table.rows),
            Arg::Count(table.cols),
            Arg::Real(scale),
        ];
        self.device.launch(&self.device.kernels.embed, [step.rows, 1, 1], THREADS, 0, &args);
    }

    fn gather_logit_rows(&self, step: &CudaStep, out: &mut CudaBuffer, x: &CudaBuffer) {
        x.holds(step.rows, Element::F32);
        out.written(step.logit_rows, x.cols, Element::F32);
        let args = [Arg::Memory(&step.memory), Arg::Memory(&out.memory), Arg::Memory(&x.memory), Arg::Count(x.cols)];
        self.device.launch(&self.device.kernels.gather_logit_rows, [step.logit_rows, 1, 1], THREADS, 0, &args);
    }

    fn rms_norm(&self, rows: Range<usize>, out: &mut CudaBuffer, x: &CudaBuffer, weight: &CudaVector, eps: f32) {
        assert_eq!(weight.len, x.cols);
        x.holds(rows.end, Element::F32);
        out.written(rows.end, x.cols, Element::Bf16);
        let args =
            [out.from(rows.start), x.from(rows.start), Arg::Memory(&weight.memory), Arg::Count(x.cols), Arg::Real(eps)];
        self.device.launch(
            &self.device.kernels.rms_norm,
            [rows.len(), 1, 1],
            1024.min(x.cols.next_multiple_of(32)),
            0,
            &args,
        );
    }

    fn rms_norm_heads(&self, rows: usize, x: &mut CudaBuffer, heads: Heads, weight: &CudaVector, eps: f32) {
        assert_eq!(weight.len, heads.dim);
        x.holds(rows, Element::F32);
        assert!(heads.columns().end <= x.cols);
        let args = [
            Arg::Memory(&x.memory),
            Arg::Memory(&weight.memory),
            Arg::Count(x.cols),
            Arg::Count(heads.first),
            Arg::Count(heads.count),
            Arg::Count(heads.dim),
            Arg::Real(eps),
        ];
        let threads = 32 * heads.count.clamp(1, 32);
        self.device.launch(&self.device.kernels.rms_norm_heads, [rows, 1, 1], threads, 0, &args);
    }

    fn linear(&self, rows: Rows, out: &mut CudaBuffer, x: &CudaBuffer, weight: &CudaMatrix, bias: Option<&CudaVector>) {
        let rows = rows.all();
        let CudaMatrix { rows: outer, cols: inner, .. } = *weight;
        assert_eq!(x.cols, inner);
        x.holds(rows, Element::Bf16);
        out.written(rows, outer, Element::F32);
        if rows == 0 {
            return;
        }
        let shape = Shape { rows, inner, outer };
        self.gemm.multiply(&self.device, shape, &out.memory, &x.memory, &weight.memory);
        if let Some(bias) = bias {
            assert_eq!(bias.len, outer);
            let args = [Arg::Memory(&out.memory), Arg::Memory(&bias.memory), Arg::Count(outer)];
            self.device.launch(&self.device.kernels.add_bias, [rows, 1, 1], THREADS, 0, &args);
        }
    }

    fn rotate(&self, step: &CudaStep, x: &mut CudaBuffer, heads: Heads, rope: &CudaRope) {
        x.holds(step.rows, Element::F32);
        assert!(heads.columns().end <= x.cols && 2 * rope.half <= heads.dim);
        let args = [
            Arg::Memory(&step.memory),
            Arg::Memory(&x.memory),
            Arg::Memory(&rope.memory),
            Arg::Count(x.cols),
            Arg::Count(heads.first),
            Arg::Count(heads.count),
            Arg::Count(heads.dim),
            Arg::Count(rope.half),
            Arg::Count(rope.positions),
            Arg::Count((rope.layout == RopeLayout::Pairs).into()),
        ];
        self.device.launch(&self.device.kernels.rotate, [step.rows, 1, 1], THREADS, 0, &args);
    }

    fn attend(&self, step: &CudaStep, out: &mut CudaBuffer, qkv: &CudaBuffer, kv: &mut CudaKv, attention: &Attention) {
        let Attention { query, key, value, scale, window } = *attention;
        let KvShape { kv_heads, head_dim } = kv.shape;
        qkv.holds(step.rows, Element::F32);
        for heads in [key, value] {
            assert_eq!((heads.count, heads.dim), (kv_heads, head_dim));
            assert!(heads.columns().end <= qkv.cols);
        }
        let args = [
            Arg::Memory(&step.memory),
            Arg::Memory(&kv.memory),
            Arg::From(&kv.memory, kv.values_at()),
            Arg::Memory(&qkv.memory),
            Arg::Count(qkv.cols),
            Arg::Count(key.first),
            Arg::Count(value.first),
            Arg::Count(kv_heads),
            Arg::Count(head_dim),
            Arg::Count(kv.pages),
        ];
        self.device.launch(&self.device.kernels.write_kv, [step.rows, 1, 1], THREADS, 0, &args);

        out.written(step.rows, query.count * query.dim, Element::Bf16);
        assert!(query.dim == head_dim && query.count.is_multiple_of(kv_heads) && query.columns().end <= qkv.cols);
        let args = [
            Arg::Memory(&step.memory),
            Arg::Memory(&out.memory),
            Arg::Memory(&qkv.memory),
            Arg::Memory(&kv.memory),
            Arg::From(&kv.memory, kv.values_at()),
            Arg::Count(qkv.cols),
            Arg::Count(query.first),
            Arg::Count(query.count),
            Arg::Count(kv_heads),
            Arg::Count(head_dim),
            Arg::Count(kv.pages),
            Arg::Count(window.unwrap_or(u32::MAX as usize)),
            Arg::Real(scale),
        ];
        let kernel = &self.device.kernels.attend[head_dim.div_ceil(32).next_power_of_two().ilog2() as usize];
        let grid = [step.rows, kv_heads, (query.count / kv_heads).div_ceil(ATTEND_GROUP)];
        let shared = 4 * ATTEND_GROUP * (head_dim + ATTEND_WARPS * (head_dim + 2));
        self.device.launch(kernel, grid, 32 * ATTEND_WARPS, shared, &args);
    }

    fn gate(&self, rows: usize, out: &mut CudaBuffer, x: &CudaBuffer, activation: Activation) {
        let inner = out.cols;
        assert_eq!(x.cols, 2 * inner);
        x.holds(rows, Element::F32);
        out.written(rows, inner, Element::Bf16);
        let gelu = activation == Activation::GeluTanh;
        let args = [
            Arg::Memory(&out.memory),
            Arg::Memory(&x.memory),
            Arg::Count(rows),
            Arg::Count(inner),
            Arg::Count(gelu.into()),
        ];
        self.device.launch(&self.device.kernels.gate, [(rows * inner).div_ceil(THREADS), 1, 1], THREADS, 0, &args);
    }

    fn add(&self, rows: Range<usize>, x: &mut CudaBuffer, y: &CudaBuffer) {
        assert_eq!(x.cols, y.cols);
        x.holds(rows.end, Element::F32);
        y.holds(rows.end, y.element);
        let kernels = &self.device.kernels;
        let kernel = if y.element == Element::F32 { &kernels.add } else { &kernels.add_narrow };
        let count = rows.len() * x.cols;
        let args = [x.from(rows.start), y.from(rows.start), Arg::Count(count)];
        self.device.launch(kernel, [count.div_ceil(THREADS), 1, 1], THREADS, 0, &args);
    }

    fn experts(
        &self,
        _: Rows,
        _: &mut CudaBuffer,
        _: &CudaBuffer,
        _: &CudaBuffer,
        _: Routing,
        _: usize,
        _: &[Gated<CudaMatrix>],
        _: Activation,
        scratch: &mut UnsupportedExperts,
    ) {
        match *scratch {}
    }
}

impl CudaBuffer {
    /// Checks an operand: it has at least `rows` rows and holds the element type that the op reads.
    fn holds(&self, rows: usize, element: Element) {
        assert!(rows <= self.rows, "{rows} rows of a buffer of {}", self.rows);
        assert_eq!(self.element, element, "an op of another kind wrote this buffer");
    }

    /// The rows from `row` on.
    fn from(&self, row: usize) -> Arg<'_> {
        let bytes = match self.element {
            Element::F32 => 4,
            Element::Bf16 => 2,
        };
        Arg::From(&self.memory, row * self.cols * bytes)
    }

    /// Checks a result's shape and sets its element type.
    fn written(&mut self, rows: usize, cols: usize, element: Element) {
        assert!(rows <= self.rows, "{rows} rows of a buffer of {}", self.rows);
        assert_eq!(cols, self.cols, "columns of the result");
        self.element = element;
    }
}
