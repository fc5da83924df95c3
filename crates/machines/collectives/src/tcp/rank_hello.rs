//! `RankHello`: the hello of a connection to a rank, or to a host that is to start one.

use std::time::Duration;

use net::{Hello, PARAMETER_BYTES, Purpose, RejectReason};
use types::{Rank, WorldSize};

use crate::shared_memory::Epoch;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankPurpose {
    /// The initiator is a rank that connects to another rank of its group.
    JoinComm,
    /// The initiator is a supervisor: the responder starts a rank for it.
    StartRank,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankHello {
    pub purpose: RankPurpose,
    /// The initiator's rank. For [`RankPurpose::StartRank`]: the rank to be started.
    pub from: Rank,
    /// The responder's rank, in the same world. For [`RankPurpose::StartRank`]: the rank to be started.
    pub to: Rank,
    pub epoch: Epoch,
}

impl RankPurpose {
    pub fn purpose(self) -> Purpose {
        match self {
            Self::JoinComm => Purpose(1),
            Self::StartRank => Purpose(2),
        }
    }
}

impl RankHello {
    /// The hello of this connection, with how long either side may be silent.
    pub fn hello(&self, silence: Duration) -> Hello {
        let mut parameters = [0; PARAMETER_BYTES];
        for (place, number) in [(0, self.from.world().get()), (2, self.from.index()), (4, self.to.index())] {
            parameters[place..place + 2].copy_from_slice(&(number as u16).to_le_bytes());
        }
        parameters[6..].copy_from_slice(&self.epoch.0.to_le_bytes());
        Hello { purpose: self.purpose.purpose(), parameters, silence }
    }

    pub fn parse(hello: &Hello) -> Result<Self, RejectReason> {
        let purposes = [RankPurpose::JoinComm, RankPurpose::StartRank];
        let purpose = purposes.into_iter().find(|purpose| purpose.purpose() == hello.purpose);
        let purpose = purpose.ok_or(RejectReason::Purpose)?;
        let [w0, w1, f0, f1, t0, t1, epoch @ ..] = hello.parameters;
        let world = WorldSize::new(u16::from_le_bytes([w0, w1])).ok_or(RejectReason::Parameters)?;
        let rank = |low, high| world.rank(u16::from_le_bytes([low, high])).ok_or(RejectReason::Parameters);
        let epoch = Epoch(u32::from_le_bytes(epoch));
        Ok(Self { purpose, from: rank(f0, f1)?, to: rank(t0, t1)?, epoch })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SILENCE: Duration = Duration::from_secs(3);

    proptest! {
        #[test]
        fn a_hello_is_read_as_it_was_written(world in 1_u16.., from: u16, to: u16, epoch: u32, starts_rank: bool) {
            let world = WorldSize::new(world).unwrap();
            let rank = |index: u16| world.rank(index % world.get() as u16).unwrap();
            let purpose = if starts_rank { RankPurpose::StartRank } else { RankPurpose::JoinComm };
            let hello = RankHello { purpose, from: rank(from), to: rank(to), epoch: Epoch(epoch) };
            prop_assert_eq!(RankHello::parse(&hello.hello(SILENCE)), Ok(hello));
        }

        #[test]
        fn parameters_that_parse_are_those_of_their_hello(purpose in 0_u8..4, parameters: [u8; PARAMETER_BYTES]) {
            let hello = Hello { purpose: Purpose(purpose), parameters, silence: SILENCE };
            match RankHello::parse(&hello) {
                Ok(parsed) => prop_assert_eq!(parsed.hello(SILENCE), hello),
                Err(RejectReason::Purpose) => prop_assert!(![1, 2].contains(&purpose)),
                Err(reason) => prop_assert_eq!(reason, RejectReason::Parameters),
            }
        }
    }
}
