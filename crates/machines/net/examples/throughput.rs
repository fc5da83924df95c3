//! Prints the throughput of a `MessageStream` on loopback beside that of plain TCP and of encryption alone on one core,
//! and the round trip of small messages over a `MessageStream` beside that over plain TCP. Each figure is the median of
//! several runs; the three transports take turns.
//!
//!     cargo run --release -p net --example throughput
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a failed measurement panics

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use net::{
    ClusterKey, Hello, MessageStream, PARAMETER_BYTES, PLAIN_BYTES_MAX, Purpose, RECORD_BYTES_MAX, SecureStream,
    WaitLimit, dial, respond,
};

const RUNS: usize = 7;
const TOTAL_BYTES: usize = 1 << 30;
const BODY_BYTES: [usize; 3] = [16 << 10, 1 << 20, 256 << 20];
const ROUND_TRIPS: usize = 2000;
const ROUND_TRIP_BYTES: [usize; 2] = [64, 16 << 10];

const DATA: u8 = 1;

fn main() {
    let runs: Vec<_> = (0..RUNS).map(|_| encryption_alone()).collect();
    println!("encryption alone   {:>8.2} GB/s", median(runs.iter().map(|run| run.0)));
    println!("decryption alone   {:>8.2} GB/s", median(runs.iter().map(|run| run.1)));
    for bytes in BODY_BYTES {
        let runs: Vec<_> = (0..RUNS).map(|_| (plain_throughput(bytes), message_throughput(bytes))).collect();
        println!("plain TCP          {:>8.2} GB/s  writes of {bytes} bytes", median(runs.iter().map(|run| run.0)));
        println!("MessageStream      {:>8.2} GB/s  messages of {bytes} bytes", median(runs.iter().map(|run| run.1)));
    }
    for bytes in ROUND_TRIP_BYTES {
        let runs: Vec<_> = (0..RUNS).map(|_| (plain_round_trip(bytes), message_round_trip(bytes))).collect();
        println!("plain TCP          {:>8.1} µs    round trip of {bytes} bytes", median(runs.iter().map(|run| run.0)));
        println!("MessageStream      {:>8.1} µs    round trip of {bytes} bytes", median(runs.iter().map(|run| run.1)));
    }
}

fn median(figures: impl Iterator<Item = f64>) -> f64 {
    let mut figures: Vec<_> = figures.collect();
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn gigabytes_per_second(bytes: usize, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64() / 1e9
}

/// Both directions of the records, in memory, in one thread.
fn encryption_alone() -> (f64, f64) {
    let (SecureStream { mut sealer, .. }, SecureStream { mut opener, .. }) = secured();
    let (plain, count) = (vec![7; PLAIN_BYTES_MAX], TOTAL_BYTES / PLAIN_BYTES_MAX / 4);
    // Not zeros: the system would map their pages only while they are written.
    let mut records = vec![1; count * RECORD_BYTES_MAX];
    let begun = Instant::now();
    records.chunks_mut(RECORD_BYTES_MAX).for_each(|record| assert_eq!(sealer.seal(&plain, record), RECORD_BYTES_MAX));
    let sealed = gigabytes_per_second(count * PLAIN_BYTES_MAX, begun);
    let mut opened = vec![0; RECORD_BYTES_MAX];
    let begun = Instant::now();
    // Each record has its length before it.
    records.chunks(RECORD_BYTES_MAX).for_each(|record| assert!(opener.open(&record[2..], &mut opened).is_ok()));
    (sealed, gigabytes_per_second(count * PLAIN_BYTES_MAX, begun))
}

fn plain_throughput(bytes: usize) -> f64 {
    let (mut from, mut to) = connected();
    thread::scope(|scope| {
        scope.spawn(move || {
            let body = vec![7; bytes];
            (0..TOTAL_BYTES / bytes).for_each(|_| from.write_all(&body).unwrap());
        });
        let mut body = vec![0; bytes];
        to.read_exact(&mut body).unwrap();
        let begun = Instant::now();
        (1..TOTAL_BYTES / bytes).for_each(|_| to.read_exact(&mut body).unwrap());
        gigabytes_per_second(TOTAL_BYTES - bytes, begun)
    })
}

fn message_throughput(bytes: usize) -> f64 {
    let (from, to) = secured();
    let (from, mut to) = (MessageStream::new(from).unwrap(), MessageStream::new(to).unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            let body = vec![7; bytes];
            (0..TOTAL_BYTES / bytes).for_each(|_| from.sender.send(DATA, &[&body]).unwrap());
            from.sender.finish().unwrap();
        });
        let mut body = Vec::new();
        let mut receive = || to.receiver.receive(None, |_| Some(bytes), &mut body).unwrap();
        receive();
        let begun = Instant::now();
        while receive().is_some() {}
        gigabytes_per_second(TOTAL_BYTES - bytes, begun)
    })
}

fn plain_round_trip(bytes: usize) -> f64 {
    let (mut near, mut far) = connected();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut body = vec![0; bytes];
            (0..ROUND_TRIPS).for_each(|_| far.read_exact(&mut body).and_then(|()| far.write_all(&body)).unwrap());
        });
        let mut body = vec![7; bytes];
        median_round_trip(|| near.write_all(&body).and_then(|()| near.read_exact(&mut body)).unwrap())
    })
}

fn message_round_trip(bytes: usize) -> f64 {
    let (near, far) = secured();
    let (mut near, mut far) = (MessageStream::new(near).unwrap(), MessageStream::new(far).unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut body = Vec::new();
            while far.receiver.receive(None, |_| Some(bytes), &mut body).unwrap().is_some() {
                far.sender.send(DATA, &[&body]).unwrap();
            }
        });
        let mut body = vec![7; bytes];
        let figure = median_round_trip(|| {
            near.sender.send(DATA, &[&body]).unwrap();
            near.receiver.receive(None, |_| Some(bytes), &mut body).unwrap();
        });
        near.sender.finish().unwrap();
        figure
    })
}

/// In microseconds.
fn median_round_trip(mut run: impl FnMut()) -> f64 {
    median((0..ROUND_TRIPS).map(|_| {
        let begun = Instant::now();
        run();
        begun.elapsed().as_secs_f64() * 1e6
    }))
}

fn connected() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    [&near, &far].into_iter().for_each(|stream| stream.set_nodelay(true).unwrap());
    (near, far)
}

fn secured() -> (SecureStream, SecureStream) {
    let key = ClusterKey::from_passphrase("a passphrase for measurements").unwrap();
    let hello = Hello { purpose: Purpose(255), parameters: [0; PARAMETER_BYTES], silence: Duration::from_secs(60) };
    let limit = WaitLimit::until(Instant::now() + Duration::from_secs(60));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let near = scope.spawn(|| dial(address, &key, &hello, &limit).unwrap());
        let ((), far) = respond(listener.accept().unwrap().0, &key, &limit, |_| Ok(())).unwrap();
        (near.join().unwrap(), far)
    })
}
