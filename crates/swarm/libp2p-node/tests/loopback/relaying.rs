//! Peers that are reached through a relay.

use libp2p_node::{Multiaddr, NetworkKey, NodeOptions, OpenError, Reachability};

use crate::peer::{ECHO, Peer, TCP, exchange, until};
use crate::run;

#[test]
fn a_node_that_listens_nowhere_is_reached_through_a_relay() {
    run(is_reached_through_a_relay(None));
}

#[test]
fn a_private_swarm_has_relays_too() {
    run(is_reached_through_a_relay(Some(NetworkKey::from_bytes([1; 32]))));
}

async fn is_reached_through_a_relay(key: Option<NetworkKey>) {
    let start = |listen: &[&str], bootstrap: Vec<Multiaddr>, relay_server: bool| {
        let network_key = key.clone();
        Peer::start(listen, |options| {
            *options = NodeOptions { bootstrap, network_key, relay_server, ..options.clone() }
        })
    };
    let relay = start(&[TCP], vec![], true).listening().await;
    let hidden = start(&[], relay.bootstrap(), false);
    until("it has a reservation", || hidden.node.reachability() == Reachability::Relayed).await;
    let addresses = hidden.node.addresses();
    assert!(addresses.iter().all(|address| address.to_string().ends_with("/p2p-circuit")), "{addresses:?}");
    // By its address, by a look-up, and by asking the relays.
    for (bootstrap, addresses) in [(vec![], addresses), (relay.bootstrap(), vec![])] {
        // It has not joined yet when it is asked.
        let client = start(&[], bootstrap, false);
        let stream = client.node.open(&hidden.node.peer(), &addresses, ECHO).await.unwrap();
        assert!(stream.is_relayed());
        exchange(stream, 1_000_000).await;
    }
}

#[test]
fn a_node_that_is_no_relay_carries_nothing() {
    run(async {
        let other = Peer::start(&[TCP], |_| {}).listening().await;
        let hidden = Peer::join(&[], &other);
        until("they are connected", || !other.node.peers().is_empty()).await;
        let client = Peer::start(&[], |_| {});
        let address = format!("{}/p2p-circuit", other.bootstrap()[0]).parse().unwrap();
        let error = client.node.open(&hidden.node.peer(), &[address], ECHO).await.unwrap_err();
        assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    });
}
