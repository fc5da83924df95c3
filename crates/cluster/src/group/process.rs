//! `Process`: one rank's process and its pipes, none of which ever blocks.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, ChildStdin, ChildStdout};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::ioctl_fionbio;

use super::inbox::Inbox;
use crate::protocol::{ReadError, Reply};

/// What a process that does not read may leave waiting for it, beyond one long line.
const OUTBOX_KEPT_BYTES: usize = 1 << 20;

/// How often a process that was killed is asked whether it has ended.
const REAP_LOOK: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: ChildStdout,
    outbox: Vec<u8>,
    sent: usize,
    inbox: Inbox,
}

impl Process {
    pub fn new(mut child: Child) -> io::Result<Self> {
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("a rank was started without pipes"));
        };
        ioctl_fionbio(&stdin, true)?;
        ioctl_fionbio(&stdout, true)?;
        Ok(Self { child, stdin, stdout, outbox: Vec::new(), sent: 0, inbox: Inbox::default() })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where its replies come from.
    pub fn output(&self) -> BorrowedFd<'_> {
        self.stdout.as_fd()
    }

    /// Where its requests go, while some wait to be written.
    pub fn input(&self) -> Option<BorrowedFd<'_>> {
        (self.sent < self.outbox.len()).then(|| self.stdin.as_fd())
    }

    /// Writes what fits now, the rest when there is room.
    pub fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.outbox.extend_from_slice(line);
        self.flush()
    }

    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.outbox.len() {
            match self.stdin.write(&self.outbox[self.sent..]) {
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
        self.inbox.fill(&mut self.stdout)
    }

    pub fn next_reply(&mut self) -> Option<Result<Reply, ReadError>> {
        self.inbox.next()
    }

    /// Whether somebody stopped it: it answers nothing until it is continued.
    pub fn is_stopped(&self) -> bool {
        let Ok(stat) = fs::read_to_string(format!("/proc/{}/stat", self.pid())) else { return false };
        // The name of the program, which may hold anything, ends with the last parenthesis.
        let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
        matches!(state, Some('T' | 't'))
    }

    /// Ends it, whatever it does, and lets the kernel forget it.
    pub fn kill(mut self) {
        let _ = self.child.kill(); // an error means that it has ended
        if !self.reap(Duration::from_secs(1)) {
            // It sits in the kernel: somebody has to wait for it, but nobody else has to wait for that.
            thread::spawn(move || self.child.wait());
        }
    }

    /// Waits for its end. False if it takes longer than `limit`.
    pub fn reap(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < end => thread::sleep(REAP_LOOK),
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => return true,
            }
        }
    }

    /// How it ended, for people; `None` while it has not.
    pub fn ending(&mut self) -> Option<String> {
        self.reap(Duration::from_millis(200)).then_some(())?;
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }
}
