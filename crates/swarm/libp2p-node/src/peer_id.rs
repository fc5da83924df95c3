//! Peer ids: libp2p's, the swarm's, and their text in base58.

use libp2p_identity::PeerId;

/// The text that libp2p shows everywhere: base58.
pub fn peer_text(peer: &directory::PeerId) -> String {
    match to_libp2p(peer) {
        Some(peer) => peer.to_base58(),
        None => peer.to_string(),
    }
}

/// The peer with this base58 text.
pub fn parse_peer(text: &str) -> Option<directory::PeerId> {
    text.parse().ok().map(|peer| from_libp2p(&peer))
}

pub(crate) fn from_libp2p(peer: &PeerId) -> directory::PeerId {
    directory::PeerId::new(&peer.to_bytes()).expect("libp2p's peer ids are not longer than the swarm's")
}

/// None for bytes that are no libp2p peer id.
pub(crate) fn to_libp2p(peer: &directory::PeerId) -> Option<PeerId> {
    PeerId::from_bytes(peer.as_bytes()).ok()
}
