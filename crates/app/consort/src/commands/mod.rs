//! The command line: one file for each command.

mod chat;
mod cluster;
mod completions;
mod debug;
// The document describes a build with all features.
#[cfg(all(test, feature = "swarm", feature = "cake", feature = "neuron"))]
mod document;
pub mod join;
mod list;
mod man;
mod plan;
mod ps;
mod pull;
pub mod ranks;
mod rm;
pub mod run;
pub mod serve;
mod show;
mod worker;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::swarm::SwarmArgs;

/// One large language model on the machines you already have.
#[derive(Debug, Parser)]
#[command(name = "consort", version, propagate_version = true)]
#[command(override_usage = "consort <COMMAND>", arg_required_else_help = true)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Cli {
    #[command(flatten)]
    worker: Option<worker::WorkerArgs>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::RunArgs),
    Chat(chat::ChatArgs),
    Serve(Box<serve::ServeArgs>),
    Join(join::JoinArgs),
    Cluster(cluster::ClusterArgs),
    Plan(Box<plan::PlanArgs>),
    Ranks(ranks::RanksArgs),
    Swarm(SwarmArgs),
    Pull(pull::PullArgs),
    List(list::ListArgs),
    Rm(rm::RmArgs),
    Show(show::ShowArgs),
    Ps(ps::PsArgs),
    Bench(BenchArgs),
    Debug(debug::DebugArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
}

impl Cli {
    /// The command line as users know it: without the options of rank processes.
    fn documented() -> clap::Command {
        let full = Self::command();
        clap::Command::new("consort")
            .version(env!("CARGO_PKG_VERSION"))
            .propagate_version(true)
            .about(full.get_about().cloned().unwrap_or_default())
            .subcommand_required(true)
            .subcommands(full.get_subcommands().cloned())
    }

    pub fn run(self) -> Result<ExitCode> {
        let Some(command) = self.command else {
            let worker = self.worker.context("name a command")?;
            return worker.run();
        };
        match command {
            Command::Run(command) => return command.run(),
            Command::Chat(command) => return command.run(),
            Command::Serve(command) => return command.run(),
            Command::Join(command) => command.run()?,
            Command::Cluster(command) => return command.run(),
            Command::Plan(command) => command.run()?,
            Command::Ranks(command) => command.run()?,
            Command::Swarm(command) => return command.run(),
            Command::Pull(command) => command.run()?,
            Command::List(command) => command.run()?,
            Command::Rm(command) => command.run()?,
            Command::Show(command) => command.run()?,
            Command::Ps(command) => command.run()?,
            Command::Bench(command) => command.run()?,
            Command::Debug(command) => command.run()?,
            Command::Completions(command) => command.run()?,
            Command::Man(command) => command.run()?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
