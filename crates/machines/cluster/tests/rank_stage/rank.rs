//! Rank processes: this program, started again.

use std::{env, fs, io, process};

use ranks::worker::{self, COLLECTIVE_TIMEOUT, INIT_TIMEOUT, Options, build_id};
use rustix::process::{Pid, Signal, kill_process};
use types::WorldSize;

/// Serves as a rank, if this process was started as one.
pub fn serve_if_asked() -> bool {
    let arguments: Vec<_> = env::args().collect();
    if !arguments.iter().any(|argument| argument == "--worker") {
        return false;
    }
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name).unwrap();
        arguments[at + 1].parse().unwrap()
    };
    let options = Options {
        rank: WorldSize::new(value("--tp-size")).unwrap().rank(value("--rank")).unwrap(),
        cuda_device: 0,
        build: build_id(),
        init_timeout: INIT_TIMEOUT,
        collective_timeout: COLLECTIVE_TIMEOUT,
        threads_max: None,
        #[cfg(debug_assertions)]
        fault: None,
    };
    worker::run(options, io::stdin(), io::stdout(), || process::exit(1)).unwrap();
    true
}

/// The rank processes of this one, in the order of their ranks.
pub fn pids() -> Vec<u32> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut ranks: Vec<_> = pids.filter_map(|pid| Some((rank_of(pid)?, pid))).collect();
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

/// The rank of a process, if it is a child of this one that has not ended.
fn rank_of(pid: u32) -> Option<u16> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let (state, parent) = (fields.next()?, fields.next()?.parse::<u32>().ok()?);
    let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
    let rank = line.split('\0').skip_while(|argument| *argument != "--rank").nth(1)?;
    if parent == process::id() && state != "Z" { rank.parse().ok() } else { None }
}

pub fn kill(pid: u32) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
}
