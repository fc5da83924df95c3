//! How an answer looks: as it is where a program reads it, wrapped in a terminal, and with its Markdown rendered where the
//! terminal has styles.
//!
//! Models decide about this text. In a terminal, control characters among it are left out.

mod inline;
mod line_start;
mod markdown;
mod plain_text;
mod style;
mod table;
mod word_wrap;

use std::env;
use std::io::{IsTerminal, Result, Write, stdout};

use crate::terminal;
use markdown::Markdown;
use plain_text::PlainText;
use style::Style;

/// The columns of a terminal that does not tell them: it breaks lines itself.
const UNKNOWN_WIDTH: usize = 1 << 16;
/// The lines around reasoning in a terminal without styles.
const REASONING_BEGIN: &str = "(reasoning)";
const REASONING_END: &str = "(answer)";

/// How answers are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rendering {
    /// As they are, without reasoning: for a program.
    Raw,
    /// Wrapped between words.
    Plain,
    /// The same, with Markdown rendered.
    Styled,
}

impl Rendering {
    /// What fits standard output. `is_plain`: the user wants no styles.
    pub fn of_stdout(is_plain: bool) -> Self {
        let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb" || term.is_empty());
        match stdout().is_terminal() {
            false => Self::Raw,
            true if is_plain || is_dumb || is_set("NO_COLOR") => Self::Plain,
            true => Self::Styled,
        }
    }
}

/// Prints one answer as it comes.
pub struct AnswerPrinter<W: Write> {
    out: W,
    rendering: Rendering,
    width: usize,
    part: Part,
    /// The cursor is at the start of a line.
    ends_line: bool,
}

/// What was printed last.
enum Part {
    Nothing,
    Reasoning(PlainText),
    Raw,
    Plain(PlainText),
    Markdown(Markdown),
}

impl<W: Write> AnswerPrinter<W> {
    pub fn new(out: W, rendering: Rendering) -> Self {
        let width = terminal::stdout_width().unwrap_or(UNKNOWN_WIDTH);
        Self { out, rendering, width, part: Part::Nothing, ends_line: true }
    }

    /// The next text of the answer.
    pub fn text(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if matches!(self.part, Part::Nothing | Part::Reasoning(_)) {
            self.begin_text()?;
        }
        let printed = match &mut self.part {
            Part::Markdown(markdown) => markdown.push(&terminal::printable(text)),
            Part::Plain(plain) => plain.push(&terminal::printable(text)),
            _ => text.to_owned(),
        };
        self.print(&printed)
    }

    /// The next text of the reasoning before the answer.
    pub fn reasoning(&mut self, text: &str) -> Result<()> {
        if self.rendering == Rendering::Raw || text.is_empty() {
            return Ok(());
        }
        if !matches!(self.part, Part::Reasoning(_)) {
            self.end()?;
            let is_styled = self.rendering == Rendering::Styled;
            if !is_styled {
                self.print(&format!("{REASONING_BEGIN}\n"))?;
            }
            let style = if is_styled { Style::DIM } else { Style::PLAIN };
            self.part = Part::Reasoning(PlainText::new(self.width, style));
        }
        let Part::Reasoning(plain) = &mut self.part else { return Ok(()) };
        let printed = plain.push(&terminal::printable(text));
        self.print(&printed)
    }

    /// Prints what was held back, and ends the last line. A program gets a line for each answer, even for an empty one.
    pub fn finish(mut self) -> Result<()> {
        if self.rendering == Rendering::Raw {
            return self.print("\n");
        }
        self.end()
    }

    fn begin_text(&mut self) -> Result<()> {
        if matches!(self.part, Part::Reasoning(_)) {
            self.end()?;
            let end = if self.rendering == Rendering::Styled { "\n".to_owned() } else { format!("{REASONING_END}\n") };
            self.print(&end)?;
        }
        self.part = match self.rendering {
            Rendering::Raw => Part::Raw,
            Rendering::Plain => Part::Plain(PlainText::new(self.width, Style::PLAIN)),
            Rendering::Styled => Part::Markdown(Markdown::new(self.width)),
        };
        Ok(())
    }

    /// Ends the part that is being printed.
    fn end(&mut self) -> Result<()> {
        let rest = match std::mem::replace(&mut self.part, Part::Nothing) {
            Part::Nothing | Part::Raw => return Ok(()),
            Part::Reasoning(mut plain) | Part::Plain(mut plain) => plain.finish(),
            Part::Markdown(mut markdown) => markdown.finish(),
        };
        self.print(&rest)?;
        if self.ends_line { Ok(()) } else { self.print("\n") }
    }

    fn print(&mut self, text: &str) -> Result<()> {
        if let Some(last) = text.chars().next_back() {
            self.ends_line = last == '\n';
        }
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }
}
