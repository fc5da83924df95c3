//! `consort chat`: a conversation in the terminal.

use std::env;
use std::fs;
use std::io::{Write, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use engine::{Engine, Executor, SamplingParams};
use model::Checkpoint;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use text::Message;
use types::TokenId;

use crate::generate::{AnswerEnd, generate};
use crate::interrupt;
use crate::language::Language;
use crate::options::{ModelOptions, RequestedCapacity, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::store::Store;

const CONTEXT_DEFAULT: usize = 8192;
/// The part of the context that is kept free for an answer.
const ANSWER_PART: usize = 4;

/// Talk to a model
///
/// Ctrl-C stops an answer, Ctrl-D or /exit leaves, /clear begins a new conversation.
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// A hub model (owner/name, owner/name:Q4_K_M), a folder or a .gguf file; none is the default model
    model: Option<String>,
    /// Instructions that come before the conversation
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    options: ModelOptions,
}

impl ChatArgs {
    pub fn run(self) -> Result<ExitCode> {
        interrupt::install()?;
        let files = Store::from_environment()?.resolve(self.model.as_deref())?;
        let checkpoint = Checkpoint::open(&files.path).with_context(|| format!("open {}", files.name))?;
        let language = Language::open(&files.path, &checkpoint)
            .with_context(|| format!("read the text side of {}", files.name))?;
        let positions = self.options.context(&checkpoint, CONTEXT_DEFAULT)?;
        let capacity = RequestedCapacity::full(1, positions, 1);
        let executor = self.options.load(&files.path, &checkpoint, &self.threads, capacity)?.into_executor();
        let engine = Engine::new(executor, self.options.chunk());
        eprintln!("{}. Ctrl-C stops an answer, /clear begins anew, /exit leaves.", files.name);

        let system = self.system.as_ref().map(|text| Message::new("system", text));
        let mut conversation = Conversation { engine, language, options: self.sampling, system, turns: Vec::new() };
        let mut editor = DefaultEditor::new().context("open the terminal")?;
        let history = history_file();
        if let Some(path) = &history {
            // A first conversation has no history yet.
            let _ = editor.load_history(path);
        }
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => break,
                Err(error) => return Err(error).context("read from the terminal"),
            };
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let _ = editor.add_history_entry(line);
            match line {
                "/exit" | "/quit" | "/bye" => break,
                "/clear" => {
                    conversation.turns.clear();
                    eprintln!("(a new conversation)");
                }
                _ if line.starts_with('/') => eprintln!("commands: /clear, /exit"),
                _ => conversation.say(line)?,
            }
        }
        if let Some(path) = &history {
            // Not worth an error at the end of a good conversation.
            let _ = path.parent().map(fs::create_dir_all).and_then(|_| editor.save_history(path).ok());
        }
        Ok(ExitCode::SUCCESS)
    }
}

struct Conversation<E: Executor> {
    engine: Engine<E>,
    language: Language,
    options: SamplingOptions,
    system: Option<Message>,
    /// User and assistant in turn.
    turns: Vec<Message>,
}

impl<E: Executor> Conversation<E> {
    /// One turn: what the user says, and the answer as it comes.
    fn say(&mut self, line: &str) -> Result<()> {
        self.turns.push(Message::new("user", line));
        let prompt = match self.prompt() {
            Ok(prompt) => prompt,
            Err(error) => return self.give_up(error),
        };
        let params: SamplingParams = self.options.params(&self.language.defaults);
        let mut out = stdout().lock();
        let max = self.options.max_tokens;
        let answered = generate(&mut self.engine, &self.language.tokenizer, prompt, params, max, |piece| {
            out.write_all(piece.as_bytes())?;
            Ok(out.flush()?)
        });
        let answered = match answered {
            Ok(answered) => answered,
            Err(error) if error.is::<std::io::Error>() => return Err(error),
            Err(error) => return self.give_up(error),
        };
        writeln!(out)?;
        if answered.ending == AnswerEnd::Length {
            eprintln!("(cut off: no room for more)");
        }
        self.turns.push(Message::new("assistant", answered.text));
        Ok(())
    }

    /// The tokens of the conversation. When they do not leave enough of the context for an answer, its oldest turns are forgotten.
    fn prompt(&mut self) -> Result<Vec<TokenId>> {
        let positions = self.engine.capacity().tokens_max();
        loop {
            let messages: Vec<_> = self.system.iter().chain(&self.turns).cloned().collect();
            let tokens = self.language.conversation(&messages)?;
            if tokens.len() <= positions - positions / ANSWER_PART || self.turns.len() < 3 {
                return Ok(tokens);
            }
            eprintln!("(the conversation is too long: its oldest turn is forgotten)");
            self.turns.drain(..2);
        }
    }

    /// A turn that cannot be answered is told and forgotten; the conversation goes on.
    fn give_up(&mut self, error: anyhow::Error) -> Result<()> {
        eprintln!("error: {error:#}");
        self.turns.pop();
        Ok(())
    }
}

/// Where the lines that were typed are kept between conversations.
fn history_file() -> Option<PathBuf> {
    let state = match env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => env::home_dir()?.join(".local/state"),
    };
    Some(state.join("consort/chat_history"))
}
