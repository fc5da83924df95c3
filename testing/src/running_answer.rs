//! `RunningAnswer`: a streamed completion in which something happens.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::TcpStream;

use rustix::process::{Pid, Signal, kill_process};

use crate::bounded::wait_until;
use crate::serving::{Server, completion};

/// A stream of which the first text has come.
pub struct RunningAnswer<'a> {
    server: &'a Server,
    stream: TcpStream,
    received: Vec<u8>,
}

impl Server {
    /// Sends a request for a completion that is streamed, and waits for its first text.
    pub fn begin_answer(&self, body: &str) -> RunningAnswer<'_> {
        let stream = self.open("POST /v1/completions", body);
        let mut answer = RunningAnswer { server: self, stream, received: Vec::new() };
        while !answer.text().contains("\"text\"") {
            assert_ne!(answer.receive().unwrap(), 0, "{}", answer.text());
        }
        answer
    }

    /// Stops the server's process, not those of its ranks, while `act` runs.
    fn while_stopped<T>(&self, act: impl FnOnce() -> T) -> T {
        /// The process goes on, also when the test fails.
        struct Continue(Pid);
        impl Drop for Continue {
            fn drop(&mut self) {
                let _ = kill_process(self.0, Signal::CONT);
            }
        }
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::STOP).unwrap();
        let _continue = Continue(pid);
        wait_until("the server is stopped", || is_stopped(self.child.id()));
        act()
    }
}

impl RunningAnswer<'_> {
    /// Acts while the answer is under way: the server has not sent its end, and stands still meanwhile.
    pub fn interrupt<T>(&mut self, act: impl FnOnce() -> T) -> T {
        let server = self.server;
        server.while_stopped(|| {
            self.stream.set_nonblocking(true).unwrap();
            let error = loop {
                match self.receive() {
                    Ok(bytes) => assert_ne!(bytes, 0, "the answer has ended already: {}", self.text()),
                    Err(error) => break error,
                }
            };
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            assert!(!self.text().contains("[DONE]"), "the answer has ended already: {}", self.text());
            self.stream.set_nonblocking(false).unwrap();
            act()
        })
    }

    /// The whole text, once the answer has ended.
    pub fn finish(mut self) -> String {
        self.stream.read_to_end(&mut self.received).unwrap();
        assert!(self.text().contains("[DONE]"), "{}", self.text());
        completion(&self.text())
    }

    /// All that came, once the stream has ended, however it ended.
    pub fn rest(mut self) -> String {
        self.stream.read_to_end(&mut self.received).unwrap();
        self.text()
    }

    fn receive(&mut self) -> std::io::Result<usize> {
        let mut bytes = [0; 1 << 14];
        let count = self.stream.read(&mut bytes)?;
        self.received.extend_from_slice(&bytes[..count]);
        Ok(count)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.received).into_owned()
    }
}

/// Whether all threads of a process are stopped.
fn is_stopped(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    // A thread may have ended meanwhile.
    let stats = threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok());
    let states: Vec<_> = stats.filter_map(|stat| stat.rsplit_once(')')?.1.trim_start().chars().next()).collect();
    !states.is_empty() && states.iter().all(|state| *state == 'T')
}
