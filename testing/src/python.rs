//! The Python programs of `tests`, which play the other side of foreign protocols. They need nothing but Python.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::repository;

/// A program of a folder of `tests`.
pub fn python(folder: &str, program: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg("-B").arg(program).current_dir(repository("tests").join(folder));
    command
}

/// A program that serves. Dropping it ends the process.
pub struct PythonServer {
    child: Child,
    stdout: BufReader<ChildStdout>,
    pub address: SocketAddr,
}

impl PythonServer {
    /// Starts it and waits until it listens.
    pub fn start(mut program: Command) -> Self {
        let mut child = program.stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let port = line.trim().strip_prefix("listening ").unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        Self { child, stdout, address: SocketAddr::from(([127, 0, 0, 1], port)) }
    }

    /// The next line that it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    pub fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for PythonServer {
    fn drop(&mut self) {
        self.kill();
        let mut rest = String::new();
        let _ = self.stdout.read_to_string(&mut rest);
    }
}
