//! Reads the file of API keys again on SIGHUP.

use std::sync::Arc;

use anyhow::Result;
use server::App;

use super::http::ApiKeyOptions;

/// Starts a task that waits for the signal. Without a file of keys, SIGHUP keeps its meaning, which is to end the process.
#[cfg(unix)]
pub fn spawn(app: Arc<App>, options: ApiKeyOptions) -> Result<()> {
    use anyhow::Context;
    use tokio::signal::unix::{SignalKind, signal};
    use tracing::{info, warn};

    if !options.has_file() {
        return Ok(());
    }
    let mut hangups = signal(SignalKind::hangup()).context("listen for SIGHUP")?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            match options.keys() {
                Ok(keys) => {
                    info!(keys = keys.len(), "the API keys were read again");
                    app.replace_keys(keys);
                }
                Err(error) => warn!("the API keys stay as they are: {error:#}"),
            }
        }
    });
    Ok(())
}

#[cfg(not(unix))]
pub fn spawn(_: Arc<App>, _: ApiKeyOptions) -> Result<()> {
    Ok(())
}
