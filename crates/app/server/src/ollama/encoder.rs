//! Encodes a generation as the lines of `/api/chat` or `/api/generate`, or as one body.

use std::time::{Duration, Instant};

use text::{Delta, Tokenizer};

use super::response::{
    OllamaCalledFunction, OllamaChatReply, OllamaDoneReason, OllamaGenerateReply, OllamaMetrics, OllamaReply,
    OllamaReplyMessage, OllamaToolCall,
};
use crate::error::ApiError;
use crate::generation::{BlockKind, ChoiceFinish, ChoiceOutput, GenerationEvent, OutputBlock, ScoredToken, Usage};
use crate::ids::new_id;
use crate::openai::{LogprobsBody, TokenLogprob};
use crate::stream::{StreamEncoder, StreamEvent};

/// Which of the two replies is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    Chat,
    Generate,
}

pub struct OllamaEncoder {
    header: ReplyHeader,
    tokenizer: Tokenizer,
    logprobs: bool,
    clock: ReplyClock,
    /// The tool call that is being generated: its name and arguments so far.
    call: Option<(String, String)>,
    calls: usize,
    /// The tokens of the prompt and the output, if the reply returns them.
    context: Option<Vec<u32>>,
    finish: ChoiceFinish,
}

/// What all lines of a reply have in common.
#[derive(Clone, Debug)]
pub struct ReplyHeader {
    pub kind: ReplyKind,
    /// The model's name as in the request.
    pub model: String,
}

/// The times of one request.
#[derive(Clone, Copy, Debug)]
pub struct ReplyClock {
    started: Instant,
    accepted: Instant,
    prefilled: Option<Instant>,
}

/// What one line says.
#[derive(Default)]
struct Piece {
    text: String,
    thinking: String,
    tool_calls: Vec<OllamaToolCall>,
    logprobs: Vec<TokenLogprob>,
}

/// What the last line adds.
struct End {
    reason: OllamaDoneReason,
    context: Option<Vec<u32>>,
    metrics: OllamaMetrics,
}

impl OllamaEncoder {
    /// For a generation that the engine has just accepted. `returns_context`: its events have tokens.
    pub fn new(
        header: ReplyHeader,
        tokenizer: Tokenizer,
        logprobs: bool,
        returns_context: bool,
        started: Instant,
    ) -> Self {
        Self {
            header,
            tokenizer,
            logprobs,
            clock: ReplyClock { started, accepted: Instant::now(), prefilled: None },
            call: None,
            calls: 0,
            context: returns_context.then(Vec::new),
            finish: ChoiceFinish::Stop,
        }
    }

    /// Notes times and tokens. Called with each event, streamed or not.
    pub fn observe(&mut self, event: &GenerationEvent) {
        let tokens = match event {
            GenerationEvent::Prefilled { prompt } => {
                self.clock.prefilled.get_or_insert_with(Instant::now);
                prompt
            }
            GenerationEvent::Delta { tokens, .. } => tokens,
            GenerationEvent::Finished(_) => return,
        };
        if let Some(context) = &mut self.context {
            context.extend(tokens.iter().map(|token| token.id.0));
        }
    }

    fn delta(&mut self, delta: Delta, piece: &mut Piece) {
        if !matches!(delta, Delta::Arguments { .. }) {
            self.end_call(piece, false);
        }
        match delta {
            Delta::Text(text) => piece.text += &text,
            Delta::Reasoning(text) => piece.thinking += &text,
            Delta::ToolCall { name, .. } => self.call = Some((name, String::new())),
            Delta::Arguments { json, .. } => {
                if let Some((_, arguments)) = &mut self.call {
                    *arguments += &json;
                }
            }
        }
    }

    fn end_call(&mut self, piece: &mut Piece, cut_off: bool) {
        let Some((name, arguments)) = self.call.take() else { return };
        piece.tool_calls.extend(tool_call(self.calls, name, &arguments, cut_off));
        self.calls += 1;
    }

    /// Log probabilities, without the token that ended the output.
    fn logprobs(&self, tokens: Vec<ScoredToken>) -> Vec<TokenLogprob> {
        if !self.logprobs {
            return Vec::new();
        }
        let is_text = |token: &ScoredToken| !self.tokenizer.eos_ids().contains(&token.id);
        let tokens: Vec<_> = tokens.into_iter().filter(is_text).collect();
        LogprobsBody::new(&self.tokenizer, &tokens).content
    }

