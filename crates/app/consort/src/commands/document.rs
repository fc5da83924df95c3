//! `docs/cli.md`, rendered from the definition of the command line. What clap does not know is in `document/notes.md`: each
//! section there goes below the same heading here, and sections without such a heading follow at the end.

use std::collections::BTreeMap;
use std::fs;

use clap::{Arg, Command};

use super::Cli;

const NOTES: &str = include_str!("document/notes.md");
const COLUMNS: usize = 120;
const SHARED: &str = "Options of several commands";
const ENVIRONMENT: &str = "Environment";

/// Options under one heading. Those that a command has beside them have none.
struct OptionGroup {
    heading: Option<String>,
    /// A list, ready for the document.
    text: String,
}

/// The hand-written sections, in their order. Those that were taken are gone.
struct Notes(Vec<(&'static str, &'static str)>);

impl Notes {
    /// The text before the first heading, and the sections.
    fn parse(text: &'static str) -> (&'static str, Self) {
        let (preamble, sections) = text.split_once("\n## ").expect("the notes have sections");
        let sections = sections.split("\n## ").map(|section| section.split_once('\n').expect("a section has a text"));
        (preamble.trim(), Self(sections.map(|(heading, text)| (heading, text.trim())).collect()))
    }

    fn take(&mut self, heading: &str) -> Option<&'static str> {
        let index = self.0.iter().position(|section| section.0 == heading)?;
        Some(self.0.remove(index).1)
    }
}

fn render() -> String {
    let mut root = Cli::documented().disable_help_subcommand(true);
    root.build();
    let commands = descendants(&root);
    let groups: Vec<Vec<OptionGroup>> = commands.iter().map(|command| option_groups(command)).collect();
    let shared = shared_groups(&groups);
    let (preamble, mut notes) = Notes::parse(NOTES);

    let mut parts = vec![preamble.to_owned(), contents(&commands)];
    for (command, groups) in commands.iter().zip(&groups) {
        let title = full_name(command);
        parts.push(format!("## {title}"));
        parts.push(paragraphs(command));
        let aliases: Vec<_> = command.get_visible_aliases().map(|alias| format!("`consort {alias}`")).collect();
        if !aliases.is_empty() {
            parts.push(format!("The same: {}.", aliases.join(", ")));
        }
        if !command.has_subcommands() {
            parts.push(format!("```text\n{}\n```", usage(command)));
        }
        parts.extend(notes.take(title).map(str::to_owned));
        let (elsewhere, here): (Vec<_>, Vec<_>) = groups.iter().partition(|group| is_shared(group, &shared));
        for group in here {
            parts.extend(group.heading.as_ref().map(|heading| format!("**{heading}**")));
            parts.push(group.text.clone());
        }
        let links: Vec<_> = elsewhere.iter().filter_map(|group| group.heading.as_deref()).map(link).collect();
        if !links.is_empty() {
            parts.push(wrapped(&format!("Options of several commands: {}.", links.join(", ")), ""));
        }
    }
    parts.push(format!("## {SHARED}"));
    for group in shared {
        let heading = group.heading.as_deref().unwrap_or_default();
        parts.push(format!("### {heading}"));
        parts.extend(notes.take(heading).map(str::to_owned));
        parts.push(group.text.clone());
    }
    parts.push(format!("## {ENVIRONMENT}"));
    parts.push(environment(&commands));
    parts.extend(notes.take(ENVIRONMENT).map(str::to_owned));
    for (heading, text) in notes.0 {
        assert!(!heading.starts_with("consort"), "the notes are about a command that is not there: {heading}");
        parts.push(format!("## {heading}\n\n{text}"));
    }
    parts.retain(|part| !part.is_empty());
    parts.join("\n\n") + "\n"
}

/// Every command below this one that is shown, each before its own subcommands.
fn descendants(command: &Command) -> Vec<&Command> {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    shown.flat_map(|subcommand| [vec![subcommand], descendants(subcommand)].concat()).collect()
}

