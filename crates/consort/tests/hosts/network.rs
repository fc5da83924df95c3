//! `Network`: machines with a network of their own, as namespaces that a bridge joins. It takes root, and Debian's iproute2.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::host::Host;

const PORT: u16 = 7000;

/// The first machine is the supervisor's. Dropped, they are gone.
pub struct Network {
    names: Vec<String>,
}

impl Network {
    /// One machine and so many hosts. `None` for those who may not make networks, who are told so.
    pub fn new(hosts: usize) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root makes networks");
            return None;
        }
        install();
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let names = (0..=hosts).map(|index| format!("consort-{}-{made}-{index}", process::id())).collect();
        let network = Self { names };
        for index in 0..=hosts {
            let name = &network.names[index];
            ip(&format!("netns add {name}"));
            ip(&format!("-n {name} link set lo up"));
        }
        let first = &network.names[0];
        ip(&format!("-n {first} link add eth0 type bridge"));
        for (index, name) in network.names.iter().enumerate() {
            if index > 0 {
                ip(&format!("link add host{index} netns {first} type veth peer name eth0 netns {name}"));
                ip(&format!("-n {first} link set host{index} master eth0 up"));
            }
            ip(&format!("-n {name} addr add {}/24 dev eth0", address(index)));
            ip(&format!("-n {name} link set eth0 up"));
        }
        Some(network)
    }

    /// `consort ranks` on each host.
    pub fn hosts(&self) -> Vec<Host> {
        let start =
            |index: usize| self.within(index, || Host::start_at(&format!("{}:{PORT}", address(index)), Path::new(".")));
        (1..self.names.len()).map(start).collect()
    }

    /// Runs `what`, and the processes that it starts, on a machine.
    pub fn within<T: Send>(&self, index: usize, what: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.names[index])).unwrap();
        let enter = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            what()
        };
        thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    /// Has every packet to a host wait, where the kernel can do so.
    pub fn delay(&self, time: &str) {
        for index in 1..self.names.len() {
            let arguments = format!("-n {} qdisc add dev host{index} root netem delay {time}", self.names[0]);
            let status = Command::new("tc").args(arguments.split(' ')).stderr(Stdio::null()).status().unwrap();
            if !status.success() {
                eprintln!("without delays: this kernel has no netem");
            }
        }
    }

    /// Nothing reaches a host, and nobody is told.
    pub fn unplug(&self, index: usize) {
        ip(&format!("-n {} link set host{index} down", self.names[0]));
    }

    pub fn plug(&self, index: usize) {
        ip(&format!("-n {} link set host{index} up", self.names[0]));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 1)
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// Debian's iproute2, where it is missing.
fn install() {
    if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_ok() {
        return;
    }
    for arguments in [&["update", "-qq"][..], &["install", "-y", "-qq", "--no-install-recommends", "iproute2"]] {
        let status = Command::new("apt-get").args(arguments).stdout(Stdio::null()).status();
        assert!(status.is_ok_and(|status| status.success()), "apt-get {arguments:?} failed: install iproute2 by hand");
    }
}
