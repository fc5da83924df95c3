//! `ClusterKey`: the secret that the machines of a cluster share.

use std::fmt;

/// An attacker who records a handshake can try passphrases offline, so it has to be long: better random than memorable.
pub const PASSPHRASE_BYTES_MIN: usize = 16;

const CONTEXT: &str = "consort cluster key from a passphrase, version 1";
const FINGERPRINT_TEXT: &[u8] = b"consort cluster key fingerprint, version 1";

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

    /// What a machine may announce of its key.
    pub fn fingerprint(&self) -> KeyFingerprint {
        let hash = blake3::keyed_hash(&self.0, FINGERPRINT_TEXT);
        KeyFingerprint(*hash.as_bytes().first_chunk().expect("a hash has 32 bytes"))
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

/// Machines with the same key have the same fingerprint. It does not tell the key; whoever has it can check a guess, as
/// with a recorded handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyFingerprint([u8; 8]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a key's fingerprint is 16 hexadecimal digits")]
pub struct InvalidFingerprint;

impl fmt::Display for KeyFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl std::str::FromStr for KeyFingerprint {
    type Err = InvalidFingerprint;

    fn from_str(text: &str) -> Result<Self, InvalidFingerprint> {
        let digits = text.len() == 16 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let number = u64::from_str_radix(text, 16).ok().filter(|_| digits).ok_or(InvalidFingerprint)?;
        Ok(Self(number.to_be_bytes()))
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
    #[test]
    fn a_fingerprint_tells_keys_apart_and_reads_back() {
        let fingerprint = |byte| ClusterKey::from_bytes([byte; 32]).fingerprint();
        assert_eq!(fingerprint(1), fingerprint(1));
        assert_ne!(fingerprint(1), fingerprint(2));
        assert_eq!(fingerprint(1).to_string().parse(), Ok(fingerprint(1)));
        for wrong in ["", "0123", "0123456789ABCDEF", "+123456789abcdef", "0123456789abcdef0"] {
            assert_eq!(wrong.parse::<KeyFingerprint>(), Err(InvalidFingerprint), "{wrong}");
        }
    }
}
