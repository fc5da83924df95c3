//! How a server ends: by a signal, gracefully; by a second one, at once; or because the model cannot be loaded.

use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use server::{App, Listener, LoadStage};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::interrupt;

/// Time for the last words after the engine has been stopped.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Time for the engine, and the ranks that it may have, to end.
const ENGINE_END: Duration = Duration::from_secs(10);

/// Serves until something ends it.
pub async fn run(
    listener: Listener,
    app: &Arc<App>,
    signals: &mut Signals,
    failure: oneshot::Receiver<anyhow::Error>,
    grace: Duration,
) -> Result<ExitCode> {
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        // A sender that is gone means the same.
        let _ = stopped.await;
    };
    let mut serving = pin!(listener.serve(server::router(app), stopped, grace + LAST_WORDS));
    tokio::select! {
        _ = &mut serving => return Ok(ExitCode::SUCCESS),
        Ok(error) = failure => return Err(error),
        () = signals.next() => {}
    }
    let served = app.stage().model().ok();
    app.set_stage(LoadStage::Draining);
    drop(stop);
    let Some(served) = served else { return Ok(ExitCode::SUCCESS) };
    info!(grace_s = grace.as_secs(), "shutting down: answers may finish; once more ends at once");
    let thread_exit = served.service.thread_exit();
    let drain = tokio::task::spawn_blocking(move || served.service.drain(grace));
    let finishing = async {
        let (all_closed, unfinished) = tokio::join!(serving, drain);
        if all_closed {
            // Ranks end in order, if they can.
            let _ = tokio::task::spawn_blocking(move || thread_exit.wait(ENGINE_END)).await;
        }
        (all_closed, unfinished.unwrap_or(0))
    };
    tokio::select! {
        (all_closed, unfinished) = finishing => {
            if unfinished > 0 || !all_closed {
                warn!(unfinished, "answers were cut off");
            }
            Ok(ExitCode::SUCCESS)
        }
        () = signals.next() => Ok(ExitCode::from(interrupt::EXIT_CODE)),
    }
}

/// Ctrl-C, and what a supervisor sends.
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
    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    #[cfg(not(unix))]
    async fn next(&mut self) {
        // Without the signal there is nothing to wait for but the end of the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
