//! `Node`: what a machine runs that has joined a cluster. Coordinators with the cluster key have it load ranges of layers and run
//! them as stages of chains. Nothing else can be asked of it.

mod control;
mod expected;
#[cfg(debug_assertions)]
mod fault;
mod loaded_stage;
mod memory;
mod observer;
mod running_chain;
mod stage_executor;
mod stage_loop;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use kernels::cpu::Level;
use net::{AcceptedStream, ClusterKey, Hello, MessageStream, PurposeLimit, RejectReason, SecureListener};
use tracing::debug;

pub use expected::{Expectation, ExpectedConnections, NodeConnection};
#[cfg(debug_assertions)]
pub use fault::{NodeFault, NodeFaultError};
pub use observer::{IncomingWeights, NoObserver, NodeObserver};
pub use stage_executor::NodeRanks;
pub(crate) use stage_loop::{MESSAGES_MAX, run_in_process};
pub use stage_loop::{StageConnections, StageShape, run};

use crate::purpose::{CHAIN, CONTROL, ConnectionId, RESULTS, WEIGHTS};
use crate::wire::control::WireFacts;
use memory::NodeMemory;
use weights::TensorStore;

/// Connections of each purpose, in all and from one address.
const LIMITS: [PurposeLimit; 4] = [
    PurposeLimit { purpose: CONTROL, in_all: 64, per_address: 16 },
    PurposeLimit { purpose: WEIGHTS, in_all: 64, per_address: 32 },
    PurposeLimit { purpose: CHAIN, in_all: 64, per_address: 16 },
    PurposeLimit { purpose: RESULTS, in_all: 64, per_address: 16 },
];

/// What a node is, and what it may use.
#[derive(Debug)]
pub struct NodeOptions {
    pub key: ClusterKey,
    pub store: TensorStore,
    /// How long another machine may be silent before it counts as lost.
    pub silence: Duration,
    /// Compute threads, of each rank.
    pub threads: usize,
    pub level: Level,
    /// Rank processes that share each layer; `None`: layers run in this process.
    pub ranks: Option<NodeRanks>,
    /// Memory that the stages of all coordinators may use, of what is free; `None`: all of it.
    pub memory_max: Option<u64>,
    /// What it says of itself. The free memory is measured whenever a coordinator asks.
    pub facts: WireFacts,
    pub observer: Box<dyn NodeObserver>,
}

/// A bound socket.
#[derive(Debug)]
pub struct Node {
    listener: TcpListener,
    shared: Arc<NodeShared>,
}

/// What all connections of a node share.
#[derive(Debug)]
struct NodeShared {
    key: ClusterKey,
    store: TensorStore,
    silence: Duration,
    threads: usize,
    level: Level,
    ranks: Option<NodeRanks>,
    memory: NodeMemory,
    facts: WireFacts,
    observer: Box<dyn NodeObserver>,
    expected: ExpectedConnections,
}

impl Node {
    pub fn bind(address: SocketAddr, options: NodeOptions) -> io::Result<Self> {
        let NodeOptions { key, store, silence, threads, level, ranks, memory_max, facts, observer } = options;
        let listener = TcpListener::bind(address)?;
        let expected = ExpectedConnections::default();
        let memory = NodeMemory::new(memory_max);
        let shared = NodeShared { key, store, silence, threads, level, ranks, memory, facts, observer, expected };
        Ok(Self { listener, shared: Arc::new(shared) })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves coordinators until `is_over`.
    pub fn serve(&self, is_over: impl Fn() -> bool + Sync) -> io::Result<()> {
        let listener = SecureListener { listener: &self.listener, key: &self.shared.key, limits: &LIMITS };
        let admit = |hello: &Hello| {
            let id = ConnectionId::of(hello);
            let is_welcome = id.purpose == CONTROL || self.shared.expected.is_expected(id);
            if is_welcome { Ok(id) } else { Err(RejectReason::Parameters) }
        };
        listener.serve(admit, |id, accepted| self.accept(id, accepted), is_over)
    }

    fn accept(&self, id: ConnectionId, accepted: AcceptedStream) {
        let AcceptedStream { address, secured, slot, .. } = accepted;
        match MessageStream::new(secured) {
            Ok(stream) if id.purpose == CONTROL => control::serve(&self.shared, stream, address),
            Ok(stream) => self.shared.expected.deliver(id, NodeConnection { stream, slot }),
            Err(error) => debug!(%address, %error, "a connection could not be used"),
        }
    }
}

impl NodeShared {
    /// What it is, for a coordinator whose stage holds so much memory.
    fn facts(&self, own: u64) -> WireFacts {
        let free = ranks::memory_available().unwrap_or(self.facts.memory_bytes);
        WireFacts { memory_bytes: self.memory.offered(free, own), ..self.facts.clone() }
    }
}
