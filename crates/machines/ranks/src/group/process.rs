//! `Process`: one rank's process and its non-blocking pipes. A rank on another host is a rank stream behind such pipes.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use net::ClusterKey;
use rustix::io::ioctl_fionbio;
use types::Rank;

use super::deadlines::Deadlines;
use super::hosts::Route;
use super::inbox::Inbox;
use super::remote::{Pipes, RemoteProcess};
use crate::protocol::{RankReply, ReadError};
use crate::stopped::is_stopped;

/// Outbox capacity that is kept after everything was written.
const OUTBOX_KEPT_BYTES: usize = 1 << 20;

/// How often `reap` checks whether the process has ended.
const REAP_INTERVAL: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Process {
    location: ProcessLocation,
    input: File,
    output: File,
    outbox: Vec<u8>,
    sent: usize,
    inbox: Inbox,
}

/// Where the process runs.
#[derive(Debug)]
enum ProcessLocation {
    Local(Child),
    Remote(RemoteProcess),
}

impl Process {
    pub fn new(mut child: Child) -> io::Result<Self> {
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a rank was started without pipes"));
        };
        Self::with(ProcessLocation::Local(child), input.into(), output.into())
    }

    /// Has `host` start `rank`. Lines that are sent wait in the pipe until it is connected; if that takes too long, the
    /// output ends.
    pub fn remote(host: &str, key: &ClusterKey, rank: Rank, deadlines: &Deadlines) -> io::Result<Self> {
        let (remote, Pipes { input, output }) = RemoteProcess::start(host, key, rank, deadlines)?;
        Self::with(ProcessLocation::Remote(remote), input.into(), output.into())
    }

    fn with(location: ProcessLocation, input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        ioctl_fionbio(&input, true)?;
        ioctl_fionbio(&output, true)?;
        let (input, output) = (input.into(), output.into());
        Ok(Self { location, input, output, outbox: Vec::new(), sent: 0, inbox: Inbox::default() })
    }

    /// The pid, if the process runs on this host.
    pub fn pid(&self) -> Option<u32> {
        match &self.location {
            ProcessLocation::Local(child) => Some(child.id()),
            ProcessLocation::Remote(_) => None,
        }
    }

    /// The addresses of the connection to its host, if that is another one and connected.
    pub fn route(&self) -> Option<Route> {
        match &self.location {
            ProcessLocation::Local(_) => None,
            ProcessLocation::Remote(remote) => remote.route(),
        }
    }

    /// The pipe of its replies.
    pub fn output(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }

    /// The pipe of its requests, while some wait to be written.
    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        (self.sent < self.outbox.len()).then(|| self.input.as_fd())
    }

    /// Queues a line and writes what the pipe takes now.
    pub fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.outbox.extend_from_slice(line);
        self.flush()
    }

    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.outbox.len() {
            match self.input.write(&self.outbox[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.outbox.clear();
        self.outbox.shrink_to(OUTBOX_KEPT_BYTES);
        self.sent = 0;
        Ok(())
    }

    /// Reads what is available. False: its output has ended.
    pub fn receive(&mut self) -> io::Result<bool> {
        self.inbox.fill(&mut self.output)
    }

    /// A `spare` reply of the same op is taken, and its memory is reused.
    pub fn next_reply(&mut self, spare: &mut Option<RankReply>) -> Option<Result<RankReply, ReadError>> {
        self.inbox.next(spare)
    }

    /// Whether the process is stopped (SIGSTOP), so that it replies to nothing. On another host, that host reports it.
    pub fn is_stopped(&self) -> bool {
        match &self.location {
            ProcessLocation::Local(child) => is_stopped(child.id()),
            ProcessLocation::Remote(remote) => remote.is_stopped(),
        }
    }

    /// Kills the process and reaps it.
    pub fn kill(mut self) {
        match &mut self.location {
            ProcessLocation::Remote(remote) => return remote.dismiss(),
            ProcessLocation::Local(child) => {
                let _ = child.kill(); // an error means that the process has ended
            }
        }
        if !self.reap(Duration::from_secs(1))
            && let ProcessLocation::Local(mut child) = self.location
        {
            // It is stuck in the kernel: a thread reaps it, so that the caller need not wait.
            thread::spawn(move || child.wait());
        }
    }

    /// Waits until the process has ended. False if that takes longer than `limit`.
    pub fn reap(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let has_ended = match &mut self.location {
                ProcessLocation::Local(child) => !matches!(child.try_wait(), Ok(None)),
                ProcessLocation::Remote(remote) => remote.exit_reason().is_some(),
            };
            if has_ended || Instant::now() >= end {
                return has_ended;
            }
            thread::sleep(REAP_INTERVAL);
        }
    }

    /// How the process ended, for messages; `None` while it runs.
    pub fn exit_reason(&mut self) -> Option<String> {
        self.reap(Duration::from_millis(200)).then_some(())?;
        match &mut self.location {
            ProcessLocation::Local(child) => {
                child.try_wait().ok().flatten().map(|status| format!("its process ended, {status}"))
            }
            ProcessLocation::Remote(remote) => remote.exit_reason(),
        }
    }
}
