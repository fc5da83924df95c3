//! `Listener`: accepts connections, with or without TLS, until the server is stopped.
//!
//! The resources of clients are bounded: there is a limit on connections, in all and for each address, and timeouts for the
//! handshake, the headers of a request, the time without a request and the reading of a response.

mod connection_table;
mod connections;
mod guarded_body;
#[cfg(test)]
mod http2_tests;
mod pieced_body;
mod send_watch;
mod tls;
mod write_timeout;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;
use tracing::{debug, warn};
use types::LogLimit;

use crate::local_operator::RemoteAddress;
use crate::metrics::ConnectionMetrics;
pub use connections::ConnectionLimits;
use connections::{Connection, Connections};
use guarded_body::GuardedBody;
use pieced_body::PiecedBody;
pub use tls::{Tls, TlsError};
use write_timeout::{WRITE_TIMEOUT, WriteTimeout};

/// The default of [`ConnectionLimits::total`], where descriptors suffice.
pub const CONNECTIONS_MAX: usize = 4096;
/// Maximum concurrent requests of one HTTP/2 connection.
const STREAMS_MAX: u32 = 256;
/// The bytes of bodies that a client of HTTP/2 may send before they are read, on a stream and on a connection.
const WINDOW_BYTES: u32 = 128 << 10;
/// Timeout of a TLS handshake.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);
/// How long a connection may be open without a request: before the first byte, within the headers, and after a response.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// How long a connection may take to close once it has to.
const CLOSE_MAX: Duration = Duration::from_secs(5);
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
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
}

impl Listener {
    /// `host` is a name or an address; port 0 selects any free port.
    pub async fn bind(host: &str, port: u16, tls: Option<Tls>) -> Result<Self, ListenError> {
        let failed = |source| ListenError { address: format!("{host}:{port}"), source };
        let tcp = TcpListener::bind((host, port)).await.map_err(failed)?;
        Ok(Self { tcp, tls, limits: ConnectionLimits::new(CONNECTIONS_MAX), metrics: ConnectionMetrics::default() })
    }

    /// Serves HTTPS if there is a TLS configuration.
    #[must_use]
    pub fn with_tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }

    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    #[must_use]
    pub fn with_limits(self, limits: ConnectionLimits) -> Self {
        Self { limits, ..self }
    }

    /// Counts connections in these metrics: see [`crate::App::connection_metrics`].
    #[must_use]
    pub fn with_metrics(self, metrics: ConnectionMetrics) -> Self {
        Self { metrics, ..self }
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }

    /// Accepts connections until `stop`, and then until no request is running or `grace` is over, so that probes are
    /// answered to the end. Returns whether all requests have ended.
    pub async fn serve(self, router: Router, stop: impl Future<Output = ()>, grace: Duration) -> bool {
        let connections = Connections::new(self.limits, self.metrics);
        let (close, closing) = watch::channel(false);
        let server = Server { router, acceptor: self.tls.map(|tls| TlsAcceptor::from(tls.0)), closing };
        let have_ended = {
            let mut accepting = pin!(accept_all(&self.tcp, &connections, &server));
            tokio::select! {
                biased;
                () = stop => {}
                never = &mut accepting => match never {},
            }
            tokio::select! {
                ended = timeout(grace, connections.no_requests()) => ended.is_ok(),
                never = accepting => match never {},
            }
        };
        drop(self.tcp);
        close.send_replace(true);
        // Connections that do not close in time end with the process.
        let _ = timeout(CLOSE_MAX, connections.all_closed()).await;
        have_ended
    }
}

async fn accept_all(tcp: &TcpListener, connections: &Arc<Connections>, server: &Server) -> Infallible {
    let (mut failures, mut refusals) = (LogLimit::default(), LogLimit::default());
    loop {
        let (stream, address) = match tcp.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(count) = failures.count(Instant::now()) {
                    warn!(%error, count, "connections could not be accepted");
                }
                connections.evict_first();
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(connection) = connections.admit(address.ip()).await else {
            if let Some(count) = refusals.count(Instant::now()) {
                warn!(%address, count, "connections were refused: all others have requests");
            }
            continue;
        };
        let server = server.clone();
        tokio::spawn(async move {
            let serving = server.serve_connection(stream, address.ip(), &connection);
            let served = tokio::select! {
                served = serving => served,
                () = connection.evicted() => Err("it was evicted".into()),
            };
            if let Err(error) = served {
                debug!(%address, %error, "a connection ended");
            }
        });
    }
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

/// What all connections of a listener share.
#[derive(Clone)]
struct Server {
    router: Router,
    acceptor: Option<TlsAcceptor>,
    /// True when connections have to close.
    closing: watch::Receiver<bool>,
}

impl Server {
    async fn serve_connection(
        self,
        stream: TcpStream,
        from: IpAddr,
        connection: &Connection,
    ) -> Result<(), ConnectionError> {
        // Each token is a small packet that must not wait for the next one.
        stream.set_nodelay(true)?;
        let stream = WriteTimeout::new(stream);
        match &self.acceptor {
            None => self.serve_http(stream, from, connection).await,
            Some(acceptor) => {
                let stream = timeout(HANDSHAKE_MAX, acceptor.accept(stream)).await??;
                self.serve_http(stream, from, connection).await
            }
        }
    }

    async fn serve_http(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        from: IpAddr,
        connection: &Connection,
    ) -> Result<(), ConnectionError> {
        let (router, requests) = (self.router.clone(), Arc::new(connection.requests()));
        let sends = Arc::clone(connection.sends());
        let service =
            service_fn(move |request: Request<Incoming>| {
                let (router, running, sending) = (router.clone(), requests.begin(), sends.begin());
                let receiving = requests.receive();
                let mut request = request.map(|body| Body::new(GuardedBody::new(body, receiving)));
                request.extensions_mut().insert(RemoteAddress(from));
                async move {
                    let response = router.oneshot(request).await?;
                    Ok::<_, Infallible>(response.map(|body| {
                        GuardedBody::new(GuardedBody::new(PiecedBody::new(body), running), sending.begun())
                    }))
                }
            });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_MAX);
        let mut http2 = builder.http2();
        http2.timer(TokioTimer::new()).max_concurrent_streams(STREAMS_MAX).keep_alive_interval(Some(IDLE_MAX));
        http2.initial_stream_window_size(WINDOW_BYTES).initial_connection_window_size(WINDOW_BYTES);
        let mut http = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let mut closing = self.closing.clone();
        tokio::select! {
            served = &mut http => return served,
            // An error means that the listener is gone.
            _ = closing.wait_for(|closing| *closing) => {}
            () = connection.idle_for(IDLE_MAX) => {}
            () = connection.sends().stalled(WRITE_TIMEOUT) => return Err("its client does not read".into()),
        }
        http.as_mut().graceful_shutdown();
        tokio::select! {
            served = http => served,
            () = connection.idle_for(CLOSE_MAX) => Err("it did not close in time".into()),
            () = connection.sends().stalled(WRITE_TIMEOUT) => Err("its client does not read".into()),
        }
    }
}
