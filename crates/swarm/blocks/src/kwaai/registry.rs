//! A registry: a node of hivemind's DHT, such as KwaaiNet's bootstraps. One call opens a connection, a stream, and closes both.
//!
//! rust-libp2p's swarm refuses the names of hivemind's protocols. Its transports know nothing of names: a TCP connection with
//! Noise and yamux gives streams as they are, and the protocol is negotiated on them here.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use kwaai::{CallId, FRAME_BYTES_MAX, KwaaiWireError, UnaryBody, UnaryMessage};
use libp2p_core::multiaddr::Protocol;
use libp2p_core::muxing::{StreamMuxer, StreamMuxerBox, SubstreamBox};
use libp2p_core::transport::{DialOpts, PortUse, Transport};
use libp2p_core::upgrade::Version;
use libp2p_core::{Endpoint, Multiaddr};
use libp2p_identity::{Keypair, PeerId};
use tokio::time::timeout;
use tokio_util::compat::{Compat, FuturesAsyncReadCompatExt};

use super::frames::{FrameForm, KwaaiStreamError, read_header, read_payload, write_frame};
use super::multistream::{NegotiationError, propose};
use super::random_bytes;

/// For a whole call, from the connection to the reply. KwaaiNet's own limit.
const CALL_TIME_MAX: Duration = Duration::from_secs(30);
/// For the end of a connection that has served.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("{0} is not an IP address or a name with a TCP port")]
    Address(Multiaddr),
    #[error("no address was found for {name}")]
    Name { name: String, source: io::Error },
    #[error("the registry could not be reached")]
    Connect(#[source] io::Error),
    #[error("the peer there is {found}, not {expected}")]
    OtherPeer { found: Box<PeerId>, expected: Box<PeerId> },
    #[error("the connection to the registry broke")]
    Connection(#[source] io::Error),
    #[error(transparent)]
    Negotiation(#[from] NegotiationError),
    #[error(transparent)]
    Stream(#[from] KwaaiStreamError),
    #[error("the registry answered nonsense: {0}")]
    Wire(#[from] KwaaiWireError),
    #[error("the registry answered an error: {0}")]
    Refused(String),
    #[error("the registry gave no answer within {0:?}")]
    TimedOut(Duration),
}

/// Calls a protocol of the registry at `address` with `data`, and returns the data of its response.
pub(super) async fn call(
    key: &Keypair,
    address: &Multiaddr,
    protocol: &str,
    data: &[u8],
) -> Result<Vec<u8>, RegistryError> {
    on_stream(key, address, async |stream, peer| call_on(stream, peer, protocol, data).await).await
}

/// Sends a message of a protocol that has no calls, behind its length, and returns the message that comes back.
pub(super) async fn ask(
    key: &Keypair,
    address: &Multiaddr,
    protocol: &str,
    frame: &[u8],
    reply_bytes_max: usize,
) -> Result<Vec<u8>, RegistryError> {
    let ask = async |mut stream: RegistryStream, _| {
        propose(&mut stream, protocol).await?;
        write_frame(&mut stream, frame).await?;
        // The header is the same as that of an envelope.
        let bytes = read_header(&mut stream, FrameForm::Enveloped, reply_bytes_max).await?;
        Ok(read_payload(&mut stream, bytes).await?)
    };
    on_stream(key, address, ask).await
}

type RegistryStream = Compat<SubstreamBox>;

/// Connects, opens a stream, and closes the connection when `exchange` is done with it.
async fn on_stream(
    key: &Keypair,
    address: &Multiaddr,
    exchange: impl AsyncFnOnce(RegistryStream, PeerId) -> Result<Vec<u8>, RegistryError>,
) -> Result<Vec<u8>, RegistryError> {
    let call = async {
        let (peer, mut connection) = connect(key, address).await?;
        let response = drive_exchange(&mut connection, peer, exchange).await;
        // The registry sees the end of the connection in any case.
        let _ = timeout(CLOSE_TIME_MAX, poll_fn(|cx| Pin::new(&mut connection).poll_close(cx))).await;
        response
    };
    timeout(CALL_TIME_MAX, call).await.map_err(|_| RegistryError::TimedOut(CALL_TIME_MAX))?
}

async fn connect(key: &Keypair, address: &Multiaddr) -> Result<(PeerId, StreamMuxerBox), RegistryError> {
    let (address, expected) = resolve(address).await?;
    let noise = libp2p_noise::Config::new(key).map_err(|error| RegistryError::Connect(io::Error::other(error)))?;
    let tcp = libp2p_tcp::tokio::Transport::new(libp2p_tcp::Config::new().nodelay(true));
    let secured = tcp.upgrade(Version::V1).authenticate(noise);
    let mut transport = secured.multiplex(libp2p_yamux::Config::default()).boxed();
    let options = DialOpts { role: Endpoint::Dialer, port_use: PortUse::New };
    let dialled = transport.dial(address, options).map_err(|error| RegistryError::Connect(io::Error::other(error)))?;
    let (found, connection) = dialled.await.map_err(RegistryError::Connect)?;
    match expected {
        Some(expected) if expected != found => {
            Err(RegistryError::OtherPeer { found: Box::new(found), expected: Box::new(expected) })
        }
        _ => Ok((found, connection)),
    }
}

/// The address of a TCP socket, and the peer that is expected there, if the address names one.
async fn resolve(address: &Multiaddr) -> Result<(Multiaddr, Option<PeerId>), RegistryError> {
    let parts: Vec<_> = address.iter().collect();
    let (host, port, peer) = match &*parts {
        [host, Protocol::Tcp(port)] => (host, *port, None),
        [host, Protocol::Tcp(port), Protocol::P2p(peer)] => (host, *port, Some(*peer)),
        _ => return Err(RegistryError::Address(address.clone())),
    };
    let (name, is_wanted): (_, fn(&SocketAddr) -> bool) = match host {
        Protocol::Ip4(_) | Protocol::Ip6(_) => {
            return Ok((Multiaddr::empty().with(host.clone()).with(Protocol::Tcp(port)), peer));
        }
        Protocol::Dns(name) => (name, |_| true),
        Protocol::Dns4(name) => (name, SocketAddr::is_ipv4),
        Protocol::Dns6(name) => (name, SocketAddr::is_ipv6),
        _ => return Err(RegistryError::Address(address.clone())),
    };
    let unknown = |source| RegistryError::Name { name: name.to_string(), source };
    let mut found = tokio::net::lookup_host((&**name, port)).await.map_err(unknown)?;
    let found = found.find(is_wanted).ok_or_else(|| unknown(io::ErrorKind::NotFound.into()))?;
    Ok((Multiaddr::from(found.ip()).with(Protocol::Tcp(port)), peer))
}

async fn drive_exchange(
    connection: &mut StreamMuxerBox,
    peer: PeerId,
    exchange: impl AsyncFnOnce(RegistryStream, PeerId) -> Result<Vec<u8>, RegistryError>,
) -> Result<Vec<u8>, RegistryError> {
    let stream = poll_fn(|cx| match drive(connection, cx) {
        Poll::Ready(error) => Poll::Ready(Err(error)),
        Poll::Pending => Pin::new(&mut *connection).poll_outbound(cx),
    });
    let stream = stream.await.map_err(RegistryError::Connection)?;
    let mut exchange = pin!(exchange(stream.compat(), peer));
    // Bytes of a stream only move while its connection is driven.
    poll_fn(|cx| match exchange.as_mut().poll(cx) {
        Poll::Pending => drive(connection, cx).map(|error| Err(RegistryError::Connection(error))),
        done => done,
    })
    .await
}

/// Moves a connection on. Ready when it has ended.
fn drive(connection: &mut StreamMuxerBox, cx: &mut Context<'_>) -> Poll<io::Error> {
    // We serve nothing, so a stream of the other side's is dropped.
    match Pin::new(&mut *connection).poll_inbound(cx) {
        Poll::Ready(Ok(_)) => cx.waker().wake_by_ref(),
        Poll::Ready(Err(error)) => return Poll::Ready(error),
        Poll::Pending => {}
    }
    match Pin::new(connection).poll(cx) {
        Poll::Ready(Err(error)) => Poll::Ready(error),
        Poll::Ready(Ok(_)) => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
        Poll::Pending => Poll::Pending,
    }
}

async fn call_on(
    mut stream: RegistryStream,
    peer: PeerId,
    protocol: &str,
    data: &[u8],
) -> Result<Vec<u8>, RegistryError> {
    propose(&mut stream, protocol).await?;
    let call = CallId(random_bytes());
    let body = UnaryBody::Call { peer: &peer.to_bytes(), protocol, data };
    write_frame(&mut stream, &UnaryMessage { call, body }.encode()?).await?;
    let bytes = read_header(&mut stream, FrameForm::Enveloped, FRAME_BYTES_MAX).await?;
    let payload = read_payload(&mut stream, bytes).await?;
    match UnaryMessage::decode(&payload)? {
        message if message.call != call => Err(KwaaiWireError::OtherCall.into()),
        UnaryMessage { body: UnaryBody::Response(data), .. } => Ok(data.to_vec()),
        UnaryMessage { body: UnaryBody::Error(text), .. } => {
            let end = text.floor_char_boundary(kwaai::FAILURE_TEXT_BYTES_MAX);
            Err(RegistryError::Refused(text[..end].to_owned()))
        }
        UnaryMessage { body: UnaryBody::Call { .. }, .. } => Err(KwaaiWireError::Unexpected.into()),
    }
}
