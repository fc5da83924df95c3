//! `Reply`: all parts of one choice, put together.

use text::Delta;

use super::{Finish, Part, Token};

/// One finished choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply {
    pub text: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
    /// Tokens with log probabilities, where these were asked for.
    pub tokens: Vec<Token>,
    pub prompt: Vec<Token>,
    /// Set by the last part.
    pub finish: Option<Finish>,
}

/// A call of a tool, with its arguments as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ToolCall {
    pub name: String,
    pub arguments: String,
}

impl Reply {
    pub fn push(&mut self, part: Part) {
        match part {
            Part::Prefilled { prompt } => self.prompt = prompt,
            Part::Said { deltas, tokens } => {
                self.tokens.extend(tokens);
                deltas.into_iter().for_each(|delta| self.add(delta));
            }
            Part::Ended(finish) => self.finish = Some(finish),
        }
    }

    fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Text(text) => self.text += &text,
            Delta::Reasoning(text) => self.reasoning += &text,
            Delta::ToolCall { index, name } => self.call(index).name = name,
            Delta::Arguments { index, json } => self.call(index).arguments += &json,
        }
    }

    /// Calls are numbered in the order in which they begin.
    fn call(&mut self, index: usize) -> &mut ToolCall {
        if index >= self.calls.len() {
            self.calls.push(ToolCall::default());
        }
        let last = self.calls.len() - 1;
        &mut self.calls[index.min(last)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_a_reply() {
        let mut reply = Reply::default();
        let said = |deltas| Part::Said { deltas, tokens: Vec::new() };
        reply.push(Part::Prefilled { prompt: Vec::new() });
        reply.push(said(vec![Delta::Reasoning("hm".into()), Delta::Text("I ".into())]));
        reply.push(said(vec![Delta::Text("call".into()), Delta::ToolCall { index: 0, name: "f".into() }]));
        reply.push(said(vec![Delta::Arguments { index: 0, json: "{\"a\":".into() }]));
        reply.push(said(vec![Delta::Arguments { index: 0, json: "1}".into() }]));
        reply.push(said(vec![Delta::ToolCall { index: 1, name: "g".into() }]));
        reply.push(Part::Ended(Finish::ToolCalls));
        let call = |name: &str, arguments: &str| ToolCall { name: name.into(), arguments: arguments.into() };
        assert_eq!((reply.text.as_str(), reply.reasoning.as_str()), ("I call", "hm"));
        assert_eq!(reply.calls, [call("f", "{\"a\":1}"), call("g", "")]);
        assert_eq!(reply.finish, Some(Finish::ToolCalls));
    }
}
