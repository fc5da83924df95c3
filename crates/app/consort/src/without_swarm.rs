//! What stands for `swarm` in a build without that feature: the command and the option that begin with a swarm say so, and no
//! [`Placement`](crate::placement::Placement) is a swarm.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::executors::{LoadObserver, LoadedModel, OpenedModel};
use crate::usage::UsageError;

const ABSENT: &str = "this build of consort has no swarm: build it with `--features swarm`";

#[derive(Args, Clone, Debug)]
pub struct SwarmOptions {
    #[arg(long, hide = true)]
    pub swarm: bool,
}

/// There is none.
#[derive(Clone, Debug)]
pub enum SwarmPlacement {}

impl SwarmPlacement {
    pub fn new(options: &SwarmOptions) -> Result<Option<Self>, UsageError> {
        if options.swarm { Err(UsageError::new(ABSENT)) } else { Ok(None) }
    }

    pub fn has_kwaai_servers(&self) -> bool {
        match *self {}
    }

    pub fn connect(&self, _: &OpenedModel<'_>, _: &mut dyn LoadObserver) -> Result<Box<dyn LoadedModel>> {
        match *self {}
    }
}

#[derive(Args, Debug)]
#[command(hide = true, disable_help_flag = true)]
pub struct SwarmArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _rest: Vec<OsString>,
}

impl SwarmArgs {
    pub fn run(self) -> Result<ExitCode> {
        Err(UsageError::new(ABSENT).into())
    }
}
