//! The admin port: probes and metrics on a listener and a thread of their own, so that requests to the public port cannot
//! starve them. It answers until the process ends.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use server::{App, ConnectionLimits, Listener, Router, Tls, admin_router};
use tracing::{info, warn};

use super::http::HostAndPort;
use crate::listening;

/// Maximum connections to the admin port.
pub const ADMIN_CONNECTIONS_MAX: usize = 32;

/// Starts the admin port of a server. On a loopback address there is no TLS, and no key is needed.
pub fn start(app: &Arc<App>, at: HostAndPort, tls: Option<Tls>) -> Result<()> {
    let app = Arc::clone(app);
    start_with(at, tls, move |address| {
        if !address.ip().is_loopback() && app.config().keys.is_empty() {
            warn_of(address, "use --api-key, or a loopback address for --admin");
        }
        admin_router(&app, !address.ip().is_loopback())
    })
}

/// Starts the thread and waits until it listens. `router` makes the service for the address that it got.
pub fn start_with(
    at: HostAndPort,
    tls: Option<Tls>,
    router: impl FnOnce(SocketAddr) -> Router + Send + 'static,
) -> Result<()> {
    let (started, result) = sync_channel(1);
    let serve = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = match runtime.context("start the admin port") {
            Ok(runtime) => runtime,
            Err(error) => return drop(started.send(Err(error))),
        };
        runtime.block_on(async {
            match bind(&at, tls).await {
                Err(error) => drop(started.send(Err(error))),
                Ok((listener, address)) => {
                    let scheme = if listener.has_tls() { "https" } else { "http" };
                    info!("probes and metrics on {scheme}://{address}");
                    let router = router(address);
                    drop(started.send(Ok(())));
                    listener.serve(router, pending(), Duration::ZERO).await;
                }
            }
        });
    };
    thread::Builder::new().name("admin".to_owned()).spawn(serve).context("start the thread of the admin port")?;
    result.recv().context("start the admin port")?
}

async fn bind(at: &HostAndPort, tls: Option<Tls>) -> Result<(Listener, SocketAddr)> {
    let listener = Listener::bind(&at.host, at.port, None).await;
    let listener = listener.map_err(|error| listening::explain(error.address(), "--admin", error.io()))?;
    let address = listener.address().context("find out the address of the admin port")?;
    let tls = tls.filter(|_| !address.ip().is_loopback());
    Ok((listener.with_tls(tls).with_limits(ConnectionLimits::new(ADMIN_CONNECTIONS_MAX)), address))
}

pub fn warn_of(address: SocketAddr, remedy: &str) {
    warn!("everybody who can reach {address} can read the metrics: {remedy}");
}
