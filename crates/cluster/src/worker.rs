//! The rank process: serves the line protocol of [`crate::protocol`] on a pair of pipes.
//!
//! A reading thread takes lines from the input; the thread that calls [`run`] works them off one after another and
//! answers each. What must not wait for the work at hand is done by the reading thread: `cancel`, `abort`, a `ping` during a
//! request that may take long, and the end of the input, which ends the epoch of the group, so that a rank whose
//! leader is gone does not compute on.
//!
//! A request that can not be served is answered with a typed error and the rank lives on. Nobody waits for a rank that
//! failed in the middle of a step: it ends the epoch before it answers.
#![cfg(target_os = "linux")]

mod build;
mod dense;
#[cfg(debug_assertions)]
mod fault;
mod peers;
mod process;
mod queue;
mod rank_zero;
mod reader;
mod rendezvous;
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

use crate::collective::GroupCollective;
use crate::protocol::WriteError;

pub use build::{build_id, build_id_of};
#[cfg(debug_assertions)]
pub use fault::{Fault, FaultError};

use process::{Process, pong};
use queue::RequestQueue;
use reader::RequestReader;
use replies::ReplyWriter;

/// How long the requests before the end of the input may still take.
pub const GRACE: Duration = Duration::from_secs(2);

/// How long the ranks of an `init` may take to find each other, unless told otherwise.
pub const INIT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a rank waits for the others of its `init` in one collective, unless told otherwise.
pub const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// What a rank is started with.
#[derive(Debug)]
pub struct Options {
    pub rank: Rank,
    pub cuda_device: u32,
    /// What this build is called: see [`build_id`].
    pub build: String,
    /// How long the ranks of an `init` take to find each other at most: see [`INIT_TIMEOUT`].
    pub init_timeout: Duration,
    /// How long a rank of an `init` waits for the others: see [`COLLECTIVE_TIMEOUT`].
    pub collective_timeout: Duration,
    /// Threads of a model at most, whatever a leader asks for.
    pub threads_max: Option<NonZeroUsize>,
    /// What goes wrong, for tests.
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

/// What starts `program` as a rank process, which is to be given pipes. The kernel ends the process with the thread that
/// starts it.
pub fn command(program: &Path, rank: Rank, cuda_device: usize) -> Command {
    let mut command = Command::new(program);
    command.args(["--worker", "--end-with-thread"]);
    for (name, value) in [("--rank", rank.index()), ("--tp-size", rank.world().get()), ("--cuda-device", cuda_device)] {
        command.args([name, &value.to_string()]);
    }
    command
}

/// Serves requests until one is `shutdown` or the input ends. `abandon` is called from another thread when the input has
/// ended and the work at hand does not end within [`GRACE`]: it ends the process.
pub fn run(
    options: Options,
    input: impl Read + Send + 'static,
    output: impl Write + Send + 'static,
    abandon: impl FnOnce() + Send + 'static,
) -> Result<(), WorkerError> {
    let (queue, replies, link) =
        (Arc::new(RequestQueue::default()), ReplyWriter::new(output), GroupCollective::new(options.rank));
    let (working, worked) = mpsc::channel();
    let pong = pong(options.rank, options.cuda_device);
    let reader = RequestReader::new(Arc::clone(&queue), replies.clone(), link.abort_handle(), pong);
    let read = move || {
        reader.read(input);
        if worked.recv_timeout(GRACE) == Err(mpsc::RecvTimeoutError::Timeout) {
            abandon();
        }
    };
    // It is not joined: after a `shutdown` it still waits for a line.
    thread::Builder::new().name("reader".into()).spawn(read).map_err(WorkerError::Thread)?;
    let served = Process::new(options, replies, link).serve(&queue);
    drop::<mpsc::Sender<()>>(working);
    Ok(served?)
}
