//! The head of every message between ranks. It holds the number of the phase and its operation, so that ranks which
//! disagree get an error and not a wrong sum; or it is the goodbye of a rank that leaves.

use types::{Rank, WorldSize};

use super::encoding::Encoding;

pub(super) const HEAD_BYTES: usize = 16;

/// The operation of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TcpOp {
    /// The ranks compare their options.
    CheckOptions(Encoding),
    /// Every rank receives all values of all others and sums them.
    Sum,
    /// Every rank receives its shard of all others' values and sums it.
    Scatter,
    /// Every rank sends the sums of its shard.
    GatherSums,
    /// Rank 0 receives the columns of all others.
    Columns,
}

/// Why a group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TcpAbortCause {
    Aborted,
    Lost(Rank),
}

/// The number of a phase, its operation and the number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MessageHeader {
    sequence: u64,
    word: u64,
}

const GOODBYE: u64 = 0xff;

impl MessageHeader {
    pub fn new(sequence: u64, call: TcpOp, elements: usize) -> Self {
        let (kind, detail) = match call {
            TcpOp::CheckOptions(encoding) => (1, encoding as u64),
            TcpOp::Sum => (2, 0),
            TcpOp::Scatter => (3, 0),
            TcpOp::GatherSums => (4, 0),
            TcpOp::Columns => (6, 0),
        };
        Self { sequence, word: kind << 56 | detail << 40 | elements as u64 }
    }

    pub fn goodbye(cause: TcpAbortCause) -> Self {
        let number = match cause {
            TcpAbortCause::Aborted => 0,
            TcpAbortCause::Lost(rank) => 1 + rank.index() as u64,
        };
        Self { sequence: u64::MAX, word: GOODBYE << 56 | number }
    }

    /// The cause, if this is a goodbye. An invalid number still means that the group is over.
    pub fn cause(self, world: WorldSize) -> Option<TcpAbortCause> {
        let (kind, number) = (self.word >> 56, self.word & !(GOODBYE << 56));
        let lost = || world.rank(u16::try_from(number.checked_sub(1)?).ok()?).map(TcpAbortCause::Lost);
        (kind == GOODBYE).then(|| lost().unwrap_or(TcpAbortCause::Aborted))
    }

    pub fn bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.word.to_le_bytes());
        bytes
    }

    /// Parses the first bytes of a message; `None` if there are too few.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (sequence, rest) = bytes.split_first_chunk()?;
        Some(Self { sequence: u64::from_le_bytes(*sequence), word: u64::from_le_bytes(*rest.first_chunk()?) })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn last_words_say_why() {
        let world = WorldSize::new(3).unwrap();
        for cause in world.ranks().map(TcpAbortCause::Lost).chain([TcpAbortCause::Aborted]) {
            assert_eq!(MessageHeader::parse(&MessageHeader::goodbye(cause).bytes()).unwrap().cause(world), Some(cause));
        }
        let beyond = WorldSize::new(9).unwrap().rank(8).unwrap();
        assert_eq!(MessageHeader::goodbye(TcpAbortCause::Lost(beyond)).cause(world), Some(TcpAbortCause::Aborted));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_head_or_too_few(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let head = MessageHeader::parse(&bytes);
            prop_assert_eq!(head.map(|head| head.bytes().to_vec()), bytes.get(..HEAD_BYTES).map(<[u8]>::to_vec));
            let _ = head.map(|head| head.cause(WorldSize::ONE));
        }

        #[test]
        fn calls_differ_in_their_heads(sequence: u64, elements in 0_usize..1 << 40) {
            let calls = [
                TcpOp::CheckOptions(Encoding::F32), TcpOp::CheckOptions(Encoding::Q8), TcpOp::Sum, TcpOp::Scatter, TcpOp::GatherSums, TcpOp::Columns,
            ];
            for (index, call) in calls.into_iter().enumerate() {
                let head = MessageHeader::new(sequence, call, elements);
                prop_assert_eq!(head.cause(WorldSize::ONE), None);
                prop_assert!(head != MessageHeader::new(sequence.wrapping_add(1), call, elements));
                prop_assert!(head != MessageHeader::new(sequence, call, elements ^ 1));
                prop_assert!(calls[..index].iter().all(|&other| MessageHeader::new(sequence, other, elements) != head));
            }
        }
    }
}
