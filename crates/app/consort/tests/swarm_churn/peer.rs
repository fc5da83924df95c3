//! `Peer`: a machine of the swarm, on which `consort swarm serve` runs, or not.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use testing::bounded::{Log, ended};
use testing::network::{Network, address};
use testing::oracle;
use testing::serving::{consort, kill};

pub const MODEL: &str = "gemma3/model-f32";
pub const LAYERS: usize = 7;
/// The peers' blocks. Those without one choose their own.
pub const BLOCKS: [Option<(usize, usize)>; 7] =
    [Some((0, 3)), Some((3, 7)), Some((0, 4)), Some((4, 7)), Some((2, 5)), None, None];
/// Peers that the others join the swarm through.
pub const BOOTSTRAP_PEERS: usize = 2;
/// K/V tokens of each peer: enough for all clients, also while sessions of a lost connection are still open.
pub const KV_TOKENS: usize = 32 << 10;
/// The memory of those that choose: too little for all layers.
const MEMORY: &str = "36M";
const PORT: u16 = 4101;

pub struct Peer {
    pub index: usize,
    folder: PathBuf,
    /// How often it got another identity.
    identity: usize,
    process: Option<PeerProcess>,
}

struct PeerProcess {
    child: Child,
    log: Log,
    id: String,
    layers: (usize, usize),
    idle: Holdings,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    pub threads: usize,
    pub files: usize,
    pub memory_mib: usize,
}

impl Peer {
    /// Starts its process, and waits until the block is served.
    pub fn start(network: &Network, index: usize, folder: PathBuf, bootstrap: &[String]) -> Self {
        let mut peer = Self { index, folder, identity: 0, process: None };
        peer.join(network, bootstrap);
        peer
    }

    pub fn join(&mut self, network: &Network, bootstrap: &[String]) {
        let identity = self.folder.join(format!("{}-{}", self.index, self.identity));
        let memory = ["--memory", MEMORY].map(str::to_owned);
        let block = BLOCKS[self.index - 1];
        let block = block.map_or(memory, |(start, end)| ["--layers".to_owned(), format!("{start}..{end}")]);
        let mut listen = format!("/ip4/{}/tcp/{PORT}", address(self.index));
        // Some have QUIC, too.
        if self.index.is_multiple_of(2) {
            listen += &format!(",/ip4/{}/udp/{PORT}/quic-v1", address(self.index));
        }
        let (model, kv_tokens) = (oracle(MODEL), KV_TOKENS.to_string());
        let mut args = vec!["swarm", "serve", model.to_str().unwrap(), "--no-lan", "--listen", &listen];
        args.extend(["--identity", identity.to_str().unwrap(), "--kv-tokens", &kv_tokens]);
        args.extend(block.iter().map(String::as_str));
        args.extend(bootstrap.iter().flat_map(|address| ["--bootstrap", address.as_str()]));
        let (child, log) = network.within(self.index, || {
            let mut child = consort(&args).stderr(Stdio::piped()).spawn().unwrap();
            let log = Log::read(child.stderr.take().unwrap());
            (child, log)
        });
        let id = field(&log.line_with("joined the swarm"), "peer").trim_matches('"').to_owned();
        let line = log.line_with("the block is served");
        let layers = field(&line, "layers");
        let (start, end) = layers.split_once("..").unwrap();
        let layers = (start.parse().unwrap(), end.parse().unwrap());
        let idle = Holdings::of(child.id());
        self.process = Some(PeerProcess { child, log, id, layers, idle });
    }

    /// Where others join the swarm through it.
    pub fn address(&self) -> String {
        let id = &self.process.as_ref().unwrap().id;
        format!("/ip4/{}/tcp/{PORT}/p2p/{id}", address(self.index))
    }

    pub fn layers(&self) -> Option<(usize, usize)> {
        self.process.as_ref().map(|process| process.layers)
    }

    /// What the process holds, and what it held when it had been started.
    pub fn holdings(&self) -> Option<(Holdings, Holdings)> {
        self.process.as_ref().map(|process| (Holdings::of(process.child.id()), process.idle))
    }

    pub fn signal(&self, name: &str) {
        kill(name, self.process.as_ref().unwrap().child.id());
    }

    /// An error if the process has ended on its own.
    pub fn check(&mut self) -> Result<(), String> {
        let Some(process) = &mut self.process else { return Ok(()) };
        match process.child.try_wait().unwrap() {
            None => Ok(()),
            Some(status) => Err(format!("peer {} ended with {status}: {}", self.index, process.log.so_far())),
        }
    }

    /// Ends the process as a service manager does. Returns its last words.
    pub fn leave(&mut self) -> Result<String, String> {
        self.signal("TERM");
        let mut process = self.process.take().unwrap();
        let (status, log) = (ended(&mut process.child), process.log.so_far());
        match log.lines().find(|line| line.contains("leaving the swarm")) {
            Some(line) if status.success() => Ok(line.to_owned()),
            _ => Err(format!("peer {} left with {status}: {log}", self.index)),
        }
    }

    pub fn kill(&mut self) {
        self.signal("KILL");
        self.process.take().unwrap().child.wait().unwrap();
    }

    /// When it joins again, nobody knows it.
    pub fn take_new_identity(&mut self) {
        self.identity += 1;
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
    }
}

impl Holdings {
    pub fn of(pid: u32) -> Self {
        let count = |what: &str| fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib: usize = memory.and_then(|text| text.split_whitespace().next()?.parse().ok()).unwrap_or_default();
        Self { threads: count("task"), files: count("fd"), memory_mib: kib >> 10 }
    }
}

/// A field of a line of the log.
pub fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, value) = line.split_once(&format!("{name}=")).unwrap_or_else(|| panic!("no {name} in {line}"));
    value.split_whitespace().next().unwrap_or_default()
}
