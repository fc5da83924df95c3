//! The program, as a library: it is compiled beside the crates that it uses, and a binary would be after them.
#![forbid(unsafe_code)]

mod bench;
mod bounded_file;
#[cfg_attr(not(feature = "cake"), path = "without_cake.rs")]
mod cake;
mod cluster_key;
mod commands;
mod configuration;
mod executors;
mod generate;
mod interrupt;
mod invitations;
mod listening;
mod model_config;
mod options;
mod placement;
mod plan_file;
mod progress;
mod rendering;
mod running_servers;
mod sampling;
mod server_client;
mod stats;
mod store;
#[cfg_attr(not(feature = "swarm"), path = "without_swarm.rs")]
mod swarm;
mod terminal;
mod terminal_mode;
mod text_assets;
mod usage;
mod waiting_line;

use std::io;
use std::process::ExitCode;

/// Carries out the command line of this process.
pub fn main() -> ExitCode {
    match commands::run() {
        Ok(code) => code,
        // The reader closed the output, as `head` does. That is not an error.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            terminal::error(&error);
            if usage::is_usage_error(&error) { usage::EXIT_CODE.into() } else { ExitCode::FAILURE }
        }
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    io_errors.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}
