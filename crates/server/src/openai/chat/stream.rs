//! A chat completion as `chat.completion.chunk` events.

use serde::Serialize;
use text::{Delta, Tokenizer};

use super::response::{LogprobsBody, call_id, finish_reason};
use crate::answer::{Finish, Part, Token, Usage};
use crate::error::ApiError;
use crate::openai::chunk::Chunks;
use crate::sse::{Event, EventWriter};

pub struct ChunkWriter {
    chunks: Chunks,
    tokenizer: Tokenizer,
    choices: usize,
    logprobs: bool,
}

#[derive(Serialize)]
struct ChunkChoice {
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

impl ChunkWriter {
    pub fn new(model: &str, tokenizer: Tokenizer, choices: usize, logprobs: bool, include_usage: bool) -> Self {
        let chunks = Chunks::new("chatcmpl-", "chat.completion.chunk", model, include_usage);
        Self { chunks, tokenizer, choices, logprobs }
    }

    fn choice(&self, index: usize, delta: DeltaBody, tokens: &[Token], finish: Option<&Finish>) -> Event {
        let logprobs = (self.logprobs && !tokens.is_empty()).then(|| LogprobsBody::new(&self.tokenizer, tokens));
        let finish_reason = finish.map(|finish| finish_reason(Some(finish)));
        self.chunks.choice(ChunkChoice { index, delta, logprobs, finish_reason })
    }
}

impl EventWriter for ChunkWriter {
    fn begin(&mut self) -> Vec<Event> {
        let first = || DeltaBody { role: Some("assistant"), content: Some(String::new()), ..DeltaBody::default() };
        (0..self.choices).map(|index| self.choice(index, first(), &[], None)).collect()
    }

    fn part(&mut self, choice: usize, part: Part) -> Vec<Event> {
        match part {
            Part::Prefilled { .. } => Vec::new(),
            Part::Ended(finish) => vec![self.choice(choice, DeltaBody::default(), &[], Some(&finish))],
            // Their text is not certain yet, their log probabilities are.
            Part::Said { deltas, tokens } if deltas.is_empty() => {
                vec![self.choice(choice, DeltaBody::default(), &tokens, None)]
            }
            Part::Said { deltas, tokens } => {
                let mut tokens = tokens.as_slice();
                let event = |delta| self.choice(choice, DeltaBody::from(delta), std::mem::take(&mut tokens), None);
                deltas.into_iter().map(event).collect()
            }
        }
    }

    fn end(&mut self, usage: Usage) -> Vec<Event> {
        self.chunks.end(usage)
    }

    fn fail(&mut self, error: &ApiError) -> Vec<Event> {
        vec![Event::data(&error.openai())]
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
