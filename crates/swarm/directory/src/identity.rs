//! Who and what: peers, models, and points in time.

use std::fmt;

/// libp2p's longest: a public key of up to 42 bytes as it is, or its hash.
pub const PEER_ID_BYTES_MAX: usize = 44;

/// The identity of a peer: the bytes of its libp2p peer id, 1 to [`PEER_ID_BYTES_MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId {
    bytes: [u8; PEER_ID_BYTES_MAX],
    len: u8,
}

impl PeerId {
    pub fn new(id: &[u8]) -> Option<Self> {
        let mut bytes = [0; PEER_ID_BYTES_MAX];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        (!id.is_empty()).then_some(Self { bytes, len: id.len() as u8 })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({self})")
    }
}

/// Identifies the weights of a model. Peers with the same digest compute the same function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ModelDigest(pub [u8; 32]);

/// Milliseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct UnixTime(pub u64);

impl UnixTime {
    pub fn plus(self, milliseconds: u64) -> Self {
        Self(self.0.saturating_add(milliseconds))
    }

    /// Milliseconds since `earlier`; 0 if that is later.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
