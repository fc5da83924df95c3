//! Generates one answer from the tokens of a prompt, and passes on its text piece by piece.

use anyhow::{Result, bail};
use engine::{Engine, EventKind, Executor, FinishReason, Finished, Request, SamplingParams, Timings};
use text::{SpecialTokens, Tokenizer};
use types::TokenId;

use crate::interrupt::InterruptGuard;
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
    mut show: impl FnMut(&str) -> Result<()>,
) -> Result<GeneratedAnswer> {
    let mut detokenizer = tokenizer.detokenizer(SpecialTokens::Hide);
    let (mut text, mut tokens, mut events) = (String::new(), Vec::new(), Vec::new());
    let tokens_max = tokens_max.unwrap_or(usize::MAX);
    let request =
        engine.add(Request { sampling, eos: tokenizer.eos_ids().into(), ..Request::greedy(prompt, tokens_max) })?;
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
