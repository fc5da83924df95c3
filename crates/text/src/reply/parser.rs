//! A reply, a piece at a time, split into text, reasoning and calls of tools.
//!
//! How the reply is cut into pieces never matters. Only what may still turn out to be a tag is held back, and white space
//! next to one. What begins like a call but is none is given back as text.

use super::function_call::FunctionCallParser;
use super::json_validator::NotJson;
use super::named_call::{NamedCallParser, is_name};
use super::object_call::ObjectCallParser;
use super::{CALL, CALLS, PYTHON, ReplyFormat, Tool, ToolSyntax};
use std::sync::Arc;

/// The next bit of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Text(String),
    Reasoning(String),
    /// A call begins. Calls are counted from zero.
    ToolCall {
        index: usize,
        name: String,
    },
    /// More of a call's arguments. Joined they are a JSON object; the beginning of one if the reply was cut off.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Splits one reply.
pub struct ReplyParser {
    format: ReplyFormat,
    /// The tools that may be called; calls are looked for only if there are any.
    tools: Arc<[Tool]>,
    state: ReplyState,
    /// White space that belongs to the text, unless a tag follows.
    space: String,
    /// The beginning of what may become a tag.
    partial: String,
    /// Text has been given out, so that forms which only begin a reply are past.
    started: bool,
    reasoned: bool,
    /// White space is dropped until text comes.
    trim: bool,
    /// The tag that may still close the last call.
    closing: Option<&'static str>,
    calls: usize,
    deltas: Vec<Delta>,
}

enum ReplyState {
    Text,
    Reasoning,
    Calls(Calls),
}

/// Calls in one pair of tags.
struct Calls {
    /// All since the last call that was certain: given back as text if no call comes of it.
    raw: String,
    state: CallsState,
    in_list: bool,
}

enum CallsState {
    Before,
    Call(CallParser),
    After,
}

/// Reads one call.
enum CallParser {
    Object(ObjectCallParser),
    Function(FunctionCallParser),
    Named(NamedCallParser),
}

impl ReplyParser {
    /// A parser at the beginning of a reply. Without `tools` nothing is taken for a call.
    pub fn new(format: &ReplyFormat, tools: impl Into<Arc<[Tool]>>) -> Self {
        Self {
            format: format.clone(),
            tools: tools.into(),
            state: ReplyState::Text,
            space: String::new(),
            partial: String::new(),
            started: false,
            reasoned: false,
            trim: false,
            closing: None,
            calls: 0,
            deltas: Vec::new(),
        }
    }

    /// Says what the reply answers: it begins in the middle of reasoning if the prompt opened that.
    pub fn after_prompt(mut self, prompt: &str) -> Self {
        if self.format.opens_reasoning(prompt) {
            self.begin_reasoning();
        }
        self
    }

    /// What has become certain with this piece.
    pub fn push(&mut self, piece: &str) -> Vec<Delta> {
        piece.chars().for_each(|c| self.take(c));
        std::mem::take(&mut self.deltas)
    }

    /// What is left when the reply ends here.
    pub fn finish(mut self) -> Vec<Delta> {
        match std::mem::replace(&mut self.state, ReplyState::Text) {
            ReplyState::Calls(calls) => self.give_back(&calls.raw),
            ReplyState::Reasoning => {
                let rest = std::mem::take(&mut self.partial);
                rest.chars().for_each(|c| self.reasoning(c));
            }
            ReplyState::Text => {
                let rest = std::mem::take(&mut self.partial);
                rest.chars().for_each(|c| self.text(c));
                let space = std::mem::take(&mut self.space);
                self.emit_text(&space);
            }
        }
        self.deltas
    }

    fn take(&mut self, c: char) {
        match &mut self.state {
            ReplyState::Text => self.take_text(c),
            ReplyState::Reasoning => self.take_reasoning(c),
            ReplyState::Calls(_) => self.take_call(c),
        }
    }

