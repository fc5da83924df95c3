//! `consort ranks`: lends this machine to supervisors on others. Each gets a rank process, which ends with its connection.

use std::io;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use clap::Args;
use cluster::tcp::{RankProcess, serve_ranks};
use cluster::worker;
use tracing::{error, info};
use types::Rank;

use super::serve::logs::{self, LogFormat};
use crate::cluster_key::KeyOptions;
use crate::options::{cpus, own_program, thread_count};

/// The CUDA device of a rank that has a host to itself.
const CUDA_DEVICE: usize = 0;

static IS_OVER: AtomicBool = AtomicBool::new(false);

/// Lend this machine's CPUs to models that run on several machines
///
/// Those who have the cluster's key start ranks here, by --tp-hosts. A model has to lie under the same path as there. Ctrl-C
/// ends all ranks.
#[derive(Args, Debug)]
pub struct RanksArgs {
    /// Where to listen; 0.0.0.0 is all of this machine's addresses, port 0 any that is free
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: String,
    /// Threads of a rank at most [default: one for each CPU]
    #[arg(short, long, value_name = "COUNT", env = "CONSORT_THREADS", value_parser = thread_count)]
    threads: Option<NonZeroUsize>,
    #[command(flatten)]
    key: KeyOptions,
    /// How to write the log, on standard error
    #[arg(long, value_enum, default_value_t)]
    log: LogFormat,
}

impl RanksArgs {
    pub fn run(self) -> Result<()> {
        logs::install(self.log, "info")?;
        let key = self.key.key()?;
        let listener = TcpListener::bind(&self.listen).with_context(|| format!("listen on {}", self.listen))?;
        ctrlc::set_handler(|| IS_OVER.store(true, Ordering::SeqCst)).context("take over Ctrl-C")?;
        info!("ranks run here for those who have the key: listening on {}", listener.local_addr()?);
        let threads_max = self.threads.map_or_else(cpus, NonZeroUsize::get);
        serve_ranks(&listener, &key, |rank| spawn(rank, threads_max), || IS_OVER.load(Ordering::SeqCst))
            .context("serve ranks")
    }
}

/// Called in a thread that lives as long as the rank, which asks the kernel to end it with that thread.
fn spawn(rank: Rank, threads_max: usize) -> io::Result<RankProcess> {
    let mut command = worker::command(&own_program(), rank, CUDA_DEVICE);
    command.args(["--threads-max", &threads_max.to_string()]);
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.inspect_err(|cause| error!(%rank, "a rank can not be started: {cause}"))?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("a rank was started without pipes"));
    };
    let pid = child.id();
    info!(%rank, pid, "rank started");
    let kill = move || {
        let _ = child.kill(); // an error means that it has ended
        let ended = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        info!(%rank, pid, "rank ended: {ended}");
    };
    Ok(RankProcess { pid, stdin: Box::new(stdin), stdout: Box::new(stdout), kill: Box::new(kill) })
}
