//! `ChatInput`: what a user enters: edited in a terminal, or from a pipe or file.

use std::env;
use std::fs;
use std::io::{self, BufRead, Read, StdinLock, stdin};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use rustyline::{
    Cmd, CompletionType, ConditionalEventHandler, Config, Editor, Event, EventContext, EventHandler, KeyCode, KeyEvent,
    Modifiers, RepeatCount,
};

use super::completion::{ChatHelper, ModelNames};
use super::multi_line;
use super::quiet_input::QuietInput;
use super::type_ahead::{TypeAhead, Typed};
use crate::terminal;
use crate::terminal_mode;

const LINE_BYTES_MAX: u64 = 64 << 20;
const HISTORY_MAX: usize = 1000;
const PROMPT: &str = "> ";

/// What was entered at once. It may have several lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A message or a command.
    Line(String),
    /// A message that was in quotes, so it is no command.
    Block(String),
}

pub enum ChatInput {
    Terminal(Box<TerminalInput>),
    Pipe(StdinLock<'static>),
}

impl ChatInput {
    /// In a terminal, what is typed from now on waits for [`Self::next`].
    pub fn open() -> Result<Self> {
        Ok(match QuietInput::begin(TypeAhead::default())? {
            Some(quiet) => Self::Terminal(Box::new(TerminalInput::open(quiet)?)),
            None => Self::Pipe(stdin().lock()),
        })
    }

    /// What Tab completes after `/model`.
    pub fn set_models(&mut self, models: ModelNames) {
        if let Self::Terminal(input) = self
            && let Some(helper) = input.editor.helper_mut()
        {
            helper.models = models;
        }
    }

    /// The next entry that is not blank; `None` at the end.
    pub fn next(&mut self) -> Result<Option<Entry>> {
        loop {
            let text = match self {
                Self::Terminal(input) => input.read()?,
                Self::Pipe(input) => read_entry(input)?,
            };
            let Some(text) = text else { return Ok(None) };
            let entry = match multi_line::unquoted(&text) {
                Some(block) => Entry::Block(block.to_owned()),
                None => Entry::Line(text.trim().to_owned()),
            };
            let (Entry::Line(text) | Entry::Block(text)) = &entry;
            if !text.trim().is_empty() {
                return Ok(Some(entry));
            }
        }
    }

    /// Saves the history of entries.
    pub fn close(self) {
        if let Self::Terminal(mut input) = self
            && let Some(path) = &input.history
        {
            // A history that cannot be saved is not an error.
            let _ = path.parent().map(fs::create_dir_all).and_then(|_| input.editor.save_history(path).ok());
        }
    }
}

pub struct TerminalInput {
    editor: Editor<ChatHelper, DefaultHistory>,
    history: Option<PathBuf>,
    /// Ctrl-C discarded an empty line.
    is_empty_interrupt: Arc<AtomicBool>,
    continued: Continued,
    /// Reads the keys while no line is edited.
    quiet: Option<QuietInput>,
}

impl TerminalInput {
    fn open(quiet: QuietInput) -> Result<Self> {
        let config = Config::builder()
            .completion_type(CompletionType::List)
            .completion_show_all_if_ambiguous(true)
            .max_history_size(HISTORY_MAX)
            .context("open the terminal")?
            .build();
        let mut editor = Editor::with_config(config).context("open the terminal")?;
        editor.set_helper(Some(ChatHelper::new()));
        let is_empty_interrupt = Arc::new(AtomicBool::new(false));
        let continued = Continued::default();
        let newline = || EventHandler::Simple(Cmd::Newline);
        editor.bind_sequence(KeyEvent::ctrl('J'), newline());
        editor.bind_sequence(KeyEvent(KeyCode::Enter, Modifiers::ALT), newline());
        editor.bind_sequence(
            KeyEvent(KeyCode::Enter, Modifiers::NONE),
            EventHandler::Conditional(Box::new(ContinueAfterBackslash(Arc::clone(&continued)))),
        );
        editor.bind_sequence(
            KeyEvent::ctrl('C'),
            EventHandler::Conditional(Box::new(NoticeInterrupt(Arc::clone(&is_empty_interrupt)))),
        );
        editor.bind_sequence(KeyEvent::ctrl('Z'), EventHandler::Conditional(Box::new(Suspend)));
        let history = history_file();
        if let Some(path) = &history {
            // On the first run there is no history file.
            let _ = editor.load_history(path);
        }
        Ok(Self { editor, history, is_empty_interrupt, continued, quiet: Some(quiet) })
    }

    /// The text that was typed ahead, or else is edited now; blank if Ctrl-C discards it.
    fn read(&mut self) -> Result<Option<String>> {
        let mut typed = self.quiet.take().map(QuietInput::end).unwrap_or_default();
        let text = match typed.next() {
            Some(Typed::End) => None,
            Some(Typed::Message(text)) => {
                // As the editor shows a line.
                terminal::print_line(format_args!("{PROMPT}{text}"))?;
                Some(text)
            }
            None => self.edit(&typed.take_line())?,
        };
        self.quiet = QuietInput::begin(typed)?;
        if let Some(text) = text.as_deref().filter(|text| !text.trim().is_empty()) {
            let _ = self.editor.add_history_entry(text);
        }
        Ok(text)
    }

