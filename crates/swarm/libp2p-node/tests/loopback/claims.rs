//! Addresses that peers claim. All machines here are this one, so a node is told to take loopback addresses for foreign ones, as
//! it takes those of a machine's private network; it dials those alone that its user named.
#![cfg(target_os = "linux")] // all of 127.0.0.0/8 is there

use std::io::ErrorKind;
use std::net::TcpListener;

use libp2p_node::{Identity, Multiaddr, OpenError, Scope};

use crate::peer::{ECHO, Peer, exchange, node, until};
use crate::run;

/// Where other peers listen.
const ELSEWHERE: &str = "/ip4/127.0.0.2/tcp/0";
/// Where machines are that only this one reaches.
const PRIVATE: [&str; 5] = [
    "/ip4/169.254.169.254/tcp/80",
    "/ip4/10.255.255.1/tcp/22",
    "/ip4/192.168.255.1/tcp/80",
    "/ip6/fd00::1/tcp/22",
    "/dns4/localhost/tcp/22",
];
const REFUSED: &str = "not one that the user named";

/// A server that must not be connected to.
struct Canary(TcpListener);

impl Canary {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.4:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self(listener)
    }

    /// What a liar claims as its addresses.
    fn claims(&self) -> Vec<Multiaddr> {
        let own = format!("/ip4/127.0.0.4/tcp/{}", self.0.local_addr().unwrap().port());
        [&*own].iter().chain(&PRIVATE).map(|text| text.parse().unwrap()).collect()
    }

    fn check(&self) {
        assert_eq!(self.0.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "somebody has connected");
    }
}

async fn refusal(victim: &Peer, peer: &directory::PeerId, addresses: &[Multiaddr]) -> String {
    let error = victim.node.open(peer, addresses, ECHO).await.unwrap_err();
    assert!(matches!(error, OpenError::Unreachable { .. }), "{error}");
    error.to_string()
}

#[test]
fn what_a_peer_tells_of_itself_is_not_dialled_where_strangers_have_nothing_to_say() {
    run(async {
        let canary = Canary::new();
        let claims = canary.claims();
        // A port that was free just now.
        let port = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap().port();
        let address: Multiaddr = format!("/ip4/127.0.0.2/tcp/{port}").parse().unwrap();
        let liar = Peer::start(&[&address.to_string()], |options| options.external = claims);
        let id = liar.node.peer();
        let named = address.clone();
        let victim = Peer::start(&[], |options| {
            options.named = vec![named];
            options.least_scope = Some(Scope::Internet);
        });
        // It is reached where the user said, and tells its addresses.
        exchange(victim.node.open(&id, &[address], ECHO).await.unwrap(), 1000).await;
        until("it is identified", || victim.node.peers().iter().any(|peer| !peer.agent.is_empty())).await;
        drop(liar);
        until("it is gone", || victim.node.peers().is_empty()).await;
        let refusal = refusal(&victim, &id, &[]).await;
        assert!(refusal.contains(REFUSED), "{refusal}");
        canary.check();
    });
}

#[test]
fn what_a_look_up_or_somebody_else_tells_of_a_peer_is_not_dialled_there() {
    run(async {
        let canary = Canary::new();
        let claims = canary.claims();
        let helper = Peer::start(&[ELSEWHERE], |_| {}).listening().await;
        let bootstrap = helper.bootstrap();
        // Tested by nobody, its addresses are believed by the helper, in whose table it is.
        let (liar, _streams) = node(&[], |options| {
            options.bootstrap = bootstrap.clone();
            options.external = claims.clone();
            options.relay_server = true;
        });
        let victim = Peer::start(&[], |options| {
            options.bootstrap = bootstrap;
            options.least_scope = Some(Scope::Internet);
        });
        until("the helper knows the liar", || helper.node.peers().iter().any(|peer| peer.peer == liar.peer())).await;
        let mut told = String::new();
        while !told.contains(REFUSED) {
            told = refusal(&victim, &liar.peer(), &[]).await;
        }
        canary.check();
        // As a client that names the next peer of a chain.
        let nobody = Identity::ephemeral().peer();
        let told = refusal(&victim, &nobody, &claims).await;
        assert!(told.contains(REFUSED), "{told}");
        canary.check();
        // With the default rules, its bootstrap peer's address says that all are on this machine.
        let local = Peer::start(&[], |options| {
            options.bootstrap = helper.bootstrap();
            options.least_scope = None;
        });
        let there = Peer::start(&["/ip4/127.0.0.3/tcp/0"], |_| {}).listening().await;
        exchange(local.open(&there).await, 1000).await;
    });
}
