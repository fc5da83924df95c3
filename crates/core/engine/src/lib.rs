//! The decode loop: many requests run together in steps. Also step plans, the sampler, page tables and the prefix cache.
//!
//! [`Engine`] plans steps and an [`Executor`] runs them; the engine does not know where. [`LocalExecutor`] is the executor that
//! runs a model in this process; a [`Stage`] runs a range of its layers, and [`CoordinatorStage`] what comes before and after a
//! chain of stages; [`EmbeddingAndHead`] is that without sampling. [`Service`] runs an engine on a thread of its own. Synchronous throughout; no sockets, no
//! text.
#![forbid(unsafe_code)]

mod clock;
mod completion_rate;
mod constraint;
mod coordinator_stage;
mod draft;
mod embedding_and_head;
mod engine;
mod executor;
mod generation;
mod head;
pub mod inspect;
mod local;
mod logit_row;
pub mod measure;
mod page_pool;
mod page_tables;
mod plan;
mod plan_check;
mod prefill_cost;
mod prefix;
mod queue;
mod random;
mod request;
mod running;
mod sampler;
mod scheduler;
mod sequence;
mod service;
mod session_table;
mod stage;
mod stats;

pub use constraint::{Constraint, ConstraintError, TokenMask};
pub use coordinator_stage::CoordinatorStage;
pub use embedding_and_head::EmbeddingAndHead;
pub use engine::{
    CHUNK_DEFAULT, Engine, EngineError, EngineOptions, PREFILL_STEP_DEFAULT, REBUILD_TIMEOUT_DEFAULT, WAITING_MAX,
    WaitingForModel,
};
pub use executor::{Capacity, Executor, ExecutorError, Health, MissingLayers, OpenedSession, RankReport};
pub use generation::Generation;
pub use local::LocalExecutor;
pub use page_pool::PagePool;
pub use page_tables::{PageTables, SESSIONS_MAX};
pub use plan::{
    Entry, EntryWithoutStates, LogitRows, Phase, PooledEmbedding, PromptLogprobs, RequestedOutput, Sample, StepOutput,
    StepPlan, SuppressedTokens,
};
pub use prefix::{PageHash, Prefix, page_hashes};
pub use random::fresh_seed;
pub use request::{
    Event, EventKind, Failure, FinishReason, Finished, Pooling, Request, RequestId, RequestKind, TenantId, Timings,
};
pub use sampler::{
    AllowedTokens, History, Logprobs, SampleError, Sampled, Sampler, SamplingParams, SamplingParamsError,
    TOP_LOGPROBS_MAX,
};
pub use service::{EventSink, RequestHandle, Service, SubmitError, ThreadExit};
pub use session_table::SessionTable;
pub use stage::Stage;
pub use stats::{EngineStats, FinishCounts};
