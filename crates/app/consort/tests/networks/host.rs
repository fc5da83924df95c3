//! `Host`: a process of `consort ranks` that stands for a machine.

use std::path::Path;
use std::process::{Child, Stdio};

use testing::bounded::Log;
use testing::network::{Network, address};
use testing::serving::{children, consort};

const PORT: u16 = 7000;
pub const KEY: &str = "a key that only tests have";

/// A running `consort ranks`.
pub struct Host {
    pub child: Child,
    pub address: String,
}

impl Host {
    pub fn start() -> Self {
        Self::start_at("127.0.0.1:0", Path::new("."))
    }

    pub fn start_at(listen: &str, folder: &Path) -> Self {
        let mut command = consort(&["ranks", "--listen", listen]);
        command.current_dir(folder).env("CONSORT_CLUSTER_KEY", KEY);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let line = Log::read(child.stderr.take().unwrap()).line_with("listening on ");
        let address = line.rsplit(' ').next().unwrap().to_owned();
        Self { child, address }
    }

    /// Starts one on each machine of a network but the first.
    pub fn start_all(network: &Network) -> Vec<Self> {
        let start =
            |index| network.within(index, || Self::start_at(&format!("{}:{PORT}", address(index)), Path::new(".")));
        network.others().map(start).collect()
    }

    pub fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value for `--tp-hosts`.
pub fn addresses(hosts: &[Host]) -> String {
    hosts.iter().map(|host| host.address.as_str()).collect::<Vec<_>>().join(",")
}
