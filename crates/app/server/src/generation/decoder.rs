//! `ChoiceDecoder`: one sequence of a generation, from tokens to text, reasoning and tool calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{Failure, Logprobs, RequestHandle, SampleError, Sampled};
use text::{Delta, Detokenizer, RepeatedCalls, ReplyParser, StopMatch, StopStrings};
use types::TokenId;

use super::{ChoiceFinish, GenerationEvent, ScoredToken};
use crate::error::ApiError;

pub(super) struct ChoiceDecoder {
    /// Dropping the handle cancels the request. The flag tells the metrics that the output was complete.
    running: Option<(RequestHandle, Arc<AtomicBool>)>,
    /// Kept if its log probabilities were requested.
    prompt: Vec<TokenId>,
    text: Option<(Detokenizer, StopStrings)>,
    /// None: all output is text.
    parser: Option<ReplyParser>,
    wants_tokens: bool,
    include_end_token: bool,
    single_tool_call: bool,
    /// The field of the request that the grammar comes from, if there is one.
    grammar_param: Option<&'static str>,
    /// Drops a tool call that was made before; the output ends there.
    repeated_calls: RepeatedCalls,
    /// The last delta was reasoning.
    reasoning: bool,
    called: bool,
    ended: bool,
}

impl ChoiceDecoder {
    pub fn new(detokenizer: Detokenizer, stops: StopStrings, parser: Option<ReplyParser>) -> Self {
        Self {
            running: None,
            prompt: Vec::new(),
            text: Some((detokenizer, stops)),
            parser,
            wants_tokens: false,
            include_end_token: false,
            single_tool_call: false,
            grammar_param: None,
            repeated_calls: RepeatedCalls::default(),
            reasoning: false,
            called: false,
            ended: false,
        }
    }

    /// Adds tokens to the events.
    pub fn with_tokens(mut self) -> Self {
        self.wants_tokens = true;
        self
    }

    /// Adds the token that ends the output to the events, although it is not part of the text.
    pub fn with_end_token(mut self, include_end_token: bool) -> Self {
        self.include_end_token = include_end_token;
        self
    }

    /// Ends the output before a second tool call.
    pub fn with_one_call_only(mut self, single_tool_call: bool) -> Self {
        self.single_tool_call = single_tool_call;
        self
    }

    /// The output follows a grammar from this field of the request.
    pub fn with_grammar(mut self, param: Option<&'static str>) -> Self {
        self.grammar_param = param;
        self
    }

    /// Whether the output starts within reasoning, because the prompt opened it.
    pub fn with_reasoning(mut self, reasoning: bool) -> Self {
        self.reasoning = reasoning;
        self
    }

    /// Adds the prompt's tokens to the first event.
    pub fn with_prompt(mut self, prompt: Vec<TokenId>) -> Self {
        self.prompt = prompt;
        self
    }

    /// `completed` is set when the output is complete before the engine ends the request.
    pub fn run(&mut self, handle: RequestHandle, completed: Arc<AtomicBool>) {
        self.running = Some((handle, completed));
    }

    /// The output is complete. Cancels the request if it still runs.
    pub fn stop(&mut self) {
        if let Some((_ticket, completed)) = self.running.take() {
            completed.store(true, Ordering::Relaxed);
        }
        self.ended = true;
    }

    /// Why the engine gave up. A grammar that no output can follow is the request's fault.
    pub fn failure(&self, failure: Failure) -> ApiError {
        match (&failure, self.grammar_param) {
            (Failure::Constraint(_) | Failure::Sample(SampleError::NothingAllowed), Some(param)) => {
                ApiError::invalid(param, failure.to_string()).code("unsatisfiable_grammar")
            }
            _ => failure.into(),
        }
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn has_called(&self) -> bool {
        self.called
    }

    /// Whether the last token was part of reasoning, as far as it is known yet.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning
    }