    fn edit(&mut self, begun: &str) -> Result<Option<String>> {
        self.is_empty_interrupt.store(false, Ordering::Relaxed);
        self.continued.lock().unwrap_or_else(PoisonError::into_inner).clear();
        match self.editor.readline_with_initial(PROMPT, (begun, "")) {
            Ok(text) => {
                let continued = self.continued.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(Some(without_backslashes(text, &continued)))
            }
            Err(ReadlineError::Interrupted) => {
                if self.is_empty_interrupt.load(Ordering::Relaxed) {
                    terminal::note("(Ctrl-D or /exit leaves)");
                }
                Ok(Some(String::new()))
            }
            Err(ReadlineError::Eof) => Ok(None),
            Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                terminal::note("(a byte that is not UTF-8: the line is discarded)");
                Ok(Some(String::new()))
            }
            Err(error) => Err(error).context("read from the terminal"),
        }
    }
}

/// The texts before each Enter after a backslash.
type Continued = Arc<Mutex<Vec<String>>>;

/// Enter after a backslash at the end of a line begins a new line. The backslash is removed when the text is complete: the
/// editor has no command that replaces it by a line break and goes on after that.
struct ContinueAfterBackslash(Continued);

impl ConditionalEventHandler for ContinueAfterBackslash {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        let (line, at) = (context.line(), context.pos());
        let is_end = at == line.len() && multi_line::is_continued(line) && !multi_line::is_open(line);
        is_end.then(|| {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
            Cmd::Newline
        })
    }
}

/// The text without the backslashes that continued a line. `continued` are the texts that ended with them, the shortest first;
/// one that was changed since keeps its backslash.
fn without_backslashes(mut text: String, continued: &[String]) -> String {
    for before in continued.iter().rev() {
        if text.strip_prefix(before.as_str()).is_some_and(|rest| rest.starts_with('\n')) {
            text.remove(before.len() - 1);
        }
    }
    text
}

/// Notices whether Ctrl-C discards an empty line.
struct NoticeInterrupt(Arc<AtomicBool>);

impl ConditionalEventHandler for NoticeInterrupt {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        self.0.store(context.line().is_empty(), Ordering::Relaxed);
        None
    }
}

/// Ctrl-Z. The editor's own command goes on before the program has stopped, where it has several threads.
struct Suspend;

impl ConditionalEventHandler for Suspend {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, _: &EventContext<'_>) -> Option<Cmd> {
        terminal_mode::suspend();
        Some(Cmd::Repaint)
    }
}

/// A line from a pipe or file, and those that continue it. Bytes that are not UTF-8 become replacement characters.
fn read_entry(input: &mut impl BufRead) -> Result<Option<String>> {
    let Some(mut entry) = read_line(input)? else { return Ok(None) };
    loop {
        let text = entry.trim_end_matches(['\r', '\n']);
        if !multi_line::is_open(text) {
            if !multi_line::is_continued(text) {
                return Ok(Some(entry));
            }
            entry.truncate(text.len() - 1);
            entry.push('\n');
        }
        let Some(line) = read_line(input)? else { return Ok(Some(entry)) };
        entry.push_str(&line);
        ensure!(entry.len() as u64 <= LINE_BYTES_MAX, "a message is longer than {} MiB", LINE_BYTES_MAX >> 20);
    }
}

fn read_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut line = Vec::new();
    let bytes = input.take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut line).context("read standard input")?;
    ensure!(bytes as u64 <= LINE_BYTES_MAX, "a line of standard input is longer than {} MiB", LINE_BYTES_MAX >> 20);
    Ok((bytes > 0).then(|| String::from_utf8_lossy(&line).into_owned()))
}

/// The file that keeps entries between conversations.
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
        assert_eq!(read_entry(&mut input).unwrap().as_deref(), Some("caf\u{fffd}\n"));
        assert_eq!(read_entry(&mut input).unwrap().as_deref(), Some("next"));
        assert_eq!(read_entry(&mut input).unwrap(), None);
    }

    #[test]
    fn lines_that_belong_together_are_one_entry() {
        let mut input = &b"a\\\nb\\\\\n\"\"\"\nc\\\n\nd\"\"\"\ne\\"[..];
        let mut entry = || read_entry(&mut input).unwrap();
        assert_eq!(entry().as_deref(), Some("a\nb\\\\\n"));
        assert_eq!(entry().as_deref(), Some("\"\"\"\nc\\\n\nd\"\"\"\n"));
        assert_eq!(entry().as_deref(), Some("e\n"));
        assert_eq!(entry(), None);
    }

    #[test]
    fn a_backslash_that_continued_a_line_is_removed() {
        let check = |text: &str, continued: &[&str], expected: &str| {
            let continued: Vec<_> = continued.iter().map(|&text| text.to_owned()).collect();
            assert_eq!(without_backslashes(text.to_owned(), &continued), expected);
        };
        check("a\\\nb", &["a\\"], "a\nb");
        check("a\\\nb\\\nc", &["a\\", "a\\\nb\\"], "a\nb\nc");
        check("a\\\nb", &[], "a\\\nb");
        check("x\\\nb", &["a\\"], "x\\\nb");
    }

    #[test]
    fn a_line_without_an_end_is_refused() {
        let mut input = io::BufReader::new(io::repeat(b'a'));
        assert!(read_entry(&mut input).unwrap_err().to_string().contains("64 MiB"));
    }
}
