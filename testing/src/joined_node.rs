//! `JoinedNode`: a running `consort join` that listens on loopback.

use std::process::{Child, Stdio};

use tempfile::TempDir;

use crate::bounded::Log;
use crate::serving::{children, consort};

pub const KEY: &str = "a passphrase of the tests";

/// A machine that has joined. Dropping it ends the process.
pub struct JoinedNode {
    pub child: Child,
    pub address: String,
    /// Read to its end, so that the node never blocks.
    pub log: Log,
    _store: TempDir,
}

impl JoinedNode {
    pub fn start(options: &[&str]) -> Self {
        Self::start_with_key(KEY, options)
    }

    pub fn start_with_key(key: &str, options: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", key, &[&["--no-mdns"], options].concat())
    }

    pub fn start_at(listen: &str, key: &str, options: &[&str]) -> Self {
        let store = TempDir::new().unwrap();
        let mut command = consort(&["join", "--listen", listen, "--cluster-key", key]);
        command.arg("--store").arg(store.path()).args(options);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let log = Log::read(child.stderr.take().unwrap());
        let line = log.line_with("listening on ");
        let address = line.split("listening on ").nth(1).unwrap();
        let end = address.find(|c: char| !(c.is_ascii_digit() || ".:".contains(c))).unwrap_or(address.len());
        let address = address[..end].to_owned();
        Self { child, address, log, _store: store }
    }

    pub fn ranks(&self) -> Vec<u32> {
        children(self.child.id())
    }
}

impl Drop for JoinedNode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
