//! `InputLines`: the lines of a user, edited in a terminal, or from a pipe or file.

use std::env;
use std::fs;
use std::io::{self, BufRead, IsTerminal, Read, StdinLock, stdin};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::terminal;

const LINE_BYTES_MAX: u64 = 64 << 20;

pub enum InputLines {
    Terminal { editor: Box<DefaultEditor>, history: Option<PathBuf> },
    Pipe(StdinLock<'static>),
}

impl InputLines {
    pub fn open() -> Result<Self> {
        if !stdin().is_terminal() {
            return Ok(Self::Pipe(stdin().lock()));
        }
        let mut editor = Box::new(DefaultEditor::new().context("open the terminal")?);
        let history = history_file();
        if let Some(path) = &history {
            // On the first run there is no history file.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal { editor, history })
    }

    /// The next line that is not blank; `None` at the end.
    pub fn next(&mut self) -> Result<Option<String>> {
        loop {
            let line = match self {
                Self::Terminal { editor, .. } => edit_line(editor)?,
                Self::Pipe(input) => read_line(input)?,
            };
            let Some(line) = line else { return Ok(None) };
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            if let Self::Terminal { editor, .. } = self {
                let _ = editor.add_history_entry(line);
            }
            return Ok(Some(line.to_owned()));
        }
    }

    /// Saves the history of lines.
    pub fn close(self) {
        if let Self::Terminal { mut editor, history: Some(path) } = self {
            // A history that cannot be saved is not an error.
            let _ = path.parent().map(fs::create_dir_all).and_then(|_| editor.save_history(&path).ok());
        }
    }
}

/// A line from the terminal, empty if Ctrl-C discards it.
fn edit_line(editor: &mut DefaultEditor) -> Result<Option<String>> {
    match editor.readline("> ") {
        Ok(line) => Ok(Some(line)),
        Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
        Err(ReadlineError::Eof) => Ok(None),
        Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
            terminal::note("(a byte that is not UTF-8: the line is discarded)");
            Ok(Some(String::new()))
        }
        Err(error) => Err(error).context("read from the terminal"),
    }
}

/// A line from a pipe or file. Bytes that are not UTF-8 become replacement characters.
fn read_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut line = Vec::new();
    let bytes = input.take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line).context("read standard input")?;
    ensure!(bytes as u64 <= LINE_BYTES_MAX, "a line of standard input is longer than {} MiB", LINE_BYTES_MAX >> 20);
    Ok((bytes > 0).then(|| String::from_utf8_lossy(&line).into_owned()))
}

/// The file that keeps typed lines between conversations.
fn history_file() -> Option<PathBuf> {
    let state = match env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => env::home_dir()?.join(".local/state"),
    };
    Some(state.join("consort/chat_history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_utf_8_are_replaced() {
        let mut input = &b"caf\xe9\nnext"[..];
        assert_eq!(read_line(&mut input).unwrap().as_deref(), Some("caf\u{fffd}\n"));
        assert_eq!(read_line(&mut input).unwrap().as_deref(), Some("next"));
        assert_eq!(read_line(&mut input).unwrap(), None);
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let mut input = io::BufReader::new(io::repeat(b'a'));
        assert!(read_line(&mut input).unwrap_err().to_string().contains("64 MiB"));
    }
}
