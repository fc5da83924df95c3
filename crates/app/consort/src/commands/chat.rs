//! `consort chat`: a conversation in the terminal.

mod answerer;
mod attachment;
mod command;
mod completion;
mod conversation;
mod input;
mod local;
mod multi_line;
mod options;
mod quiet_input;
mod remote;
mod settings;
mod transcript;
mod type_ahead;

use std::env;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::interrupt;
use crate::model_config::ModelConfig;
use crate::options::ModelName;
use crate::rendering::Rendering;
use crate::sampling::SamplingOptions;
use crate::stats::StatsOption;
use crate::terminal;
use crate::terminal_mode;
use crate::usage::UsageError;
use answerer::Answerer;
use attachment::Attachment;
use command::{ChatCommand, HELP};
use completion::ModelNames;
use conversation::Conversation;
use input::{ChatInput, Entry};
use local::{LocalModel, LocalSetup};
use options::LocalArgs;
pub use options::is_for_model_here;
use remote::{RemoteServer, ServerAddress};
use transcript::Transcripts;

/// Models that `/model` lists.
const MODELS_SHOWN_MAX: usize = 50;

/// Chat with a model in the terminal
///
/// Ctrl-C or Esc stops an answer, Ctrl-D or /exit leaves, /clear begins a new conversation, /help lists all commands.
#[derive(Args, Debug)]
pub struct ChatArgs {
    #[command(flatten)]
    model: ModelName,
    /// Chat with a model on a server with OpenAI's API instead of running one
    #[arg(long, value_name = "URL", value_parser = remote::server_url)]
    url: Option<String>,
    /// API key of that server [default: OPENAI_API_KEY]
    #[arg(long, value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// System prompt
    #[arg(long)]
    system: Option<String>,
    /// Print answers as the model writes them, without rendering their Markdown
    #[arg(long)]
    plain: bool,
    #[command(flatten)]
    stats: StatsOption,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    local: LocalArgs,
}

impl ChatArgs {
    pub fn run(mut self) -> Result<ExitCode> {
        let source = self.source()?;
        interrupt::install()?;
        terminal_mode::restore_at_end()?;
        // Keys that are typed while the model is loaded wait as well.
        let mut input = ChatInput::open()?;
        let answerer = source.open()?;
        terminal::note(&format!(
            "{}. Ctrl-C stops an answer, /help lists the commands, /exit leaves.",
            answerer.model()
        ));
        input.set_models(answerer.model_names());
        let conversation = Conversation::new(self.sampling, self.system, Rendering::of_stdout(self.plain), self.stats);
        Chat { conversation, answerer, transcripts: Transcripts::default() }.run(&mut input)?;
        input.close();
        Ok(ExitCode::SUCCESS)
    }

    /// Checks the options.
    fn source(&mut self) -> Result<Source> {
        let model = self.model.get().map(str::to_owned);
        let Some(url) = &self.url else {
            let config = ModelConfig::new(self.local.model_options())?;
            return Ok(Source::Local(LocalSetup { config, threads: self.local.threads().clone() }, model));
        };
        if let Some(option) = self.local.typed() {
            let message =
                format!("--{option} is for a model that this command runs: with --url, the server decides that");
            return Err(UsageError::new(message).into());
        }
        let key = self.api_key.take().or_else(|| env::var("OPENAI_API_KEY").ok()).filter(|key| !key.is_empty());
        Ok(Source::Remote(ServerAddress::new(url, key), model))
    }
}

/// What is to answer, before it is loaded or asked.
enum Source {
    Local(LocalSetup, Option<String>),
    Remote(ServerAddress, Option<String>),
}

impl Source {
    fn open(self) -> Result<Answerer> {
        Ok(match self {
            Self::Local(setup, model) => Answerer::Local(Box::new(LocalModel::load(setup, model.as_deref())?)),
            Self::Remote(address, model) => Answerer::Remote(Box::new(RemoteServer::connect(address, model)?)),
        })
    }
}

struct Chat {
    conversation: Conversation,
    answerer: Answerer,
    transcripts: Transcripts,
}

