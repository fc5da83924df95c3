//! The CUDA backend: own kernels, compiled at run time for the device at hand, and cuBLASLt for matrix products.
//!
//! NVIDIA's libraries are loaded when a backend is opened; a build needs none of them. Weights are bf16, and so are keys,
//! values and whatever a matrix product reads; the residual stream, sums and the results of products are f32. A residual
//! stream in bf16 would round at every layer and save next to nothing: its traffic is a small part of that of the weights.
//! A buffer has room for f32; which of the two it holds is decided by the op that last wrote it.
//!
//! Left to later work: quantised matrix products, mixtures of experts, attention that is fast for long prompts, sampling.

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
    /// Opens the device, and compiles the kernels for it. Fails on a machine without one.
    pub fn open(ordinal: usize) -> Result<Self, BackendError> {
        let device = Device::open(ordinal)?;
        Ok(Self { gemm: Gemm::new(&device)?, device })
    }

    /// Waits for everything that was queued.
    pub fn synchronise(&self) -> Result<(), BackendError> {
        self.device.stream.synchronize().map_err(|error| fault("wait for CUDA device", error))?;
        self.device.healthy()
    }
}

/// What a buffer's memory holds now.
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

/// Keys, and behind them values: each `[pages, kv_heads, PAGE_TOKENS, head_dim]` in bf16.
pub struct CudaKv {
    memory: Memory,
    shape: KvShape,
    pages: usize,
}

impl CudaKv {
    /// The byte at which the values begin.
    fn values_at(&self) -> usize {
        2 * self.pages * self.shape.kv_heads * PAGE_TOKENS * self.shape.head_dim
    }
}

/// Working memory of the op that is not there yet: it cannot be made, so the op cannot be called.
pub enum NoExperts {}
