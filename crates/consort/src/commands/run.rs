//! `consort run`: one prompt, one answer.

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

use crate::generate::{AnswerEnd, GeneratedAnswer, generate};
use crate::interrupt;
use crate::language::Language;
use crate::options::{ModelOptions, RequestedCapacity, ThreadOption};
use crate::sampling::SamplingOptions;
use crate::store::Store;

const PROMPT_BYTES_MAX: u64 = 64 << 20;
/// RequestedCapacity for prompt and answer when nothing else is said, and for the answer behind a long prompt.
const CONTEXT_DEFAULT: usize = 8192;
const ANSWER_ROOM: usize = 2048;

/// Answer one prompt
///
/// MODEL is a hub model (owner/name, or owner/name:Q4_K_M for one of its GGUF files), a folder or a .gguf file; without
/// it the default model answers. PROMPT is a text, or - to read one from standard input.
#[derive(Args, Debug)]
#[command(override_usage = "consort run [OPTIONS] [MODEL] <PROMPT>")]
pub struct RunArgs {
    /// One word is the prompt, two are the model and the prompt.
    #[arg(required = true, num_args = 1..=2, value_name = "[MODEL] PROMPT", hide = true)]
    words: Vec<String>,
    /// Instructions that come before the prompt
    #[arg(long)]
    system: Option<String>,
    /// Let the model continue the prompt as it is, without its chat template
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
        let language = Language::open(&files.path, &checkpoint)
            .with_context(|| format!("read the text side of {}", files.name))?;
        let tokens = if self.raw { language.raw(&prompt)? } else { language.conversation(&self.messages(prompt))? };
        let wished = match self.sampling.max_tokens {
            Some(max) => tokens.len().saturating_add(max),
            None => CONTEXT_DEFAULT.max(tokens.len() + ANSWER_ROOM),
        };
        let positions = self.options.context(&checkpoint, wished.max(tokens.len() + 1))?;
        // No step has more tokens than the prompt: working memory for more would only be wasted. When ranks were lost, though,
        // the answer is computed again too.
        let most = if self.options.ranks() == 1 { tokens.len().max(1) } else { positions };
        let chunk = self.options.chunk().min(most);
        let capacity = RequestedCapacity { rows: chunk, ..RequestedCapacity::full(1, positions, 1) };
        let executor = self.options.load(&files.path, &checkpoint, &self.threads, capacity)?.into_executor();
        let mut engine = Engine::new(executor, chunk);
        let loaded = start.elapsed();

        let mut out = stdout().lock();
        let params = self.sampling.params(&language.defaults);
        let answer = generate(&mut engine, &language.tokenizer, tokens, params, self.sampling.max_tokens, |piece| {
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
        Ok(if answer.ending == AnswerEnd::Cancelled { ExitCode::from(interrupt::EXIT_CODE) } else { ExitCode::SUCCESS })
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
    // The newline that a shell puts behind the last line is not part of the question.
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// Whether a lone word, which stands for the prompt, was surely meant as the model.
fn is_model(word: &str) -> bool {
    let path = Path::new(word);
    (word.ends_with(".gguf") && path.is_file()) || path.join("config.json").is_file()
}
