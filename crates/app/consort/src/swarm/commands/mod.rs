//! `consort swarm`: lends this machine to a swarm, uses one, and shows one.

mod listening;
mod loader;
mod monitor;
mod serve;
mod status;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::commands::run::RunArgs;

/// Serve layers to a swarm of peers, or use them
///
/// Peers need not trust each other. Those on one LAN find each other; others join through a peer that they name with --bootstrap.
#[derive(Args, Debug)]
pub struct SwarmArgs {
    #[command(subcommand)]
    command: SwarmCommand,
}

#[derive(Debug, Subcommand)]
enum SwarmCommand {
    Serve(Box<serve::SwarmServeArgs>),
    Run(Box<RunArgs>),
    Status(status::SwarmStatusArgs),
}

impl SwarmArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            SwarmCommand::Serve(serve) => serve.run()?,
            SwarmCommand::Run(mut run) => {
                // As with `--swarm`.
                run.options.placement.swarm.swarm = true;
                return run.run();
            }
            SwarmCommand::Status(status) => status.run()?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