    fn ending(&mut self, usage: Usage) -> End {
        let reason = match self.finish {
            ChoiceFinish::Length => OllamaDoneReason::Length,
            _ => OllamaDoneReason::Stop,
        };
        End { reason, context: self.context.take(), metrics: self.clock.metrics(usage) }
    }
}

impl StreamEncoder for OllamaEncoder {
    type Body = OllamaReply;

    fn event(&mut self, _choice: usize, event: GenerationEvent, _usage: Usage, out: &mut Vec<StreamEvent>) {
        self.observe(&event);
        let mut piece = Piece::default();
        match event {
            GenerationEvent::Prefilled { .. } => return,
            GenerationEvent::Delta { deltas, tokens } => {
                deltas.into_iter().for_each(|delta| self.delta(delta, &mut piece));
                piece.logprobs = self.logprobs(tokens);
            }
            GenerationEvent::Finished(finish) => {
                self.end_call(&mut piece, finish == ChoiceFinish::Length);
                self.finish = finish;
            }
        }
        if !piece.is_empty() {
            out.push(StreamEvent::json(&self.header.reply(piece, None)));
        }
    }

    fn end(&mut self, usage: Usage, out: &mut Vec<StreamEvent>) {
        let end = self.ending(usage);
        out.push(StreamEvent::json(&self.header.reply(Piece::default(), Some(end))));
    }

    fn error(&mut self, error: ApiError, out: &mut Vec<StreamEvent>) {
        out.push(StreamEvent::json(&error.ollama_body()));
    }

    fn into_body(mut self, mut outputs: Vec<ChoiceOutput>, usage: Usage) -> OllamaReply {
        let output = outputs.pop().unwrap_or_default();
        let mut piece = Piece {
            text: output.text(BlockKind::Text),
            thinking: output.text(BlockKind::Reasoning),
            logprobs: self.logprobs(output.tokens),
            ..Piece::default()
        };
        let last = output.blocks.len().saturating_sub(1);
        for (index, OutputBlock { kind, text, .. }) in output.blocks.into_iter().enumerate() {
            let BlockKind::ToolCall { name } = kind else { continue };
            let cut_off = index == last && output.finish == ChoiceFinish::Length;
            piece.tool_calls.extend(tool_call(self.calls, name, &text, cut_off));
            self.calls += 1;
        }
        self.finish = output.finish;
        let end = self.ending(usage);
        self.header.reply(piece, Some(end))
    }
}

impl ReplyHeader {
    /// The reply to a request without a prompt.
    pub fn idle(&self, reason: OllamaDoneReason) -> OllamaReply {
        self.reply(Piece::default(), Some(End { reason, context: None, metrics: OllamaMetrics::default() }))
    }

    fn reply(&self, piece: Piece, end: Option<End>) -> OllamaReply {
        let (model, created_at, done) = (self.model.clone(), jiff::Timestamp::now().to_string(), end.is_some());
        let (done_reason, context, metrics) = match end {
            None => (None, None, OllamaMetrics::default()),
            Some(End { reason, context, metrics }) => (Some(reason), context, metrics),
        };
        let Piece { text, thinking, tool_calls, logprobs } = piece;
        match self.kind {
            ReplyKind::Chat => {
                let message = OllamaReplyMessage { role: "assistant", content: text, thinking, tool_calls };
                OllamaReply::Chat(OllamaChatReply { model, created_at, message, done, done_reason, logprobs, metrics })
            }
            ReplyKind::Generate => OllamaReply::Generate(OllamaGenerateReply {
                model,
                created_at,
                response: text,
                thinking,
                done,
                done_reason,
                context,
                logprobs,
                metrics,
            }),
        }
    }
}

impl ReplyClock {
    fn metrics(&self, usage: Usage) -> OllamaMetrics {
        let now = Instant::now();
        let prefilled = self.prefilled.unwrap_or(now);
        OllamaMetrics {
            total_duration: Some(nanoseconds(now - self.started)),
            load_duration: Some(nanoseconds(self.accepted - self.started)),
            prompt_eval_count: Some(usage.prompt_tokens),
            prompt_eval_duration: Some(nanoseconds(prefilled - self.accepted)),
            eval_count: Some(usage.completion_tokens),
            eval_duration: Some(nanoseconds(now - prefilled)),
        }
    }
}

pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Piece {
    fn is_empty(&self) -> bool {
        self.text.is_empty() && self.thinking.is_empty() && self.tool_calls.is_empty() && self.logprobs.is_empty()
    }
}

