//! The terminal: its width, and notes on standard error.

use std::io::{IsTerminal, Write, stderr, stdout};

use console::{Term, style};

/// Writes a line to standard error, dimmed where that is a terminal with colours. An error is ignored: a note is not worth
/// ending a command.
pub fn note(text: &str) {
    let _ = writeln!(stderr(), "{}", style(text).for_stderr().dim());
}

/// The columns of standard output; `None` if it is not a terminal.
pub fn stdout_width() -> Option<usize> {
    if !stdout().is_terminal() {
        return None;
    }
    let (_rows, columns) = Term::stdout().size_checked()?;
    Some(usize::from(columns)).filter(|&columns| columns > 0)
}
