//! `Pty`: a program in a pseudo-terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use testing::bounded::{WAIT_MAX, ended, wait_until};

pub struct Pty {
    child: Child,
    terminal: File,
    output: Receiver<Vec<u8>>,
    seen: Vec<u8>,
}

impl Pty {
    /// Starts a program whose standard streams are a terminal of this many columns. It is a process group of its own, so the
    /// signals that it sends to its group do not reach the tests.
    pub fn start(mut command: Command, columns: u16) -> Self {
        command.process_group(0);
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&terminal, size).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let own = || {
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            File::from(open(&name, flags, Mode::empty()).unwrap())
        };
        command.stdin(own()).stdout(own()).stderr(own());
        if !command.get_envs().any(|(name, _)| name == "TERM") {
            command.env("TERM", "xterm");
        }
        let child = command.spawn().unwrap();
        let terminal = File::from(terminal);
        let (pieces, output) = channel();
        let mut reader = terminal.try_clone().unwrap();
        thread::spawn(move || {
            let mut piece = [0; 4096];
            // Reading fails when the program has closed the terminal.
            while let Ok(bytes @ 1..) = reader.read(&mut piece) {
                if pieces.send(piece[..bytes].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self { child, terminal, output, seen: Vec::new() }
    }

    /// Of the program.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn send(&mut self, keys: &[u8]) {
        self.terminal.write_all(keys).unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Whether the terminal edits lines and echoes keys, as it does for a shell.
    pub fn is_original(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG)
    }

    /// Waits until the program has stopped, as Ctrl-Z has it do.
    pub fn wait_until_stopped(&self) {
        wait_until("the program stops", || {
            let status = waitpid(Some(self.pid()), WaitOptions::UNTRACED | WaitOptions::NOHANG).unwrap();
            status.is_some_and(|(_, status)| status.stopped())
        });
    }

    /// Waits for the end of the program, and returns its exit status.
    pub fn wait(&mut self) -> Option<i32> {
        ended(&mut self.child).code()
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// What is printed up to and including `words`, without escape sequences and carriage returns. The rest is kept.
    #[track_caller]
    pub fn read_to(&mut self, words: &str) -> String {
        self.read(words, plain)
    }

    /// The same with the escape sequences.
    #[track_caller]
    pub fn read_raw_to(&mut self, words: &str) -> String {
        self.read(words, |bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    #[track_caller]
    fn read(&mut self, words: &str, text: impl Fn(&[u8]) -> String) -> String {
        loop {
            // The last character may be incomplete.
            let complete = str::from_utf8(&self.seen).map_or_else(|error| error.valid_up_to(), str::len);
            let text = text(&self.seen[..complete]);
            if let Some(at) = text.find(words) {
                let end = at + words.len();
                self.seen = [&text.as_bytes()[end..], &self.seen[complete..]].concat();
                return text[..end].to_owned();
            }
            match self.output.recv_timeout(WAIT_MAX) {
                Ok(piece) => self.seen.extend(piece),
                Err(_) => panic!("`{words}` is not in the terminal:\n{text}"),
            }
        }
    }

    /// The exit status, and what is printed until the end.
    pub fn end(mut self) -> (Option<i32>, String) {
        while let Ok(piece) = self.output.recv_timeout(WAIT_MAX) {
            self.seen.extend(piece);
        }
        (ended(&mut self.child).code(), plain(&self.seen))
    }
}

/// Removes escape sequences (`ESC [ … letter`) and carriage returns. An incomplete sequence at the end is kept.
fn plain(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let (mut plain, mut rest) = (String::new(), &*text);
    while let Some((before, after)) = rest.split_once("\u{1b}[") {
        plain += before;
        let Some(end) = after.find(|c: char| c.is_ascii_alphabetic()) else {
            return plain + "\u{1b}[" + after;
        };
        rest = &after[end + 1..];
    }
    (plain + rest).replace('\r', "")
}
