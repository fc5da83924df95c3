//! Many requests, one loop: step plans, the `Executor` trait and the one that runs in this process, pages, sampler.
//!
//! [`Engine`] is the decode loop. It plans steps, an [`Executor`] runs them, and it does not know where. [`Local`] is the
//! executor for a whole model in this process. Synchronous throughout; no sockets, no text.
#![forbid(unsafe_code)]

mod engine;
mod executor;
pub mod inspect;
mod local;
pub mod measure;
mod pages;
mod plan;
mod random;
mod request;
mod row;
mod sampler;
mod sequence;
mod sessions;

pub use engine::{CHUNK_DEFAULT, Engine, EngineError, Generation, WAITING_MAX};
pub use executor::{Capacity, Executor, ExecutorError, Forked};
pub use local::Local;
pub use pages::Pages;
pub use plan::{Entry, LogitRows, Sample, StepOutput, StepPlan, Want};
pub use random::fresh_seed;
pub use request::{Event, EventKind, FinishReason, Finished, Request, RequestId, Timings};
pub use sampler::{History, Logprobs, SampleError, Sampled, Sampler, SamplingError, SamplingParams, TOP_LOGPROBS_MAX};
pub use sessions::{SESSIONS_MAX, Sessions};
