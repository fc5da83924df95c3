//! `consort cluster`: the key of the cluster, and how other machines get it.

mod invite;
mod key;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Invite machines to the cluster of this one, and show its key
#[derive(Args, Debug)]
pub struct ClusterArgs {
    #[command(subcommand)]
    command: ClusterCommand,
}

#[derive(Debug, Subcommand)]
enum ClusterCommand {
    Invite(invite::InviteArgs),
    Key(key::KeyArgs),
}

impl ClusterArgs {
    pub fn run(self) -> Result<ExitCode> {
        match self.command {
            ClusterCommand::Invite(command) => command.run(),
            ClusterCommand::Key(command) => command.run().map(|()| ExitCode::SUCCESS),
        }
    }
}
