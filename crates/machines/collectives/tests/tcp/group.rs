//! A group whose ranks are threads on loopback.

use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use collectives::shared_memory::Epoch;
use collectives::tcp::{ConnectError, Encoding, TcpAbort, TcpComm, TcpCommOptions, TcpGroup};
use net::ClusterKey;
use types::{Rank, WorldSize};

/// Far longer than a test takes.
pub const LONG: Duration = Duration::from_secs(120);
/// For waits that have to end by a deadline, and before which nothing has to happen.
pub const SHORT: Duration = Duration::from_millis(700);
/// For waits that end by a deadline before which something happens, also on a busy machine.
pub const ENOUGH: Duration = Duration::from_secs(5);

pub const OPTIONS: TcpCommOptions =
    TcpCommOptions { elements_max: 1 << 20, encoding: Encoding::F32, stall_deadline: LONG, silence_deadline: LONG };

pub fn key() -> ClusterKey {
    ClusterKey::from_passphrase("the key of all tests").unwrap()
}

pub struct Group {
    pub world: WorldSize,
    pub listeners: Vec<TcpListener>,
    pub addresses: Vec<SocketAddr>,
    pub epoch: Epoch,
}

impl Group {
    pub fn new(size: u16) -> Self {
        let world = WorldSize::new(size).unwrap();
        let listeners: Vec<_> = world.ranks().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let addresses = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
        Self { world, listeners, addresses, epoch: Epoch(1) }
    }

    pub fn rank(&self, index: u16) -> Rank {
        self.world.rank(index).unwrap()
    }

    pub fn place(&self, index: u16) -> TcpGroup<'_> {
        let (rank, listener) = (self.rank(index), &self.listeners[usize::from(index)]);
        TcpGroup { rank, listener, addresses: &self.addresses, epoch: self.epoch }
    }

    pub fn connect(&self, index: u16, options: TcpCommOptions, timeout: Duration) -> Result<TcpComm, ConnectError> {
        TcpComm::connect(self.place(index), &key(), options, &TcpAbort::default(), Instant::now() + timeout)
    }

    /// The communicators of all ranks.
    pub fn comms(&self, options: TcpCommOptions) -> Vec<TcpComm> {
        thread::scope(|scope| {
            let connect = |rank: Rank| scope.spawn(move || self.connect(rank.index() as u16, options, LONG).unwrap());
            let ranks: Vec<_> = self.world.ranks().map(connect).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// Runs `part` as every rank of a new group at once.
pub fn all<T: Send>(size: u16, options: TcpCommOptions, part: impl Fn(&mut TcpComm) -> T + Sync) -> Vec<T> {
    each(Group::new(size).comms(options), part)
}

/// Runs `part` for every communicator at once.
pub fn each<T: Send>(comms: Vec<TcpComm>, part: impl Fn(&mut TcpComm) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let part = &part;
        let ranks: Vec<_> = comms.into_iter().map(|mut comm| scope.spawn(move || part(&mut comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
