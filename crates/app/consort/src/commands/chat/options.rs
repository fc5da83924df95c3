//! `LocalArgs`: the options of a model that the chat itself runs. They have no meaning for a server.

use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use crate::options::{ModelOptions, ThreadOption};

#[derive(Args, Debug)]
struct LocalOptions {
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    options: ModelOptions,
}

/// Whether an option of `chat` is for a model that the chat itself runs.
pub fn is_for_model_here(option: &Arg) -> bool {
    LocalOptions::augment_args(Command::new("chat")).get_arguments().any(|known| known.get_id() == option.get_id())
}

/// The options, and which of them are on the command line.
#[derive(Debug)]
pub struct LocalArgs {
    options: LocalOptions,
    typed: Vec<String>,
}

impl LocalArgs {
    pub fn threads(&self) -> &ThreadOption {
        &self.options.threads
    }

    pub fn model_options(&self) -> &ModelOptions {
        &self.options.options
    }

    /// The first option that is on the command line. The environment does not count.
    pub fn typed(&self) -> Option<&str> {
        self.typed.first().map(String::as_str)
    }

    fn new(options: LocalOptions, matches: &ArgMatches) -> Self {
        let known = LocalOptions::augment_args(Command::new("chat"));
        let is_typed = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
        let typed = known.get_arguments().filter(|option| is_typed(option.get_id().as_str()));
        let typed = typed.map(|option| option.get_long().unwrap_or(option.get_id().as_str()).to_owned()).collect();
        Self { options, typed }
    }
}

impl Args for LocalArgs {
    fn augment_args(command: Command) -> Command {
        LocalOptions::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        LocalOptions::augment_args_for_update(command)
    }
}

impl FromArgMatches for LocalArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self::new(LocalOptions::from_arg_matches(matches)?, matches))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
