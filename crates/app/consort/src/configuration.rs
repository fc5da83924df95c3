//! The configuration file: what is always typed. Its values become arguments of the command, unless the command line or the
//! environment has the same option or one that excludes it. So every option is parsed and checked once, by clap.
//!
//! Keys are long options. At the top they hold for all commands that have the option, in a table such as `[serve]` for that
//! command alone.

use std::borrow::Cow;
use std::env;
use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, value_parser};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::bounded_file;
use crate::commands::is_for_model_here;
use crate::store::Settings;
use crate::usage::UsageError;

const FILE_BYTES_MAX: u64 = 64 << 10;
const FILE_NAME: &str = "config.toml";
/// A long option that stands for `--model` where a word may name a model.
const DEFAULT_MODEL: &str = "default-model";
/// Options of a command whose name means something else in others. The command has to be named in the file.
const OWN_MEANING: [(&str, &str); 2] = [("join", "model"), ("bench", "prompt")];

/// Which configuration file is used.
#[derive(Args, Debug)]
pub struct ConfigurationOptions {
    /// Configuration file [default: config.toml in ~/.config/consort]
    #[arg(long, value_name = "FILE", env = "CONSORT_CONFIG", global = true, hide_short_help = true)]
    config: Option<OsString>,
    /// Use no configuration file
    #[arg(long, global = true, hide_short_help = true)]
    no_config: bool,
}

/// Arguments of the program, the first of which is its name.
pub struct ExtendedArguments {
    pub arguments: Vec<OsString>,
    /// The file that some of them come from.
    pub file: Option<PathBuf>,
}

/// Adds what the configuration file has for the command of these arguments. Arguments that are wrong are left to the parser.
pub fn extend(command: &Command, arguments: Vec<OsString>) -> Result<ExtendedArguments> {
    let unchanged = |arguments| Ok(ExtendedArguments { arguments, file: None });
    // An error is `--help` or `--version`.
    let Ok(matches) = lenient(command.clone()).ignore_errors(true).try_get_matches_from(&arguments) else {
        return unchanged(arguments);
    };
    let (path, matches) = command_of(&matches);
    let Some((file, text)) = (if path.is_empty() { None } else { read(matches)? }) else { return unchanged(arguments) };

    let mut command = command.clone();
    command.build();
    let file_error = |error: EntryError| UsageError::new(format!("{}:{error}", file.display()));
    let entries = entries(&command, &text).map_err(file_error)?;
    let added = arguments_of(&command, &path, matches, &entries).map_err(file_error)?;
    // What follows `--` is no option.
    let end = arguments.iter().position(|argument| argument == "--").unwrap_or(arguments.len());
    let mut extended = arguments;
    extended.splice(end..end, added);
    Ok(ExtendedArguments { arguments: extended, file: Some(file) })
}

/// The command whose values may be anything: files that options name are not opened twice.
fn lenient(command: Command) -> Command {
    let any = |arg: Arg| match arg.get_action().takes_values() {
        true => arg.value_parser(value_parser!(OsString)),
        false => arg,
    };
    command.mut_args(any).mut_subcommands(lenient)
}

/// The names of the command and subcommands that are called, and the matches of the last one.
fn command_of(matches: &ArgMatches) -> (Vec<&str>, &ArgMatches) {
    let (mut path, mut last) = (Vec::new(), matches);
    while let Some((name, next)) = last.subcommand() {
        path.push(name);
        last = next;
    }
    (path, last)
}

