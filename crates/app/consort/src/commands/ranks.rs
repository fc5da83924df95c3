//! `consort ranks`: runs rank processes for supervisors on other machines. A rank process ends with its supervisor's
//! connection.

use std::io;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use anyhow::{Context, Result};
use clap::Args;
use ranks::remote::{RankProcess, serve_ranks};
use ranks::worker;
use tracing::{error, info};
use types::Rank;

use super::serve::logs::{self, LogFormat};
use super::serve::shutdown::Signals;
use crate::executors::group::current_executable;
use crate::listening;
use crate::options::{KeyOptions, cpus, thread_count};

/// The CUDA device of a rank that is alone on its host.
const CUDA_DEVICE: usize = 0;

static SHUTDOWN: AtomicBool = AtomicBool::new(false);

/// Run ranks for models that are split over several machines
///
/// Any machine that has the cluster key can start ranks here, with --tp-hosts. The model must have the same path on both
/// machines. Ctrl-C or SIGTERM ends all ranks.
#[derive(Args, Debug)]
pub struct RanksArgs {
    /// Address to listen on; 0.0.0.0 is every address of this machine, port 0 any free port
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: String,
    /// Maximum compute threads of a rank [default: one per CPU]
    #[arg(short, long, value_name = "COUNT", env = "CONSORT_THREADS", value_parser = thread_count)]
    threads: Option<NonZeroUsize>,
    /// Log format, on standard error
    #[arg(long, value_enum, default_value_t)]
    log: LogFormat,
    #[command(flatten)]
    key: KeyOptions,
}

impl RanksArgs {
    pub fn run(self) -> Result<()> {
        logs::install(self.log, "info")?;
        let key = self.key.key()?;
        let listener =
            TcpListener::bind(&self.listen).map_err(|error| listening::explain(&self.listen, "--listen", &error))?;
        watch_signals()?;
        info!("ready to start ranks for supervisors with the key: listening on {}", listener.local_addr()?);
        let threads_max = self.threads.map_or_else(cpus, NonZeroUsize::get);
        serve_ranks(&listener, &key, |rank| spawn(rank, threads_max), is_shutting_down).context("serve ranks")
    }
}

/// Whether the process was asked to end.
pub fn is_shutting_down() -> bool {
    SHUTDOWN.load(Ordering::SeqCst)
}

/// Starts a thread that waits for SIGINT (Ctrl-C) or SIGTERM: see [`is_shutting_down`].
pub fn watch_signals() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("listen for signals")?;
    let mut signals = {
        let _entered = runtime.enter();
        Signals::listen()?
    };
    let watch = move || {
        runtime.block_on(signals.next());
        SHUTDOWN.store(true, Ordering::SeqCst);
    };
    thread::Builder::new().name("signals".to_owned()).spawn(watch).context("listen for signals")?;
    Ok(())
}

/// Must run in a thread that lives as long as the rank: the rank asks the kernel to kill it when that thread ends.
fn spawn(rank: Rank, threads_max: usize) -> io::Result<RankProcess> {
    let mut command = worker::command(&current_executable(), rank, CUDA_DEVICE);
    command.args(["--threads-max", &threads_max.to_string()]);
    let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.inspect_err(|cause| error!(%rank, "a rank can not be started: {cause}"))?;
    let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(io::Error::other("a rank was started without pipes"));
    };
    let pid = child.id();
    info!(%rank, pid, "rank started");
    let kill = move || {
        let _ = child.kill(); // an error means that the process has ended already
        let ended = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        info!(%rank, pid, "rank ended: {ended}");
    };
    Ok(RankProcess { pid, stdin: Box::new(stdin), stdout: Box::new(stdout), kill: Box::new(kill) })
}
