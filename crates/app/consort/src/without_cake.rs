//! What stands for `cake` in a build without that feature: the options that begin with cake say so, and no
//! [`Placement`](crate::placement::Placement) is one of cake workers.

use anyhow::Result;
use clap::{Args, ValueEnum};

use crate::commands::join::JoinArgs;
use crate::executors::{LoadObserver, LoadedModel, OpenedModel};
use crate::options::KeyOptions;
use crate::usage::UsageError;

const ABSENT: &str = "this build of consort cannot speak cake's protocol: build it with `--features cake`";

#[derive(Args, Clone, Debug)]
pub struct CakeOptions {
    #[arg(long, hide = true)]
    cake_worker: Vec<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true)]
    cake_discover: Option<Option<String>>,
}

/// There is none.
#[derive(Clone, Debug)]
pub enum CakePlacement {}

impl CakePlacement {
    pub fn new(options: &CakeOptions, _: &[usize], _: &KeyOptions) -> Result<Option<Self>, UsageError> {
        match options.cake_worker.is_empty() && options.cake_discover.is_none() {
            true => Ok(None),
            false => Err(UsageError::new(ABSENT)),
        }
    }

    pub fn check_key(&self) -> Result<()> {
        match *self {}
    }

    pub fn form(&self, _: &OpenedModel<'_>, _: &mut dyn LoadObserver) -> Result<Box<dyn LoadedModel>> {
        match *self {}
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ProtocolOption {
    #[default]
    Consort,
    Cake,
}

#[derive(Args, Debug)]
pub struct CakeJoinOptions {
    #[arg(long, value_enum, default_value_t, hide = true)]
    protocol: ProtocolOption,
}

/// There is none.
pub enum CakeService {}

impl CakeJoinOptions {
    pub fn service(&self, _no_mdns: bool) -> Result<Option<CakeService>, UsageError> {
        match self.protocol {
            ProtocolOption::Consort => Ok(None),
            ProtocolOption::Cake => Err(UsageError::new(ABSENT)),
        }
    }
}

impl CakeService {
    pub fn serve(self, _: JoinArgs) -> Result<()> {
        match self {}
    }
}
