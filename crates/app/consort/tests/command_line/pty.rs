//! `Pty`: a program in a pseudo-terminal.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

use testing::bounded::{WAIT_MAX, ended};

pub struct Pty {
    child: Child,
    terminal: File,
    output: Receiver<Vec<u8>>,
    seen: Vec<u8>,
}

impl Pty {
    /// Starts a program whose standard streams are a terminal of this many columns.
    pub fn start(mut command: Command, columns: u16) -> Self {
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
        command.stdin(own()).stdout(own()).stderr(own()).env("TERM", "xterm");
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

    /// What is printed up to and including `words`, without escape sequences and carriage returns. The rest is kept.
    #[track_caller]
    pub fn read_to(&mut self, words: &str) -> String {
        loop {
            // The last character may be incomplete.
            let complete = str::from_utf8(&self.seen).map_or_else(|error| error.valid_up_to(), str::len);
            let text = plain(&self.seen[..complete]);
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
