//! Nodes find each other in network namespaces: two machines with one link. Needs root and Debian's iproute2.
#![allow(clippy::unwrap_used)] // test helpers

use std::collections::BTreeMap;
use std::net::SocketAddrV4;
use std::time::Duration;

use cluster::discovery::{
    Announcement, Announcer, Browser, BrowserSettings, DiscoveredNode, DiscoveryEvent, FoundInvitation, Interfaces,
    InvitationAnnouncer, MDNS_PORT, Unusable, find_invitations,
};
use net::VERSION;
use testing::needs;
use testing::network::{Namespace, ip};

/// A test that waits for longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two machines, `10.78.0.1` and `10.78.0.2`.
struct Machines([Namespace; 2]);

impl Machines {
    fn new() -> Option<Self> {
        if !needs::namespaces() {
            return None;
        }
        let machines = Self(["1", "2"].map(Namespace::new));
        let [first, second] = machines.0.each_ref().map(|machine| &machine.name);
        ip(&format!("link add eth0 netns {first} type veth peer name eth0 netns {second}"));
        for (index, name) in [first, second].into_iter().enumerate() {
            ip(&format!("-n {name} addr add 10.78.0.{}/24 dev eth0", index + 1));
            ip(&format!("-n {name} link set eth0 up"));
        }
        Some(machines)
    }

    /// Runs `task` in the namespace of a machine; threads that it starts stay there.
    fn on<T: Send>(&self, machine: usize, task: impl FnOnce() -> T + Send) -> T {
        self.0[machine].within(task)
    }

    fn announce(&self, machine: usize, name: &str, version: u16, port: u16, interfaces: &Interfaces) -> Announcer {
        let announcement = Announcement { version, ..Announcement::new(name.parse().unwrap()) };
        self.on(machine, || Announcer::start(&announcement, port, interfaces, MDNS_PORT).unwrap())
    }

    fn browse(&self, machine: usize, interfaces: Interfaces, peers: &[&str]) -> Browser {
        let peers = peers.iter().map(|peer| peer.parse().unwrap()).collect();
        let settings = BrowserSettings { interfaces, mdns_port: MDNS_PORT, peers };
        self.on(machine, || Browser::start(settings).unwrap())
    }
}

/// Waits for an event of the node with this name, or with this address if it was given.
fn next_found(browser: &Browser, name: Option<&str>) -> DiscoveredNode {
    loop {
        match browser.events().recv_timeout(PATIENCE).expect("the node is found") {
            DiscoveryEvent::Found(node) if node.name.as_ref().map(|name| name.as_str()) == name => return node,
            _ => {}
        }
    }
}

/// Whether its first address is one of IPv4.
fn is_ipv4(node: &DiscoveredNode) -> bool {
    node.addresses[0].as_str().parse::<SocketAddrV4>().is_ok()
}

fn wait_for_loss(browser: &Browser, node: &DiscoveredNode) {
    while browser.events().recv_timeout(PATIENCE).expect("the node is lost") != DiscoveryEvent::Lost(node.id.clone()) {}
}

#[test]
fn nodes_come_and_go() {
    let Some(machines) = Machines::new() else { return };
    let before = machines.announce(1, "kitchen", VERSION, 7000, &Interfaces::All);
    let stranger = machines.announce(1, "stranger", VERSION + 1, 7001, &Interfaces::All);
    let browser = machines.browse(0, Interfaces::Named(vec!["eth0".to_owned()]), &["10.78.0.9:7000"]);
    let given = next_found(&browser, None);
    assert_eq!(given.addresses[0].as_str(), "10.78.0.9:7000");
    // A node is found again when more is known of it, such as its IPv4 address.
    let mut nodes = BTreeMap::new();
    while nodes.len() < 2 || nodes.values().any(|node: &DiscoveredNode| !is_ipv4(node)) {
        match browser.events().recv_timeout(PATIENCE).expect("both are found") {
            DiscoveryEvent::Found(node) => nodes.insert(node.name.as_ref().map(|name| name.as_str().to_owned()), node),
            DiscoveryEvent::Lost(id) => panic!("{id:?} is lost"),
        };
    }
    let (kitchen, other) = (&nodes[&Some("kitchen".to_owned())], &nodes[&Some("stranger".to_owned())]);
    assert_eq!((kitchen.addresses[0].as_str(), kitchen.unusable), ("10.78.0.2:7000", None));
    assert_eq!(
        (other.addresses[0].as_str(), other.unusable),
        ("10.78.0.2:7001", Some(Unusable::OtherVersion { theirs: VERSION + 1 }))
    );
    drop(before);
    wait_for_loss(&browser, kitchen);
    let _again = machines.announce(1, "kitchen", VERSION, 7000, &Interfaces::All);
    assert_ne!(next_found(&browser, Some("kitchen")).id, kitchen.id);
    let _late = machines.announce(0, "here", VERSION, 7002, &Interfaces::All);
    let here = loop {
        let node = next_found(&browser, Some("here"));
        if is_ipv4(&node) {
            break node;
        }
    };
    assert_eq!(here.addresses[0].as_str(), "10.78.0.1:7002");
    drop(stranger);
    wait_for_loss(&browser, other);
}

#[test]
fn on_the_loopback_interface_nothing_is_heard_of_other_machines() {
    let Some(machines) = Machines::new() else { return };
    let _other = machines.announce(1, "other machine", VERSION, 7000, &Interfaces::All);
    let _here = machines.announce(0, "network", VERSION, 7001, &Interfaces::All);
    let browser = machines.browse(0, Interfaces::Loopback, &[]);
    let _local = machines.announce(0, "local", VERSION, 7002, &Interfaces::Loopback);
    let DiscoveryEvent::Found(node) = browser.events().recv_timeout(PATIENCE).unwrap() else {
        panic!("nothing was found")
    };
    assert_eq!(node.name.unwrap().as_str(), "local");
    assert!(node.addresses[0].as_str() == "127.0.0.1:7002", "{:?}", node.addresses);
}

#[test]
fn invitations_are_found_while_they_are_open() {
    let Some(machines) = Machines::new() else { return };
    let announce = |name: &str, port| {
        let name = name.parse().unwrap();
        machines.on(1, || InvitationAnnouncer::start(&name, port, &Interfaces::All, MDNS_PORT).unwrap())
    };
    // A node is no invitation.
    let _node = machines.announce(1, "kitchen", VERSION, 7420, &Interfaces::All);
    let (first, _second) = (announce("kitchen", 7421), announce("attic", 7422));
    let found = |count: usize| {
        let is_ipv4 = |found: &FoundInvitation| found.addresses[0].as_str().parse::<SocketAddrV4>().is_ok();
        let mut found = machines.on(0, || {
            find_invitations(&Interfaces::All, MDNS_PORT, |found, waited| {
                assert!(waited < PATIENCE, "{found:?}");
                found.len() == count && found.iter().all(is_ipv4)
            })
        });
        let found = found.as_mut().unwrap();
        found.sort_by_key(|found| found.name.clone());
        let text = |found: &FoundInvitation| format!("{} {}", found.name, found.addresses[0]);
        found.iter().map(text).collect::<Vec<_>>()
    };
    assert_eq!(found(2), ["attic 10.78.0.2:7422", "kitchen 10.78.0.2:7421"]);
    drop(first);
    assert_eq!(found(1), ["attic 10.78.0.2:7422"]);
}
