//! The head of every message between ranks: which phase it belongs to and what is done there, so that a disagreement is
//! an error and not a wrong sum; or the last words of a rank that leaves.

use types::{Rank, WorldSize};

use super::encoding::Encoding;

pub(super) const HEAD_BYTES: usize = 16;

/// What a phase does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// The ranks tell each other their options.
    Greet(Encoding),
    /// Everyone has everything and sums all of it.
    Sum,
    /// Everyone has its share of everything and sums that.
    Scatter,
    /// Everyone tells the sums of its share.
    Summed,
    /// The first rank has the columns of all.
    Columns,
}

/// Why a group ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    Aborted,
    Lost(Rank),
}

/// The number of a phase, and its call with the number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    sequence: u64,
    word: u64,
}

const FAREWELL: u64 = 0xff;

impl Head {
    pub fn new(sequence: u64, call: Call, elements: usize) -> Self {
        let (kind, detail) = match call {
            Call::Greet(encoding) => (1, encoding as u64),
            Call::Sum => (2, 0),
            Call::Scatter => (3, 0),
            Call::Summed => (4, 0),
            Call::Columns => (6, 0),
        };
        Self { sequence, word: kind << 56 | detail << 40 | elements as u64 }
    }

    pub fn farewell(cause: Cause) -> Self {
        let number = match cause {
            Cause::Aborted => 0,
            Cause::Lost(rank) => 1 + rank.index() as u64,
        };
        Self { sequence: u64::MAX, word: FAREWELL << 56 | number }
    }

    /// If these are last words. A number that means nothing still says that the group is over.
    pub fn cause(self, world: WorldSize) -> Option<Cause> {
        let (kind, number) = (self.word >> 56, self.word & !(FAREWELL << 56));
        let lost = || world.rank(u16::try_from(number.checked_sub(1)?).ok()?).map(Cause::Lost);
        (kind == FAREWELL).then(|| lost().unwrap_or(Cause::Aborted))
    }

    pub fn bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.word.to_le_bytes());
        bytes
    }

    /// From the first bytes of a message; `None`: there are too few.
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
        for cause in world.ranks().map(Cause::Lost).chain([Cause::Aborted]) {
            assert_eq!(Head::parse(&Head::farewell(cause).bytes()).unwrap().cause(world), Some(cause));
        }
        let beyond = WorldSize::new(9).unwrap().rank(8).unwrap();
        assert_eq!(Head::farewell(Cause::Lost(beyond)).cause(world), Some(Cause::Aborted));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_head_or_too_few(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let head = Head::parse(&bytes);
            prop_assert_eq!(head.map(|head| head.bytes().to_vec()), bytes.get(..HEAD_BYTES).map(<[u8]>::to_vec));
            let _ = head.map(|head| head.cause(WorldSize::ONE));
        }

        #[test]
        fn calls_differ_in_their_heads(sequence: u64, elements in 0_usize..1 << 40) {
            let calls = [
                Call::Greet(Encoding::F32), Call::Greet(Encoding::Q8), Call::Sum, Call::Scatter, Call::Summed, Call::Columns,
            ];
            for (index, call) in calls.into_iter().enumerate() {
                let head = Head::new(sequence, call, elements);
                prop_assert_eq!(head.cause(WorldSize::ONE), None);
                prop_assert!(head != Head::new(sequence.wrapping_add(1), call, elements));
                prop_assert!(head != Head::new(sequence, call, elements ^ 1));
                prop_assert!(calls[..index].iter().all(|&other| Head::new(sequence, other, elements) != head));
            }
        }
    }
}
