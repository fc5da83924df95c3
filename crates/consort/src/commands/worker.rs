//! `consort --worker`: a rank of a tensor-parallel group. Programs start it, not people: it serves a line protocol on its
//! input and output, and ends with whoever started it.

use std::num::NonZeroUsize;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

#[derive(Args, Debug)]
pub struct WorkerArgs {
    /// Serve as a rank process, driven over standard input and output
    #[arg(long, hide = true, required = true)]
    worker: bool,
    /// The rank of this process, below --tp-size
    #[arg(long, hide = true)]
    rank: u16,
    /// Ranks of the group
    #[arg(long, hide = true)]
    tp_size: u16,
    /// The CUDA device of this rank
    #[arg(long, hide = true, default_value_t = 0)]
    cuda_device: u32,
    /// Threads to compute on at most
    #[arg(long, hide = true)]
    threads_max: Option<NonZeroUsize>,
}

impl WorkerArgs {
    #[cfg(not(target_os = "linux"))]
    pub fn run(self) -> Result<ExitCode> {
        anyhow::bail!("tensor parallelism needs Linux");
    }

    #[cfg(target_os = "linux")]
    pub fn run(self) -> Result<ExitCode> {
        linux::run(self)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::env;
    use std::fs::File;
    use std::io;
    use std::process::{self, ExitCode};

    use anyhow::{Context, Result, bail};
    use cluster::worker::{self, INIT_DEADLINE, Options, build_id};
    use rustix::io::fcntl_dupfd_cloexec;
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    use rustix::stdio::{dup2_stdout, stderr, stdout};
    use types::WorldSize;

    use super::WorkerArgs;
    use crate::commands::serve::logs::{self, LogFormat};

    /// What goes wrong on purpose, for tests: see [`worker::Fault`].
    const FAULT_VARIABLE: &str = "CONSORT_FAULT";

    /// Descriptors below are those of standard input, output and error.
    const FIRST_FREE_FD: i32 = 3;

    pub fn run(WorkerArgs { rank, tp_size, cuda_device, threads_max, .. }: WorkerArgs) -> Result<ExitCode> {
        die_with_parent()?;
        let output = take_stdout().context("take over standard output")?;
        logs::install(LogFormat::Text, "warn")?;
        // A Ctrl-C reaches the whole terminal group. What it means is for the leader to say.
        ctrlc::set_handler(|| {}).context("take over Ctrl-C")?;
        let world = WorldSize::new(tp_size).context("--tp-size is at least 1")?;
        let rank = world.rank(rank).with_context(|| format!("--rank {rank} is not below --tp-size {tp_size}"))?;
        let fault = env::var(FAULT_VARIABLE).ok().map(|text| text.parse()).transpose()?;
        let (build, init_deadline) = (build_id(), INIT_DEADLINE);
        let options = Options { rank, cuda_device, build, init_deadline, threads_max, fault };
        worker::run(options, io::stdin(), output, || process::exit(1))?;
        Ok(ExitCode::SUCCESS)
    }

    /// However the parent ends, this process ends with it.
    fn die_with_parent() -> Result<()> {
        let parent = getppid();
        set_parent_process_death_signal(Some(Signal::KILL)).context("ask to end with the parent")?;
        if getppid() != parent {
            bail!("the parent is gone");
        }
        Ok(())
    }

    /// Standard output for the protocol alone: whatever else is printed goes to standard error.
    fn take_stdout() -> io::Result<File> {
        let own = fcntl_dupfd_cloexec(stdout(), FIRST_FREE_FD)?;
        dup2_stdout(stderr())?;
        Ok(own.into())
    }
}
