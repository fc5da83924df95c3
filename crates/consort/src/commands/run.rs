//! `consort run`: generates one answer to one prompt.

use std::io::{Read, Write, stdin, stdout};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use engine::Engine;
use model::Checkpoint;
use serde_json::json;
use text::Message;

use crate::generate::{GeneratedAnswer, GenerationEnd, generate};
use crate::interrupt;
use crate::options::{ModelOptions, RequestedCapacity, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::store::Store;
use crate::text_assets::TextAssets;

const PROMPT_BYTES_MAX: u64 = 64 << 20;
/// The default context, and the tokens reserved for the answer when the prompt needs a larger context.
const CONTEXT_DEFAULT: usize = 8192;
const ANSWER_TOKENS_RESERVED: usize = 2048;

/// Generate an answer to one prompt
///
/// MODEL is a hub model (owner/name, or owner/name:Q4_K_M for one of its GGUF files), a folder or a .gguf file; the default
/// is a small model. PROMPT is a text, or - to read it from standard input.
#[derive(Args, Debug)]
#[command(override_usage = "consort run [OPTIONS] [MODEL] <PROMPT>")]
pub struct RunArgs {
    /// One argument is the prompt, two are the model and the prompt.
    #[arg(required = true, num_args = 1..=2, value_name = "[MODEL] PROMPT", hide = true)]
    words: Vec<String>,
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
    threads: ThreadOption,
    #[command(flatten)]
    sampling: SamplingOptions,
    #[command(flatten)]
    options: ModelOptions,
}

impl RunArgs {
    pub fn run(self) -> Result<ExitCode> {
        let (name, prompt) = match self.words.as_slice() {
            [prompt] => (None, prompt),
            [name, prompt, ..] => (Some(name.as_str()), prompt),
            [] => bail!("a prompt is missing"),
        };
        if name.is_none() && is_model(prompt) {
            bail!("{prompt} is a model, and a prompt is missing; `consort chat {prompt}` talks to it");
        }
        let prompt = if prompt == "-" { read_stdin()? } else { prompt.clone() };
        ensure!(!prompt.trim().is_empty(), "the prompt is empty");
        interrupt::install()?;
        let files = Store::from_environment()?.resolve(name)?;

        let start = Instant::now();
        let checkpoint = Checkpoint::open(&files.path).with_context(|| format!("open {}", files.name))?;
        let text = TextAssets::open(&files.path, &checkpoint)
            .with_context(|| format!("read the tokenizer and template of {}", files.name))?;
        let tokens = if self.raw { text.raw(&prompt)? } else { text.conversation(&self.messages(prompt))? };
        let default_context = match self.sampling.max_tokens {
            Some(max) => tokens.len().saturating_add(max),
            None => CONTEXT_DEFAULT.max(tokens.len() + ANSWER_TOKENS_RESERVED),
        };
        let positions = self.options.context(&checkpoint, default_context.max(tokens.len() + 1))?;
        // A step never has more tokens than the prompt, so a larger working memory would be wasted. After the loss of a
        // rank, however, the tokens of the answer are computed again as well.
        let most = if self.options.ranks() == 1 { tokens.len().max(1) } else { positions };
        let chunk = self.options.chunk().min(most);
        let capacity = RequestedCapacity { rows: chunk, ..RequestedCapacity::full(1, positions, 1) };
        let executor = self.options.load(&files.path, &checkpoint, &self.threads, capacity)?.into_executor();
        let mut engine = Engine::new(executor, chunk);
        let loaded = start.elapsed();

        let mut out = stdout().lock();
        let params = self.sampling.params(&text.defaults);
        let answer = generate(&mut engine, &text.tokenizer, tokens, params, self.sampling.max_tokens, |piece| {
            if !self.json {
                out.write_all(piece.as_bytes())?;
                out.flush()?;
            }
            Ok(())
        })?;
        if self.json {
            writeln!(out, "{}", report(&files.name, &answer, loaded))?;
        } else if !answer.text.ends_with('\n') {
            writeln!(out)?;
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

fn read_stdin() -> Result<String> {
    let mut text = String::new();
    stdin()
        .lock()
        .take(PROMPT_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .context("read the prompt from standard input")?;
    if text.len() as u64 > PROMPT_BYTES_MAX {
        bail!("the prompt is longer than {} MiB", PROMPT_BYTES_MAX >> 20);
    }
    // The final newline from the shell is not part of the prompt.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// Whether a single argument, which should be the prompt, is the path of a model.
fn is_model(word: &str) -> bool {
    let path = Path::new(word);
    (word.ends_with(".gguf") && path.is_file()) || path.join("config.json").is_file()
}
