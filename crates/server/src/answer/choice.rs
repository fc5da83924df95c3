//! `Choice`: one sequence of an answer, from tokens to text, reasoning and calls.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::{Logprobs, RequestHandle, Sampled};
use text::{Delta, Detokenizer, ReplyParser, StopMatch, StopStrings};
use types::TokenId;

use super::{Finish, Part, Token};

pub(super) struct Choice {
    /// Dropping the handle cancels the request; the flag says that this is no loss.
    running: Option<(RequestHandle, Arc<AtomicBool>)>,
    /// Kept where its log probabilities are wanted.
    prompt: Vec<TokenId>,
    text: Option<(Detokenizer, StopStrings)>,
    /// None: all text is text.
    parser: Option<ReplyParser>,
    wants_tokens: bool,
    wants_end: bool,
    one_call_only: bool,
    /// The last that was said was reasoning.
    reasoning: bool,
    called: bool,
    ended: bool,
}

impl Choice {
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

    /// Parts tell their tokens.
    pub fn with_tokens(mut self) -> Self {
        self.wants_tokens = true;
        self
    }

    /// The token that ends the answer is told as well, though it is no part of the text.
    pub fn with_end_token(mut self, wants_end: bool) -> Self {
        self.wants_end = wants_end;
        self
    }

    /// A second call ends the answer, and is not part of it.
    pub fn with_one_call_only(mut self, one_call_only: bool) -> Self {
        self.one_call_only = one_call_only;
        self
    }

    /// The prompt opened the reasoning.
    pub fn with_reasoning(mut self, reasoning: bool) -> Self {
        self.reasoning = reasoning;
        self
    }

    /// The first part tells the prompt's tokens.
    pub fn with_prompt(mut self, prompt: Vec<TokenId>) -> Self {
        self.prompt = prompt;
        self
    }

    /// `satisfied` is set when the answer is complete before the engine says so.
    pub fn run(&mut self, handle: RequestHandle, satisfied: Arc<AtomicBool>) {
        self.running = Some((handle, satisfied));
    }

    /// The answer is complete. Cancels what may still run.
    pub fn stop(&mut self) {
        if let Some((_handle, satisfied)) = self.running.take() {
            satisfied.store(true, Ordering::Relaxed);
        }
        self.ended = true;
    }

    pub fn has_ended(&self) -> bool {
        self.ended
    }

    pub fn has_called(&self) -> bool {
        self.called
    }

    /// Whether the last token was part of reasoning, as far as can be told.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning
    }

    pub fn prompt_tokens(&mut self, logprobs: Vec<Option<Logprobs>>) -> Vec<Token> {
        let tokens = std::mem::take(&mut self.prompt).into_iter().zip(logprobs);
        tokens.map(|(id, logprobs)| Token { id, logprobs }).collect()
    }

    /// What this token makes certain, and whether the answer ends with it.
    pub fn token(&mut self, sampled: Sampled) -> (Option<Part>, Option<Finish>) {
        let Some((detokenizer, stops)) = &mut self.text else { return (None, None) };
        let piece = detokenizer.push(sampled.token);
        let (mut deltas, mut finish) = match stops.push(&piece) {
            StopMatch::None { text } => (self.parse(&text), None),
            StopMatch::Found { text, stop } => {
                let mut deltas = self.parse(&text);
                deltas.extend(self.parse_end());
                (deltas, Some(Finish::StopString(stop)))
            }
        };
        if self.one_call_only && cut_second_call(&mut deltas) {
            finish = Some(Finish::ToolCalls);
        }
        let tokens = if self.wants_tokens { vec![sampled.into()] } else { Vec::new() };
        (self.said(deltas, tokens), finish)
    }

    /// What was held back until now, when no more tokens come; `end` is the one that said so.
    pub fn finish(&mut self, end: Option<Sampled>) -> Option<Part> {
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
        self.said(deltas, end.filter(|_| wanted).map(Token::from).into_iter().collect())
    }

    fn said(&mut self, deltas: Vec<Delta>, tokens: Vec<Token>) -> Option<Part> {
        if let Some(last) = deltas.last() {
            self.reasoning = matches!(last, Delta::Reasoning(_));
        }
        self.called |= deltas.iter().any(|delta| matches!(delta, Delta::ToolCall { .. }));
        (!deltas.is_empty() || !tokens.is_empty()).then_some(Part::Said { deltas, tokens })
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

/// Drops a call that is not the first, and what follows it. Whether there was one.
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
