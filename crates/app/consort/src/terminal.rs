//! The terminal: its width, notes on standard error, and what of foreign text it gets.
//!
//! Models, their files and servers decide about texts that are printed. In a terminal, control characters among them could
//! move the cursor, or set the clipboard.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write, stderr, stdout};

use console::{Term, style};

/// Writes a line to standard error, dimmed where that is a terminal with colours. An error is ignored: a note is not worth
/// ending a command.
pub fn note(text: &str) {
    let _ = writeln!(stderr(), "{}", style(for_stderr(text)).for_stderr().dim());
}

/// Writes an error to standard error, with its causes.
pub fn error(error: &anyhow::Error) {
    let _ = writeln!(stderr(), "{}", for_stderr(&format!("error: {}", with_causes(error))));
}

/// An error and its causes, each once: some errors have the cause in their own text.
fn with_causes(error: &anyhow::Error) -> String {
    let mut causes = error.chain().map(ToString::to_string);
    let first = causes.next().unwrap_or_default();
    causes.fold(first, |text, cause| if text.ends_with(&cause) { text } else { format!("{text}: {cause}") })
}

/// A text as standard output gets it: only [`printable`] characters if it is a terminal.
pub fn for_stdout(text: &str) -> Cow<'_, str> {
    if stdout().is_terminal() { printable(text) } else { text.into() }
}

/// Writes a line to standard output: see [`for_stdout`].
pub fn print_line(value: impl fmt::Display) -> io::Result<()> {
    stdout().write_all(for_stdout(&format!("{value}\n")).as_bytes())
}

fn for_stderr(text: &str) -> Cow<'_, str> {
    if stderr().is_terminal() { printable(text) } else { text.into() }
}

/// The text without control characters, except line breaks and tabs.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_printable = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
    if text.chars().all(|c| is_printable(&c)) { text.into() } else { text.chars().filter(is_printable).collect() }
}

/// The columns of standard output; `None` if it is not a terminal.
pub fn stdout_width() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    let (_rows, columns) = Term::stdout().size_checked()?;
    Some(usize::from(columns)).filter(|&columns| columns > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_named_once() {
        let io = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let twice =
            anyhow::Error::new(io()).context(format!("talk to the other side: {}", io())).context("cake worker h:1");
        assert_eq!(with_causes(&twice), "cake worker h:1: talk to the other side: connection refused");
        assert_eq!(with_causes(&anyhow::Error::new(io()).context("find h")), "find h: connection refused");
    }

    #[test]
    fn control_characters_are_not_printable() {
        assert_eq!(printable("a\u{1b}[2Jb\r\u{7}c\u{9b}d\u{7f}"), "a[2Jbcd");
        assert_eq!(printable("\u{1b}]52;c;eA==\u{7}"), "]52;c;eA==");
        assert_eq!(printable("a\tb\né 日\n"), "a\tb\né 日\n");
    }
}
