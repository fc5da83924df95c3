//! Numbers: the [`Backend`] trait, its ops on the CPU, quantised formats, the thread pool. Knows nothing of models.

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
