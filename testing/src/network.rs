//! Machines with separate networks, made of network namespaces. Needs root and Debian's iproute2: see [`crate::needs`].

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::needs;

/// A network namespace with a loopback interface. Dropping the value deletes it.
pub struct Namespace {
    /// Its name for `ip`.
    pub name: String,
}

impl Namespace {
    pub fn new(role: &str) -> Self {
        let namespace = Self { name: unique(role) };
        ip(&format!("netns add {}", namespace.name));
        ip(&format!("-n {} link set lo up", namespace.name));
        namespace
    }

    /// Runs `task`, and the threads and processes that it starts, in the namespace.
    pub fn within<T: Send>(&self, task: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.name)).unwrap();
        let enter = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            task()
        };
        thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).stderr(Stdio::null()).status();
    }
}

/// Machines that a bridge connects. The first one is that of the supervisor or coordinator.
pub struct Network {
    machines: Vec<Namespace>,
}

impl Network {
    /// The first machine and `hosts` others; `None` where there are no network namespaces.
    pub fn new(hosts: usize) -> Option<Self> {
        if !needs::namespaces() {
            return None;
        }
        let machines: Vec<_> = (0..=hosts).map(|index| Namespace::new(&index.to_string())).collect();
        let first = &machines[0].name;
        ip(&format!("-n {first} link add eth0 type bridge"));
        for (index, Namespace { name }) in machines.iter().enumerate() {
            if index > 0 {
                ip(&format!("link add host{index} netns {first} type veth peer name eth0 netns {name}"));
                ip(&format!("-n {first} link set host{index} master eth0 up"));
            }
            ip(&format!("-n {name} addr add {}/24 dev eth0", address(index)));
            ip(&format!("-n {name} link set eth0 up"));
        }
        Some(Self { machines })
    }

    /// The machines but the first.
    pub fn others(&self) -> std::ops::Range<usize> {
        1..self.machines.len()
    }

    /// Runs `task`, and the processes that it starts, on a machine.
    pub fn within<T: Send>(&self, index: usize, task: impl FnOnce() -> T + Send) -> T {
        self.machines[index].within(task)
    }

    /// Drops all packets to a host, without an error to either side.
    pub fn unplug(&self, index: usize) {
        ip(&format!("-n {} link set host{index} down", self.machines[0].name));
    }

    pub fn plug(&self, index: usize) {
        ip(&format!("-n {} link set host{index} up", self.machines[0].name));
    }
}

/// The address of a machine of a [`Network`].
pub fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 1)
}

/// Runs `ip`, which must succeed.
#[track_caller]
pub fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// Gives the current namespace these rules for packets.
pub fn nft(rules: &str) -> Result<(), String> {
    let run = || {
        let mut nft = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        nft.stdin.take().expect("it is piped").write_all(format!("{rules}\n").as_bytes())?;
        nft.wait_with_output()
    };
    needs::ran("nft", run())
}

/// Creates a namespace and deletes it again. The error says what is missing.
pub(crate) fn can_make_namespaces() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root makes them".to_owned());
    }
    let name = unique("probe");
    let netns = |action: &str| needs::ran("ip", Command::new("ip").args(["netns", action, &name]).output());
    netns("add")?;
    netns("del")
}

/// Makes a NAT and a rule that drops packets in a namespace of its own.
pub(crate) fn can_filter_packets() -> Result<(), String> {
    can_make_namespaces()?;
    let rules = "table ip probe {
        chain nat { type nat hook postrouting priority 100; masquerade fully-random; }
        chain state { type filter hook input priority 0; ct state new drop; }
        chain loss { type filter hook output priority 0; numgen random mod 100 < 5 drop; }
    }";
    Namespace::new("probe").within(|| nft(rules))
}

/// The name of a namespace.
fn unique(role: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("consort-{}-{}-{role}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}
