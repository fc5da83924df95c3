//! Streams of messages and their listener, on loopback, with peers that are slow, silent, broken or strangers.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod listener;
mod messages;

use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use net::{ClusterKey, Hello, PARAMETER_BYTES, Purpose, SILENCE_MIN, SecureStream, WaitLimit, dial, respond};
use testing::watchdog::watched;

/// Far longer than anything that is waited for.
const LONG: Duration = Duration::from_secs(60);

fn key() -> ClusterKey {
    ClusterKey::from_passphrase("a passphrase for tests").unwrap()
}

fn hello(purpose: u8, silence: Duration) -> Hello {
    Hello { purpose: Purpose(purpose), parameters: [purpose; PARAMETER_BYTES], silence }
}

/// Both sides of a connection. `route` gives the address to connect to, from that of the responder.
fn secured(silence: Duration, route: impl FnOnce(SocketAddr) -> SocketAddr) -> (SecureStream, SecureStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = route(listener.local_addr().unwrap());
    let limit = WaitLimit::until(Instant::now() + LONG);
    thread::scope(|scope| {
        let near = scope.spawn(|| dial(address, &key(), &hello(9, silence), &limit).unwrap());
        let ((), far) = respond(listener.accept().unwrap().0, &key(), &limit, |_| Ok(())).unwrap();
        (near.join().unwrap(), far)
    })
}

#[test]
fn the_shortest_silence_is_that_of_tests() {
    let (near, far) = secured(Duration::ZERO, |address| address);
    assert_eq!((near.silence, far.silence), (SILENCE_MIN, SILENCE_MIN));
}
