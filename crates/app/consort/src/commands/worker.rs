//! `consort --worker`: a rank process of a tensor-parallel group. Programs start it, not users: it serves a line protocol on
//! standard input and output, and ends with the process that started it.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;

/// Whether these arguments of the program, the first of which is its name, are those of a rank process.
pub fn is_called_by(arguments: &[OsString]) -> bool {
    let begins_with_option = arguments.get(1).is_some_and(|first| first.as_encoded_bytes().starts_with(b"-"));
    begins_with_option && arguments.iter().any(|argument| argument == "--worker")
}

pub fn run(arguments: Vec<OsString>) -> Result<ExitCode> {
    WorkerArgs::parse_from(arguments).run()
}

#[derive(Debug, Parser)]
#[command(name = "consort", version)]
struct WorkerArgs {
    /// Serve as a rank process, driven over standard input and output
    #[arg(long, hide = true, required = true)]
    worker: bool,
    /// The rank of this process, below --tp-size
    #[arg(long, hide = true)]
    rank: u16,
    /// Number of ranks in the group
    #[arg(long, hide = true)]
    tp_size: u16,
    /// The CUDA device of this rank
    #[arg(long, hide = true, default_value_t = 0)]
    cuda_device: u32,
    /// Maximum compute threads
    #[arg(long, hide = true)]
    threads_max: Option<NonZeroUsize>,
    /// Seconds that an `init` may take to connect all ranks, else CONSORT_INIT_TIMEOUT, else 30
    #[arg(long, hide = true, value_parser = seconds)]
    init_timeout: Option<Duration>,
    /// Seconds that a rank of an `init` group waits for the others in one collective, else CONSORT_COLLECTIVE_TIMEOUT, else
    /// 30
    #[arg(long, hide = true, value_parser = seconds)]
    collective_timeout: Option<Duration>,
    /// The kernel kills this process when the thread that started it ends, even if this process is stopped
    #[arg(long, hide = true)]
    end_with_thread: bool,
}

const SECONDS_MIN: f64 = 0.1;
const SECONDS_MAX: f64 = 86_400.0;

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (SECONDS_MIN..=SECONDS_MAX).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("not a number from {SECONDS_MIN} to {SECONDS_MAX}"))
}

impl WorkerArgs {
    #[cfg(not(target_os = "linux"))]
    fn run(self) -> Result<ExitCode> {
        anyhow::bail!("tensor parallelism needs Linux");
    }

    #[cfg(target_os = "linux")]
    fn run(self) -> Result<ExitCode> {
        linux::run(self)
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::env;
    use std::fs::File;
    use std::io;
    use std::process::{self, ExitCode};
    use std::thread;
    use std::time::Duration;

    use anyhow::{Context, Result, anyhow, bail};
    use ranks::worker::{self, COLLECTIVE_TIMEOUT, INIT_TIMEOUT, Options, build_id};
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::io::{Errno, fcntl_dupfd_cloexec};
    use rustix::process::{Pid, PidfdFlags, Signal, getppid, pidfd_open, set_parent_process_death_signal};
    use rustix::stdio::{dup2_stdout, stderr, stdout};
    use types::WorldSize;

    use super::{WorkerArgs, seconds};
    use crate::commands::serve::logs::{self, LogFormat};

    /// The variable that injects a fault, for tests: see [`worker::Fault`].
    #[cfg(debug_assertions)]
    const FAULT_VARIABLE: &str = "CONSORT_FAULT";

    /// A leader that has fixed arguments for its workers can still set these variables. `clap` does not read them: with a
    /// variable set, it would take every command for a worker.
    const INIT_TIMEOUT_VARIABLE: &str = "CONSORT_INIT_TIMEOUT";
    const COLLECTIVE_TIMEOUT_VARIABLE: &str = "CONSORT_COLLECTIVE_TIMEOUT";

    /// Descriptors below are standard input, output and error.
    const FIRST_FREE_FD: i32 = 3;

    /// How often the parent is checked on a kernel without `pidfd_open`.
    const PARENT_POLL_INTERVAL: Duration = Duration::from_millis(500);

    pub fn run(worker: WorkerArgs) -> Result<ExitCode> {
        let WorkerArgs { rank, tp_size, cuda_device, threads_max, init_timeout, collective_timeout, .. } = worker;
        end_with_parent(worker.end_with_thread)?;
        let output = take_stdout().context("take over standard output")?;
        logs::install(LogFormat::Text, "warn")?;
        // Ctrl-C signals the whole process group of the terminal. The leader decides what it means, so ranks ignore it.
        ctrlc::set_handler(|| {}).context("take over Ctrl-C")?;
        let world = WorldSize::new(tp_size).context("--tp-size is at least 1")?;
        let rank = world.rank(rank).with_context(|| format!("--rank {rank} is not below --tp-size {tp_size}"))?;
        let options = Options {
            rank,
            cuda_device,
            build: build_id(),
            init_timeout: timeout(init_timeout, INIT_TIMEOUT_VARIABLE)?.unwrap_or(INIT_TIMEOUT),
            collective_timeout: timeout(collective_timeout, COLLECTIVE_TIMEOUT_VARIABLE)?.unwrap_or(COLLECTIVE_TIMEOUT),
            threads_max,
            #[cfg(debug_assertions)]
            fault: env::var(FAULT_VARIABLE).ok().map(|text| text.parse()).transpose()?,
        };
        worker::run(options, io::stdin(), output, || process::exit(1))?;
        Ok(ExitCode::SUCCESS)
    }

    fn timeout(flag: Option<Duration>, variable: &str) -> Result<Option<Duration>> {
        let set = || env::var(variable).ok().map(|text| seconds(&text)).transpose();
        match flag {
            Some(flag) => Ok(Some(flag)),
            None => set().map_err(|error| anyhow!("{variable}: {error}")),
        }
    }

    /// Ends this process when the parent process ends. The kernel's death signal is sent when the parent's thread ends, so
    /// only leaders that keep the thread request it.
    fn end_with_parent(death_signal: bool) -> Result<()> {
        // A parent in another PID namespace cannot be watched. Then the end of the input ends this process.
        let Some(parent) = getppid() else { return Ok(()) };
        if death_signal {
            set_parent_process_death_signal(Some(Signal::KILL)).context("ask to end with the parent")?;
        }
        let watch = move || {
            wait_for_end(parent);
            process::exit(1);
        };
        thread::Builder::new().name("parent".into()).spawn(watch).context("watch the parent")?;
        if getppid() != Some(parent) {
            bail!("the parent is gone");
        }
        Ok(())
    }

    fn wait_for_end(parent: Pid) {
        match pidfd_open(parent, PidfdFlags::empty()) {
            // The pid may have been reused. Then the parent of this process has changed, which the loop checks.
            Ok(pidfd) => {
                while getppid() == Some(parent)
                    && poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], None) == Err(Errno::INTR)
                {}
            }
            Err(_) => {
                while getppid() == Some(parent) {
                    thread::sleep(PARENT_POLL_INTERVAL);
                }
            }
        }
    }

    /// A descriptor of standard output for the protocol alone. All other output is redirected to standard error.
    fn take_stdout() -> io::Result<File> {
        let own = fcntl_dupfd_cloexec(stdout(), FIRST_FREE_FD)?;
        dup2_stdout(stderr())?;
        Ok(own.into())
    }
}
