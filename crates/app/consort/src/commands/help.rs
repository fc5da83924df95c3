//! `-h` shows the options that people use, `--help` all of them.

use clap::{Arg, Command};

/// Of the options under a heading, those that `-h` shows.
const USED: [&str; 13] = [
    "model_option",
    "context",
    "quant",
    "temperature",
    "max_tokens",
    "threads",
    "tensor_parallel",
    "cluster",
    "swarm",
    "host",
    "port",
    "api_keys",
    "verbose",
];
/// Of the others, those that it does not show.
const SELDOM: [&str; 2] = ["raw", "stats"];

/// Hides options from `-h`, which then says where they are.
pub fn shortened(command: Command) -> Command {
    let is_hidden = |arg: &Arg| {
        let id = arg.get_id().as_str();
        let is_seldom = if arg.get_help_heading().is_some() { !USED.contains(&id) } else { SELDOM.contains(&id) };
        is_seldom || arg.is_hide_short_help_set()
    };
    let hides = command.get_arguments().any(|arg| is_hidden(arg) && !arg.is_hide_set());
    let command = command.mut_args(|arg| if is_hidden(&arg) { arg.hide_short_help(true) } else { arg });
    let command = match hides {
        true => command.after_help("More options: --help shows all.").after_long_help(""),
        false => command,
    };
    command.mut_subcommands(shortened)
}