/// The file that is to be used, if there is one, and its text.
fn read(matches: &ArgMatches) -> Result<Option<(PathBuf, String)>> {
    if matches.get_flag("no_config") {
        return Ok(None);
    }
    let (file, is_named) = match matches.get_one::<OsString>("config") {
        // `CONSORT_CONFIG=` is no file.
        Some(file) if file.is_empty() => return Ok(None),
        Some(file) => (PathBuf::from(file), true),
        // Without a home folder there is no file.
        None => match Settings::own_configuration() {
            Ok(folder) => (folder.join(FILE_NAME), false),
            Err(_) => return Ok(None),
        },
    };
    let context = || format!("read the configuration file {}", file.display());
    let bytes = match bounded_file::read(&file, FILE_BYTES_MAX) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_named => return Ok(None),
        read => read.with_context(context)?,
    };
    let text =
        String::from_utf8(bytes).map_err(|_| io::Error::other("it is not text in UTF-8")).with_context(context)?;
    Ok(Some((file, text)))
}

/// A key of the file.
struct Entry<'a> {
    /// The tables that it is in.
    path: Vec<String>,
    /// With `-` for `_`, as options are written.
    key: String,
    line: usize,
    value: DeValue<'a>,
}

#[derive(Debug)]
struct EntryError {
    line: usize,
    why: String,
}

impl fmt::Display for EntryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.line, self.why)
    }
}

/// All keys of the file. Each is an option of a command.
fn entries<'a>(command: &Command, text: &'a str) -> Result<Vec<Entry<'a>>, EntryError> {
    let line = |at: usize| 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let document = DeTable::parse(text).map_err(|error| EntryError {
        line: line(error.span().map_or(0, |span| span.start)),
        why: error.message().lines().collect::<Vec<_>>().join(", "),
    })?;
    let mut entries = Vec::new();
    collect(command, Vec::new(), document.into_inner(), &line, &mut entries)?;
    Ok(entries)
}

fn collect<'a>(
    command: &Command,
    path: Vec<String>,
    table: DeTable<'a>,
    line: &dyn Fn(usize) -> usize,
    entries: &mut Vec<Entry<'a>>,
) -> Result<(), EntryError> {
    for (key, value) in table {
        let line_of_key = line(key.span().start);
        let refuse = |why: String| EntryError { line: line_of_key, why };
        let name = key.into_inner().into_owned();
        let value = match Spanned::into_inner(value) {
            DeValue::Table(inner) => {
                let Some(subcommand) = command.find_subcommand(&name) else {
                    return Err(refuse(format!("[{name}] is no command of {}", command_name(&path))));
                };
                let path = [&path[..], &[subcommand.get_name().to_owned()]].concat();
                collect(subcommand, path, inner, line, entries)?;
                continue;
            }
            value => value,
        };
        let key = name.replace('_', "-");
        if !knows(command, &key) {
            let why = match path.is_empty() {
                true => format!("unknown key `{name}`: no command has an option --{key}"),
                false => format!("unknown key `{name}`: {} has no option --{key}", command_name(&path)),
            };
            return Err(refuse(why));
        }
        entries.push(Entry { path: path.clone(), key, line: line_of_key, value });
    }
    Ok(())
}

fn command_name(path: &[String]) -> String {
    ["consort".to_owned()].iter().chain(path).cloned().collect::<Vec<_>>().join(" ")
}

/// Whether a command, or one below it, has this long option.
fn knows(command: &Command, long: &str) -> bool {
    option(command, long).is_some() || command.get_subcommands().any(|subcommand| knows(subcommand, long))
}

fn option<'a>(command: &'a Command, long: &str) -> Option<&'a Arg> {
    let is_named = |arg: &&Arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(long) || aliases.contains(&long)
    };
    let is_ours = |arg: &&Arg| {
        !matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version)
    };
    command.get_arguments().find(|arg| is_named(arg) && is_ours(arg) && !arg.is_global_set() && long != DEFAULT_MODEL)
}