    /// The prompt's tokens, if they were requested.
    pub fn prompt_tokens(&mut self, logprobs: Vec<Option<Logprobs>>) -> Vec<ScoredToken> {
        let logprobs = logprobs.into_iter().chain(std::iter::repeat_with(|| None));
        let tokens = std::mem::take(&mut self.prompt).into_iter().zip(logprobs);
        tokens.map(|(id, logprobs)| ScoredToken { id, logprobs }).collect()
    }

    /// The output that is final after this token, and the reason if the output ends with it.
    pub fn token(&mut self, sampled: Sampled) -> (Option<GenerationEvent>, Option<ChoiceFinish>) {
        let Some((detokenizer, stops)) = &mut self.text else { return (None, None) };
        let piece = detokenizer.push(sampled.token);
        let (mut deltas, mut finish) = match stops.push(&piece) {
            StopMatch::None { text } => (self.parse(&text), None),
            StopMatch::Found { text, stop } => {
                let mut deltas = self.parse(&text);
                deltas.extend(self.parse_end());
                (deltas, Some(ChoiceFinish::StopString(stop)))
            }
        };
        let has_second = self.single_tool_call && truncate_after_first_call(&mut deltas);
        deltas = self.repeated_calls.filter(deltas);
        if has_second || self.repeated_calls.has_repeated() {
            finish = Some(ChoiceFinish::ToolCalls);
        }
        let tokens = if self.wants_tokens { vec![sampled.into()] } else { Vec::new() };
        (self.delta(deltas, tokens), finish)
    }

    /// The output that was held back, after the last token. `end` is the token that ended the output.
    pub fn finish(&mut self, end: Option<Sampled>) -> Option<GenerationEvent> {
        let (detokenizer, mut stops) = self.text.take()?;
        let text = match stops.push(&detokenizer.finish()) {
            StopMatch::None { text } => text + &stops.finish(),
            StopMatch::Found { text, .. } => text,
        };
        let mut deltas = self.parse(&text);
        deltas.extend(self.parse_end());
        if self.single_tool_call {
            truncate_after_first_call(&mut deltas);
        }
        deltas = self.repeated_calls.filter(deltas);
        let wanted = self.wants_tokens && self.include_end_token;
        self.delta(deltas, end.filter(|_| wanted).map(ScoredToken::from).into_iter().collect())
    }

    fn delta(&mut self, deltas: Vec<Delta>, tokens: Vec<ScoredToken>) -> Option<GenerationEvent> {
        if let Some(last) = deltas.last() {
            self.reasoning = matches!(last, Delta::Reasoning(_));
        }
        self.called |= deltas.iter().any(|delta| matches!(delta, Delta::ToolCall { .. }));
        (!deltas.is_empty() || !tokens.is_empty()).then_some(GenerationEvent::Delta { deltas, tokens })
    }

    fn parse(&mut self, text: &str) -> Vec<Delta> {
        match &mut self.parser {
            _ if text.is_empty() => Vec::new(),
            Some(parser) => parser.push(text),
            None => vec![Delta::Text(text.to_owned())],
        }
    }

    fn parse_end(&mut self) -> Vec<Delta> {
        self.parser.take().map_or_else(Vec::new, ReplyParser::finish)
    }
}

/// Drops a second tool call and what follows it. Returns whether there was one.
fn truncate_after_first_call(deltas: &mut Vec<Delta>) -> bool {
    let second = deltas
        .iter()
        .position(|delta| matches!(delta, Delta::ToolCall { index: 1.., .. } | Delta::Arguments { index: 1.., .. }));
    deltas.truncate(second.unwrap_or(deltas.len()));
    second.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_call_is_cut_off_with_all_that_follows() {
        let call = |index| Delta::ToolCall { index, name: "f".to_owned() };
        let arguments = |index| Delta::Arguments { index, json: "{}".to_owned() };
        let mut one = vec![Delta::Text("a".to_owned()), call(0), arguments(0), Delta::Text("b".to_owned())];
        let whole = one.clone();
        assert!(!truncate_after_first_call(&mut one));
        assert_eq!(one, whole);
        let mut two = vec![arguments(0), call(1), arguments(1), Delta::Text("b".to_owned())];
        assert!(truncate_after_first_call(&mut two));
        assert_eq!(two, [arguments(0)]);
    }
}
