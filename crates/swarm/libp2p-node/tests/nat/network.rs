//! `Internet`: network namespaces that stand for machines. Some are public, others are behind a NAT of their own, which is
//! one more namespace with nftables. Needs root and Debian's iproute2 and nftables.

use std::fs;

use testing::needs;
use testing::network::{Namespace, ip, nft};

/// All machines behind a NAT have this address, as in most homes.
pub const PRIVATE_ADDRESS: &str = "192.168.1.2";
const GATEWAY: &str = "192.168.1.1";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nat {
    /// A machine with a public address.
    None,
    /// The source port stays the same where it is free.
    KeepsPorts,
    /// Every connection gets a random source port.
    RandomPorts,
}

pub struct Internet {
    machines: Vec<Machine>,
    switch: Namespace,
}

pub struct Machine {
    namespace: Namespace,
    /// Its NAT.
    router: Option<Namespace>,
    /// Where the internet sees it.
    pub public_address: String,
}

impl Internet {
    /// Machines with these NATs in front of them; `None` where network namespaces or NATs cannot be made.
    pub fn new(nats: &[Nat]) -> Option<Self> {
        if !(needs::namespaces() && needs::nftables()) {
            return None;
        }
        let switch = Namespace::new("switch");
        ip(&format!("-n {} link add eth0 type bridge", switch.name));
        ip(&format!("-n {} link set eth0 up", switch.name));
        let mut internet = Self { machines: Vec::new(), switch };
        for (index, nat) in nats.iter().enumerate() {
            internet.add_machine(index, *nat);
        }
        Some(internet)
    }

    pub fn machine(&self, index: usize) -> &Machine {
        &self.machines[index]
    }

    fn add_machine(&mut self, index: usize, nat: Nat) {
        // A range for documentation: the node takes it for public.
        let public_address = format!("203.0.113.{}", index + 1);
        let machine = Namespace::new(&format!("m{index}"));
        let router = (nat != Nat::None).then(|| Namespace::new(&format!("nat{index}")));
        if let Some(Namespace { name: router }) = &router {
            let machine = &machine.name;
            ip(&format!("link add lan netns {router} type veth peer name eth0 netns {machine}"));
            ip(&format!("-n {router} addr add {GATEWAY}/24 dev lan"));
            ip(&format!("-n {router} link set lan up"));
            ip(&format!("-n {machine} addr add {PRIVATE_ADDRESS}/24 dev eth0"));
            ip(&format!("-n {machine} link set eth0 up"));
            ip(&format!("-n {machine} route add default via {GATEWAY}"));
        }
        let switch = &self.switch.name;
        let outside = &router.as_ref().unwrap_or(&machine).name;
        ip(&format!("link add port{index} netns {switch} type veth peer name wan netns {outside}"));
        ip(&format!("-n {switch} link set port{index} master eth0 up"));
        ip(&format!("-n {outside} addr add {public_address}/24 dev wan"));
        ip(&format!("-n {outside} link set wan up"));
        if let Some(router) = &router {
            router.within(|| {
                fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                masquerade(nat);
            });
        }
        self.machines.push(Machine { namespace: machine, router, public_address });
    }

    /// The NATs of two machines refuse connections from one to the other.
    pub fn refuse(&self, one: usize, other: usize) {
        for [from, to] in [[one, other], [other, one]] {
            let rules = format!(
                "table ip refused {{
                    chain forward {{
                        type filter hook forward priority -1;
                        ip daddr {} meta l4proto tcp reject with tcp reset;
                    }}
                }}",
                self.machines[to].public_address
            );
            self.machines[from].outside().within(|| nft(&rules)).unwrap();
        }
    }

    /// They do so no more.
    pub fn allow(&self, one: usize, other: usize) {
        for index in [one, other] {
            self.machines[index].outside().within(|| nft("delete table ip refused")).unwrap();
        }
    }
}

impl Machine {
    /// Its NAT, or itself.
    fn outside(&self) -> &Namespace {
        self.router.as_ref().unwrap_or(&self.namespace)
    }

    /// Runs `task`, and the processes that it starts, on this machine.
    pub fn within<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        self.namespace.within(task)
    }
}

/// Makes the current namespace a home's router: what is not an answer does not come in.
fn masquerade(nat: Nat) {
    let ports = if nat == Nat::RandomPorts { "fully-random" } else { "" };
    let rules = format!(
        "table ip nat {{
            chain postrouting {{ type nat hook postrouting priority 100; oifname wan masquerade {ports}; }}
        }}
        table ip filter {{
            chain input {{ type filter hook input priority 0; iifname wan ct state new drop; }}
            chain forward {{ type filter hook forward priority 0; iifname wan ct state new drop; }}
        }}"
    );
    nft(&rules).unwrap();
}
