//! The log: one event per line, as text or JSON.

use anyhow::{Result, anyhow};
use clap::ValueEnum;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

use crate::progress::LogWriter;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Writes events to standard error: those that `CONSORT_LOG` selects, else those of `level` and above. Call once per
/// process.
pub fn install(format: LogFormat, level: &str) -> Result<()> {
    let filter = EnvFilter::try_from_env("CONSORT_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let log = fmt().with_env_filter(filter).with_writer(LogWriter::default).with_target(false);
    let installed = match format {
        LogFormat::Text => log.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    };
    installed.map_err(|error| anyhow!("start the log: {error}"))
}
