//! Machines made of network namespaces.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::net::{TcpListener, TcpStream};

use testing::needs;
use testing::network::{Network, address, nft};

#[test]
fn machines_reach_each_other_unless_packets_are_refused() {
    let Some(network) = Network::new(2) else { return };
    if !needs::nftables() {
        return;
    }
    let place = format!("{}:4000", address(1));
    let _listener = network.within(1, || TcpListener::bind(place.as_str()).unwrap());
    let is_reached = |from| network.within(from, || TcpStream::connect(place.as_str()).is_ok());
    assert!(is_reached(0) && is_reached(2));
    assert!(TcpStream::connect("127.0.0.1:4000").is_err(), "its network is not this process's");
    let refuse = "type filter hook input priority 0; tcp dport 4000 reject with tcp reset;";
    network.within(1, || nft(&format!("table ip refused {{\nchain input {{ {refuse} }}\n}}"))).unwrap();
    assert!(!is_reached(0) && !is_reached(2));
    network.within(1, || nft("delete table ip refused")).unwrap();
    assert!(is_reached(0));
}
