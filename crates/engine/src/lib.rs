//! Many requests, one loop: step plans, the `Executor` trait and the one that runs in this process, pages, sampler.
//!
//! [`Engine`] is the decode loop. It plans steps, an [`Executor`] runs them, and it does not know where. [`Local`] is the
//! executor for a whole model in this process. Synchronous throughout; no sockets, no text.
#![forbid(unsafe_code)]

mod constraint;
mod engine;
mod executor;
mod generation;
mod guess;
pub mod inspect;
mod ledger;
mod local;
pub mod measure;
mod pace;
mod pages;
mod plan;
mod prefix;
mod queue;
mod random;
mod request;
mod row;
mod running;
mod sampler;
mod scheduler;
mod sequence;
mod service;
mod sessions;
mod stats;

pub use constraint::{Constraint, ConstraintError, TokenMask};
pub use engine::{CHUNK_DEFAULT, Engine, EngineError, EngineOptions, REPLAY_DEFAULT, WAITING_MAX};
pub use executor::{Capacity, Executor, ExecutorError, Health, Opened, RankReport};
pub use generation::Generation;
pub use ledger::Ledger;
pub use local::Local;
pub use pages::Pages;
pub use plan::{Embedding, Entry, LogitRows, NotBefore, Role, Sample, Scores, StepOutput, StepPlan, Want};
pub use prefix::{PageHash, Prefix, page_hashes};
pub use random::fresh_seed;
pub use request::{
    Event, EventKind, Failure, FinishReason, Finished, Goal, Pooling, Request, RequestId, Tenant, Timings,
};
pub use sampler::{
    Allowed, History, Logprobs, SampleError, Sampled, Sampler, SamplingError, SamplingParams, TOP_LOGPROBS_MAX,
};
pub use service::{Ending, EventSink, Service, SubmitError, Ticket};
pub use sessions::{SESSIONS_MAX, Sessions};
pub use stats::{FinishCounts, Stats};