    fn take_text(&mut self, c: char) {
        if c == '{' && self.partial.is_empty() && self.may_begin_bare() {
            return self.begin_calls("", Some(c));
        }
        self.partial.push(c);
        while !self.partial.is_empty() {
            let markers = self.markers();
            if let Some(marker) = markers.iter().flatten().find(|marker| **marker == self.partial) {
                self.partial.clear();
                return self.found(marker);
            }
            if markers.iter().flatten().any(|marker| marker.starts_with(self.partial.as_str())) {
                return;
            }
            let first = self.partial.remove(0);
            self.text(first);
        }
    }

    /// The tags that may come in text, here.
    fn markers(&self) -> [Option<&'static str>; 3] {
        let reasoning = self.format.reasoning.filter(|_| !self.started && !self.reasoned).map(|tags| tags.open);
        let call = match self.format.tools {
            _ if self.tools.is_empty() => None,
            ToolSyntax::Tagged | ToolSyntax::Functions => Some(CALL.open),
            ToolSyntax::Bare => Some(PYTHON).filter(|_| !self.started),
            ToolSyntax::List | ToolSyntax::Named => Some(CALLS),
        };
        [reasoning, call, self.closing]
    }

    fn may_begin_bare(&self) -> bool {
        self.format.tools == ToolSyntax::Bare && !self.started && !self.tools.is_empty() && self.calls == 0
    }

    fn found(&mut self, marker: &'static str) {
        if self.closing == Some(marker) {
            self.closing = None;
        } else if self.format.reasoning.is_some_and(|tags| tags.open == marker) {
            self.begin_reasoning();
        } else {
            self.begin_calls(marker, None);
        }
    }

    fn begin_reasoning(&mut self) {
        self.state = ReplyState::Reasoning;
        self.reasoned = true;
        self.space.clear();
        self.trim = true;
    }

    fn begin_calls(&mut self, marker: &str, first: Option<char>) {
        let raw = std::mem::take(&mut self.space) + marker;
        self.state = ReplyState::Calls(Calls { raw, state: CallsState::Before, in_list: false });
        self.closing = None;
        first.into_iter().for_each(|c| self.take_call(c));
    }

    /// A character of text, no part of a tag.
    fn text(&mut self, c: char) {
        if c.is_whitespace() {
            if !self.trim {
                self.space.push(c);
            }
            if self.markers() == [None; 3] {
                let space = std::mem::take(&mut self.space);
                self.emit_text(&space);
            }
            return;
        }
        (self.started, self.trim, self.closing) = (true, false, None);
        let mut text = std::mem::take(&mut self.space);
        text.push(c);
        self.emit_text(&text);
    }

    fn take_reasoning(&mut self, c: char) {
        let close = self.format.reasoning.map_or("", |tags| tags.close);
        self.partial.push(c);
        if self.partial == close {
            self.partial.clear();
            self.space.clear();
            self.trim = true;
            self.state = ReplyState::Text;
            return;
        }
        while !close.starts_with(self.partial.as_str()) {
            let first = self.partial.remove(0);
            self.reasoning(first);
        }
    }

    /// A character of reasoning, no part of a tag. White space at both ends is dropped.
    fn reasoning(&mut self, c: char) {
        if c.is_whitespace() {
            if !self.trim {
                self.space.push(c);
            }
            return;
        }
        self.trim = false;
        let mut text = std::mem::take(&mut self.space);
        text.push(c);
        match self.deltas.last_mut() {
            Some(Delta::Reasoning(last)) => last.push_str(&text),
            _ => self.deltas.push(Delta::Reasoning(text)),
        }
    }

    fn take_call(&mut self, c: char) {
        let ReplyState::Calls(calls) = &mut self.state else { return };
        let syntax = self.format.tools;
        if let CallsState::After = calls.state {
            match c {
                ']' if calls.in_list => return calls.in_list = false,
                '{' if syntax == ToolSyntax::Tagged => calls.state = CallsState::Before,
                ',' if calls.in_list => calls.state = CallsState::Before,
                ',' | ';' if syntax == ToolSyntax::Bare => calls.state = CallsState::Before,
                _ if c.is_whitespace() => return,
                _ => return self.end_calls(c),
            }
            if c != '{' {
                return calls.raw.push(c);
            }
        }
        if let CallsState::Before = calls.state {
            let may_be_list = !calls.in_list && !matches!(syntax, ToolSyntax::Bare | ToolSyntax::Functions);
            if c.is_whitespace() || (c == '[' && may_be_list) {
                calls.in_list |= c == '[';
                return calls.raw.push(c);
            }
            match CallParser::begin(syntax, c, &self.tools) {
                Some(parser) => calls.state = CallsState::Call(parser),
                None => return self.break_off(c),
            }
        }
        self.take_call_body(c);
    }

