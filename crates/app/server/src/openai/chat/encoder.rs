//! Encodes a generation as a chat completion: as `chat.completion.chunk` events or as one body.

use serde::Serialize;
use text::{Delta, Tokenizer};

use super::response::{ChatChoice, ChatCompletion, LogprobsBody, call_id, finish_reason};
use crate::error::ApiError;
use crate::generation::{ChoiceFinish, ChoiceOutput, GenerationEvent, ScoredToken, Usage};
use crate::ids;
use crate::openai::chunk::ChunkWriter;
use crate::openai::common_fields::StreamOptions;
use crate::stream::{StreamEncoder, StreamEvent};

pub struct ChatEncoder {
    chunks: ChunkWriter,
    tokenizer: Tokenizer,
    choices: usize,
    logprobs: bool,
}

#[derive(Serialize)]
struct ChatChunkChoice {
    index: usize,
    delta: DeltaBody,
    logprobs: Option<LogprobsBody>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct DeltaBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta; 1]>,
}

#[derive(Serialize)]
struct CallDelta {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionDelta,
}

#[derive(Serialize)]
struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

impl ChatEncoder {
    pub fn new(model: &str, tokenizer: Tokenizer, choices: usize, logprobs: bool, options: StreamOptions) -> Self {
        let chunks = ChunkWriter::new("chatcmpl-", "chat.completion.chunk", model, options);
        Self { chunks, tokenizer, choices, logprobs }
    }

    fn chunk(&self, index: usize, delta: DeltaBody, tokens: &[ScoredToken], end: Option<ChoiceFinish>) -> StreamEvent {
        let logprobs = (self.logprobs && !tokens.is_empty()).then(|| LogprobsBody::new(&self.tokenizer, tokens));
        let finish_reason = end.as_ref().map(finish_reason);
        self.chunks.choice(ChatChunkChoice { index, delta, logprobs, finish_reason })
    }
}

impl StreamEncoder for ChatEncoder {
    type Body = ChatCompletion;

    fn start(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.usage = usage;
        let first = || DeltaBody { role: Some("assistant"), content: Some(String::new()), ..DeltaBody::default() };
        out.extend((0..self.choices).map(|index| self.chunk(index, first(), &[], None)));
    }

    fn event(&mut self, choice: usize, event: GenerationEvent, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.usage = usage;
        match event {
            GenerationEvent::Prefilled { .. } => {}
            // The text of these tokens is not final yet, but their log probabilities are.
            GenerationEvent::Delta { deltas, tokens } if deltas.is_empty() => {
                out.push(self.chunk(choice, DeltaBody::default(), &tokens, None));
            }
            GenerationEvent::Delta { deltas, tokens } => {
                let mut tokens = tokens.as_slice();
                let chunk = |delta| self.chunk(choice, DeltaBody::from(delta), std::mem::take(&mut tokens), None);
                out.extend(deltas.into_iter().map(chunk));
            }
            GenerationEvent::Finished(finish) => out.push(self.chunk(choice, DeltaBody::default(), &[], Some(finish))),
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.end(usage, out);
    }

    fn cancelled(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        self.chunks.usage = usage;
        let choice = |index| ChatChunkChoice {
            index,
            delta: DeltaBody::default(),
            logprobs: None,
            finish_reason: Some("cancelled"),
        };
        out.extend((0..self.choices).map(|index| self.chunks.choice(choice(index))));
        self.end(usage, out);
    }

    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::json(&error.openai_body()));
    }

    fn into_body(self, outputs: Vec<ChoiceOutput>, usage: Usage) -> ChatCompletion {
        let choice = |(index, output): (usize, ChoiceOutput)| ChatChoice {
            index,
            logprobs: self.logprobs.then(|| LogprobsBody::new(&self.tokenizer, &output.tokens)),
            finish_reason: finish_reason(&output.finish),
            message: output.into(),
        };
        ChatCompletion {
            choices: outputs.into_iter().enumerate().map(choice).collect(),
            id: self.chunks.id,
            object: "chat.completion",
            created: ids::unix_now(),
            model: self.chunks.model,
            usage: usage.into(),
        }
    }
}

impl From<Delta> for DeltaBody {
    fn from(delta: Delta) -> Self {
        let call = |index, id: Option<String>, name, arguments| {
            let r#type = id.is_some().then_some("function");
            Some([CallDelta { index, id, r#type, function: FunctionDelta { name, arguments } }])
        };
        match delta {
            Delta::Text(text) => Self { content: Some(text), ..Self::default() },
            Delta::Reasoning(text) => Self { reasoning_content: Some(text), ..Self::default() },
            Delta::ToolCall { index, name } => {
                Self { tool_calls: call(index, Some(call_id()), Some(name), String::new()), ..Self::default() }
            }
            Delta::Arguments { index, json } => Self { tool_calls: call(index, None, None, json), ..Self::default() },
        }
    }
}
