//! Registries: their encryption and multiplexing are libp2p's. A program gets each stream as it is, and negotiates the protocol
//! itself, whose name libp2p's own negotiation refuses.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;

use libp2p_core::Multiaddr;
use libp2p_core::multiaddr::Protocol;
use libp2p_core::muxing::{StreamMuxer, StreamMuxerBox};
use libp2p_core::transport::{Boxed, ListenerId, Transport, TransportEvent};
use libp2p_core::upgrade::Version;
use libp2p_identity::{Keypair, PeerId};
use tokio::net::TcpStream;
use tokio_util::compat::FuturesAsyncReadCompatExt;

/// Listens as a peer of libp2p and passes each stream on to the program. Returns the address with the peer's id.
pub async fn listen(program: SocketAddr) -> Multiaddr {
    let key = Keypair::generate_ed25519();
    let noise = libp2p_noise::Config::new(&key).unwrap();
    let tcp = libp2p_tcp::tokio::Transport::new(libp2p_tcp::Config::new());
    let secured = tcp.upgrade(Version::V1).authenticate(noise);
    let mut transport = secured.multiplex(libp2p_yamux::Config::default()).boxed();
    transport.listen_on(ListenerId::next(), "/ip4/127.0.0.1/tcp/0".parse().unwrap()).unwrap();
    let event = poll_fn(|cx| Pin::new(&mut transport).poll(cx)).await;
    let TransportEvent::NewAddress { listen_addr, .. } = event else { panic!("an address comes first") };
    tokio::spawn(accept(transport, program));
    listen_addr.with(Protocol::P2p(key.public().to_peer_id()))
}

async fn accept(mut transport: Boxed<(PeerId, StreamMuxerBox)>, program: SocketAddr) {
    loop {
        let event = poll_fn(|cx| Pin::new(&mut transport).poll(cx)).await;
        if let TransportEvent::Incoming { upgrade, .. } = event {
            tokio::spawn(async move {
                let (_, mut connection) = upgrade.await.unwrap();
                // The connection is driven by waiting for the next stream.
                while let Ok(stream) = poll_fn(|cx| Pin::new(&mut connection).poll_inbound(cx)).await {
                    tokio::spawn(async move {
                        let mut connection = TcpStream::connect(program).await.unwrap();
                        // Either side may close first.
                        let _ = tokio::io::copy_bidirectional(&mut stream.compat(), &mut connection).await;
                    });
                }
            });
        }
    }
}
