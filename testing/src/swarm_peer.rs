//! `SwarmPeer`: a running `consort swarm serve` that listens on loopback.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Child, Stdio};

use tempfile::TempDir;

use crate::bounded::Log;
use crate::serving::{children, consort};

/// A peer that serves a block. Dropping it ends the process.
pub struct SwarmPeer {
    pub child: Child,
    /// For `--bootstrap`.
    pub address: String,
    log: Log,
    /// The lines of the log that were read.
    read: RefCell<Vec<String>>,
    _folder: TempDir,
}

impl SwarmPeer {
    /// Starts a peer and waits until its block is served.
    pub fn start(model: &Path, layers: &str, options: &[&str]) -> Self {
        let peer = Self::start_unready(model, layers, options);
        peer.wait_until_served();
        peer
    }

    /// Starts a peer and waits until it listens.
    pub fn start_unready(model: &Path, layers: &str, options: &[&str]) -> Self {
        let folder = TempDir::new().unwrap();
        let mut command = consort(&["swarm", "serve", model.to_str().unwrap(), "--layers", layers, "--no-lan"]);
        command.args(["--listen", "/ip4/127.0.0.1/tcp/0", "--identity"]).arg(folder.path().join("key"));
        command.args(options).env("XDG_CACHE_HOME", folder.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let mut peer = Self { child, address: String::new(), log, read: RefCell::default(), _folder: folder };
        let line = peer.line_with("others join with --bootstrap ");
        peer.address = line.split("--bootstrap ").nth(1).unwrap().trim().to_owned();
        peer
    }

    pub fn wait_until_served(&self) {
        self.line_with("the block is served");
    }

    /// The first line of the log with these words. Waits for it.
    #[track_caller]
    pub fn line_with(&self, words: &str) -> String {
        let mut read = self.read.borrow_mut();
        if let Some(line) = read.iter().find(|line| line.contains(words)) {
            return line.clone();
        }
        loop {
            let line = self.log.next_line();
            read.push(line.clone());
            if line.contains(words) {
                return line;
            }
        }
    }

    pub fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }

    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for SwarmPeer {
    fn drop(&mut self) {
        self.kill();
    }
}
