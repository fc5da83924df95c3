//! The parameters of a group on several hosts: a secret that its ranks share, the encoding of activations, and how long
//! ranks wait for each other.

use std::fmt;
use std::time::Duration;

use collectives::tcp::Encoding;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::limits::{LimitError, WAIT_MS_MAX, count};

/// The key of one epoch's connections. In a line it is hexadecimal digits; it is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }
}

/// Without the secret.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(SecretVisitor)
    }
}

struct SecretVisitor;

impl Visitor<'_> for SecretVisitor {
    type Value = Secret;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("64 hexadecimal digits")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Secret, E> {
        let bytes = blake3::Hash::from_hex(text).map_err(|_| E::custom("a key is not 64 hexadecimal digits"))?;
        Ok(Secret(bytes.into()))
    }
}

/// How the terms of sums are sent between hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    #[default]
    F32,
    /// Rounded to eight bits, with a scale per block.
    Q8,
}

impl From<Activations> for Encoding {
    fn from(activations: Activations) -> Self {
        match activations {
            Activations::F32 => Self::F32,
            Activations::Q8 => Self::Q8,
        }
    }
}

/// How long a rank waits for ranks on other hosts, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinTimeouts {
    /// Until all ranks are connected.
    pub connect_ms: u64,
    /// For bytes from a connected rank, within a collective.
    pub stall_ms: u64,
    /// For any packet from a host.
    pub silence_ms: u64,
}

impl JoinTimeouts {
    pub fn connect(&self) -> Result<Duration, LimitError> {
        wait("connect_ms", self.connect_ms)
    }

    pub fn stall(&self) -> Result<Duration, LimitError> {
        wait("stall_ms", self.stall_ms)
    }

    pub fn silence(&self) -> Result<Duration, LimitError> {
        wait("silence_ms", self.silence_ms)
    }
}

fn wait(what: &'static str, ms: u64) -> Result<Duration, LimitError> {
    count(what, ms, WAIT_MS_MAX).map(|ms| Duration::from_millis(ms as u64))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_as_long_as_was_said_and_never_endless() {
        let max = WAIT_MS_MAX as u64;
        let timeouts = JoinTimeouts { connect_ms: 1500, stall_ms: max + 1, silence_ms: u64::MAX };
        assert_eq!(timeouts.connect(), Ok(Duration::from_millis(1500)));
        let too_large = |what, found| Err(LimitError::TooLarge { what, found, max });
        assert_eq!(timeouts.stall(), too_large("stall_ms", max + 1));
        assert_eq!(timeouts.silence(), too_large("silence_ms", u64::MAX));
    }

    #[test]
    fn a_secret_is_written_as_digits_and_never_shown() {
        let secret = Secret::new([0xab; 32]);
        let text = serde_json::to_string(&secret).unwrap();
        assert_eq!(text, format!("\"{}\"", "ab".repeat(32)));
        assert_eq!(serde_json::from_str::<Secret>(&text).unwrap(), secret);
        assert_eq!(format!("{secret:?}"), "Secret");
        for bad in ["\"ab\"", "\"\"", "7"] {
            let error = serde_json::from_str::<Secret>(bad).unwrap_err().to_string();
            assert!(!error.contains("ab\""), "{error}");
        }
    }
}
