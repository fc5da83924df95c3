//! Encodes a generation as a completion: as `text_completion` events or as one body.

use std::sync::Arc;

use serde::Serialize;
use text::{Delta, Tokenizer};

use super::logprobs::{CompletionLogprobs, TextOffset};
use super::{Completion, CompletionChoice};
use crate::error::ApiError;
use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, GenerationEvent, ScoredToken, Usage};
use crate::ids;
use crate::openai::chunk::ChunkWriter;
use crate::openai::common_fields::StreamOptions;
use crate::stream::{StreamEncoder, StreamEvent};

pub struct CompletionEncoder {
    chunks: ChunkWriter,
    tokenizer: Tokenizer,
    choices: Vec<ChoiceState>,
    logprobs: bool,
}

/// The state of one choice.
struct ChoiceState {
    /// The text before the output: the prompt if `echo` is set, else empty.
    echo: Arc<str>,
    offset: TextOffset,
}

#[derive(Serialize)]
struct CompletionChunkChoice {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
}

impl CompletionEncoder {
    /// `echoes` contains the text before each choice.
    pub fn new(
        model: &str,
        tokenizer: Tokenizer,
        echoes: Vec<Arc<str>>,
        logprobs: bool,
        options: StreamOptions,
    ) -> Self {
        let chunks = ChunkWriter::new("cmpl-", "text_completion", model, options);
        let choices = echoes.into_iter().map(|echo| ChoiceState { echo, offset: TextOffset::default() }).collect();
        Self { chunks, tokenizer, choices, logprobs }
    }

    fn chunk(&mut self, index: usize, text: String, tokens: &[ScoredToken], end: Option<ChoiceFinish>) -> StreamEvent {
        let logprobs = (self.logprobs && !tokens.is_empty()).then(|| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.extend(&self.tokenizer, tokens, &mut self.choices[index].offset);
            logprobs
        });
        let finish_reason = end.as_ref().map(finish_reason);
        self.chunks.choice(CompletionChunkChoice { index, text, logprobs, finish_reason })
    }
}

impl StreamEncoder for CompletionEncoder {
    type Body = Completion;

    fn event(&mut self, choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.usage = usage;
        match event {
            GenerationEvent::Prefilled { prompt } => {
                let echo = std::mem::take(&mut self.choices[choice].echo);
                if !echo.is_empty() {
                    out.push(self.chunk(choice, echo.to_string(), &prompt, None));
                }
            }
            GenerationEvent::Delta { deltas, tokens } => {
                let text = deltas.into_iter().filter_map(|delta| match delta {
                    Delta::Text(text) => Some(text),
                    _ => None,
                });
                let text = text.collect();
                out.push(self.chunk(choice, text, &tokens, None));
            }
            GenerationEvent::Finished(finish) => out.push(self.chunk(choice, String::new(), &[], Some(finish))),
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.end(usage, out);
    }

    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::json(&error.openai_body()));
    }

    fn into_body(self, outputs: Vec<ChoiceOutput>, usage: Usage) -> Completion {
        let choice = |(index, (output, mut state)): (usize, (ChoiceOutput, ChoiceState))| {
            let logprobs = self.logprobs.then(|| {
                let mut logprobs = CompletionLogprobs::default();
                logprobs.extend(&self.tokenizer, &output.prompt, &mut state.offset);
                logprobs.extend(&self.tokenizer, &output.tokens, &mut state.offset);
                logprobs
            });
            let text = [&*state.echo, &output.text(BlockKind::Text)].concat();
            CompletionChoice { index, text, logprobs, finish_reason: finish_reason(&output.finish) }
        };
        Completion {
            id: self.chunks.id,
            object: "text_completion",
            created: ids::unix_now(),
            model: self.chunks.model,
            choices: outputs.into_iter().zip(self.choices).enumerate().map(choice).collect(),
            usage: usage.into(),
        }
    }
}

fn finish_reason(finish: &ChoiceFinish) -> &'static str {
    if *finish == ChoiceFinish::Length { "length" } else { "stop" }
}
