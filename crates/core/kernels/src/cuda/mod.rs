//! The CUDA backend: its own kernels, compiled at run time for the device, and cuBLASLt for matrix products.
//!
//! NVIDIA's libraries are loaded when a backend is opened; a build needs none of them. Weights, keys, values and the inputs
//! of matrix products are bf16; the residual stream, sums and the results of products are f32. A residual stream in bf16
//! would round at every layer and save little, because its traffic is small compared with that of the weights. A buffer has
//! space for f32; the op that last wrote it decides whether it holds f32 or bf16.
//!
//! Not implemented: quantised matrix products, mixtures of experts, attention that is fast for long prompts, sampling.

mod device;
mod gemm;
mod graph;
mod ops;
mod step;
mod weights;

use device::{Device, Memory, fault};
use gemm::Gemm;

pub use graph::Graph;
pub use step::CudaStep;

use crate::{BackendError, KvShape, PAGE_TOKENS, RopeLayout};

pub struct CudaBackend {
    device: Device,
    gemm: Gemm,
}

impl CudaBackend {
    /// Opens the device and compiles the kernels for it. Fails on a machine without a CUDA device.
    pub fn open(ordinal: usize) -> Result<Self, BackendError> {
        let device = Device::open(ordinal)?;
        Ok(Self { gemm: Gemm::new(&device)?, device })
    }

    /// Waits for all queued work.
    pub fn synchronise(&self) -> Result<(), BackendError> {
        self.device.stream.synchronize().map_err(|error| fault("wait for CUDA device", error))?;
        self.device.healthy()
    }
}

/// The element type that a buffer holds now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    F32,
    Bf16,
}

pub struct CudaBuffer {
    memory: Memory,
    rows: usize,
    cols: usize,
    element: Element,
}

/// bf16 weights `[rows, cols]`.
pub struct CudaMatrix {
    memory: Memory,
    rows: usize,
    cols: usize,
}

pub struct CudaVector {
    memory: Memory,
    len: usize,
}

/// Cosine and sine `[positions, half]`.
pub struct CudaRope {
    memory: Memory,
    half: usize,
    positions: usize,
    layout: RopeLayout,
}

/// Keys, then values: each `[pages, kv_heads, PAGE_TOKENS, head_dim]` in bf16.
pub struct CudaKv {
    memory: Memory,
    shape: KvShape,
    pages: usize,
}

impl CudaKv {
    /// The byte offset of the values.
    fn values_at(&self) -> usize {
        2 * self.pages * self.shape.kv_heads * PAGE_TOKENS * self.shape.head_dim
    }
}

/// Scratch memory of `experts`, which is not implemented. It has no value, so the op cannot be called.
pub enum UnsupportedExperts {}
