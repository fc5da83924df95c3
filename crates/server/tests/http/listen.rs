use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use server::{Listener, Tls};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use crate::fixture;

const GRACE: Duration = Duration::from_secs(600);

/// A server on a free port. Dropping the sender stops it.
async fn serve(tls: Option<Tls>) -> (SocketAddr, oneshot::Sender<()>, JoinHandle<bool>) {
    let listener = Listener::bind("127.0.0.1", 0, tls).await.unwrap();
    let address = listener.address().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let router = server::router(&fixture::ready(fixture::config(), fixture::shared()));
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

#[tokio::test]
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
