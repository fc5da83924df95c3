//! Whether a process was stopped, as by SIGSTOP: it is there, and does nothing until it is continued.
#![cfg(target_os = "linux")]

use std::fs;

/// Of a child that has not been reaped.
pub fn is_stopped(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The name of the program, which may hold anything, ends with the last parenthesis.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}
