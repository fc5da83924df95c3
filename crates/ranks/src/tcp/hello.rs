//! `Hello`: what the initiator wants, in clear, as the prologue of the handshake; and the reasons for a rejection.

use std::fmt;
use std::time::Duration;

use types::{Rank, WorldSize};

use crate::shared_memory::Epoch;

/// Increased with every change that an older build would misread.
pub(super) const VERSION: u16 = 2;

pub(super) const HELLO_BYTES: usize = 25;

const MAGIC: [u8; 8] = *b"consort\0";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The initiator is a rank that connects to another rank of its group.
    JoinComm,
    /// The initiator is a supervisor: the responder starts a rank for it.
    StartRank,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub purpose: Purpose,
    /// The initiator's rank. For [`Purpose::StartRank`]: the rank to be started.
    pub from: Rank,
    /// The responder's rank, in the same world. For [`Purpose::StartRank`]: the rank to be started.
    pub to: Rank,
    pub epoch: Epoch,
    /// How long either side may be silent, in whole milliseconds.
    pub silence: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HelloError {
    /// Not the first bytes of this protocol.
    UnknownProtocol,
    Version(u16),
}

impl Hello {
    pub fn bytes(&self) -> [u8; HELLO_BYTES] {
        let purpose = match self.purpose {
            Purpose::JoinComm => 1,
            Purpose::StartRank => 2,
        };
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = purpose;
        for (place, number) in [(11, self.from.world().get()), (13, self.from.index()), (15, self.to.index())] {
            bytes[place..place + 2].copy_from_slice(&(number as u16).to_le_bytes());
        }
        let silence_ms = u32::try_from(self.silence.as_millis()).unwrap_or(u32::MAX);
        bytes[17..21].copy_from_slice(&self.epoch.0.to_le_bytes());
        bytes[21..].copy_from_slice(&silence_ms.to_le_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        if bytes[..8] != MAGIC {
            return Err(HelloError::UnknownProtocol);
        }
        let number = |place: usize| u16::from_le_bytes([bytes[place], bytes[place + 1]]);
        if number(8) != VERSION {
            return Err(HelloError::Version(number(8)));
        }
        let purpose = match bytes[10] {
            1 => Purpose::JoinComm,
            2 => Purpose::StartRank,
            _ => return Err(HelloError::UnknownProtocol),
        };
        let rank = |place| WorldSize::new(number(11)).and_then(|world| world.rank(number(place)));
        let (Some(from), Some(to)) = (rank(13), rank(15)) else { return Err(HelloError::UnknownProtocol) };
        let word = |place: usize| u32::from(number(place)) | u32::from(number(place + 2)) << 16;
        let (epoch, silence) = (Epoch(word(17)), Duration::from_millis(word(21).into()));
        Ok(Self { purpose, from, to, epoch, silence })
    }
}

/// Why the responder rejected the connection. Not authenticated: it serves only for messages and to give up early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectReason {
    Version,
    Key,
    /// The responder starts ranks but was addressed as a rank, or the other way round.
    Purpose,
    World,
    /// The responder is another rank, or the initiator's rank does not connect to it.
    Rank,
    Epoch,
    /// The responder has no free slot.
    Busy,
}

impl RejectReason {
    const ALL: [Self; 7] = [Self::Version, Self::Key, Self::Purpose, Self::World, Self::Rank, Self::Epoch, Self::Busy];

    /// The byte that is sent. 0 is none of them: it means accepted.
    pub(super) fn byte(self) -> u8 {
        self as u8 + 1
    }

    pub(super) fn parse(byte: u8) -> Option<Self> {
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
            Self::Key => "its key is another",
            Self::Purpose => "it is there for something else",
            Self::World => "its group has another size",
            Self::Rank => "it is another rank",
            Self::Epoch => "its group is in another epoch",
            Self::Busy => "it is busy",
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
        assert_eq!((RejectReason::parse(0), RejectReason::parse(8)), (None, None));
    }

    proptest! {
        #[test]
        fn a_hello_is_read_as_it_was_written(
            world in 1_u16.., from: u16, to: u16, epoch: u32, silence_ms: u32, is_rank_stream: bool,
        ) {
            let world = WorldSize::new(world).unwrap();
            let rank = |index: u16| world.rank(index % world.get() as u16).unwrap();
            let purpose = if is_rank_stream { Purpose::StartRank } else { Purpose::JoinComm };
            let (epoch, silence) = (Epoch(epoch), Duration::from_millis(silence_ms.into()));
            let hello = Hello { purpose, from: rank(from), to: rank(to), epoch, silence };
            prop_assert_eq!(Hello::parse(&hello.bytes()), Ok(hello));
        }

        #[test]
        fn bytes_that_parse_are_those_of_their_hello(bytes: [u8; HELLO_BYTES - 8], is_ours: bool) {
            let mut whole = [0; HELLO_BYTES];
            whole[8..].copy_from_slice(&bytes);
            if is_ours {
                whole[..11].copy_from_slice(b"consort\0\x02\x00\x01");
            }
            if let Ok(hello) = Hello::parse(&whole) {
                prop_assert_eq!(hello.bytes(), whole);
            }
        }
    }
}