fn contents(commands: &[&Command]) -> String {
    let line = |command: &&Command| {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        item(&format!("{}: {about}", link(full_name(command))))
    };
    commands.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The groups in the order in which `--help` has them.
fn option_groups(command: &Command) -> Vec<OptionGroup> {
    let mut groups: Vec<OptionGroup> = Vec::new();
    for arg in shown_args(command) {
        let (heading, text) = (arg.get_help_heading().map(str::to_owned), option(arg));
        match groups.iter_mut().find(|group| group.heading == heading) {
            Some(group) => group.text += &format!("\n{text}"),
            None => groups.push(OptionGroup { heading, text }),
        }
    }
    groups.sort_by_key(|group| group.heading.is_some());
    groups
}

/// The groups with a heading that several commands have alike.
fn shared_groups(groups: &[Vec<OptionGroup>]) -> Vec<&OptionGroup> {
    let mut shared: Vec<&OptionGroup> = Vec::new();
    for (index, group) in groups.iter().enumerate().flat_map(|(index, own)| own.iter().map(move |group| (index, group)))
    {
        let is_repeated = groups[index + 1..].iter().flatten().any(|other| is_same(group, other));
        if group.heading.is_some() && is_repeated && !is_shared(group, &shared) {
            shared.push(group);
        }
    }
    shared
}

fn is_shared(group: &OptionGroup, shared: &[&OptionGroup]) -> bool {
    shared.iter().any(|other| is_same(group, other))
}

fn is_same(one: &OptionGroup, other: &OptionGroup) -> bool {
    one.heading == other.heading && one.text == other.text
}

/// Those that every command has are in the notes.
fn shown_args(command: &Command) -> impl Iterator<Item = &Arg> {
    let is_own = |arg: &&Arg| !arg.is_global_set() && !["help", "version"].contains(&arg.get_id().as_str());
    command.get_arguments().filter(|arg| !arg.is_hide_set()).filter(is_own)
}

fn option(arg: &Arg) -> String {
    let short = arg.get_short().filter(|_| arg.get_long().is_some());
    let name = short.map_or_else(|| arg.to_string(), |short| format!("-{short}, {arg}"));
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut text = if help.is_empty() { format!("`{name}`") } else { format!("`{name}`: {help}") };
    let takes_value = arg.get_action().takes_values();
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if takes_value && !defaults.is_empty() && !arg.is_hide_default_value_set() {
        text += &format!(" [default: {}]", defaults.join(" "));
    }
    let values = if takes_value && !arg.is_hide_possible_values_set() { arg.get_possible_values() } else { Vec::new() };
    let values: Vec<_> = values.iter().filter(|value| !value.is_hide_set()).collect();
    let has_help = values.iter().any(|value| value.get_help().is_some());
    if !values.is_empty() && !has_help {
        let names: Vec<_> = values.iter().map(|value| value.get_name()).collect();
        text += &format!(" [possible values: {}]", names.join(", "));
    }
    let aliases: Vec<_> = arg.get_all_aliases().unwrap_or_default().iter().map(|alias| format!("--{alias}")).collect();
    if !aliases.is_empty() {
        text += &format!(" [also: {}]", aliases.join(", "));
    }
    if let Some(variable) = arg.get_env().filter(|_| !arg.is_hide_env_set()) {
        text += &format!(" [env: {}]", variable.to_string_lossy());
    }
    let mut lines = vec![item(&text)];
    for value in values.iter().filter(|_| has_help) {
        let help = value.get_help().map_or_else(String::new, |help| format!(": {help}"));
        lines.push(format!("  {}", wrapped(&format!("- `{}`{help}", value.get_name()), "    ")));
    }
    lines.join("\n")
}

/// Every variable that stands for an option, with the options.
fn environment(commands: &[&Command]) -> String {
    let mut variables: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for arg in commands.iter().flat_map(|command| shown_args(command)) {
        let (Some(variable), Some(long)) = (arg.get_env(), arg.get_long()) else { continue };
        let options = variables.entry(variable.to_string_lossy().into_owned()).or_default();
        let option = format!("`--{long}`");
        if !options.contains(&option) {
            options.push(option);
        }
    }
    let lines = variables.iter().map(|(variable, options)| item(&format!("`{variable}`: {}", options.join(", "))));
    lines.collect::<Vec<_>>().join("\n")
}

fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

fn usage(command: &Command) -> String {
    command.clone().render_usage().to_string().trim_start_matches("Usage: ").to_owned()
}

fn paragraphs(command: &Command) -> String {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    about.split("\n\n").map(|paragraph| wrapped(paragraph, "")).collect::<Vec<_>>().join("\n\n")
}

fn link(heading: &str) -> String {
    format!("[{heading}](#{})", heading.to_lowercase().replace(' ', "-").replace(',', ""))
}

fn item(text: &str) -> String {
    wrapped(&format!("- {text}"), "  ")
}

/// `text` in lines, all but the first with this indent.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a line");
        if line.trim().is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= COLUMNS {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(format!("{indent}{word}"));
        }
    }
    lines.join("\n")
}

#[test]
fn the_document_of_the_command_line_is_up_to_date() {
    let (path, rendered) = (concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/cli.md"), render());
    if std::env::var_os("CONSORT_WRITE_DOCS").is_some_and(|value| value == "1") {
        fs::write(path, &rendered).expect("write docs/cli.md");
    }
    let written = fs::read_to_string(path).expect("read docs/cli.md");
    let differing = written.lines().zip(rendered.lines()).position(|(written, rendered)| written != rendered);
    let line = differing.unwrap_or_else(|| written.lines().count().min(rendered.lines().count())) + 1;
    assert!(written == rendered, "docs/cli.md differs from line {line} on: its first lines say how it is written");
}
