//! Prints how fast tensors get from memory into another node's store, beside plain TCP over the same link and beside
//! Noise encryption alone on one core; and what hashing and writing take on one core. Each figure is the median of several
//! runs, which take turns. On loopback, or between two machines (start the receiver first):
//!
//!     cargo run --release -p cluster --example transfer -- [GIGABYTES] [CONNECTIONS]
//!     cargo run --release -p cluster --example transfer -- receive ADDRESS:PORT [GIGABYTES] [CONNECTIONS]
//!     cargo run --release -p cluster --example transfer -- send ADDRESS:PORT [GIGABYTES] [CONNECTIONS]
//!
//! Files are written to the folder for temporary files (`TMPDIR`).
#![allow(clippy::unwrap_used)] // a failed measurement panics

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cluster::purpose::{ConnectionId, WEIGHTS};
use net::{ClusterKey, MessageStream, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, SecureStream, WaitLimit, dial, respond};
use rustix::time::{ClockId, clock_gettime};
use weights::{CONNECTIONS_DEFAULT, Download, StoreLimits, TensorId, TensorStore, Upload, upload};

const RUNS: usize = 5;
const TENSOR_BYTES: usize = 48 << 20;
/// Of a write and of a read, where there are no messages.
const PIECE_BYTES: usize = 256 << 10;
const SILENCE: Duration = Duration::from_secs(30);

struct Setting {
    ids: Vec<TensorId>,
    source: HashMap<[u8; 32], Vec<u8>>,
    connections: usize,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mut args = args.iter().map(String::as_str).peekable();
    let role = args.next_if(|role| ["send", "receive"].contains(role));
    let address = role.map(|_| args.next().expect("an address").parse::<SocketAddr>().expect("ADDRESS:PORT"));
    let gigabytes: f64 = args.next().map_or(2.0, |number| number.parse().expect("a number"));
    let connections = args.next().map_or(CONNECTIONS_DEFAULT, |number| number.parse().expect("a number"));
    let setting = Setting::new((gigabytes * 1e9) as usize, connections);
    match (role, address) {
        (Some("receive"), Some(address)) => receive(&TcpListener::bind(address).unwrap(), &setting),
        (_, Some(address)) => send(address, &setting),
        (_, None) => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            thread::scope(|scope| {
                scope.spawn(|| receive(&listener, &setting));
                send(listener.local_addr().unwrap(), &setting);
            });
        }
    }
}

impl Setting {
    fn new(bytes: usize, connections: usize) -> Self {
        let tensor = |seed: usize| {
            let mut bytes = vec![0; TENSOR_BYTES];
            blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
            (*blake3::hash(&bytes).as_bytes(), bytes)
        };
        let source: HashMap<_, _> = (0..bytes.div_ceil(TENSOR_BYTES)).map(tensor).collect();
        let ids = source.iter().map(|(hash, bytes)| TensorId { hash: *hash, bytes: bytes.len() as u64 }).collect();
        Self { ids, source, connections }
    }

    fn bytes(&self) -> usize {
        self.source.values().map(Vec::len).sum()
    }
}

#[derive(Default)]
struct Figures {
    plain: Vec<f64>,
    encryption: Vec<f64>,
    hashing: Vec<f64>,
    writing: Vec<f64>,
    transfer: Vec<f64>,
    cores: Vec<f64>,
}

fn send(address: SocketAddr, setting: &Setting) {
    let mut figures = Figures::default();
    for _ in 0..RUNS {
        figures.plain.push(plain(address, setting));
        figures.encryption.push(encryption());
        figures.hashing.push(rate(setting.bytes(), || {
            setting.source.values().for_each(|bytes| assert_ne!(blake3::hash(bytes).as_bytes(), &[0; 32]));
        }));
        figures.writing.push(writing(setting));
        let before = cpu_seconds();
        let begun = Instant::now();
        figures.transfer.push(rate(setting.bytes(), || {
            let limit = WaitLimit::until(Instant::now() + SILENCE);
            let hello = ConnectionId { purpose: WEIGHTS, number: 0, index: 0 }.hello(SILENCE);
            let dial = || MessageStream::connect(address, &key(), &hello, &limit);
            let (connections, source) = (setting.connections, &setting.source);
            upload(&Upload { dial: &dial, connections, source, sent: &|_| {}, is_over: &|| false }).unwrap();
        }));
        figures.cores.push((cpu_seconds() - before) / begun.elapsed().as_secs_f64());
    }
    let Figures { plain, encryption, hashing, writing, transfer, cores } = figures;
    let (plain, encryption, transfer) = (median(plain), median(encryption), median(transfer));
    println!("plain TCP, {:>2} connections     {plain:>7.3} GB/s", setting.connections);
    println!("encryption alone, 1 core      {encryption:>7.3} GB/s");
    println!("hashing alone, 1 core         {:>7.3} GB/s", median(hashing));
    println!("writing files alone, 1 core   {:>7.3} GB/s", median(writing));
    println!("transfer, {:>2} connections      {transfer:>7.3} GB/s", setting.connections);
    let (bound, limit) = if plain < encryption { ("plain TCP", plain) } else { ("encryption", encryption) };
    println!("of the smaller limit, {bound}: {:.0} %", 100.0 * transfer / limit);
    let available = thread::available_parallelism().map_or(0, usize::from);
    println!("cores busy in this process during the transfer: {:.1} of {available}", median(cores));
}

