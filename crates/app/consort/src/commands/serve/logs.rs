//! The log: one event per line, for a person at a terminal, as text, or as JSON.

use std::env;
use std::fmt;
use std::io::{IsTerminal, stderr};
use std::sync::OnceLock;

use anyhow::{Result, anyhow};
use clap::ValueEnum;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::progress::LogWriter;

/// The variables that select events, the first one that is set.
const VARIABLES: [&str; 2] = ["CONSORT_LOG", "RUST_LOG"];
/// The crates of this workspace. Events of others are for those who look for a fault, so only the variables select them.
const CRATES: [&str; 20] = [
    "blocks",
    "cake",
    "chains",
    "cluster",
    "collectives",
    "consort",
    "directory",
    "engine",
    "jinja",
    "kernels",
    "kwaai",
    "libp2p_node",
    "model",
    "net",
    "plan",
    "ranks",
    "server",
    "text",
    "types",
    "weights",
];
/// Crates of others whose names begin with one of these.
const OTHERS: [&str; 4] = ["netlink_packet_core", "netlink_packet_route", "netlink_proto", "netlink_sys"];
/// The crates whose events tell a person what became of machines.
const TOLD: [&str; 5] = ["consort", "cluster", "cake", "blocks", "directory"];

static HAS_PERSON: OnceLock<bool> = OnceLock::new();

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Writes events to standard error: those that a variable selects, else those of `level` and above of our crates. Call once
/// per process.
pub fn install(format: LogFormat, level: &str) -> Result<()> {
    let filter = selected().unwrap_or_else(|| default_filter(&directives(&CRATES, level)));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogWriter::default).with_target(false);
    let installed = match format {
        LogFormat::Text => log.with_ansi(stderr().is_terminal()).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    installed.map_err(|error| anyhow!("start the log: {error}"))
}

/// The log of a server. In a terminal, where a person reads it, it has few lines and no times, unless everything is asked for:
/// see [`has_person`].
pub fn install_for_server(format: LogFormat, verbose: bool) -> Result<()> {
    let is_quiet = format == LogFormat::Text && stderr().is_terminal() && !verbose && selected().is_none();
    HAS_PERSON.get_or_init(|| is_quiet);
    if !is_quiet {
        return install(format, "info");
    }
    let filter = default_filter(&format!("{},{}", directives(&CRATES, "warn"), directives(&TOLD, "info")));
    let log =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(LogWriter::default).event_format(PersonFormat);
    log.try_init().map_err(|error| anyhow!("start the log: {error}"))
}

/// Whether a person reads the log of this server as it runs.
pub fn has_person() -> bool {
    HAS_PERSON.get().is_some_and(|has| *has)
}

/// What the variables select. A level alone is one of our events; those of other crates are for whoever looks for a fault, so they
/// come with `debug`, or by their names.
fn selected() -> Option<EnvFilter> {
    let value = VARIABLES.iter().find_map(|variable| env::var(variable).ok().filter(|value| !value.is_empty()))?;
    match value.as_str() {
        "error" | "warn" | "info" => Some(default_filter(&directives(&CRATES, &value))),
        value => EnvFilter::try_new(value).ok(),
    }
}

/// Events of our crates. A directive selects all names that it is the beginning of, so names of other crates that begin with one
/// of ours are left out again.
fn default_filter(directives: &str) -> EnvFilter {
    EnvFilter::new(format!("{directives},{}=off", OTHERS.join("=off,")))
}

fn directives(crates: &[&str], level: &str) -> String {
    crates.iter().map(|name| format!("{name}={level}")).collect::<Vec<_>>().join(",")
}

/// The message and its fields, after a word if something is odd.
struct PersonFormat;

impl<S, N> FormatEvent<S, N> for PersonFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match *event.metadata().level() {
            Level::ERROR => writer.write_str("error: ")?,
            Level::WARN => writer.write_str("warning: ")?,
            _ => {}
        }
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    fn entries(folder: &Path) -> Vec<PathBuf> {
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    /// The folders of the workspace's crates.
    fn crates() -> Vec<PathBuf> {
        let groups = entries(&testing::repository("crates")).into_iter().filter(|path| path.is_dir());
        groups.flat_map(|group| entries(&group)).filter(|path| path.join("Cargo.toml").exists()).collect()
    }

    /// A crate that is missing in the list would log nothing. Targets have underscores.
    #[test]
    fn every_crate_of_the_workspace_is_known() {
        let names: BTreeSet<_> =
            crates().iter().map(|path| path.file_name().unwrap().to_str().unwrap().replace('-', "_")).collect();
        assert_eq!(names, CRATES.iter().map(|name| (*name).to_owned()).collect());
    }

    /// Crates of others that this program is made of log nothing by default, whatever their names begin with.
    #[test]
    fn only_our_crates_log() {
        let lock = fs::read_to_string(testing::repository("Cargo.lock")).unwrap();
        let names = lock.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        let names: Vec<String> = names.map(|name| name.replace('-', "_")).collect();
        let begins = |name: &&String| CRATES.iter().any(|known| name.starts_with(known) && name.as_str() != *known);
        let others: BTreeSet<&str> = names.iter().filter(begins).map(String::as_str).collect();
        assert_eq!(others, OTHERS.into_iter().collect());
    }

    /// The calls in a source file that write to the log, up to their last parenthesis.
    fn log_calls(source: &str) -> Vec<&str> {
        let starts = ["error!(", "warn!(", "info!(", "debug!("]
            .iter()
            .flat_map(|name| source.match_indices(name).map(|(at, name)| (at, at + name.len())));
        let ends = |from: usize| {
            let mut depth = 1;
            let close = |c: char| {
                depth += i32::from(c == '(') - i32::from(c == ')');
                depth == 0
            };
            source[from..].find(close).map_or(source.len(), |length| from + length)
        };
        starts.map(|(start, from)| &source[start..ends(from)]).collect()
    }

    /// `Some("…")` and the like are for programmers.
    #[test]
    fn no_event_has_debug_text() {
        let is_debug_text = |call: &str| [":?}", "(?", "= ?", ", ?", "    ?"].iter().any(|form| call.contains(form));
        assert!(is_debug_text(log_calls("x; warn!(peer = ?a, \"b\");")[0]));
        let mut folders: Vec<PathBuf> = crates().iter().map(|path| path.join("src")).collect();
        while let Some(folder) = folders.pop() {
            for path in entries(&folder) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs")
                    && !path.ends_with("serve/logs.rs")
                {
                    let source = fs::read_to_string(&path).unwrap();
                    let wrong: Vec<_> = log_calls(&source).into_iter().filter(|call| is_debug_text(call)).collect();
                    assert!(wrong.is_empty(), "{}: {wrong:?}", path.display());
                }
            }
        }
    }
}
