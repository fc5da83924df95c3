//! `Internet`: network namespaces that stand for machines. Some are public, others are behind a NAT of their own, which is
//! one more namespace with nftables. Needs root and Debian's iproute2 and nftables.

use std::env;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// If this variable is `required`, the test fails where namespaces cannot be created.
const REQUIRED: &str = "CONSORT_TEST_NAMESPACES";
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

/// Dropping the value deletes the namespaces.
pub struct Internet {
    names: Vec<String>,
    machines: Vec<Machine>,
}

pub struct Machine {
    namespace: String,
    /// Its NAT, or itself.
    outside: String,
    /// Where the internet sees it.
    pub public_address: String,
}

impl Internet {
    /// Machines with these NATs in front of them. Where network namespaces or NATs cannot be made, prints a message and
    /// returns `None`; with `CONSORT_TEST_NAMESPACES=required` it panics.
    pub fn new(nats: &[Nat]) -> Option<Self> {
        if let Err(reason) = can_make_nats() {
            assert!(env::var_os(REQUIRED).is_none_or(|value| value != "required"), "no network namespaces: {reason}");
            eprintln!("test nat DID NOT RUN, it needs network namespaces: {reason}");
            return None;
        }
        let mut internet = Self { names: Vec::new(), machines: Vec::new() };
        let switch = internet.namespace("switch");
        ip(&format!("-n {switch} link add eth0 type bridge"));
        ip(&format!("-n {switch} link set eth0 up"));
        for (index, nat) in nats.iter().enumerate() {
            internet.add_machine(index, *nat, &switch);
        }
        Some(internet)
    }

    pub fn machine(&self, index: usize) -> &Machine {
        &self.machines[index]
    }

    fn add_machine(&mut self, index: usize, nat: Nat, switch: &str) {
        // A range for documentation: the node takes it for public.
        let public_address = format!("203.0.113.{}", index + 1);
        let namespace = self.namespace(&format!("m{index}"));
        let outside = match nat {
            Nat::None => namespace.clone(),
            Nat::KeepsPorts | Nat::RandomPorts => {
                let router = self.namespace(&format!("nat{index}"));
                ip(&format!("link add lan netns {router} type veth peer name eth0 netns {namespace}"));
                ip(&format!("-n {router} addr add {GATEWAY}/24 dev lan"));
                ip(&format!("-n {router} link set lan up"));
                ip(&format!("-n {namespace} addr add {PRIVATE_ADDRESS}/24 dev eth0"));
                ip(&format!("-n {namespace} link set eth0 up"));
                ip(&format!("-n {namespace} route add default via {GATEWAY}"));
                router
            }
        };
        ip(&format!("link add port{index} netns {switch} type veth peer name wan netns {outside}"));
        ip(&format!("-n {switch} link set port{index} master eth0 up"));
        ip(&format!("-n {outside} addr add {public_address}/24 dev wan"));
        ip(&format!("-n {outside} link set wan up"));
        if nat != Nat::None {
            within(&outside, || {
                fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                masquerade(nat).unwrap();
            });
        }
        self.machines.push(Machine { namespace, outside, public_address });
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
            within(&self.machines[from].outside, || nft(&rules)).unwrap();
        }
    }

    /// They do so no more.
    pub fn allow(&self, one: usize, other: usize) {
        for index in [one, other] {
            within(&self.machines[index].outside, || nft("delete table ip refused")).unwrap();
        }
    }

    fn namespace(&mut self, role: &str) -> String {
        let name = format!("consort-{}-{role}", process::id());
        self.names.push(name.clone());
        ip(&format!("netns add {name}"));
        ip(&format!("-n {name} link set lo up"));
        name
    }
}

impl Machine {
    /// Runs `task`, and the processes that it starts, on this machine.
    pub fn within<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        within(&self.namespace, task)
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

fn within<T: Send>(namespace: &str, task: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(format!("/run/netns/{namespace}")).unwrap();
    let enter = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        task()
    };
    thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// Makes the current namespace a home's router: what is not an answer does not come in.
fn masquerade(nat: Nat) -> Result<(), String> {
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
    nft(&rules)
}

/// Changes the rules of the current namespace.
fn nft(rules: &str) -> Result<(), String> {
    let run = || {
        let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        nft.stdin.take().expect("it is piped").write_all(rules.as_bytes())?;
        nft.wait_with_output()
    };
    let output = run().map_err(|error| format!("`nft` can not be run ({error}); Debian has it in nftables"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("`nft`: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// Makes a NAT and deletes it again. The error says what is missing.
fn can_make_nats() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root makes them".to_owned());
    }
    let name = format!("consort-{}-probe", process::id());
    let netns = |action: &str| {
        let output = Command::new("ip").args(["netns", action, &name]).output();
        let output = output.map_err(|error| format!("`ip` can not be run ({error}); Debian has it in iproute2"))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(format!("`ip netns {action}`: {}", String::from_utf8_lossy(&output.stderr).trim())),
        }
    };
    netns("add")?;
    let made = within(&name, || masquerade(Nat::RandomPorts));
    netns("del")?;
    made
}