/// The arguments for a command that is called with `matches`.
fn arguments_of(
    root: &Command,
    path: &[&str],
    matches: &ArgMatches,
    entries: &[Entry<'_>],
) -> Result<Vec<OsString>, EntryError> {
    let command = path.iter().try_fold(root, |command, name| command.find_subcommand(name)).unwrap_or(root);
    let is_explicit = |arg: &&Arg| {
        let source = matches.value_source(arg.get_id().as_str());
        matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let explicit: Vec<&Arg> = command.get_arguments().filter(is_explicit).collect();
    // With --url a server runs the model.
    let is_remote = path == ["chat"] && explicit.iter().any(|arg| arg.get_id() == "url");
    let applies = |entry: &&Entry<'_>| {
        let is_above = entry.path.len() <= path.len() && entry.path.iter().zip(path).all(|(table, name)| table == name);
        let means_another = entry.path.is_empty() && OWN_MEANING.contains(&(path[0], &entry.key));
        is_above && !means_another
    };
    let mut applicable: Vec<&Entry<'_>> = entries.iter().filter(applies).collect();
    // What is said of the command itself comes first.
    applicable.sort_by_key(|entry| (std::cmp::Reverse(entry.path.len()), entry.line));

    let (mut taken, mut added): (Vec<(&Arg, &Entry<'_>)>, Vec<OsString>) = (Vec::new(), Vec::new());
    for entry in applicable {
        let Some(arg) = option(command, &entry.key) else { continue };
        if is_remote && is_for_model_here(arg) {
            continue;
        }
        let values = entry.arguments(arg)?;
        if explicit.iter().any(|other| other.get_id() == arg.get_id() || exclude(command, arg, other)) {
            continue;
        }
        let rival = taken.iter().find(|(other, _)| other.get_id() == arg.get_id() || exclude(command, arg, other));
        if let Some((_, other)) = rival {
            if other.path.len() > entry.path.len() {
                continue;
            }
            let why = format!("`{}` does not go with `{}` in line {}", entry.key, other.key, other.line);
            return Err(EntryError { line: entry.line, why });
        }
        taken.push((arg, entry));
        added.extend(values.iter().map(|value| {
            // A word may name another model.
            let default_model =
                entry.key == "model" && command.get_arguments().any(|arg| arg.get_long() == Some(DEFAULT_MODEL));
            let long = if default_model { DEFAULT_MODEL } else { &entry.key };
            OsString::from(match value {
                None => format!("--{long}"),
                Some(value) => format!("--{long}={value}"),
            })
        }));
    }
    Ok(added)
}

fn exclude(command: &Command, one: &Arg, other: &Arg) -> bool {
    let lists = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|listed| listed.get_id() == other.get_id())
    };
    lists(one, other) || lists(other, one)
}

impl Entry<'_> {
    /// The value of each argument to add: `None` is the option alone. They are checked as on the command line.
    fn arguments(&self, arg: &Arg) -> Result<Vec<Option<Cow<'_, str>>>, EntryError> {
        let needs_value = arg.get_num_args().is_none_or(|count| count.min_values() > 0);
        let values: Vec<Option<Cow<'_, str>>> = match (&self.value, arg.get_action()) {
            (DeValue::Boolean(is_set), ArgAction::SetTrue) => {
                if *is_set {
                    vec![None]
                } else {
                    Vec::new()
                }
            }
            (_, ArgAction::SetTrue) => return Err(self.refuse("it must be true or false")),
            (DeValue::Boolean(is_set), _) if !needs_value => {
                if *is_set {
                    vec![None]
                } else {
                    Vec::new()
                }
            }
            (DeValue::Array(items), ArgAction::Append) => {
                let values = items.iter().map(|item| self.scalar(item.get_ref()));
                values.map(|value| value.map(Some)).collect::<Result<_, _>>()?
            }
            (DeValue::Array(_), _) => return Err(self.refuse("it takes one value")),
            (value, _) => vec![Some(self.scalar(value)?)],
        };
        for value in values.iter().flatten() {
            self.check(arg, value)?;
        }
        Ok(values)
    }

    fn scalar<'a>(&'a self, value: &'a DeValue<'_>) -> Result<Cow<'a, str>, EntryError> {
        Ok(match value {
            DeValue::String(text) => at_home(text),
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().into(),
            DeValue::Float(number) => number.as_str().into(),
            DeValue::Boolean(value) => value.to_string().into(),
            _ => return Err(self.refuse("it must be a text, a number, or true or false")),
        })
    }

    /// Parses the value as the command would.
    fn check(&self, arg: &Arg, value: &str) -> Result<(), EntryError> {
        // Alone: what the option requires or excludes is not there.
        let alone =
            Arg::new("value").long("value").action(ArgAction::Append).value_parser(arg.get_value_parser().clone());
        let alone = match arg.get_value_delimiter() {
            Some(delimiter) => alone.value_delimiter(delimiter),
            None => alone,
        };
        let command = Command::new("consort").no_binary_name(true).arg(alone);
        match command.try_get_matches_from([format!("--value={value}")]) {
            Ok(_) => Ok(()),
            Err(error) => {
                let why = sentence(&error).replace("--value <value>", &self.key);
                Err(EntryError { line: self.line, why })
            }
        }
    }

    fn refuse(&self, why: &str) -> EntryError {
        EntryError { line: self.line, why: format!("`{}`: {why}", self.key) }
    }
}

