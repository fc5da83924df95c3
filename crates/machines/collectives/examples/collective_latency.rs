//! Prints how long an `all_reduce` takes between ranks that are threads of this process: over shared memory, and over TCP
//! on loopback, exact and as eight bits.
//!
//!     cargo run --release -p ranks --example collective_latency [RANKS]
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a failed measurement panics

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use collectives::Communicator as _;
use collectives::shared_memory::{Epoch, GroupLimits, Segment};
use collectives::tcp::{Encoding, TcpAbort, TcpComm, TcpCommOptions, TcpGroup};
use net::ClusterKey;
use types::{Rank, WorldSize};

const SIZES: [usize; 4] = [1 << 10, 1 << 12, 1 << 16, 1 << 19]; // elements: 4 KiB to 2 MiB
const SPAN: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    let ranks = std::env::args().nth(1).map_or(2, |ranks| ranks.parse().unwrap());
    let world = WorldSize::new(ranks).unwrap();
    println!("{:>14} {:>12} {:>12} {:>12}", "transport", "bytes", "median", "p99");
    for elements in SIZES {
        let (segment, _fd) = Segment::create(GroupLimits { world, elements_max: elements }).unwrap();
        let epoch = segment.epoch();
        report("shared memory", elements, world, |rank| {
            let mut comm = segment.join(rank, epoch).unwrap();
            move |values: &mut [f32]| comm.all_reduce(values).unwrap()
        });
        for (name, encoding) in [("tcp", Encoding::F32), ("tcp, q8", Encoding::Q8)] {
            let listeners: Vec<_> = world.ranks().map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
            let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_addr().unwrap()).collect();
            let key = ClusterKey::from_passphrase("for a measurement").unwrap();
            let options = TcpCommOptions {
                elements_max: elements,
                encoding,
                stall_deadline: PATIENCE,
                silence_deadline: PATIENCE,
            };
            report(name, elements, world, |rank| {
                let listener = &listeners[rank.index()];
                let place = TcpGroup { rank, listener, addresses: &addresses, epoch: Epoch(1) };
                let mut comm =
                    TcpComm::connect(place, &key, options, &TcpAbort::default(), Instant::now() + PATIENCE).unwrap();
                move |values: &mut [f32]| comm.all_reduce(values).unwrap()
            });
        }
    }
}

/// Runs as many collectives as fit in [`SPAN`] and prints the latencies on rank 0.
fn report<E: FnMut(&mut [f32])>(name: &str, elements: usize, world: WorldSize, join: impl Fn(Rank) -> E + Sync) {
    let mut times = thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = world.ranks().map(|rank| scope.spawn(move || run(elements, rank, join(rank)))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).next().unwrap()
    });
    times.sort();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!("{name:>14} {:>12} {:>12.1?} {:>12.1?}", elements * 4, at(50), at(99));
}

fn run(elements: usize, rank: Rank, mut exchange: impl FnMut(&mut [f32])) -> Vec<Duration> {
    let (mut times, mut values, begun) = (Vec::new(), vec![1.0; elements], Instant::now());
    // The sum of the first element is negative when rank 0's clock says that the time is up: all ranks then stop.
    loop {
        values.fill(1.0);
        values[0] = if rank.index() == 0 && begun.elapsed() > SPAN { -1e6 } else { 1.0 };
        let start = Instant::now();
        exchange(&mut values);
        times.push(start.elapsed());
        if values[0] < 0.0 {
            return times;
        }
    }
}
