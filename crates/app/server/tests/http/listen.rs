use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use server::{CONNECTIONS_MAX, ConnectionLimits, Listener, Tls};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use testing::served_model;

const GRACE: Duration = Duration::from_secs(600);

/// A server on a free port. Dropping the sender stops it.
async fn serve(tls: Option<Tls>) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<bool>) {
    let router = server::router(&served_model::ready(served_model::config(), served_model::shared()));
    serve_router(router, tls, CONNECTIONS_MAX).await
}

async fn serve_router(
    router: Router,
    tls: Option<Tls>,
    connections: usize,
) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<bool>) {
    let listener = Listener::bind("127.0.0.1", 0, tls).await.unwrap();
    let listener = listener.with_limits(ConnectionLimits { total: connections, per_address: connections });
    let address = listener.address().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let stopped = async {
        let _ = stopped.await;
    };
    (address, stop, tokio::spawn(listener.serve(router, stopped, GRACE)))
}

async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.unwrap();
    String::from_utf8(response).unwrap()
}

const GET: &str = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn a_client_that_first_sends_a_refused_body_whole_gets_its_response() {
    let config = server::Config { body_bytes_max: 1000, ..served_model::config() };
    let router = server::router(&served_model::ready(config, served_model::shared()));
    let (address, _stop, _) = serve_router(router, None, CONNECTIONS_MAX).await;
    // More than the buffers of both sockets hold.
    let body = "x".repeat(64 << 20);
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}",
        body.len()
    );
    let response = exchange(TcpStream::connect(address).await.unwrap(), &format!("{head}\r\n\r\n{body}")).await;
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
    // A client that asks first is told without sending.
    let asking = format!("{head}\r\nexpect: 100-continue\r\n\r\n");
    let response = exchange(TcpStream::connect(address).await.unwrap(), &asking).await;
    assert!(response.starts_with("HTTP/1.1 413 "), "{response}");
}

#[tokio::test]
async fn a_certificate_makes_it_https() {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let tls = Tls::from_pem(made.cert.pem().as_bytes(), made.signing_key.serialize_pem().as_bytes()).unwrap();
    let (address, _stop, _) = serve(Some(tls)).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from(made.cert.der().to_vec())).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let connector = TlsConnector::from(Arc::new(config.with_root_certificates(roots).with_no_client_auth()));
    let stream = TcpStream::connect(address).await.unwrap();
    let stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
    assert!(exchange(stream, GET).await.starts_with("HTTP/1.1 200"));
    // A client without TLS gets no HTTP response, and does not affect other clients.
    let mut plain = TcpStream::connect(address).await.unwrap();
    plain.write_all(GET.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"));
}

#[test]
fn a_certificate_that_cannot_be_used_is_refused() {
    let one = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let other = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let (certificate, key) = (one.cert.pem(), other.signing_key.serialize_pem());
    assert!(Tls::from_pem(certificate.as_bytes(), key.as_bytes()).is_err(), "they do not belong together");
    assert!(Tls::from_pem(b"", key.as_bytes()).is_err());
    assert!(Tls::from_pem(certificate.as_bytes(), b"nonsense").is_err());
}

#[tokio::test]
async fn an_answer_under_way_is_finished_before_the_end() {
    let (address, stop, serving) = serve(None).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = r#"{"prompt": "a", "max_tokens": 64, "stream": true, "ignore_eos": true}"#;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    stream.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes()).await.unwrap();
    let mut first = [0; 12];
    stream.read_exact(&mut first).await.unwrap();
    assert_eq!(&first, b"HTTP/1.1 200");
    drop(stop);
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).await.unwrap();
    assert!(String::from_utf8(rest).unwrap().contains("data: [DONE]"));
    assert!(serving.await.unwrap(), "nobody was cut off");
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

