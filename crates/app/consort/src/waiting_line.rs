//! `WaitingLine`: tells in the terminal what an answer waits for while a part of the model is not there.
//!
//! An answer may have been printed in part. So the line is below it, and the cursor goes back to where the answer goes on.

use std::io::{IsTerminal, Write, stderr};
use std::time::{Duration, Instant};

use engine::WaitingForModel;

use crate::terminal;

/// What takes less time is not told.
const PATIENCE: Duration = Duration::from_secs(1);

pub struct WaitingLine {
    is_terminal: bool,
    /// The seconds that were told last.
    told: Option<u64>,
}

impl WaitingLine {
    pub fn new() -> Self {
        Self { is_terminal: stderr().is_terminal(), told: None }
    }

    /// To be called again and again, with what the answer waits for, if it waits.
    pub fn update(&mut self, waiting: Option<&WaitingForModel>) {
        let now = Instant::now();
        let Some(waiting) = waiting.filter(|waiting| now.saturating_duration_since(waiting.since) >= PATIENCE) else {
            return self.clear();
        };
        let seconds = now.saturating_duration_since(waiting.since).as_secs();
        if self.told == Some(seconds) {
            return;
        }
        match self.is_terminal {
            true => self.show(&line(waiting, seconds)),
            // A log gets one line for each time.
            false if self.told.is_none() => terminal::note(&line(waiting, seconds)),
            false => {}
        }
        self.told = Some(seconds);
    }

    /// Removes the line.
    pub fn clear(&mut self) {
        if self.told.take().is_some() && self.is_terminal {
            self.show("");
        }
    }

    /// Replaces the line below the cursor.
    fn show(&self, text: &str) {
        let columns = console::Term::stderr().size().1;
        let text: String = terminal::printable(text).chars().take(usize::from(columns).saturating_sub(1)).collect();
        // Down and up, so that there is a line below; then there, and back.
        let written =
            write!(stderr(), "\x1bD\x1bM\x1b7\x1b[1B\r\x1b[2K{}\x1b8", console::style(text).for_stderr().dim());
        // A note is not worth ending a command.
        let _ = written.and_then(|()| stderr().flush());
    }
}

impl Drop for WaitingLine {
    fn drop(&mut self) {
        self.clear();
    }
}

fn line(waiting: &WaitingForModel, seconds: u64) -> String {
    let why = &waiting.why;
    match waiting.layers {
        Some(layers) => format!("waiting for layers {layers}, {seconds} s: {why}"),
        None => format!("waiting for the model, {seconds} s: {why}"),
    }
}

#[cfg(test)]
mod tests {
    use types::LayerRange;

    use super::*;

    #[test]
    fn the_line_names_layers_time_and_reason() {
        let waiting = |layers| WaitingForModel { layers, since: Instant::now(), why: "attic is gone".into() };
        assert_eq!(line(&waiting(LayerRange::new(0, 15)), 12), "waiting for layers 0..15, 12 s: attic is gone");
        assert_eq!(line(&waiting(None), 1), "waiting for the model, 1 s: attic is gone");
    }
}
