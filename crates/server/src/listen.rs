//! The socket: connections are taken, with TLS or without, until the server is told to stop.
//!
//! A client can hold only so much: connections are counted, and one that does not shake hands, does not send its
//! headers, or does not read what is sent to it, is closed after a while.

mod stall;
mod tls;

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

use stall::Stalling;
pub use tls::{Tls, TlsError};

/// Connections that are held at once; others wait in the kernel's queue.
pub const CONNECTIONS_MAX: usize = 4096;
/// Requests of one HTTP/2 connection at once.
const STREAMS_MAX: u32 = 256;
/// Time for a TLS handshake, and for the head of a request.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
const HEADERS_MAX: Duration = Duration::from_secs(30);
/// How long to wait when the system has no more sockets to give.
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
    /// `host` is a name or an address; port 0 takes any that is free.
    pub async fn bind(host: &str, port: u16, tls: Option<Tls>) -> Result<Self, ListenError> {
        let failed = |source| ListenError { address: format!("{host}:{port}"), source };
        let tcp = TcpListener::bind((host, port)).await.map_err(failed)?;
        Ok(Self { tcp, tls })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Takes connections until `stop`, then lets those that have a request under way finish it, for at most `grace`.
    /// Returns whether all did.
    pub async fn serve(self, router: Router, stop: impl Future<Output = ()>, grace: Duration) -> bool {
        let (graceful, seats) = (GracefulShutdown::new(), Arc::new(Semaphore::new(CONNECTIONS_MAX)));
        let acceptor = self.tls.map(|tls| TlsAcceptor::from(tls.0));
        let mut stop = pin!(stop);
        loop {
            let next = async {
                let seat = Arc::clone(&seats).acquire_owned().await.expect("the semaphore is never closed");
                (seat, self.tcp.accept().await)
            };
            let (seat, accepted) = tokio::select! {
                biased;
                () = &mut stop => break,
                next = next => next,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a connection could not be taken");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (watcher, router, acceptor) = (graceful.watcher(), router.clone(), acceptor.clone());
            tokio::spawn(async move {
                if let Err(error) = converse(stream, acceptor, router, watcher).await {
                    debug!(%error, "a connection ended");
                }
                drop(seat);
            });
        }
        drop(self.tcp);
        timeout(grace, graceful.shutdown()).await.is_ok()
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

async fn converse(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    router: Router,
    watcher: Watcher,
) -> Result<(), ConnectionError> {
    // Tokens are small and wanted at once.
    stream.set_nodelay(true)?;
    let stream = Stalling::new(stream);
    match acceptor {
        None => answer(stream, router, watcher).await,
        Some(acceptor) => answer(timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await??, router, watcher).await,
    }
}

async fn answer(
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
