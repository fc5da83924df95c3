//! `QuietInput`: the keyboard while the chat is busy. Keys are read and kept instead of being echoed; Esc and
//! Ctrl-C cancel the answer.

use std::io::{PipeWriter, pipe};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, kill_current_process_group};
use rustix::stdio::stdin;

use super::type_ahead::{ActionKey, TypeAhead};
use crate::interrupt;
use crate::terminal_mode::{self, QuietMode};

/// The bytes of one key arrive together. If nothing follows an escape character for this long, it is the Esc key.
const ESCAPE_WAIT: Duration = Duration::from_millis(50);

pub struct QuietInput {
    /// Ends the thread when it is closed.
    open: Option<PipeWriter>,
    reader: Option<JoinHandle<TypeAhead>>,
}

impl QuietInput {
    /// Keys are appended to what was `typed` before. `None` if standard input is no terminal.
    pub fn begin(mut typed: TypeAhead) -> Result<Option<Self>> {
        let Some(mode) = QuietMode::enter() else { return Ok(None) };
        let (closed, open) = pipe().context("make a pipe")?;
        let read = move || {
            while wait(&closed, None) == Ready::Input && read_keys(&mut typed) {
                if typed.ends_with_escape() && wait(&closed, Some(ESCAPE_WAIT)) == Ready::Nothing {
                    act(typed.escape_key());
                }
            }
            drop(mode);
            typed
        };
        let reader = thread::Builder::new().name("keyboard".to_owned()).spawn(read).context("start a thread")?;
        Ok(Some(Self { open: Some(open), reader: Some(reader) }))
    }

    /// Restores the terminal. Returns what was typed.
    pub fn end(mut self) -> TypeAhead {
        self.join()
    }

    fn join(&mut self) -> TypeAhead {
        drop(self.open.take());
        self.reader.take().and_then(|reader| reader.join().ok()).unwrap_or_default()
    }
}

impl Drop for QuietInput {
    fn drop(&mut self) {
        self.join();
    }
}

#[derive(PartialEq, Eq)]
enum Ready {
    Input,
    Nothing,
    /// The pipe was closed.
    Closed,
}

fn wait(closed: &std::io::PipeReader, limit: Option<Duration>) -> Ready {
    let terminal = stdin();
    let mut fds = [PollFd::new(&terminal, PollFlags::IN), PollFd::new(closed, PollFlags::IN)];
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    loop {
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) => return Ready::Nothing,
            Ok(_) if !fds[1].revents().is_empty() => return Ready::Closed,
            Ok(_) => return Ready::Input,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return Ready::Closed,
        }
    }
}

/// Reads what was typed. Returns false if the terminal is gone.
fn read_keys(typed: &mut TypeAhead) -> bool {
    let mut bytes = [0; 1024];
    match rustix::io::read(stdin(), &mut bytes) {
        Ok(0) => false,
        Ok(count) => {
            typed.push(&bytes[..count]).into_iter().for_each(act);
            true
        }
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => true,
        Err(_) => false,
    }
}

fn act(key: ActionKey) {
    match key {
        ActionKey::Cancel => {
            interrupt::cancel();
        }
        ActionKey::Interrupt => {
            if !interrupt::cancel() {
                // As the terminal does when it has not been told otherwise.
                let _ = kill_current_process_group(Signal::INT);
            }
        }
        ActionKey::Suspend => terminal_mode::suspend(),
    }
}
