//! Generates one answer from the tokens of a prompt, and passes on its text piece by piece.

use anyhow::{Result, bail};
use engine::{Engine, EventKind, Executor, FinishReason, Finished, Request, SamplingParams, Timings};
use text::{Delta, Detokenizer, ReplyFormat, ReplyParser, SpecialTokens, Tokenizer, Tool};
use types::TokenId;

use crate::interrupt::InterruptGuard;
use crate::text_assets::{EncodedPrompt, TextAssets};
use crate::waiting_line::WaitingLine;

#[derive(Debug)]
pub struct GeneratedAnswer {
    pub text: String,
    pub tokens: Vec<TokenId>,
    pub ending: GenerationEnd,
    pub timings: Timings,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerationEnd {
    /// An end-of-sequence token.
    Stop,
    /// The answer has `--max-tokens` tokens.
    MaxTokens,
    /// Prompt and answer fill the context.
    ContextFull,
    /// Ctrl-C.
    Cancelled,
}

impl GenerationEnd {
    /// The `finish_reason` of OpenAI's API, and `cancelled`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::MaxTokens | Self::ContextFull => "length",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Runs `engine` on one prompt until the generation ends or `interrupt` cancels it. Calls `show` with text as soon as it is
/// final.
pub fn generate<E: Executor>(
    engine: &mut Engine<E>,
    tokenizer: &Tokenizer,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    tokens_max: Option<usize>,
    interrupt: &InterruptGuard,
    show: impl FnMut(&str) -> Result<()>,
) -> Result<GeneratedAnswer> {
    let request = request(tokenizer, prompt, sampling, tokens_max);
    run(engine, request, tokenizer.detokenizer(SpecialTokens::Hide), interrupt, show)
}

/// The same for the reply to a conversation: tells text from reasoning.
pub fn generate_reply<E: Executor>(
    engine: &mut Engine<E>,
    assets: &TextAssets,
    prompt: EncodedPrompt,
    sampling: SamplingParams,
    tokens_max: Option<usize>,
    interrupt: &InterruptGuard,
    mut show: impl FnMut(Delta) -> Result<()>,
) -> Result<GeneratedAnswer> {
    let tokenizer = &assets.tokenizer;
    let format = assets.template.as_ref().map_or_else(|| ReplyFormat::detect("", false), |t| t.reply_format().clone());
    let no_tools: [Tool; 0] = [];
    let mut parser = ReplyParser::new(&format, no_tools).after_prompt(&prompt.text);
    let detokenizer = tokenizer.detokenizer(SpecialTokens::Hide).with_shown_tokens(format.marker_ids(tokenizer));
    let request = request(tokenizer, prompt.tokens, sampling, tokens_max);
    let show_piece = |piece: &str| parser.push(piece).into_iter().try_for_each(&mut show);
    let answer = run(engine, request, detokenizer, interrupt, show_piece)?;
    parser.finish().into_iter().try_for_each(show)?;
    Ok(answer)
}

fn request(
    tokenizer: &Tokenizer,
    prompt: Vec<TokenId>,
    sampling: SamplingParams,
    tokens_max: Option<usize>,
) -> Request {
    let greedy = Request::greedy(prompt, tokens_max.unwrap_or(usize::MAX));
    Request { sampling, eos: tokenizer.eos_ids().into(), ..greedy }
}

fn run<E: Executor>(
    engine: &mut Engine<E>,
    request: Request,
    mut detokenizer: Detokenizer,
    interrupt: &InterruptGuard,
    mut show: impl FnMut(&str) -> Result<()>,
) -> Result<GeneratedAnswer> {
    let (mut text, mut tokens, mut events) = (String::new(), Vec::new(), Vec::new());
    let request = engine.add(request)?;
    let mut waiting = WaitingLine::new();
    let finished = loop {
        if interrupt.is_interrupted()
            && let Some(finished) = engine.cancel(request)
        {
            break finished;
        }
        if !engine.step(&mut events)? && events.is_empty() {
            bail!("the engine stopped in the middle of an answer");
        }
        waiting.update(engine.waiting_for().as_ref());
        let mut finished = None;
        for event in events.drain(..) {
            match event.kind {
                EventKind::Token(sampled) => {
                    tokens.push(sampled.token);
                    let piece = detokenizer.push(sampled.token);
                    if !piece.is_empty() {
                        text.push_str(&piece);
                        show(&piece)?;
                    }
                }
                EventKind::Finished(end) => finished = Some(end),
                _ => {}
            }
        }
        if let Some(finished) = finished {
            break finished;
        }
    };
    waiting.clear();
    let rest = detokenizer.finish();
    if !rest.is_empty() {
        text.push_str(&rest);
        show(&rest)?;
    }
    let Finished { reason, timings } = finished;
    let ending = match reason {
        FinishReason::Eos(_) | FinishReason::Complete => GenerationEnd::Stop,
        FinishReason::Length => GenerationEnd::MaxTokens,
        FinishReason::Context => GenerationEnd::ContextFull,
        FinishReason::Cancelled => GenerationEnd::Cancelled,
        FinishReason::Failed(error) => bail!(error),
    };
    Ok(GeneratedAnswer { text, tokens, ending, timings })
}
