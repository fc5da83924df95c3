//! The command line: one file for each command.

mod chat;
mod debug;
mod list;
mod pull;
mod rm;
mod run;
mod serve;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::bench::Bench;

/// One large language model on the machines you already have.
#[derive(Debug, Parser)]
#[command(name = "consort", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Run),
    Chat(chat::Chat),
    Serve(serve::Serve),
    Pull(pull::Pull),
    List(list::List),
    Rm(rm::Rm),
    Bench(Bench),
    Debug(debug::Debug),
}

impl Cli {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            Command::Run(command) => return command.run(),
            Command::Chat(command) => return command.run(),
            Command::Serve(command) => return command.run(),
            Command::Pull(command) => command.run()?,
            Command::List(command) => command.run()?,
            Command::Rm(command) => command.run()?,
            Command::Bench(command) => command.run()?,
            Command::Debug(command) => command.run()?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
