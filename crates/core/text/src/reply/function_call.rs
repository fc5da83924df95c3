//! Parses one tool call in tags: `<function=NAME>`, `<parameter=KEY>` value `</parameter>` …, `</function>`.
//!
//! Values are plain text; the tool's schema tells which of them are strings. A value is returned when it is complete.

use super::Tool;
use super::json_validator::NotACall;
use super::object_call::NAME_BYTES_MAX;
use serde_json::Value;
use std::sync::Arc;

const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";

pub(super) struct FunctionCallParser {
    tools: Arc<[Tool]>,
    state: TagState,
    /// The characters since the last tag.
    text: String,
    name: Option<String>,
    key: String,
    parameters: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum TagState {
    /// In a tag, or where one is expected.
    Tag,
    Value,
    Done,
}

impl FunctionCallParser {
    pub fn new(tools: Arc<[Tool]>) -> Self {
        Self { tools, state: TagState::Tag, text: String::new(), name: None, key: String::new(), parameters: 0 }
    }

    /// Like [`ObjectCallParser::push`](super::object_call::ObjectCallParser::push).
    pub fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotACall> {
        if self.state == TagState::Tag && self.text.is_empty() && c.is_whitespace() {
            return Ok(None);
        }
        self.text.push(c);
        if self.state == TagState::Value {
            if c == '>' && self.text.ends_with(PARAMETER_END) {
                let text = std::mem::take(&mut self.text);
                self.value(text.strip_suffix(PARAMETER_END).unwrap_or(&text), arguments);
                self.state = TagState::Tag;
            }
            return Ok(None);
        }
        let tags: &[&str] = if self.name.is_none() { &[FUNCTION] } else { &[PARAMETER, FUNCTION_END] };
        let fits =
            |tag: &&str| tag.starts_with(self.text.as_str()) || (tag.ends_with('=') && self.text.starts_with(*tag));
        if !tags.iter().any(fits) || self.text.len() > NAME_BYTES_MAX {
            return Err(NotACall);
        }
        if c != '>' {
            return Ok(None);
        }
        let tag = std::mem::take(&mut self.text);
        let (_, value) = tag.trim_end_matches('>').split_once('=').unwrap_or_default();
        if tag == FUNCTION_END {
            arguments.push_str(if self.parameters == 0 { "{}" } else { "}" });
            self.state = TagState::Done;
        } else if self.name.is_none() {
            return Ok(self.name.insert(value.to_owned()).clone().into());
        } else {
            self.key = value.to_owned();
            self.state = TagState::Value;
        }
        Ok(None)
    }

    pub fn is_done(&self) -> bool {
        self.state == TagState::Done
    }

    pub fn is_announced(&self) -> bool {
        self.name.is_some()
    }

    fn value(&mut self, text: &str, arguments: &mut String) {
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        let parsed = if self.is_string() { None } else { serde_json::from_str(text).ok() };
        let value: Value = parsed.unwrap_or_else(|| Value::from(text));
        let separator = if self.parameters == 0 { "{" } else { ", " };
        arguments.push_str(&format!("{separator}{}: {value}", Value::from(self.key.as_str())));
        self.parameters += 1;
    }

    /// True if the parameter is a string in the schema, or is not in the schema.
    fn is_string(&self) -> bool {
        let tool = self.tools.iter().find(|tool| Some(&tool.name) == self.name.as_ref());
        let parameters = tool.and_then(|tool| tool.parameters.as_ref());
        match parameters.and_then(|schema| schema.get("properties")?.get(&self.key)) {
            None => true,
            Some(schema) => match schema.get("type") {
                Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
                kind => kind.is_some_and(|kind| kind == "string"),
            },
        }
    }
}