/// `None` for a call that was cut off before its arguments were complete: a client would run it with wrong ones.
fn tool_call(index: usize, name: String, arguments: &str, cut_off: bool) -> Option<OllamaToolCall> {
    let arguments = match arguments.trim() {
        "" if !cut_off => Default::default(),
        json => serde_json::from_str(json).ok()?,
    };
    Some(OllamaToolCall { id: new_id("call_"), function: OllamaCalledFunction { index, name, arguments } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn encoder(kind: ReplyKind) -> OllamaEncoder {
        let tokenizer = testing::oracle("qwen3/model-f32/tokenizer.json");
        let header = ReplyHeader { kind, model: "m".to_owned() };
        OllamaEncoder::new(header, Tokenizer::from_file(tokenizer).unwrap(), false, false, Instant::now())
    }

    /// Checks that the lines of these deltas, and the one body, have this content.
    fn check(deltas: Vec<Delta>, finish: ChoiceFinish, lines: Value, message: Value) {
        let (mut streaming, mut whole) = (encoder(ReplyKind::Chat), ChoiceOutput::default());
        let mut out = Vec::new();
        let deltas = deltas.into_iter().map(|delta| GenerationEvent::Delta { deltas: vec![delta], tokens: Vec::new() });
        for event in deltas.chain([GenerationEvent::Finished(finish)]) {
            whole.push(event.clone());
            streaming.event(0, event, Usage::default(), &mut out);
        }
        streaming.end(Usage::default(), &mut out);
        let message_of = |reply: &Value| {
            let mut message = reply["message"].clone();
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                assert!(call.as_object_mut().unwrap().remove("id").unwrap().as_str().unwrap().starts_with("call_"));
            }
            message
        };
        let sent: Vec<Value> = out.iter().map(|event| serde_json::from_slice(&event.data).unwrap()).collect();
        let (last, parts) = sent.split_last().unwrap();
        assert_eq!(parts.iter().map(message_of).collect::<Value>(), lines);
        assert!(parts.iter().all(|line| line["done"] == false));
        assert_eq!((&last["done"], &last["message"]["content"]), (&json!(true), &json!("")));
        let body = encoder(ReplyKind::Chat).into_body(vec![whole], Usage::default());
        let body = serde_json::to_value(body).unwrap();
        assert_eq!(message_of(&body), message);
        assert_eq!((&body["done"], &body["done_reason"]), (&json!(true), &last["done_reason"]));
    }

    fn call(index: usize, name: &str, json: &str) -> [Delta; 2] {
        [Delta::ToolCall { index, name: name.into() }, Delta::Arguments { index, json: json.into() }]
    }

    #[test]
    fn a_tool_call_is_one_line_when_it_is_complete() {
        let mut deltas = vec![Delta::Reasoning("hm".into()), Delta::Text("I look".into())];
        deltas.extend(call(0, "find", "{\"a\":"));
        deltas.push(Delta::Arguments { index: 0, json: " 1}".into() });
        deltas.push(Delta::ToolCall { index: 1, name: "stop".into() });
        let find = json!({"function": {"index": 0, "name": "find", "arguments": {"a": 1}}});
        let stop = json!({"function": {"index": 1, "name": "stop", "arguments": {}}});
        check(
            deltas,
            ChoiceFinish::ToolCalls,
            json!([
                {"role": "assistant", "content": "", "thinking": "hm"},
                {"role": "assistant", "content": "I look"},
                {"role": "assistant", "content": "", "tool_calls": [find]},
                {"role": "assistant", "content": "", "tool_calls": [stop]},
            ]),
            json!({"role": "assistant", "content": "I look", "thinking": "hm", "tool_calls": [find, stop]}),
        );
    }

    #[test]
    fn a_call_that_was_cut_off_is_not_sent() {
        for json in ["{\"a\": [1, ", ""] {
            let message = json!({"role": "assistant", "content": ""});
            check(call(0, "find", json).into(), ChoiceFinish::Length, json!([]), message);
        }
    }

    #[test]
    fn a_reply_without_a_prompt_has_its_own_reason() {
        let reply = encoder(ReplyKind::Generate).header.idle(OllamaDoneReason::Unload);
        let mut reply = serde_json::to_value(reply).unwrap();
        assert!(reply["created_at"].take().as_str().unwrap().ends_with('Z'));
        let expected = json!({"model": "m", "created_at": null, "response": "", "done": true, "done_reason": "unload"});
        assert_eq!(reply, expected);
    }
}
