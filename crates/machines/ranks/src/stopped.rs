//! Whether a process is stopped, as by SIGSTOP: it exists, but does nothing until SIGCONT.
#![cfg(target_os = "linux")]

use std::fs;

/// `pid` is a child that has not been reaped, so the pid is not reused.
pub fn is_stopped(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The program's name, which may contain anything, ends with the last parenthesis.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}
