//! `Process`: one rank's process and its pipes, none of which ever blocks. On another host, it is a link behind such pipes.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;
use types::Rank;

use super::deadlines::Deadlines;
use super::hosts::Route;
use super::inbox::Inbox;
use super::remote::{Pipes, Remote};
use crate::protocol::{ReadError, Reply};
use crate::stopped::is_stopped;
use crate::tcp::ClusterKey;

/// What a process that does not read may leave waiting for it, beyond one long line.
const OUTBOX_KEPT_BYTES: usize = 1 << 20;

/// How often a process that was killed is asked whether it has ended.
const REAP_LOOK: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Process {
    location: ProcessLocation,
    input: File,
    output: File,
    outbox: Vec<u8>,
    sent: usize,
    inbox: Inbox,
}

/// Where it runs.
#[derive(Debug)]
enum ProcessLocation {
    Here(Child),
    Elsewhere(Remote),
}

impl Process {
    pub fn new(mut child: Child) -> io::Result<Self> {
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a rank was started without pipes"));
        };
        Self::with(ProcessLocation::Here(child), input.into(), output.into())
    }

    /// Has `host` start `rank`. What is sent waits until it is there; if it does not come in time, that is its end.
    pub fn elsewhere(host: &str, key: &ClusterKey, rank: Rank, deadlines: &Deadlines) -> io::Result<Self> {
        let (remote, Pipes { input, output }) = Remote::start(host, key, rank, deadlines)?;
        Self::with(ProcessLocation::Elsewhere(remote), input.into(), output.into())
    }

    fn with(location: ProcessLocation, input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        ioctl_fionbio(&input, true)?;
        ioctl_fionbio(&output, true)?;
        let (input, output) = (input.into(), output.into());
        Ok(Self { location, input, output, outbox: Vec::new(), sent: 0, inbox: Inbox::default() })
    }

    /// On this host.
    pub fn pid(&self) -> Option<u32> {
        match &self.location {
            ProcessLocation::Here(child) => Some(child.id()),
            ProcessLocation::Elsewhere(_) => None,
        }
    }

    /// To its host, if that is another and connected.
    pub fn route(&self) -> Option<Route> {
        match &self.location {
            ProcessLocation::Here(_) => None,
            ProcessLocation::Elsewhere(remote) => remote.route(),
        }
    }

    /// Where its replies come from.
    pub fn output(&self) -> BorrowedFd<'_> {
        self.output.as_fd()
    }

    /// Where its requests go, while some wait to be written.
    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        (self.sent < self.outbox.len()).then(|| self.input.as_fd())
    }

    /// Writes what fits now, the rest when there is room.
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

    /// Takes in what it has written. False: there is nothing more to come.
    pub fn receive(&mut self) -> io::Result<bool> {
        self.inbox.fill(&mut self.output)
    }

    pub fn next_reply(&mut self) -> Option<Result<Reply, ReadError>> {
        self.inbox.next()
    }

    /// Whether somebody stopped it: it answers nothing until it is continued. On another host that is what the host says.
    pub fn is_stopped(&self) -> bool {
        match &self.location {
            ProcessLocation::Here(child) => is_stopped(child.id()),
            ProcessLocation::Elsewhere(remote) => remote.is_stopped(),
        }
    }

    /// Ends it, whatever it does, and lets the kernel forget it.
    pub fn kill(mut self) {
        match &mut self.location {
            ProcessLocation::Elsewhere(remote) => return remote.dismiss(),
            ProcessLocation::Here(child) => {
                let _ = child.kill(); // an error means that it has ended
            }
        }
        if !self.reap(Duration::from_secs(1))
            && let ProcessLocation::Here(mut child) = self.location
        {
            // It sits in the kernel: somebody has to wait for it, but nobody else has to wait for that.
            thread::spawn(move || child.wait());
        }
    }

    /// Waits for its end. False if it takes longer than `limit`.
    pub fn reap(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let has_ended = match &mut self.location {
                ProcessLocation::Here(child) => !matches!(child.try_wait(), Ok(None)),
                ProcessLocation::Elsewhere(remote) => remote.ending().is_some(),
            };
            if has_ended || Instant::now() >= end {
                return has_ended;
            }
            thread::sleep(REAP_LOOK);
        }
    }

    /// How it ended, for people; `None` while it has not.
    pub fn ending(&mut self) -> Option<String> {
        self.reap(Duration::from_millis(200)).then_some(())?;
        match &mut self.location {
            ProcessLocation::Here(child) => {
                child.try_wait().ok().flatten().map(|status| format!("its process ended, {status}"))
            }
            ProcessLocation::Elsewhere(remote) => remote.ending(),
        }
    }
}
