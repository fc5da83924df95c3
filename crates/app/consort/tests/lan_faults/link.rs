//! Faults of a machine's link.

use std::process::Command;

use crate::network::Network;

/// Drops packets to and from a machine, this percentage of them. Needs Debian's nftables.
pub fn lose_packets(network: &Network, machine: usize, percent: u32) {
    let hook = |way: &str| {
        let drop = format!("numgen random mod 100 < {percent} drop");
        format!("add chain inet loss {way} {{ type filter hook {way} priority 0; }}; add rule inet loss {way} {drop}")
    };
    nft(network, machine, &format!("add table inet loss; {}; {}", hook("input"), hook("output")));
}

pub fn lose_no_packets(network: &Network, machine: usize) {
    nft(network, machine, "add table inet loss; delete table inet loss");
}

fn nft(network: &Network, machine: usize, rules: &str) {
    let status = network.within(machine, || Command::new("nft").arg(rules).status());
    assert!(status.is_ok_and(|status| status.success()), "nft {rules}");
}