    fn take_call_body(&mut self, c: char) {
        let ReplyState::Calls(Calls { raw, state: CallsState::Call(parser), .. }) = &mut self.state else { return };
        let mut arguments = String::new();
        let known = match parser.push(c, &mut arguments) {
            Ok(known) => known,
            Err(NotJson) => return self.break_off(c),
        };
        if let Some(name) = known {
            // A reply that is a JSON object need not be a call: its name must be one we know.
            if self.format.tools == ToolSyntax::Bare && !self.tools.iter().any(|tool| tool.name == name) {
                return self.break_off(c);
            }
            raw.clear();
            self.deltas.push(Delta::ToolCall { index: self.calls, name });
            self.calls += 1;
        }
        if !parser.is_announced() {
            raw.push(c);
        }
        if parser.is_done()
            && let ReplyState::Calls(calls) = &mut self.state
        {
            calls.state = CallsState::After;
        }
        self.emit_arguments(&arguments);
    }

    /// The calls are over, and `c` is what comes after them.
    fn end_calls(&mut self, c: char) {
        self.state = ReplyState::Text;
        self.trim = true;
        self.closing = matches!(self.format.tools, ToolSyntax::Tagged | ToolSyntax::Functions).then_some(CALL.close);
        self.take_text(c);
    }

    /// What looked like a call is none: it is text after all, and `c` may begin something new.
    fn break_off(&mut self, c: char) {
        let ReplyState::Calls(calls) = std::mem::replace(&mut self.state, ReplyState::Text) else { return };
        self.give_back(&calls.raw);
        self.trim = false;
        self.take_text(c);
    }

    fn give_back(&mut self, raw: &str) {
        self.started |= !raw.trim().is_empty();
        self.emit_text(raw);
    }

    fn emit_text(&mut self, text: &str) {
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(Delta::Text(last)) => last.push_str(text),
            _ => self.deltas.push(Delta::Text(text.to_owned())),
        }
    }

    fn emit_arguments(&mut self, json: &str) {
        match self.deltas.last_mut() {
            _ if json.is_empty() => {}
            Some(Delta::Arguments { json: last, .. }) => last.push_str(json),
            _ => self.deltas.push(Delta::Arguments { index: self.calls - 1, json: json.to_owned() }),
        }
    }
}

impl CallParser {
    /// What a call that begins with `c` is read with.
    fn begin(syntax: ToolSyntax, c: char, tools: &Arc<[Tool]>) -> Option<Self> {
        match (syntax, c) {
            (ToolSyntax::Functions, '<') => Some(Self::Function(FunctionCallParser::new(tools.clone()))),
            (ToolSyntax::Functions, _) => None,
            (ToolSyntax::Bare, '{') => Some(Self::Object(ObjectCallParser::bare())),
            (_, '{') => Some(Self::Object(ObjectCallParser::default())),
            (ToolSyntax::List | ToolSyntax::Named, _) if is_name(c) => Some(Self::Named(NamedCallParser::default())),
            _ => None,
        }
    }

    fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotJson> {
        match self {
            Self::Object(parser) => parser.push(c, arguments),
            Self::Function(parser) => parser.push(c, arguments),
            Self::Named(parser) => parser.push(c, arguments),
        }
    }

    fn is_announced(&self) -> bool {
        match self {
            Self::Object(parser) => parser.is_announced(),
            Self::Function(parser) => parser.is_announced(),
            Self::Named(parser) => parser.is_announced(),
        }
    }

    fn is_done(&self) -> bool {
        match self {
            Self::Object(parser) => parser.is_done(),
            Self::Function(parser) => parser.is_done(),
            Self::Named(parser) => parser.is_done(),
        }
    }
}

#[cfg(test)]
mod tests;
