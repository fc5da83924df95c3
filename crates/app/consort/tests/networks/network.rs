//! `Network`: machines with separate networks, made of network namespaces that a bridge connects. Needs root and Debian's
//! iproute2.

use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::{self, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// If this variable is `required`, a test fails where namespaces cannot be created.
const REQUIRED: &str = "CONSORT_TEST_NAMESPACES";

/// The first machine is that of the supervisor or coordinator. Dropping the value deletes the namespaces.
pub struct Network {
    names: Vec<String>,
}

impl Network {
    /// The first machine and `hosts` others. Where network namespaces cannot be created, prints a message and returns
    /// `None`; with `CONSORT_TEST_NAMESPACES=required` it panics.
    #[track_caller]
    pub fn new(hosts: usize) -> Option<Self> {
        if let Err(reason) = can_make_namespaces() {
            assert!(env::var_os(REQUIRED).is_none_or(|value| value != "required"), "no network namespaces: {reason}");
            let test = thread::current().name().unwrap_or_default().to_owned();
            tell(&format!("test {test} DID NOT RUN, it needs network namespaces: {reason}"));
            return None;
        }
        let number = unique();
        let names = (0..=hosts).map(|index| format!("consort-{}-{number}-{index}", process::id())).collect();
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

    /// The machines but the first.
    pub fn others(&self) -> std::ops::Range<usize> {
        1..self.names.len()
    }

    /// Runs `task`, and the processes that it starts, in the namespace of a machine.
    pub fn within<T: Send>(&self, index: usize, task: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/run/netns/{}", self.names[index])).unwrap();
        let enter = || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            task()
        };
        thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    /// Drops all packets to a host, without an error to either side.
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

/// The address of a machine.
pub fn address(index: usize) -> String {
    format!("10.77.0.{}", index + 1)
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status();
    assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
}

/// Creates a namespace and deletes it again. The error says what is missing.
fn can_make_namespaces() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("only root makes them".to_owned());
    }
    let name = format!("consort-{}-probe-{}", process::id(), unique());
    for action in ["add", "del"] {
        let output = Command::new("ip").args(["netns", action, &name]).output();
        let output = output.map_err(|error| format!("`ip` can not be run ({error}); Debian has it in iproute2"))?;
        if !output.status.success() {
            return Err(format!("`ip netns {action}`: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
    }
    Ok(())
}

/// A number that is unique in this process.
fn unique() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Writes a line that the test harness does not capture, unlike `eprintln!`.
pub fn tell(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
