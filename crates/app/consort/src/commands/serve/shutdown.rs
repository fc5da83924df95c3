//! Shutdown of the server: gracefully on a signal, at once on a second one, or when the model cannot be loaded.

use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use server::{App, Listener, ServedModel};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::interrupt;

/// Time to send the last events after the engine has been stopped.
const FINAL_EVENTS_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for the engine and its ranks to end.
const ENGINE_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until a signal, an error of the model's loading, or the end of the listener.
pub async fn run(
    listener: Listener,
    app: &Arc<App>,
    signals: &mut Signals,
    failure: oneshot::Receiver<anyhow::Error>,
    grace: Duration,
) -> Result<ExitCode> {
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        // A dropped sender means stop as well.
        let _ = stopped.await;
    };
    let mut serving = pin!(listener.serve(server::router(app), stopped, grace + FINAL_EVENTS_TIMEOUT));
    tokio::select! {
        _ = &mut serving => return Ok(ExitCode::SUCCESS),
        Ok(error) = failure => return Err(error),
        () = signals.next() => {}
    }
    // `/ready` says so from now on. The listener answers probes until the last request has ended.
    let served = app.models().close();
    drop(stop);
    if served.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    info!("shutting down: answers may finish within {} s; once more ends at once", grace.as_secs());
    let exits: Vec<_> = served.iter().map(|model| model.service.thread_exit()).collect();
    let drain = tokio::task::spawn_blocking(move || drain(served, grace));
    let finishing = async {
        let (all_ended, unfinished) = tokio::join!(serving, drain);
        if all_ended {
            // Gives the ranks time to shut down cleanly.
            let wait = move || exits.iter().all(|exit| exit.wait(ENGINE_EXIT_TIMEOUT));
            let _ = tokio::task::spawn_blocking(wait).await;
        }
        (all_ended, unfinished.unwrap_or(0))
    };
    tokio::select! {
        (all_ended, unfinished) = finishing => {
            if unfinished > 0 || !all_ended {
                warn!("{unfinished} answers were cut off");
            }
            Ok(ExitCode::SUCCESS)
        }
        () = signals.next() => Ok(ExitCode::from(interrupt::EXIT_CODE)),
    }
}

/// Lets the answers of all models finish within `grace`. Returns how many were cut off.
fn drain(models: Vec<Arc<ServedModel>>, grace: Duration) -> usize {
    let end = Instant::now() + grace;
    let drain = |model: Arc<ServedModel>| model.service.drain(end.saturating_duration_since(Instant::now()));
    models.into_iter().map(drain).sum()
}

/// SIGINT (Ctrl-C) and SIGTERM.
pub struct Signals {
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
}

impl Signals {
    #[cfg(unix)]
    pub fn listen() -> Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let listen = |kind| signal(kind).context("listen for signals");
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    #[cfg(not(unix))]
    pub fn listen() -> Result<Self> {
        Ok(Self {})
    }

    #[cfg(unix)]
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    #[cfg(not(unix))]
    pub async fn next(&mut self) {
        // If the handler cannot be installed, waits for ever: the process is ended from outside.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
