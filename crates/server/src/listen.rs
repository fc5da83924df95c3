//! `Listener`: accepts connections, with or without TLS, until the server is stopped.
//!
//! The resources of clients are bounded: there is a limit on connections, and timeouts for the handshake, the headers of a
//! request and the reading of a response.

mod tls;
mod write_timeout;

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;
use tracing::{debug, warn};

pub use tls::{Tls, TlsError};
use write_timeout::WriteTimeout;

/// Maximum open connections; further ones wait in the kernel's queue.
pub const CONNECTIONS_MAX: usize = 4096;
/// Maximum concurrent requests of one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// Timeouts of a TLS handshake, and of the headers of a request.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
const HEADERS_MAX: Duration = Duration::from_secs(30);
/// How long to wait after `accept` fails, for example because the process has too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
#[error("listen on {address}")]
pub struct ListenError {
    address: String,
    source: io::Error,
}

/// A bound socket.
pub struct Listener {
    tcp: TcpListener,
    tls: Option<Tls>,
}

impl Listener {
    /// `host` is a name or an address; port 0 selects any free port.
    pub async fn bind(host: &str, port: u16, tls: Option<Tls>) -> Result<Self, ListenError> {
        let failed = |source| ListenError { address: format!("{host}:{port}"), source };
        let tcp = TcpListener::bind((host, port)).await.map_err(failed)?;
        Ok(Self { tcp, tls })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts connections until `stop`, then lets running requests finish for at most `grace`. Returns whether all
    /// finished.
    pub async fn serve(self, router: Router, stop: impl Future<Output = ()>, grace: Duration) -> bool {
        let (graceful, permits) = (GracefulShutdown::new(), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
        let acceptor = self.tls.map(|tls| TlsAcceptor::from(tls.0));
        let mut stop = pin!(stop);
        loop {
            let next = async {
                let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
                (permit, self.tcp.accept().await)
            };
            let (permit, accepted) = tokio::select! {
                biased;
                () = &mut stop => break,
                next = next => next,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (watcher, router, acceptor) = (graceful.watcher(), router.clone(), acceptor.clone());
            tokio::spawn(async move {
                if let Err(error) = serve_connection(stream, acceptor, router, watcher).await {
                    debug!(%error, "a connection ended");
                }
                drop(permit);
            });
        }
        drop(self.tcp);
        timeout(grace, graceful.shutdown()).await.is_ok()
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

async fn serve_connection(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    router: Router,
    watcher: Watcher,
) -> Result<(), ConnectionError> {
    // Each token is a small packet that must not wait for the next one.
    stream.set_nodelay(true)?;
    let stream = WriteTimeout::new(stream);
    match acceptor {
        None => serve_http(stream, router, watcher).await,
        Some(acceptor) => serve_http(timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await??, router, watcher).await,
    }
}

async fn serve_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    router: Router,
    watcher: Watcher,
) -> Result<(), ConnectionError> {
    let service =
        TowerToHyperService::new(router.map_request(|request: Request<Incoming>| request.map(axum::body::Body::new)));
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADERS_MAX);
    builder.http2().timer(TokioTimer::new()).max_concurrent_streams(STREAMS_MAX).keep_alive_interval(Some(HEADERS_MAX));
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    watcher.watch(connection).await
}
