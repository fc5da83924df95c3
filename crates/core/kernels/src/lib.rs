//! The [`Backend`] trait, its ops on the CPU, quantised formats and the thread pool. This crate knows nothing about models.

mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod probe;
pub mod quant;

pub use backend::{
    Activation, Attention, Backend, BackendError, Gated, HEAD_DIM_MAX, Heads, KvShape, MatrixSource, NormRope,
    PAGE_TOKENS, RopeLayout, Routing, Rows, Span, StepInputs, StepLimits,
};