impl Chat {
    fn run(mut self, input: &mut ChatInput) -> Result<()> {
        while let Some(entry) = input.next()? {
            let line = match entry {
                Entry::Block(text) => {
                    self.conversation.say(&text, &mut self.answerer)?;
                    continue;
                }
                Entry::Line(line) => line,
            };
            match ChatCommand::parse(&line) {
                None => self.conversation.say(&line, &mut self.answerer)?,
                Some(Ok(ChatCommand::Exit)) => break,
                Some(Ok(ChatCommand::Model(name))) => {
                    self = self.with_model(name)?;
                    input.set_models(self.answerer.model_names());
                }
                Some(Ok(command)) => self.obey(command)?,
                Some(Err(why)) => terminal::note(&format!("({why})")),
            }
        }
        Ok(())
    }

    /// Goes on with another model. If it cannot be loaded, with the one of before.
    fn with_model(mut self, name: &str) -> Result<Self> {
        let (answerer, switched) = self.answerer.switched(name)?;
        self.answerer = answerer;
        match switched {
            Ok(()) => terminal::note(&format!("({} answers from now on)", self.answerer.model())),
            Err(error) => {
                terminal::error(&error);
                terminal::note(&format!("(it is still {})", self.answerer.model()));
            }
        }
        Ok(self)
    }

    /// Runs one command. What goes wrong is told; only an output that cannot be written ends the chat.
    fn obey(&mut self, command: ChatCommand<'_>) -> Result<()> {
        let conversation = &mut self.conversation;
        let told = match command {
            // These change more than the conversation.
            ChatCommand::Exit | ChatCommand::Model(_) => return Ok(()),
            ChatCommand::Retry => return conversation.retry(&mut self.answerer),
            ChatCommand::Help => Ok(HELP.to_owned()),
            ChatCommand::Clear => {
                conversation.clear();
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
            ChatCommand::ShowModels => Ok(self.models()),
            ChatCommand::ShowFiles => Ok(match &conversation.files[..] {
                [] => "(no file is part of the next message: /file FILE adds one)".to_owned(),
                files => files.iter().map(Attachment::description).collect::<Vec<_>>().join("\n"),
            }),
            ChatCommand::File(name) => Attachment::read(name).map(|file| {
                let told = format!("({}: part of the next message)", file.description());
                conversation.files.push(file);
                told
            }),
            ChatCommand::ShowSettings => Ok(self.answerer.settings(&conversation.sampling)),
            ChatCommand::Set { name, value } => {
                settings::set(&mut conversation.sampling, name, value).map(|()| format!("({name} is {value})"))
            }
            ChatCommand::Think(thinks) => match self.answerer.has_reasoning_switch() {
                true => {
                    conversation.thinks = thinks;
                    Ok(match thinks {
                        Some(true) => "(the model reasons before it answers)".to_owned(),
                        Some(false) => "(the model answers without reasoning)".to_owned(),
                        None => "(the model decides whether it reasons)".to_owned(),
                    })
                }
                false => Err(format!("{} cannot be told whether to reason", self.answerer.model())),
            },
            ChatCommand::Save(file) => {
                let system = conversation.system.as_deref();
                self.transcripts.save(file, self.answerer.model(), system, &conversation.turns)
            }
            ChatCommand::Load(file) => self.transcripts.load(file).map(|(system, turns)| {
                let told = format!("({} loaded)", transcript::counted(turns.len()));
                (conversation.system, conversation.turns) = (system, turns);
                told
            }),
        };
        terminal::note(&told.unwrap_or_else(|why| format!("({why})")));
        Ok(())
    }

    /// The model, and the others that can be named.
    fn models(&self) -> String {
        let names = self.answerer.model_names().names();
        let others = names.iter().filter(|name| *name != self.answerer.model());
        let mut lines = vec![format!("{} (answers now)", self.answerer.model())];
        lines.extend(others.clone().take(MODELS_SHOWN_MAX).cloned());
        match others.count().saturating_sub(MODELS_SHOWN_MAX) {
            0 => {}
            more => lines.push(format!("and {more} more")),
        }
        if let ModelNames::Store = self.answerer.model_names() {
            lines.push("/model NAME goes on with another one; it is downloaded if it is not here".to_owned());
        } else {
            lines.push("/model NAME goes on with another one".to_owned());
        }
        lines.join("\n")
    }
}
