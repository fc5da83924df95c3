//! The rank process: serves the line protocol of [`crate::protocol`] on a pair of pipes.
//!
//! A reading thread takes lines from the input; the thread that calls [`run`] handles them one after another and
//! replies to each. The reading thread itself handles what must not wait for a running request: `cancel`, `abort`, a
//! `ping` during a long request, and the end of the input. That end aborts the epoch of the group, so that a rank whose
//! leader is gone stops computing.
//!
//! A request that fails gets a typed error as its reply, and the rank goes on. No other rank waits for one that failed
//! in the middle of a step: it aborts the epoch before it replies.
#![cfg(target_os = "linux")]

mod build;
#[cfg(debug_assertions)]
mod fault;
#[cfg_attr(not(feature = "neuron"), path = "worker/without_neuron.rs")]
mod neuron;
mod process;
mod queue;
mod reader;
mod replies;
mod request_error;
mod shard;

use std::io::{Read, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use types::Rank;

use crate::protocol::WriteError;
use collectives::GroupCollective;

pub use build::{build_id, build_id_of};
#[cfg(debug_assertions)]
pub use fault::{Fault, FaultError};

use process::{RankServer, pong};
use queue::RequestQueue;
use reader::RequestReader;
use replies::ReplyWriter;

/// How long requests that were read before the end of the input may still take.
pub const GRACE: Duration = Duration::from_secs(2);

/// Default of [`Options::init_timeout`].
pub const INIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Default of [`Options::collective_timeout`].
pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The options of a rank process.
#[derive(Debug)]
pub struct Options {
    pub rank: Rank,
    pub cuda_device: u32,
    /// The id of this build: see [`build_id`].
    pub build: String,
    /// How long the rendezvous of an `init` may take.
    pub init_timeout: Duration,
    /// How long a rank of an `init` waits for the others before and within a step.
    pub collective_timeout: Duration,
    /// Limit of the threads of a model, whatever a leader requests.
    pub threads_max: Option<NonZeroUsize>,
    /// The fault to inject, for tests.
    #[cfg(debug_assertions)]
    pub fault: Option<Fault>,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error("start the reading thread")]
    Thread(#[source] std::io::Error),
    #[error(transparent)]
    Answer(#[from] WriteError),
}

/// The command that starts `program` as a rank process; the caller sets up its pipes. The kernel kills the process when
/// the thread that started it ends.
pub fn command(program: &Path, rank: Rank, cuda_device: usize) -> Command {
    let mut command = Command::new(program);
    command.args(["--worker", "--end-with-thread"]);
    for (name, value) in [("--rank", rank.index()), ("--tp-size", rank.world().get()), ("--cuda-device", cuda_device)] {
        command.args([name, &value.to_string()]);
    }
    command
}

/// Serves requests until one is `shutdown` or the input ends. `abandon` is called from another thread if the input has
/// ended and the running requests do not finish within [`GRACE`]: it has to end the process.
pub fn run(
    options: Options,
    input: impl Read + Send + 'static,
    output: impl Write + Send + 'static,
    abandon: impl FnOnce() + Send + 'static,
) -> Result<(), WorkerError> {
    let (queue, replies, collective) =
        (Arc::new(RequestQueue::default()), ReplyWriter::new(output), GroupCollective::new(options.rank));
    let (working, worked) = mpsc::channel();
    let pong = pong(options.rank, options.cuda_device);
    let reader = RequestReader::new(Arc::clone(&queue), replies.clone(), collective.abort_handle(), pong);
    let read = move || {
        reader.read(input);
        if worked.recv_timeout(GRACE) == Err(mpsc::RecvTimeoutError::Timeout) {
            abandon();
        }
    };
    // The thread is not joined: after a `shutdown` it still waits for a line.
    thread::Builder::new().name("reader".into()).spawn(read).map_err(WorkerError::Thread)?;
    let served = RankServer::new(options, replies, collective).serve(&queue);
    drop::<mpsc::Sender<()>>(working);
    Ok(served?)
}
