//! Cake workers as stages of our chain: [`CakeExecutor`] runs the layers of one, [`set_up_worker`] gives it layers and weights,
//! [`CakeChainBuilder`] forms a chain of several.

mod chain_builder;
mod executor;
mod history;
mod link;
mod setup;

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use types::LayerRange;

use super::auth::CakeKey;
use super::connection::{CakeConnection, CakeConnectionError};
use super::frame_budget::FrameBudget;
use super::layer_name::CakeLayerPrefix;
use super::wire::FRAME_BYTES_MAX;

pub use chain_builder::{CakeChainBuilder, CakeChainConfig, CakeChainError, CakeSetupProgress, CakeStagePlan, LoadOwn};
pub use executor::CakeExecutor;
pub use setup::{CakeSetupError, SetupFiles, set_up_worker};

/// How long it may take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a worker may take to answer what needs no work.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer that is not a tensor.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A worker and the layers that it runs for us.
#[derive(Clone, Debug)]
pub struct CakeWorkerAddress {
    pub address: SocketAddr,
    pub key: Option<CakeKey>,
    pub layers: LayerRange,
    pub prefix: CakeLayerPrefix,
    /// How long a step may take.
    pub step_timeout: Duration,
}

impl CakeWorkerAddress {
    fn connect(&self) -> Result<CakeConnection, CakeConnectionError> {
        connect(self.address, self.key.as_ref())
    }
}

fn connect(address: SocketAddr, key: Option<&CakeKey>) -> Result<CakeConnection, CakeConnectionError> {
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => CakeConnectionError::Silent(CONNECT_TIMEOUT),
        _ => CakeConnectionError::Io(error),
    })?;
    // One frame at a time: a connection has one request in flight.
    CakeConnection::as_master(stream, key, Arc::clone(&FrameBudget::new(FRAME_BYTES_MAX)))
}
