//! cake's protocol, in both roles: this machine as a worker of a cake master, and cake workers as stages of our chain.
//!
//! It is plaintext: authentication proves that a peer has the cluster key when it connects, and nothing protects what
//! follows. So it is off unless asked for. No other module knows of this one.
#![deny(unsafe_code)]

mod auth;
mod connection;
mod discovery;
mod frame_budget;
mod layer_name;
mod master;
mod split;
pub mod wire;
mod worker;

pub use auth::{CakeAuthError, CakeKey};
pub use connection::{AUTHENTICATION_DEADLINE, CakeConnectionError};
pub use discovery::{
    CakeAnnouncement, CakeGpu, DISCOVERY_PORT, DISCOVERY_WINDOW, DiscoveredWorker, WORKERS_MAX, answer_queries,
    broadcast_addresses, discover, read_any_packet,
};
pub use layer_name::{CakeLayerPrefix, CakeLayersError, layer_number, layer_range, layer_ranges};
pub use master::{
    CakeChainBuilder, CakeChainConfig, CakeChainError, CakeExecutor, CakeSetupError, CakeSetupProgress, CakeStagePlan,
    CakeWorkerAddress, LoadOwn, SetupFiles, set_up_worker,
};
pub use split::split_by_memory;
pub use worker::{
    CONNECTIONS_MAX, CakeLoader, CakeSession, CakeStage, CakeStageError, CakeStoreError, CakeStoreLimits,
    CakeTransferError, CakeWorker, CakeWorkerError, CakeWorkerSettings, ExecutorLoader, HANDSHAKES_MAX, LoadExecutor,
};
