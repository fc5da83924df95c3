//! Waits with a time limit. At the limit the test fails with a message that names the event.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Far longer than any event in the tests takes.
pub const WAIT_MAX: Duration = Duration::from_secs(120);
/// Far longer than a whole program takes, even on a busy machine.
pub const RUN_MAX: Duration = Duration::from_secs(600);

/// Waits until `is_true`.
#[track_caller]
pub fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_true() {
        assert!(begun.elapsed() < WAIT_MAX, "waited {WAIT_MAX:?} until {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until a process ends.
#[track_caller]
pub fn ended(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until("a process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// The lines of a log as they are written. A thread reads the log to its end, so that the writer never blocks.
pub struct Log(Receiver<String>);

impl Log {
    pub fn read(log: impl Read + Send + 'static) -> Self {
        let (lines, taken) = channel();
        let each = move |line: std::io::Result<String>| {
            // The receiver may have been dropped already.
            let _ = lines.send(line.unwrap());
        };
        thread::spawn(move || BufReader::new(log).lines().for_each(each));
        Self(taken)
    }

    /// The next line that contains `words`.
    #[track_caller]
    pub fn line_with(&self, words: &str) -> String {
        let mut seen = String::new();
        loop {
            let line = match self.0.recv_timeout(WAIT_MAX) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("waited {WAIT_MAX:?} for `{words}` in the log:\n{seen}"),
                Err(RecvTimeoutError::Disconnected) => panic!("`{words}` is not in the log:\n{seen}"),
            };
            if line.contains(words) {
                return line;
            }
            seen += &line;
            seen.push('\n');
        }
    }

    /// The next line.
    #[track_caller]
    pub fn next_line(&self) -> String {
        self.line_with("")
    }

    /// The lines that were written and not taken yet.
    pub fn so_far(&self) -> String {
        self.0.try_iter().map(|line| line + "\n").collect()
    }

    /// The remaining lines, up to the end of the log.
    #[track_caller]
    pub fn rest(&self) -> String {
        let mut rest = String::new();
        loop {
            match self.0.recv_timeout(WAIT_MAX) {
                Ok(line) => rest = rest + &line + "\n",
                Err(RecvTimeoutError::Disconnected) => return rest,
                Err(RecvTimeoutError::Timeout) => panic!("waited {WAIT_MAX:?} for the end of the log:\n{rest}"),
            }
        }
    }
}

/// Runs a program to its end.
#[track_caller]
pub fn output(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    output_of(child)
}

/// Like [`output`], for a process that was started already. Closes its standard input.
#[track_caller]
pub fn output_of(child: Child) -> Output {
    let pid = child.id();
    let (done, result) = channel();
    thread::spawn(move || done.send(child.wait_with_output()));
    let Ok(output) = result.recv_timeout(RUN_MAX) else {
        // The process may have ended already, so the result is ignored.
        let _ = Command::new("sh").args(["-c", &format!("kill -KILL {pid}")]).status();
        panic!("a program did not end within {RUN_MAX:?}");
    };
    output.unwrap()
}