// The clock jumps over the time that the server waits for headers.
#[tokio::test(start_paused = true)]
async fn nonsense_is_answered_or_dropped_and_the_server_goes_on() {
    let (address, _stop, _) = serve(None).await;
    for nonsense in
        ["\r\n\r\n\r\n", "GET\0/ HTTP/9.9\r\n\r\n", "POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n"]
    {
        let answer = exchange(TcpStream::connect(address).await.unwrap(), nonsense).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    assert!(exchange(TcpStream::connect(address).await.unwrap(), GET).await.starts_with("HTTP/1.1 200"));
}

/// A service with a request that runs until the test ends it, and one that is answered at once.
struct Gated {
    begun: Arc<Semaphore>,
    gate: Arc<Semaphore>,
    router: Router,
}

impl Gated {
    fn new() -> Self {
        let (begun, gate) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let handler = {
            let (begun, gate) = (Arc::clone(&begun), Arc::clone(&gate));
            async move || {
                begun.add_permits(1);
                gate.acquire().await.unwrap().forget();
                "it has ended"
            }
        };
        let router = Router::new().route("/slow", get(handler)).route("/health", get(async || "ok"));
        Self { begun, gate, router }
    }

    /// Sends a request that runs until [`Gated::end`].
    async fn begin(&self, address: SocketAddr) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(&GET.replace("/health", "/slow").into_bytes()).await.unwrap();
        self.begun.acquire().await.unwrap().forget();
        stream
    }

    async fn end(&self, stream: TcpStream) {
        self.gate.add_permits(1);
        assert!(read_all(stream).await.ends_with("it has ended"));
    }
}

/// What the server sends until it closes the connection.
async fn read_all(mut stream: TcpStream) -> String {
    let mut answer = Vec::new();
    // A connection that is closed before its data was read is reset.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

async fn is_healthy(address: SocketAddr) -> bool {
    read_all_of(address, GET).await.starts_with("HTTP/1.1 200")
}

async fn read_all_of(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(request.as_bytes()).await;
    read_all(stream).await
}

#[tokio::test]
async fn connections_without_a_request_are_evicted_for_others_and_running_requests_stay() {
    const MAX: usize = 8;
    let gated = Gated::new();
    let (address, _stop, _) = serve_router(gated.router.clone(), None, MAX).await;
    let running = gated.begin(address).await;
    let mut silent = Vec::new();
    for first in ["", "PRI * HTTP/2.0\r\n", "GET /health HTTP/1.1\r\nho"].iter().cycle().take(3 * MAX) {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let _ = stream.write_all(first.as_bytes()).await;
        silent.push(stream);
    }
    assert!(is_healthy(address).await);
    assert_eq!(read_all(silent.remove(0)).await, "", "the first was evicted");
    gated.end(running).await;
    assert!(is_healthy(address).await);
}

#[tokio::test]
async fn a_body_that_does_not_arrive_holds_no_connection() {
    let gated = Gated::new();
    let router = gated.router.clone().route("/body", axum::routing::post(async |body: String| body));
    let (address, _stop, _) = serve_router(router, None, 1).await;
    let mut waiting = TcpStream::connect(address).await.unwrap();
    let head = "POST /body HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 9\r\n\r\n";
    waiting.write_all(head.as_bytes()).await.unwrap();
    // The handler has begun to read.
    let mut told = [0; 12];
    waiting.read_exact(&mut told).await.unwrap();
    assert_eq!(&told, b"HTTP/1.1 100");
    assert!(is_healthy(address).await);
    assert!(!read_all(waiting).await.contains("HTTP/1.1 200"));
}

#[tokio::test]
async fn when_every_connection_has_a_request_a_new_one_is_refused() {
    let gated = Gated::new();
    let (address, _stop, _) = serve_router(gated.router.clone(), None, 2).await;
    let running = [gated.begin(address).await, gated.begin(address).await];
    assert_eq!(read_all_of(address, GET).await, "");
    for stream in running {
        gated.end(stream).await;
    }
    assert!(is_healthy(address).await);
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_sends_no_request_is_closed() {
    let gated = Gated::new();
    let (address, _stop, _) = serve_router(gated.router.clone(), None, CONNECTIONS_MAX).await;
    for first in ["", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "GET /health HTTP/1.1\r\nho"] {
        let answer = tokio::task::spawn(async move {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(first.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        });
        answer.await.unwrap();
    }
}

#[tokio::test]
async fn while_requests_run_at_shutdown_probes_are_answered() {
    let gated = Gated::new();
    let (address, stop, serving) = serve_router(gated.router.clone(), None, CONNECTIONS_MAX).await;
    let running = gated.begin(address).await;
    let silent = TcpStream::connect(address).await.unwrap();
    drop(stop);
    for _ in 0..3 {
        assert!(is_healthy(address).await);
    }
    gated.end(running).await;
    assert!(serving.await.unwrap(), "nobody was cut off");
    assert_eq!(read_all(silent).await, "");
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}
