//! A completion as `text_completion` events.

use serde::Serialize;
use text::Delta;

use super::logprobs::{CompletionLogprobs, Offsets};
use super::{Shape, finish_reason};
use crate::answer::{Finish, Part, Token, Usage};
use crate::error::ApiError;
use crate::openai::chunk::Chunks;
use crate::sse::{Event, EventWriter};

pub struct CompletionWriter {
    chunks: Chunks,
    shape: Shape,
    offsets: Vec<Offsets>,
}

#[derive(Serialize)]
struct ChunkChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl CompletionWriter {
    pub(super) fn new(model: &str, shape: Shape, include_usage: bool) -> Self {
        let offsets = shape.echoes.iter().map(|_| Offsets::default()).collect();
        Self { chunks: Chunks::new("cmpl-", "text_completion", model, include_usage), shape, offsets }
    }

    fn choice(&mut self, index: usize, text: String, tokens: &[Token], finish: Option<&Finish>) -> Event {
        let logprobs = (self.shape.logprobs && !tokens.is_empty()).then(|| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.extend(&self.shape.tokenizer, tokens, &mut self.offsets[index]);
            logprobs
        });
        let finish_reason = finish.map(|finish| finish_reason(Some(finish)));
        self.chunks.choice(ChunkChoice { index, text, logprobs, finish_reason })
    }
}

impl EventWriter for CompletionWriter {
    fn begin(&mut self) -> Vec<Event> {
        Vec::new()
    }

    fn part(&mut self, choice: usize, part: Part) -> Vec<Event> {
        match part {
            Part::Prefilled { prompt } => {
                let echo = std::mem::take(&mut self.shape.echoes[choice]);
                if echo.is_empty() { Vec::new() } else { vec![self.choice(choice, echo, &prompt, None)] }
            }
            Part::Said { deltas, tokens } => {
                let text = deltas.into_iter().filter_map(|delta| match delta {
                    Delta::Text(text) => Some(text),
                    _ => None,
                });
                let text = text.collect();
                vec![self.choice(choice, text, &tokens, None)]
            }
            Part::Ended(finish) => vec![self.choice(choice, String::new(), &[], Some(&finish))],
        }
    }

    fn end(&mut self, usage: Usage) -> Vec<Event> {
        self.chunks.end(usage)
    }

    fn fail(&mut self, error: &ApiError) -> Vec<Event> {
        vec![Event::data(&error.openai())]
    }
}
