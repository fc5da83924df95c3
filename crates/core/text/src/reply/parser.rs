//! Splits a streamed reply into text, reasoning and tool calls.
//!
//! The result does not depend on how the reply is cut into pieces. Only text that may become a tag, and white space next to
//! it, is held back. Text that starts like a call but is none is returned as text.

use super::function_call::FunctionCallParser;
use super::json_validator::NotACall;
use super::named_call::{NamedCallParser, is_name};
use super::object_call::ObjectCallParser;
use super::{CALL, CALLS, PYTHON, ReplyFormat, Tool, ToolSyntax};
use std::sync::Arc;

/// The next part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Text(String),
    Reasoning(String),
    /// A tool call starts. Calls are counted from 0.
    ToolCall {
        index: usize,
        name: String,
    },
    /// More of a call's arguments. Concatenated they are a JSON object, or a prefix of one if the reply was cut off.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Parses one reply.
pub struct ReplyParser {
    format: ReplyFormat,
    /// The tools that may be called. If there are none, calls are not parsed.
    tools: Arc<[Tool]>,
    state: ReplyState,
    /// White space that is part of the text, unless a tag follows.
    space: String,
    /// Text that may become a tag.
    partial: String,
    /// Text was emitted, so formats that are allowed only at the start of a reply no longer apply.
    started: bool,
    reasoned: bool,
    /// White space is dropped until text follows.
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

/// The calls within one pair of tags.
struct Calls {
    /// The text since the last announced call: emitted as text if it is not a call.
    raw: String,
    state: CallsState,
    in_list: bool,
}

enum CallsState {
    Before,
    Call(CallParser),
    After,
}

/// Parses one call.
enum CallParser {
    Object(ObjectCallParser),
    Function(FunctionCallParser),
    Named(NamedCallParser),
}

impl ReplyParser {
    /// A parser at the start of a reply. Without `tools` no calls are parsed.
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

    /// Sets the prompt. If it opens the reasoning, the reply starts within reasoning.
    pub fn after_prompt(mut self, prompt: &str) -> Self {
        if self.format.opens_reasoning(prompt) {
            self.begin_reasoning();
        }
        self
    }

    /// The deltas that are final after this piece.
    pub fn push(&mut self, piece: &str) -> Vec<Delta> {
        piece.chars().for_each(|c| self.take(c));
        std::mem::take(&mut self.deltas)
    }

    /// The remaining deltas, at the end of the reply.
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

    /// The tags that are allowed at this place in text.
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

    /// Handles a character of text that is not part of a tag.
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

    /// Handles a character of reasoning that is not part of a tag. White space at both ends is dropped.
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
                None => return self.abort_call(c),
            }
        }
        self.take_call_body(c);
    }

    fn take_call_body(&mut self, c: char) {
        let ReplyState::Calls(Calls { raw, state: CallsState::Call(parser), .. }) = &mut self.state else { return };
        let mut arguments = String::new();
        let known = match parser.push(c, &mut arguments) {
            Ok(known) => known,
            Err(NotACall) => return self.abort_call(c),
        };
        if let Some(name) = known {
            // A reply that is a JSON object is a call only if it names a known tool.
            if self.format.tools == ToolSyntax::Bare && !self.tools.iter().any(|tool| tool.name == name) {
                return self.abort_call(c);
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

    /// Ends the calls. `c` is the character after them.
    fn end_calls(&mut self, c: char) {
        self.state = ReplyState::Text;
        self.trim = true;
        self.closing = matches!(self.format.tools, ToolSyntax::Tagged | ToolSyntax::Functions).then_some(CALL.close);
        self.take_text(c);
    }

    /// The text is not a call after all: emits it as text. `c` may start a new tag.
    fn abort_call(&mut self, c: char) {
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
    /// The parser for a call that starts with `c`.
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

    fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotACall> {
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
