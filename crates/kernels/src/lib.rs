//! Numbers: the [`Backend`] trait, its ops on the CPU, quantised formats, the thread pool. Knows nothing of models.

mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod probe;
pub mod quant;
mod shared;

pub use backend::{
    Activation, Attention, Backend, BackendError, Form, Gated, Heads, HostWork, KvShape, MatrixSource, PAGE_TOKENS,
    RopeLayout, Routing, Rows, Span, StepInputs, StepLimits, Strips, Turn,
};
pub use shared::SharedMemory;
