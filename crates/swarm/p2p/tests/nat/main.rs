//! Peers behind NATs. Every machine is a network namespace and every node a process in one; this program starts itself as
//! those. Peers reach each other through a relay, and then directly if their NATs allow it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod network;
mod peer;
#[path = "../../../../machines/net/tests/streams/watchdog.rs"]
mod watchdog;

use std::time::Duration;

use network::{Internet, Nat};
use peer::{Peer, STAYS_RELAYED};

/// How often peers are started that are to reach each other directly.
const ATTEMPTS_MAX: usize = 4;
const DIRECT_TIME_MAX: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug)]
enum Over {
    Tcp,
    Quic,
    Both,
}

fn main() {
    if !peer::run_if_asked() {
        watchdog::watched(all);
    }
}

fn all() {
    // Of the peer that opens streams, and of the other one; and how they end up.
    let cases = [
        (Over::Tcp, Nat::KeepsPorts, Nat::KeepsPorts, "direct"),
        (Over::Quic, Nat::KeepsPorts, Nat::KeepsPorts, "direct"),
        (Over::Both, Nat::RandomPorts, Nat::RandomPorts, "relayed"),
        // The other peer can dial the public one.
        (Over::Both, Nat::None, Nat::RandomPorts, "direct"),
    ];
    for (over, opener, other, end) in cases {
        for attempt in 1.. {
            let Some(internet) = Internet::new(&[Nat::None, opener, other]) else { return };
            if check(&internet, over, end) {
                break;
            }
            assert!(attempt < ATTEMPTS_MAX, "over {over:?}, {opener:?} to {other:?}: not {end}");
        }
        println!("over {over:?}, {opener:?} to {other:?}: {end}");
    }
}

/// False if two peers did not get a direct connection: both have to try at the same moment, which a busy machine may miss.
fn check(internet: &Internet, over: Over, end: &str) -> bool {
    let (relay_machine, opener, other) = (internet.machine(0), internet.machine(1), internet.machine(2));
    let listen = |ip: &str| over.addresses(ip).iter().map(|address| format!("listen {address} ")).collect::<String>();
    let relay = Peer::start(relay_machine, &format!("{}relay", listen("0.0.0.0")));
    let bootstrap = over.addresses(&relay_machine.public_address);
    let bootstrap: String = bootstrap.iter().map(|address| format!("bootstrap {address}/p2p/{} ", relay.id)).collect();
    let options = format!("{}{bootstrap}", listen("0.0.0.0"));
    let mut other = Peer::start(other, &options);
    let mut opener = Peer::start(opener, &options);
    other.wait_for("reachability", "Relayed");
    opener.wait_for(&format!("path {}", relay.id), "direct");
    let echo = format!("echo {}", other.id);
    let first = opener.ask(&echo);
    assert!(["relayed", "direct"].contains(&first.as_str()), "{first}");
    match end {
        "direct" if !opener.becomes(&format!("path {}", other.id), "direct", DIRECT_TIME_MAX) => return false,
        "direct" => {}
        // The peer that was dialled through the relay is the one that tries.
        _ => other.wait_for_log(STAYS_RELAYED),
    }
    for _ in 0..3 {
        assert_eq!(opener.ask(&echo), end);
        assert_eq!(other.ask(&format!("echo {}", opener.id)), end);
    }
    true
}

impl Over {
    fn addresses(self, ip: &str) -> Vec<String> {
        let tcp = format!("/ip4/{ip}/tcp/4001");
        let quic = format!("/ip4/{ip}/udp/4001/quic-v1");
        match self {
            Self::Tcp => vec![tcp],
            Self::Quic => vec![quic],
            Self::Both => vec![tcp, quic],
        }
    }
}
