//! `consort run`: generates one answer to one prompt.

mod input;

use std::io::{Write, stdout};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use engine::{Engine, EngineOptions, Executor};
use model::Checkpoint;
use serde_json::json;
use text::Message;

use crate::generate::{GeneratedAnswer, GenerationEnd, generate};
use crate::interrupt::{self, InterruptGuard};
use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{CONTEXT_DEFAULT, ModelOption, ModelOptions, ThreadOption};
use crate::placement::Placement;
use crate::sampling::SamplingOptions;
use crate::stats::StatsOption;
use crate::terminal;
use crate::text_assets::TextAssets;
use input::{NamedInput, RunInput};

/// The tokens reserved for the answer when the prompt needs a larger context than the default one.
const ANSWER_TOKENS_RESERVED: usize = 2048;

/// Generate an answer to one prompt
///
/// MODEL is a name of the catalogue (qwen3:4b), a hub model (owner/name, or owner/name:Q4_K_M for one of its GGUF
/// files), a folder or a .gguf file; the default is the best that suits this machine. PROMPT is a text. Standard
/// input, unless it is a terminal, is the prompt, or follows the one given.
#[derive(Args, Debug)]
#[command(override_usage = "consort run [OPTIONS] [MODEL] [PROMPT]")]
pub struct RunArgs {
    /// One argument is the prompt, two are the model and the prompt. More are refused in words.
    #[arg(num_args = 0.., value_name = "PROMPT", hide = true)]
    words: Vec<String>,
    #[command(flatten)]
    model: ModelOption,
    /// The same as PROMPT
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The model if none is named: see `configuration`.
    #[arg(long, hide = true)]
    default_model: Option<String>,
    /// System prompt
    #[arg(long)]
    system: Option<String>,
    /// Continue the prompt as plain text, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Print one JSON object at the end: text, tokens, finish_reason, prompt_tokens, timings
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stats: StatsOption,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    pub options: ModelOptions,
}

impl RunArgs {
    pub fn run(self) -> Result<ExitCode> {
        let config = ModelConfig::new(&self.options)?;
        let named = NamedInput { model: self.model.model_option.as_deref(), prompt: self.prompt.as_deref() };
        let RunInput { model, prompt } = RunInput::read(named, &self.words)?;
        let model = model.or_else(|| self.default_model.clone());
        interrupt::install()?;
        let files = config.resolve(model.as_deref())?;

        let start = Instant::now();
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        let text = TextAssets::of(&files, &checkpoint).context("read the tokenizer and template")?;
        let tokens = if self.raw { text.raw(&prompt)? } else { text.conversation(&self.messages(prompt))? };
        let default_context = match self.sampling.max_tokens {
            Some(max) => tokens.len().saturating_add(max),
            None => CONTEXT_DEFAULT.max(tokens.len() + ANSWER_TOKENS_RESERVED),
        };
        let positions = config.execution.context(&checkpoint, default_context.max(tokens.len() + 1))?;
        // A step never has more tokens than the prompt, so a larger working memory would be wasted. After the loss of a
        // rank or a machine, however, the tokens of the answer are computed again as well.
        let most = if matches!(config.placement, Placement::Here) { tokens.len().max(1) } else { positions };
        let chunk = config.execution.chunk().min(most);
        let draft_tokens_max = config.placement.draft_tokens_default();
        let capacity = RequestedCapacity { rows: chunk, ..RequestedCapacity::full(1, positions, 1 + draft_tokens_max) };
        let executor: Box<dyn Executor> = config.load(&files.path, &checkpoint, &self.threads, capacity)?;
        let mut engine =
            Engine::with_options(executor, EngineOptions { chunk, draft_tokens_max, ..EngineOptions::default() });
        let loaded = start.elapsed();

        let mut out = stdout().lock();
        let params = self.sampling.params(&text.defaults);
        let (max, interrupt) = (self.sampling.max_tokens, InterruptGuard::new());
        let answer = generate(&mut engine, &text.tokenizer, tokens, params, max, &interrupt, |piece| {
            if !self.json {
                out.write_all(terminal::for_stdout(piece).as_bytes())?;
                out.flush()?;
            }
            Ok(())
        })?;
        if self.json {
            terminal::print_line(report(&files.name, &answer, loaded))?;
        } else if !answer.text.ends_with('\n') {
            writeln!(out)?;
        }
        if answer.ending == GenerationEnd::ContextFull {
            let more =
                if positions < checkpoint.description().positions_max { "; --context makes it larger" } else { "" };
            terminal::note(&format!("(cut off: the context of {positions} tokens is full{more})"));
        }
        if !self.json {
            self.stats.print(&answer.timings);
        }
        Ok(if answer.ending == GenerationEnd::Cancelled {
            ExitCode::from(interrupt::EXIT_CODE)
        } else {
            ExitCode::SUCCESS
        })
    }

    fn messages(&self, prompt: String) -> Vec<Message> {
        let system = self.system.as_ref().map(|text| Message::new("system", text));
        system.into_iter().chain([Message::new("user", prompt)]).collect()
    }
}

fn report(model: &str, answer: &GeneratedAnswer, loaded: Duration) -> serde_json::Value {
    let GeneratedAnswer { text, tokens, ending, timings } = answer;
    json!({
        "model": model,
        "text": text,
        "tokens": tokens.iter().map(|token| token.0).collect::<Vec<_>>(),
        "finish_reason": ending.name(),
        "prompt_tokens": timings.prompt_tokens,
        "timings": {
            "load_s": loaded.as_secs_f64(),
            "prefill_s": timings.prefill.as_secs_f64(),
            "decode_s": timings.decode.as_secs_f64(),
            "prefill_tokens_per_s": timings.prefill_tokens_per_s(),
            "decode_tokens_per_s": timings.decode_tokens_per_s(),
        },
    })
}
