//! `consort chat`: a conversation in the terminal.

mod command;
mod conversation;
mod input;
mod settings;
mod transcript;
mod word_wrap;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use engine::{Engine, Executor};
use model::Checkpoint;

use crate::interrupt;
use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{CONTEXT_DEFAULT, ModelName, ModelOptions, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::stats::StatsOption;
use crate::terminal;
use crate::text_assets::TextAssets;
use command::{ChatCommand, HELP};
use conversation::Conversation;
use input::InputLines;
use transcript::Transcripts;

/// Chat with a model in the terminal
///
/// Ctrl-C stops an answer, Ctrl-D or /exit leaves, /clear begins a new conversation, /help lists all commands.
#[derive(Args, Debug)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelName,
    /// System prompt
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    stats: StatsOption,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    options: ModelOptions,
}

impl ChatArgs {
    pub fn run(self) -> Result<ExitCode> {
        let model = ModelConfig::new(&self.options)?;
        interrupt::install()?;
        let files = model.resolve(self.model.get())?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let text = TextAssets::open(&files.path, &checkpoint).context("read the tokenizer and template")?;
        let positions = model.execution.context(&checkpoint, CONTEXT_DEFAULT)?;
        let capacity = RequestedCapacity::full(1, positions, 1);
        let executor: Box<dyn Executor> = model.load(&files.path, &checkpoint, &self.threads, capacity)?;
        let engine = Engine::new(executor, model.execution.chunk());
        terminal::note(&format!("{}. Ctrl-C stops an answer, /help lists the commands, /exit leaves.", files.name));

        let mut conversation = Conversation::new(engine, text, self.sampling, self.stats, self.system);
        let mut transcripts = Transcripts::new(files.name);
        let mut input = InputLines::open()?;
        while let Some(line) = input.next()? {
            match ChatCommand::parse(&line) {
                None => conversation.say(&line)?,
                Some(Ok(ChatCommand::Exit)) => break,
                Some(Ok(command)) => obey(command, &mut conversation, &mut transcripts)?,
                Some(Err(why)) => terminal::note(&format!("({why})")),
            }
        }
        input.close();
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs one command. What goes wrong is told; only an output that cannot be written ends the chat.
fn obey<E: Executor>(
    command: ChatCommand<'_>,
    conversation: &mut Conversation<E>,
    transcripts: &mut Transcripts,
) -> Result<()> {
    let told = match command {
        ChatCommand::Exit => return Ok(()),
        ChatCommand::Retry => return conversation.retry(),
        ChatCommand::Help => Ok(HELP.to_owned()),
        ChatCommand::Clear => {
            conversation.turns.clear();
            Ok("(a new conversation)".to_owned())
        }
        ChatCommand::ShowSystem => Ok(match &conversation.system {
            Some(text) => format!("(system prompt: {text})"),
            None => "(no system prompt)".to_owned(),
        }),
        ChatCommand::System(text) => {
            conversation.system = text.map(str::to_owned);
            Ok(if text.is_some() { "(system prompt set)" } else { "(no system prompt)" }.to_owned())
        }
        ChatCommand::ShowSettings => Ok(settings::list(&conversation.sampling, conversation.defaults())),
        ChatCommand::Set { name, value } => {
            settings::set(&mut conversation.sampling, name, value).map(|()| format!("({name} is {value})"))
        }
        ChatCommand::Save(file) => transcripts.save(file, conversation.system.as_deref(), &conversation.turns),
        ChatCommand::Load(file) => transcripts.load(file).map(|(system, turns)| {
            let told = format!("({} loaded)", transcript::counted(turns.len()));
            (conversation.system, conversation.turns) = (system, turns);
            told
        }),
    };
    terminal::note(&told.unwrap_or_else(|why| format!("({why})")));
    Ok(())
}
