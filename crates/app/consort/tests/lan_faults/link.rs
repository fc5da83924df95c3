//! Faults of a machine's link.

use testing::network::{Network, nft};

/// Drops packets to and from a machine, this percentage of them. Needs Debian's nftables.
pub fn lose_packets(network: &Network, machine: usize, percent: u32) {
    let hook = |way: &str| {
        let drop = format!("numgen random mod 100 < {percent} drop");
        format!("add chain inet loss {way} {{ type filter hook {way} priority 0; }}; add rule inet loss {way} {drop}")
    };
    add_rules(network, machine, &format!("add table inet loss; {}; {}", hook("input"), hook("output")));
}

pub fn lose_no_packets(network: &Network, machine: usize) {
    add_rules(network, machine, "add table inet loss\n delete table inet loss");
}

fn add_rules(network: &Network, machine: usize, rules: &str) {
    network.within(machine, || nft(rules)).unwrap();
}