/// Accepts, for each run, plain connections and those of a transfer.
fn receive(listener: &TcpListener, setting: &Setting) {
    for _ in 0..RUNS {
        thread::scope(|scope| {
            for _ in 0..setting.connections {
                let (mut stream, _) = listener.accept().unwrap();
                scope.spawn(move || {
                    stream.write_all(&[1]).unwrap();
                    let mut buffer = vec![0; PIECE_BYTES];
                    while stream.read(&mut buffer).unwrap() > 0 {}
                    stream.write_all(&[1]).unwrap();
                });
            }
        });

        let folder = tempfile::tempdir().unwrap();
        let limits = StoreLimits { bytes_max: u64::MAX, free_bytes_min: 0 };
        let pinned = Arc::new(TensorStore::open(folder.path(), limits).unwrap().pin(&setting.ids).unwrap());
        let download = Download::new(pinned, &setting.ids, |_| {});
        thread::scope(|scope| {
            for _ in 0..setting.connections {
                let (stream, _) = listener.accept().unwrap();
                let limit = WaitLimit::until(Instant::now() + SILENCE);
                let ((), secured) = respond(stream, &key(), &limit, |_| Ok(())).unwrap();
                scope.spawn(|| download.receive(MessageStream::new(secured).unwrap()).unwrap());
            }
        });
        download.wait(Duration::ZERO).unwrap().unwrap();
    }
}

fn plain(address: SocketAddr, setting: &Setting) -> f64 {
    let tensors: Vec<_> = setting.source.values().collect();
    let connect = || {
        let mut stream = TcpStream::connect(address).unwrap();
        // The receiver is there: it has removed the files of the last transfer.
        stream.read_exact(&mut [0]).unwrap();
        stream
    };
    let mut streams: Vec<_> = (0..setting.connections).map(|_| connect()).collect();
    // Pieces go to the connections in turn, so that all of them end at about the same time.
    rate(setting.bytes(), || {
        thread::scope(|scope| {
            for (index, stream) in streams.iter_mut().enumerate() {
                let (tensors, connections) = (&tensors, setting.connections);
                scope.spawn(move || {
                    let pieces = tensors.iter().flat_map(|bytes| bytes.chunks(PIECE_BYTES));
                    pieces.skip(index).step_by(connections).for_each(|piece| stream.write_all(piece).unwrap());
                    stream.shutdown(Shutdown::Write).unwrap();
                    stream.read_exact(&mut [0]).unwrap();
                });
            }
        });
    })
}

/// Records in memory, in one thread.
fn encryption() -> f64 {
    const COUNT: usize = 1 << 13;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let limit = WaitLimit::until(Instant::now() + SILENCE);
    let hello = ConnectionId::control().hello(SILENCE);
    let address = listener.local_addr().unwrap();
    let SecureStream { mut sealer, .. } = thread::scope(|scope| {
        scope.spawn(|| respond(listener.accept().unwrap().0, &key(), &limit, |_| Ok(())).unwrap());
        dial(address, &key(), &hello, &limit).unwrap()
    });
    let (plain, mut record) = (vec![7; PLAIN_BYTES_MAX], vec![0; RECORD_BYTES_MAX]);
    rate(COUNT * PLAIN_BYTES_MAX, || {
        (0..COUNT).for_each(|_| assert_eq!(sealer.seal(&plain, &mut record), RECORD_BYTES_MAX));
    })
}

fn writing(setting: &Setting) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    rate(setting.bytes(), || {
        for (name, bytes) in setting.source.values().enumerate() {
            let mut file = File::create(folder.path().join(name.to_string())).unwrap();
            bytes.chunks(PIECE_BYTES).for_each(|piece| file.write_all(piece).unwrap());
        }
    })
}

/// In gigabytes per second.
fn rate(bytes: usize, run: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    run();
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn key() -> ClusterKey {
    ClusterKey::from_passphrase("a passphrase for measurements").unwrap()
}
