//! `Dial`: how streams to other peers are opened. The network of the swarm provides it; tests connect peers in one process.

use std::pin::Pin;

use directory::PeerId;
use libp2p_node::Scope;
use tokio::io::{AsyncRead, AsyncWrite};

/// A stream of bytes to a peer whose identity the network has proved.
pub trait ByteStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> ByteStream for S {}

pub type BoxedStream = Box<dyn ByteStream>;

#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DialError(pub String);

pub type Dialled<'a> = Pin<Box<dyn Future<Output = Result<BoxedStream, DialError>> + Send + 'a>>;

pub trait Dial: Send + Sync + 'static {
    /// Opens a stream to a peer that may be reached at these multiaddresses. Ends with an error within a limited time.
    fn open<'a>(&'a self, peer: PeerId, addresses: &'a [String], protocol: &'static str) -> Dialled<'a>;

    /// Multiaddresses of a peer, as text, for other peers.
    fn addresses(&self, peer: PeerId) -> Vec<String>;
}

/// Of the addresses that a client gives for another peer, those at which it may have this node dial. A client must not have it
/// dial machines that only this node can reach: addresses of a private network count for a client that is in one too, those of
/// this machine for one that is on it. Names may stand for any machine.
pub(crate) fn dialable(addresses: &[String], client: &[String]) -> Vec<String> {
    let scope = |address: &String| libp2p_node::scope(&address.parse().ok()?);
    let least = client.iter().filter_map(scope).min().unwrap_or(Scope::Internet);
    addresses.iter().filter(|address| scope(address).is_some_and(|scope| scope >= least)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_a_node_dial_only_what_it_could_reach_itself() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let all = texts(&[
            "/ip4/203.0.113.7/tcp/4001",
            "/ip4/10.1.2.3/tcp/22",
            "/ip4/127.0.0.1/tcp/22",
            "/ip6/::1/tcp/22",
            "/ip4/0.0.0.0/tcp/22",
            "/ip4/169.254.169.254/tcp/80",
            "/ip6/::ffff:127.0.0.1/tcp/22",
            "/dns4/localhost/tcp/22",
            "no address",
        ]);
        let public = dialable(&all, &texts(&["/ip4/203.0.113.1/tcp/1"]));
        assert_eq!(public, all[..1]);
        assert_eq!(dialable(&all, &[]), public);
        assert_eq!(dialable(&all, &texts(&["/ip4/192.168.0.9/tcp/1"])), all[..2]);
        assert_eq!(dialable(&all, &texts(&["/ip4/127.0.0.1/tcp/1"])), all[..7]);
    }

    /// Addresses come from other peers, as text.
    #[test]
    fn any_text_is_an_address_or_is_left_out() {
        let pieces = [
            "/ip4/203.0.113.7",
            "/ip6/::1",
            "/tcp/4001",
            "/tcp/70000",
            "/udp/1",
            "/quic-v1",
            "/p2p/",
            "/p2p/12D3KooW",
            "/p2p-circuit",
            "/dns4/é",
            "/unix/a/b",
            "/",
            "//",
            "\0",
            "ip4",
            "/certhash/u",
            "/memory/99999999999999999999",
            "/onion3/x:1",
            "/ws",
        ];
        for number in 0..pieces.len().pow(3) {
            let text: String = (0..3).map(|place| pieces[number / pieces.len().pow(place) % pieces.len()]).collect();
            let left = dialable(std::slice::from_ref(&text), &[]);
            assert!(left.is_empty() || text.starts_with("/ip4/203.0.113.7"), "{text}");
        }
    }
}
