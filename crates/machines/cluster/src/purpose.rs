//! What connections between the machines of a cluster are for, and the parameters in their hellos.

use std::time::Duration;

use net::{Hello, PARAMETER_BYTES, Purpose};

/// A coordinator directs a node.
pub const CONTROL: Purpose = Purpose(3);
/// A coordinator sends tensors to a node.
pub const WEIGHTS: Purpose = Purpose(4);
/// A stage, or the coordinator, sends steps to the next stage.
pub const CHAIN: Purpose = Purpose(5);
/// The coordinator receives states from the last stage.
pub const RESULTS: Purpose = Purpose(6);

/// What a connection belongs to: a transfer of weights, or a stage's place in a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    pub purpose: Purpose,
    /// The number of the transfer or of the chain.
    pub number: u64,
    /// The index of the stage in its chain.
    pub index: u16,
}

impl ConnectionId {
    pub const fn control() -> Self {
        Self { purpose: CONTROL, number: 0, index: 0 }
    }

    pub fn of(hello: &Hello) -> Self {
        let (number, index) = hello.parameters.split_first_chunk().expect("the parameters have ten bytes");
        let index = index.first_chunk().expect("the parameters have ten bytes");
        Self { purpose: hello.purpose, number: u64::from_le_bytes(*number), index: u16::from_le_bytes(*index) }
    }

    pub fn hello(&self, silence: Duration) -> Hello {
        let mut parameters = [0; PARAMETER_BYTES];
        parameters[..8].copy_from_slice(&self.number.to_le_bytes());
        parameters[8..].copy_from_slice(&self.index.to_le_bytes());
        Hello { purpose: self.purpose, parameters, silence }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_carries_what_its_connection_belongs_to() {
        let id = ConnectionId { purpose: CHAIN, number: 0x0102_0304_0506_0708, index: 0x0a0b };
        assert_eq!(ConnectionId::of(&id.hello(Duration::from_secs(1))), id);
    }
}
