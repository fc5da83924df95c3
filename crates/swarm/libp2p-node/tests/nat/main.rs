//! Peers behind NATs. Every machine is a network namespace and every node a process in one; this program starts itself as
//! those. Peers reach each other through a relay, and then directly if their NATs allow it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod network;
mod peer;

use network::{Internet, Nat};
use peer::{Peer, STAYS_RELAYED};
use testing::watchdog::watched;

#[derive(Clone, Copy, Debug)]
enum Over {
    Tcp,
    Quic,
    Both,
}

fn main() {
    if peer::run_if_asked() {
        return;
    }
    // Of the peer that opens streams, and of the other one; and how they end up.
    let cases = [
        (Over::Tcp, Nat::KeepsPorts, Nat::KeepsPorts, "direct"),
        (Over::Quic, Nat::KeepsPorts, Nat::KeepsPorts, "direct"),
        (Over::Both, Nat::RandomPorts, Nat::RandomPorts, "relayed"),
        // The other peer can dial the public one.
        (Over::Both, Nat::None, Nat::RandomPorts, "direct"),
    ];
    for (over, opener, other, end) in cases {
        watched(move || {
            let Some(internet) = Internet::new(&[Nat::None, opener, other]) else { return };
            check(&internet, over, end);
            println!("over {over:?}, {opener:?} to {other:?}: {end}");
        });
    }
    watched(|| {
        let Some(internet) = Internet::new(&[Nat::None, Nat::KeepsPorts, Nat::KeepsPorts]) else { return };
        check_second_attempt(&internet);
        println!("over Tcp, after an attempt in vain: direct");
    });
}

/// Peers on three machines.
struct Peers {
    _relay: Peer,
    opener: Peer,
    other: Peer,
}

impl Peers {
    /// Starts them, and has the opener send bytes to the other one.
    fn start(internet: &Internet, over: Over) -> Self {
        let (relay_machine, opener, other) = (internet.machine(0), internet.machine(1), internet.machine(2));
        let listen =
            |ip: &str| over.addresses(ip).iter().map(|address| format!("listen {address} ")).collect::<String>();
        let relay = Peer::start(relay_machine, &format!("{}relay", listen("0.0.0.0")));
        let bootstrap = over.addresses(&relay_machine.public_address);
        let bootstrap: String =
            bootstrap.iter().map(|address| format!("bootstrap {address}/p2p/{} ", relay.id)).collect();
        let options = format!("{}{bootstrap}", listen("0.0.0.0"));
        let mut other = Peer::start(other, &options);
        let mut opener = Peer::start(opener, &options);
        other.wait_for("reachability", "Relayed");
        opener.wait_for(&format!("path {}", relay.id), "direct");
        let first = opener.ask(&format!("echo {}", other.id));
        assert!(["relayed", "direct"].contains(&first.as_str()), "{first}");
        Self { _relay: relay, opener, other }
    }

    /// A direct connection is there for both of them a moment after each other.
    fn wait_until_direct(&mut self) {
        self.opener.wait_for(&format!("path {}", self.other.id), "direct");
        self.other.wait_for(&format!("path {}", self.opener.id), "direct");
    }

    fn check_path(&mut self, path: &str) {
        for _ in 0..3 {
            assert_eq!(self.opener.ask(&format!("echo {}", self.other.id)), path);
            assert_eq!(self.other.ask(&format!("echo {}", self.opener.id)), path);
        }
    }
}

fn check(internet: &Internet, over: Over, end: &str) {
    let mut peers = Peers::start(internet, over);
    match end {
        "direct" => peers.wait_until_direct(),
        // The peer that was dialled through the relay is the one that tries.
        _ => peers.other.wait_for_log(STAYS_RELAYED),
    }
    peers.check_path(end);
}

/// Peers that could not connect directly do so later, when it works.
fn check_second_attempt(internet: &Internet) {
    internet.refuse(1, 2);
    let mut peers = Peers::start(internet, Over::Tcp);
    peers.other.wait_for_log(STAYS_RELAYED);
    peers.check_path("relayed");
    internet.allow(1, 2);
    peers.wait_until_direct();
    peers.check_path("direct");
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
