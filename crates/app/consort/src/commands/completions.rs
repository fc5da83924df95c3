//! `consort completions`: a script with which a shell completes commands and options.

use std::io::{Write, stdout};

use anyhow::{Context, Result};
use clap::{Arg, Args, Command};
use clap_complete::{Shell, generate};

use super::Cli;

/// Print a script that completes commands and options in a shell
///
/// bash: consort completions bash > ~/.local/share/bash-completion/completions/consort
#[derive(Args, Debug)]
pub struct CompletionsArgs {
    #[arg(value_enum)]
    shell: Shell,
}

impl CompletionsArgs {
    pub fn run(self) -> Result<()> {
        let mut command = Cli::documented();
        // `generate` panics if its output cannot be written.
        let mut script = Vec::new();
        generate(self.shell, &mut command, "consort", &mut script);
        let mut script = String::from_utf8(script).context("write the script")?;
        if self.shell == Shell::Zsh {
            script = with_colons_escaped(script, &command);
        }
        Ok(stdout().write_all(script.as_bytes())?)
    }
}

/// In a zsh script a colon ends the name of a value, such as HOST:PORT.
fn with_colons_escaped(script: String, command: &Command) -> String {
    let arguments = command.get_subcommands().flat_map(Command::get_arguments);
    let names = arguments.filter_map(Arg::get_value_names).flatten().filter(|name| name.contains(':'));
    names.fold(script, |script, name| script.replace(&format!(":{name}:"), &format!(":{}:", name.replace(':', "\\:"))))
}
