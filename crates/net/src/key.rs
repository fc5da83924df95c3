//! `ClusterKey`: the secret that the machines of a cluster share.

use std::fmt;

/// An attacker who records a handshake can try passphrases offline, so it has to be long: better random than memorable.
pub const PASSPHRASE_BYTES_MIN: usize = 16;

const CONTEXT: &str = "consort cluster key from a passphrase, version 1";

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a cluster's passphrase has at least {PASSPHRASE_BYTES_MIN} bytes, not {bytes}")]
pub struct WeakPassphrase {
    pub bytes: usize,
}

#[derive(Clone)]
pub struct ClusterKey([u8; 32]);

impl ClusterKey {
    /// White space around the passphrase does not count: it often comes from a file.
    pub fn from_passphrase(passphrase: &str) -> Result<Self, WeakPassphrase> {
        let passphrase = passphrase.trim();
        if passphrase.len() < PASSPHRASE_BYTES_MIN {
            return Err(WeakPassphrase { bytes: passphrase.len() });
        }
        Ok(Self(blake3::derive_key(CONTEXT, passphrase.as_bytes())))
    }

    /// A key of random bytes, for one purpose.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Without the key.
impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_passphrase_is_refused_and_white_space_does_not_count() {
        let weak = ClusterKey::from_passphrase(" too short      \n").unwrap_err();
        assert_eq!(weak, WeakPassphrase { bytes: 9 });
        let key = |passphrase| ClusterKey::from_passphrase(passphrase).unwrap();
        assert_eq!(key("a passphrase for tests").0, key("a passphrase for tests\n").0);
        assert_eq!(format!("{:?}", key("a passphrase for tests")), "ClusterKey");
    }
}