/// What an error of the parser says, on one line and without the usage.
pub fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().take_while(|line| !line.is_empty()).map(str::trim);
    lines.collect::<Vec<_>>().join(" ").trim_start_matches("error: ").to_owned()
}

/// The text with the home folder for `~/`, which elsewhere a shell replaces.
fn at_home(text: &str) -> Cow<'_, str> {
    let path = || Some(env::home_dir()?.join(text.strip_prefix("~/")?));
    path().and_then(|path| path.to_str().map(|path| Cow::Owned(path.to_owned()))).unwrap_or(Cow::Borrowed(text))
}

/// Names the file where the command line alone is right.
pub fn blamed(file: &Path, error: &clap::Error) -> UsageError {
    UsageError::new(format!("{}: {}", file.display(), sentence(error)))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[derive(clap::Parser)]
    #[command(name = "consort")]
    struct Program {
        #[command(flatten)]
        _configuration: ConfigurationOptions,
        #[command(subcommand)]
        _command: ProgramCommand,
    }

    #[derive(clap::Subcommand)]
    enum ProgramCommand {
        Serve(ServeArgs),
        Run(RunArgs),
    }

    #[derive(Args)]
    struct ServeArgs {
        #[arg(conflicts_with = "model_option")]
        model: Option<String>,
        #[arg(long = "model")]
        model_option: Option<String>,
        #[arg(long, default_value_t = 8000)]
        port: u16,
        #[arg(long)]
        key: Vec<String>,
        #[arg(long)]
        cluster: bool,
        #[arg(long, num_args = 0..=1, require_equals = true)]
        exact: Option<Option<String>>,
        #[arg(long, alias = "kv-size", conflicts_with = "memory")]
        tokens: Option<u32>,
        #[arg(long)]
        memory: Option<String>,
    }

    #[derive(Args)]
    struct RunArgs {
        words: Vec<String>,
        #[arg(long = "model")]
        model_option: Option<String>,
        #[arg(long, hide = true)]
        default_model: Option<String>,
        #[arg(long)]
        tokens: Option<u32>,
    }

    /// The arguments after those that were given, or the error without its file.
    fn added(text: &str, given: &[&str]) -> Result<Vec<String>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let file = file.path().to_str().unwrap();
        let config = format!("--config={file}");
        let mut arguments: Vec<OsString> = ["consort"].iter().chain(given).map(OsString::from).collect();
        arguments.insert(2, config.into());
        let before = arguments.len();
        let extended = extend(&Program::command(), arguments);
        let arguments = extended.map_err(|error| error.to_string().replace(file, "file"))?.arguments;
        Ok(arguments[before..].iter().map(|argument| argument.to_string_lossy().into_owned()).collect())
    }

    #[track_caller]
    fn check(text: &str, given: &[&str], expected: &[&str]) {
        assert_eq!(added(text, given), Ok(expected.iter().map(|&word| word.to_owned()).collect()), "{text}: {given:?}");
    }

    #[test]
    fn keys_become_options_of_the_commands_that_have_them() {
        check("port = 9000", &["serve"], &["--port=9000"]);
        check("port = 9000", &["run", "hello"], &[]);
        check("tokens = 5\n[run]\ntokens = 7", &["run", "hello"], &["--tokens=7"]);
        check("tokens = 5\n[run]\ntokens = 7", &["serve"], &["--tokens=5"]);
        check("cluster = true\nexact = true", &["serve"], &["--cluster", "--exact"]);
        check("cluster = false\nexact = \"avx2\"", &["serve"], &["--exact=avx2"]);
        check("key = [\"a\", \"b\"]", &["serve"], &["--key=a", "--key=b"]);
        // Names that options also have, as people write them.
        check("kv_size = 5", &["serve"], &["--kv-size=5"]);
    }

    #[test]
    fn the_command_line_and_the_environment_come_first() {
        check("port = 9000", &["serve", "--port", "1"], &[]);
        check("memory = \"2G\"", &["serve", "--tokens", "5"], &[]);
        check("tokens = 5", &["serve", "--memory", "2G"], &[]);
        check("model = \"a\"", &["serve"], &["--model=a"]);
        check("model = \"a\"", &["serve", "b"], &[]);
        // A word of `run` may be a model or the prompt, which the command finds out.
        check("model = \"a\"", &["run", "b"], &["--default-model=a"]);
        check("memory = \"2G\"\n[serve]\ntokens = 5", &["serve"], &["--tokens=5"]);
    }

    #[test]
    fn what_follows_two_dashes_stays_last() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "tokens = 5").unwrap();
        let config = format!("--config={}", file.path().display());
        let given = ["consort", "run", &config, "--", "--hello"].map(OsString::from);
        let extended = extend(&Program::command(), given.to_vec()).unwrap().arguments;
        assert_eq!(extended[3..], ["--tokens=5", "--", "--hello"].map(OsString::from));
    }

    #[test]
    fn mistakes_are_named_with_line_and_key() {
        for (text, why) in [
            ("\n\ntempersture = 1", "file:3: unknown key `tempersture`: no command has an option --tempersture"),
            (
                "[serve]\ndefault-model = 1",
                "file:2: unknown key `default-model`: consort serve has no option --default-model",
            ),
            ("[run]\nport = 1", "file:2: unknown key `port`: consort run has no option --port"),
            ("config = \"x\"", "file:1: unknown key `config`: no command has an option --config"),
            ("[walk]\nport = 1", "file:1: [walk] is no command of consort"),
            ("port = 70000", "file:1: invalid value '70000' for 'port': 70000 is not in 0..=65535"),
            ("port = [1, 2]", "file:1: `port`: it takes one value"),
            ("port = 1979-05-27", "file:1: `port`: it must be a text, a number, or true or false"),
            ("cluster = 1", "file:1: `cluster`: it must be true or false"),
            ("tokens = 5\n\nmemory = \"2G\"", "`memory` does not go with `tokens` in line 1"),
            ("port = 1\nport = 2", "file:2: duplicate key"),
            ("port = ", "file:1: "),
        ] {
            let error = added(text, &["serve"]).unwrap_err();
            assert!(error.contains(why) && error.lines().count() == 1, "{text}: {error}");
        }
    }

    #[test]
    fn a_file_that_is_named_has_to_be_there_and_is_bounded() {
        let extend_with = |config: &str| {
            let arguments = ["consort", "serve", config].map(OsString::from);
            extend(&Program::command(), arguments.to_vec()).map(|extended| extended.arguments.len())
        };
        assert!(extend_with("--config=/no/where").unwrap_err().to_string().contains("/no/where"));
        assert!(format!("{:#}", extend_with("--config=/dev/zero").unwrap_err()).contains("longer than"));
        assert_eq!(extend_with("--config=").unwrap(), 3);
        assert_eq!(extend_with("--no-config").unwrap(), 3);
    }
}
