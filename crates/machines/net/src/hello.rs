//! `Hello`: what the initiator wants, in clear, as the prologue of the handshake; and the reasons for a rejection.

use std::fmt;
use std::time::Duration;

/// Increased with every change that an older build would misread.
pub const VERSION: u16 = 5;

pub(crate) const HELLO_BYTES: usize = 25;
/// Bytes of a hello whose meaning depends on its purpose.
pub const PARAMETER_BYTES: usize = 10;

pub(crate) const MAGIC: [u8; 8] = *b"consort\0";

/// What a connection is for. 1 and 2 are purposes of `ranks`, 3 to 15 of `cluster`, 16 is that of invitations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Purpose(pub u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub purpose: Purpose,
    pub parameters: [u8; PARAMETER_BYTES],
    /// How long either side may be silent, in whole milliseconds.
    pub silence: Duration,
}

const SPLIT: &str = "the bytes were split at these lengths";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloError {
    /// Not the first bytes of this protocol.
    UnknownProtocol,
    Version(u16),
}

impl Hello {
    pub(crate) fn bytes(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.purpose.0;
        bytes[11..21].copy_from_slice(&self.parameters);
        let silence_ms = u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX);
        bytes[21..].copy_from_slice(&silence_ms.to_le_bytes());
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        let (magic, rest) = bytes.split_at(MAGIC.len());
        let (version, rest) = rest.split_at(2);
        let (purpose, rest) = rest.split_at(1);
        let (parameters, silence_ms) = rest.split_at(PARAMETER_BYTES);
        if magic != MAGIC {
            return Err(HelloError::UnknownProtocol);
        }
        let version = u16::from_le_bytes([version[0], version[1]]);
        if version != VERSION {
            return Err(HelloError::Version(version));
        }
        let silence_ms = u32::from_le_bytes(silence_ms.try_into().expect(SPLIT));
        let silence = Duration::from_millis(silence_ms.into());
        Ok(Self { purpose: Purpose(purpose[0]), parameters: parameters.try_into().expect(SPLIT), silence })
    }
}

/// Why the responder rejected the connection. Not authenticated: it serves only for messages and to give up early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    Version,
    Key,
    /// The responder does not serve this purpose.
    Purpose,
    World,
    /// The responder is another rank, or the initiator's rank does not connect to it.
    Rank,
    Epoch,
    /// The responder has no free slot.
    Busy,
    /// The parameters of the hello are not valid for its purpose.
    Parameters,
}

impl RejectReason {
    const ALL: [Self; 8] =
        [Self::Version, Self::Key, Self::Purpose, Self::World, Self::Rank, Self::Epoch, Self::Busy, Self::Parameters];

    /// The byte that is sent. 0 is none of them: it means accepted.
    pub(crate) fn byte(self) -> u8 {
        self as u8 + 1
    }

    pub(crate) fn parse(byte: u8) -> Option<Self> {
        Self::ALL.get(usize::from(byte).checked_sub(1)?).copied()
    }

    /// Whether the same hello may be accepted later.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Epoch | Self::Busy)
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "it speaks another version",
            Self::Key => "its cluster key is another",
            Self::Purpose => "it is there for something else",
            Self::World => "its group has another size",
            Self::Rank => "it is another rank",
            Self::Epoch => "it is in another epoch",
            Self::Busy => "it is busy",
            Self::Parameters => "the parameters of the connection are not valid",
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_refusal_has_a_byte_of_its_own() {
        for reason in RejectReason::ALL {
            assert_eq!(RejectReason::parse(reason.byte()), Some(reason));
        }
        assert_eq!((RejectReason::parse(0), RejectReason::parse(9)), (None, None));
    }

    proptest! {
        #[test]
        fn a_hello_is_read_as_it_was_written(purpose: u8, parameters: [u8; PARAMETER_BYTES], silence_ms: u32) {
            let silence = Duration::from_millis(silence_ms.into());
            let hello = Hello { purpose: Purpose(purpose), parameters, silence };
            prop_assert_eq!(Hello::parse(&hello.bytes()), Ok(hello));
        }

        #[test]
        fn bytes_that_parse_are_those_of_their_hello(bytes: [u8; HELLO_BYTES - 8], is_ours: bool) {
            let mut whole = [0; HELLO_BYTES];
            whole[8..].copy_from_slice(&bytes);
            if is_ours {
                whole[..10].copy_from_slice(b"consort\0\x05\x00");
            }
            let parsed = Hello::parse(&whole);
            prop_assert!(parsed.is_ok() || !is_ours);
            if let Ok(hello) = parsed {
                prop_assert_eq!(hello.bytes(), whole);
            }
        }
    }
}
