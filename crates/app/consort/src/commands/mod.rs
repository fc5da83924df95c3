//! The command line: one file for each command.

mod chat;
mod cluster;
mod completions;
mod debug;
// The document describes a build with all features.
#[cfg(all(test, feature = "swarm", feature = "cake", feature = "neuron"))]
mod document;
mod help;
pub mod join;
mod list;
mod man;
mod plan;
mod ps;
mod pull;
pub mod ranks;
mod rm;
pub mod run;
mod search;
pub mod serve;
mod show;
mod stop;
mod worker;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::configuration::{self, ConfigurationOptions, ExtendedArguments};
use crate::swarm::SwarmArgs;

pub use chat::is_for_model_here;

/// One large language model on the machines you already have.
#[derive(Debug, Parser)]
#[command(name = "consort", version, propagate_version = true)]
#[command(override_usage = "consort <COMMAND>", arg_required_else_help = true, subcommand_required = true)]
pub struct Cli {
    #[command(flatten)]
    _configuration: ConfigurationOptions,
    #[command(subcommand)]
    command: Command,
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
    Search(search::SearchArgs),
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    Rm(rm::RmArgs),
    Show(show::ShowArgs),
    Ps(ps::PsArgs),
    Stop(stop::StopArgs),
    Bench(BenchArgs),
    #[command(hide = true)]
    Debug(debug::DebugArgs),
    Completions(completions::CompletionsArgs),
    Man(man::ManArgs),
}

/// Runs the command that the arguments of this process name.
pub fn run() -> Result<ExitCode> {
    let given: Vec<OsString> = env::args_os().collect();
    if worker::is_called_by(&given) {
        return worker::run(given);
    }
    let mut command = Cli::documented();
    let ExtendedArguments { arguments, file } = configuration::extend(&command, given.clone())?;
    let matches = match (command.try_get_matches_from_mut(arguments), file) {
        (Ok(matches), _) => matches,
        (Err(error), Some(file)) if command.try_get_matches_from_mut(given).is_ok() => {
            return Err(configuration::blamed(&file, &error).into());
        }
        (Err(error), _) => error.exit(),
    };
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).run()
}

impl Cli {
    /// The command line as users know it: without the options of rank processes.
    fn documented() -> clap::Command {
        help::shortened(Self::command())
    }

    fn run(self) -> Result<ExitCode> {
        match self.command {
            Command::Run(command) => return command.run(),
            Command::Chat(command) => return command.run(),
            Command::Serve(command) => return command.run(),
            Command::Join(command) => command.run()?,
            Command::Cluster(command) => return command.run(),
            Command::Plan(command) => command.run()?,
            Command::Ranks(command) => command.run()?,
            Command::Swarm(command) => return command.run(),
            Command::Pull(command) => command.run()?,
            Command::Search(command) => command.run()?,
            Command::List(command) => command.run()?,
            Command::Rm(command) => command.run()?,
            Command::Show(command) => command.run()?,
            Command::Ps(command) => command.run()?,
            Command::Stop(command) => command.run()?,
            Command::Bench(command) => command.run()?,
            Command::Debug(command) => command.run()?,
            Command::Completions(command) => command.run()?,
            Command::Man(command) => command.run()?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
