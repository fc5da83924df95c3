//! How connections are made: TCP with Noise and yamux, QUIC, and relayed ones over either. In a private network, TCP with a
//! pre-shared key.

use libp2p_core::Transport;
use libp2p_core::muxing::StreamMuxerBox;
use libp2p_core::transport::Boxed;
use libp2p_core::transport::timeout::TransportTimeout;
use libp2p_core::upgrade::Version;
use libp2p_dns::tokio::Transport as Names;
use libp2p_identity::{Keypair, PeerId};
use libp2p_pnet::{PnetConfig, PreSharedKey};
use libp2p_relay::client::Transport as RelayTransport;
use libp2p_tcp::tokio::Transport as TcpTransport;

use crate::error::NodeError;
use crate::handshakes::{Evictable, Handshakes};
use crate::limits::{HANDSHAKE_TIME_MAX, QUIC_CONNECTION_BYTES_MAX, QUIC_STREAM_BYTES_MAX, STREAMS_PER_CONNECTION_MAX};

type Connections = Boxed<(PeerId, StreamMuxerBox)>;

/// `relay` makes connections through relays, which are encrypted between their ends like all others. `handshakes` has those of
/// incoming connections.
pub fn transport(
    keypair: &Keypair,
    private: Option<PreSharedKey>,
    relay: RelayTransport,
    handshakes: Handshakes,
) -> Result<Connections, NodeError> {
    let encryption =
        libp2p_noise::Config::new(keypair).map_err(|error| NodeError::Encryption { reason: error.to_string() })?;
    let tcp = TcpTransport::new(libp2p_tcp::Config::default().nodelay(true));
    let direct: Connections = match private {
        Some(key) => tcp
            .and_then(move |socket, _| PnetConfig::new(key).handshake(socket))
            .upgrade(Version::V1Lazy)
            .authenticate(encryption.clone())
            .multiplex(multiplexer())
            .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection)))
            .boxed(),
        None => tcp
            .upgrade(Version::V1Lazy)
            .authenticate(encryption.clone())
            .multiplex(multiplexer())
            .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection)))
            .or_transport(
                libp2p_quic::tokio::Transport::new(quic(keypair))
                    .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection))),
            )
            .map(|either, _| either.into_inner())
            .boxed(),
    };
    let relayed = relay
        .upgrade(Version::V1Lazy)
        .authenticate(encryption)
        .multiplex(multiplexer())
        .map(|(peer, connection), _| (peer, StreamMuxerBox::new(connection)));
    let all = relayed.or_transport(with_names(direct)).map(|either, _| either.into_inner());
    let all = TransportTimeout::new(all, HANDSHAKE_TIME_MAX).boxed();
    Ok(Evictable::new(all, handshakes).boxed())
}

/// Resolves names in addresses with the system's settings. Where it has none, no name is resolved.
fn with_names(direct: Connections) -> Names<Connections> {
    match Names::system(()) {
        Ok(_) => Names::system(direct).unwrap_or_else(|_| unreachable!("settings that were just read")),
        Err(_) => Names::custom(direct, Default::default(), Default::default()),
    }
}

fn multiplexer() -> libp2p_yamux::Config {
    let mut config = libp2p_yamux::Config::default();
    config.set_max_num_streams(STREAMS_PER_CONNECTION_MAX);
    config
}

fn quic(keypair: &Keypair) -> libp2p_quic::Config {
    let mut config = libp2p_quic::Config::new(keypair);
    config.handshake_timeout = HANDSHAKE_TIME_MAX;
    config.max_concurrent_stream_limit = STREAMS_PER_CONNECTION_MAX as u32;
    config.max_stream_data = QUIC_STREAM_BYTES_MAX;
    config.max_connection_data = QUIC_CONNECTION_BYTES_MAX;
    config
}
