//! `ChoiceDecoder`: one sequence of a generation, from tokens to text, reasoning and tool calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{Logprobs, RequestHandle, Sampled};
use text::{Delta, Detokenizer, ReplyParser, StopMatch, StopStrings};
use types::TokenId;

use super::{ChoiceFinish, GenerationEvent, ScoredToken};

pub(super) struct ChoiceDecoder {
    /// Dropping the ticket cancels the request; the flag tells metrics that the output was complete.
    running: Option<(RequestHandle, Arc<AtomicBool>)>,
    /// Kept where its log probabilities were asked for.
    prompt: Vec<TokenId>,
    text: Option<(Detokenizer, StopStrings)>,
    /// None: all output is text.
    parser: Option<ReplyParser>,
    wants_tokens: bool,
    wants_end: bool,
    one_call_only: bool,
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
            wants_end: false,
            one_call_only: false,
            reasoning: false,
            called: false,
            ended: false,
        }
    }

    /// Events carry their tokens.
    pub fn with_tokens(mut self) -> Self {
        self.wants_tokens = true;
        self
    }

    /// Events carry the token that ends the output as well, though it is not part of the text.
    pub fn with_end_token(mut self, wants_end: bool) -> Self {
        self.wants_end = wants_end;
        self
    }

    /// A second tool call ends the output, and is not part of it.
    pub fn with_one_call_only(mut self, one_call_only: bool) -> Self {
        self.one_call_only = one_call_only;
        self
    }

    /// The prompt opened the reasoning.
    pub fn with_reasoning(mut self, reasoning: bool) -> Self {
        self.reasoning = reasoning;
        self
    }

    /// The first event carries the prompt's tokens.
    pub fn with_prompt(mut self, prompt: Vec<TokenId>) -> Self {
        self.prompt = prompt;
        self
    }

    /// `completed` is set when the output is complete before the engine says so.
    pub fn run(&mut self, ticket: RequestHandle, completed: Arc<AtomicBool>) {
        self.running = Some((ticket, completed));
    }

    /// The output is complete. Cancels the request if it still runs.
    pub fn stop(&mut self) {
        if let Some((_ticket, completed)) = self.running.take() {
            completed.store(true, Ordering::Relaxed);
        }
        self.ended = true;
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn has_called(&self) -> bool {
        self.called
    }

    /// Whether the last token was part of reasoning, as far as is known yet.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning
    }

    pub fn prompt_tokens(&mut self, logprobs: Vec<Option<Logprobs>>) -> Vec<ScoredToken> {
        let tokens = std::mem::take(&mut self.prompt).into_iter().zip(logprobs);
        tokens.map(|(id, logprobs)| ScoredToken { id, logprobs }).collect()
    }

    /// The output that this token makes certain, and whether the output ends with it.
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
        if self.one_call_only && cut_second_call(&mut deltas) {
            finish = Some(ChoiceFinish::ToolCalls);
        }
        let tokens = if self.wants_tokens { vec![sampled.into()] } else { Vec::new() };
        (self.delta(deltas, tokens), finish)
    }

    /// The output that was held back, when no more tokens come; `end` is the token that ended it.
    pub fn finish(&mut self, end: Option<Sampled>) -> Option<GenerationEvent> {
        let (detokenizer, mut stops) = self.text.take()?;
        let text = match stops.push(&detokenizer.finish()) {
            StopMatch::None { text } => text + &stops.finish(),
            StopMatch::Found { text, .. } => text,
        };
        let mut deltas = self.parse(&text);
        deltas.extend(self.parse_end());
        if self.one_call_only {
            cut_second_call(&mut deltas);
        }
        let wanted = self.wants_tokens && self.wants_end;
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
fn cut_second_call(deltas: &mut Vec<Delta>) -> bool {
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
        assert!(!cut_second_call(&mut one));
        assert_eq!(one, whole);
        let mut two = vec![arguments(0), call(1), arguments(1), Delta::Text("b".to_owned())];
        assert!(cut_second_call(&mut two));
        assert_eq!(two, [arguments(0)]);
    }
}
