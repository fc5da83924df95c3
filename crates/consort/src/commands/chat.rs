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

use crate::generate::{GenerationEnd, generate};
use crate::interrupt;
use crate::options::{ModelOptions, RequestedCapacity, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::store::Store;
use crate::text_assets::TextAssets;

const CONTEXT_DEFAULT: usize = 8192;
/// One part in this many of the context is reserved for the answer.
const ANSWER_CONTEXT_DIVISOR: usize = 4;

/// Chat with a model in the terminal
///
/// Ctrl-C stops an answer, Ctrl-D or /exit leaves, /clear begins a new conversation.
#[derive(Args, Debug)]
pub struct ChatArgs {
    /// Hub model (owner/name, owner/name:Q4_K_M), folder or .gguf file [default: a small model]
    model: Option<String>,
    /// System prompt
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
        let text = TextAssets::open(&files.path, &checkpoint)
            .with_context(|| format!("read the tokenizer and template of {}", files.name))?;
        let positions = self.options.context(&checkpoint, CONTEXT_DEFAULT)?;
        let capacity = RequestedCapacity::full(1, positions, 1);
        let executor = self.options.load(&files.path, &checkpoint, &self.threads, capacity)?.into_executor();
        let engine = Engine::new(executor, self.options.chunk());
        eprintln!("{}. Ctrl-C stops an answer, /clear begins anew, /exit leaves.", files.name);

        let system = self.system.as_ref().map(|text| Message::new("system", text));
        let mut conversation = Conversation { engine, text, options: self.sampling, system, turns: Vec::new() };
        let mut editor = DefaultEditor::new().context("open the terminal")?;
        let history = history_file();
        if let Some(path) = &history {
            // On the first run there is no history file.
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
            // A history that cannot be saved is not an error.
            let _ = path.parent().map(fs::create_dir_all).and_then(|_| editor.save_history(path).ok());
        }
        Ok(ExitCode::SUCCESS)
    }
}

struct Conversation<E: Executor> {
    engine: Engine<E>,
    text: TextAssets,
    options: SamplingOptions,
    system: Option<Message>,
    /// Alternating messages of user and assistant.
    turns: Vec<Message>,
}

impl<E: Executor> Conversation<E> {
    /// One turn: sends the user's message and prints the answer as it is generated.
    fn say(&mut self, line: &str) -> Result<()> {
        self.turns.push(Message::new("user", line));
        let prompt = match self.prompt() {
            Ok(prompt) => prompt,
            Err(error) => return self.discard_turn(error),
        };
        let params: SamplingParams = self.options.params(&self.text.defaults);
        let mut out = stdout().lock();
        let max = self.options.max_tokens;
        let answered = generate(&mut self.engine, &self.text.tokenizer, prompt, params, max, |piece| {
            out.write_all(piece.as_bytes())?;
            Ok(out.flush()?)
        });
        let answered = match answered {
            Ok(answered) => answered,
            Err(error) if error.is::<std::io::Error>() => return Err(error),
            Err(error) => return self.discard_turn(error),
        };
        writeln!(out)?;
        if answered.ending == GenerationEnd::Length {
            eprintln!("(cut off: the context is full)");
        }
        self.turns.push(Message::new("assistant", answered.text));
        Ok(())
    }

    /// The tokens of the conversation. If they leave too little of the context for an answer, the oldest turns are removed.
    fn prompt(&mut self) -> Result<Vec<TokenId>> {
        let positions = self.engine.capacity().tokens_max();
        loop {
            let messages: Vec<_> = self.system.iter().chain(&self.turns).cloned().collect();
            let tokens = self.text.conversation(&messages)?;
            if tokens.len() <= positions - positions / ANSWER_CONTEXT_DIVISOR || self.turns.len() < 3 {
                return Ok(tokens);
            }
            eprintln!("(the conversation is too long: its oldest turn is forgotten)");
            self.turns.drain(..2);
        }
    }

    /// Prints the error and removes the turn that failed. The conversation continues.
    fn discard_turn(&mut self, error: anyhow::Error) -> Result<()> {
        eprintln!("error: {error:#}");
        self.turns.pop();
        Ok(())
    }
}

/// The file that keeps typed lines between conversations.
fn history_file() -> Option<PathBuf> {
    let state = match env::var_os("XDG_STATE_HOME").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => env::home_dir()?.join(".local/state"),
    };
    Some(state.join("consort/chat_history"))
}
