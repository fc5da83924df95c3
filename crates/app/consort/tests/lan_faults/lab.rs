//! `Lab`: machines that run `consort join`, and stay while servers come and go.

use std::fs;
use std::process::{Child, Stdio};

use tempfile::TempDir;

use testing::bounded::{Log, wait_until};
use testing::network::{Network, address};
use testing::oracle;
use testing::serving::{Server, consort, is_gone, kill};

/// Machines besides that of the server: three with layers and a spare.
pub const MACHINES: usize = 4;
const PORT: u16 = 7420;
const KEY: &str = "a key that only tests have";

pub struct Lab {
    pub network: Network,
    nodes: Vec<NodeProcess>,
}

/// A running `consort join`.
pub struct NodeProcess {
    child: Child,
    log: Log,
    _store: TempDir,
    /// What the process holds when it serves nobody.
    idle: Holdings,
}

/// Threads and open files of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holdings {
    threads: usize,
    files: usize,
}

impl Lab {
    pub fn start(network: Network) -> Self {
        let nodes = network.others().map(|index| NodeProcess::start(&network, index, None)).collect();
        Self { network, nodes }
    }

    /// Starts a machine's process again, with an empty store, and perhaps with a fault.
    pub fn restart(&mut self, index: usize, fault: Option<&str>) {
        // It has the address of the new one.
        self.end(index);
        self.nodes[index - 1] = NodeProcess::start(&self.network, index, fault);
    }

    /// Starts a server whose first layers are on the first machine, and so on.
    pub fn serve(&self, has_spare: bool) -> Server {
        let (machines, split) = if has_spare { (MACHINES, "2,1,1,0") } else { (MACHINES - 1, "2,1,1") };
        let peers: Vec<_> = (1..=machines).map(|index| format!("{}:{PORT}", address(index))).collect();
        let peers = peers.join(",");
        let options = ["--node", &peers, "--split", split, "--cluster-key", KEY, "--served-model-name", "m"];
        let model = oracle("qwen3/model-f32");
        self.network.within(0, || Server::listen("true", model.to_str().unwrap(), &options, &[]))
    }

    /// Waits until the processes that had no fault hold no more than when they served nobody.
    pub fn wait_until_idle(&self, faulty: usize) -> Result<(), String> {
        for (index, node) in (1..).zip(&self.nodes).filter(|(index, _)| *index != faulty) {
            if is_gone(node.child.id()) {
                return Err(format!("machine {index} has ended: {}", node.log.so_far()));
            }
            wait_until(&format!("machine {index} is idle again, as {:?}", node.idle), || {
                let Holdings { threads, files } = Holdings::of(node.child.id());
                threads <= node.idle.threads && files <= node.idle.files
            });
        }
        Ok(())
    }

    /// Ends a machine's process, which may be stopped.
    pub fn end(&mut self, index: usize) {
        self.nodes[index - 1].end();
    }
}

impl NodeProcess {
    fn start(network: &Network, index: usize, fault: Option<&str>) -> Self {
        let store = tempfile::tempdir().unwrap();
        let (listen, name) = (format!("{}:{PORT}", address(index)), format!("machine-{index}"));
        let folder = store.path().to_str().unwrap();
        let args = ["join", "--listen", &listen, "--name", &name, "--store", folder, "--no-mdns"];
        let (child, log) = network.within(index, || {
            let mut command = consort(&args);
            command.env("CONSORT_CLUSTER_KEY", KEY);
            if let Some(fault) = fault {
                command.env("CONSORT_FAULT", fault);
            }
            let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
            let log = Log::read(child.stderr.take().unwrap());
            log.line_with("ready to run layers");
            (child, log)
        });
        let idle = Holdings::of(child.id());
        Self { child, log, _store: store, idle }
    }

    fn end(&mut self) {
        if !is_gone(self.child.id()) {
            kill("KILL", self.child.id());
        }
        let _ = self.child.wait();
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        self.end();
    }
}

impl Holdings {
    fn of(pid: u32) -> Self {
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        Self { threads: count("task"), files: count("fd") }
    }
}
