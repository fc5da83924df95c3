//! Parses one tool call with its name in front: `NAME[ARGS]{…}`, with an optional `[CALL_ID]…` in between.

use super::json_validator::{JsonValidator, NotACall};
use super::object_call::NAME_BYTES_MAX;
use super::{ARGUMENTS, CALL_ID};

#[derive(Default)]
pub(super) struct NamedCallParser {
    /// The text before the arguments.
    head: String,
    arguments: Option<JsonValidator>,
}

impl NamedCallParser {
    /// Like [`ObjectCallParser::push`](super::object_call::ObjectCallParser::push).
    pub fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotACall> {
        if let Some(json) = &mut self.arguments {
            json.push(c, arguments)?;
            return Ok(None);
        }
        if c != '{' {
            self.head.push(c);
            return if self.head.len() > NAME_BYTES_MAX { Err(NotACall) } else { Ok(None) };
        }
        let head = self.head.trim_end();
        let head = head.strip_suffix(ARGUMENTS).unwrap_or(head);
        let name = head.split(CALL_ID).next().unwrap_or_default().trim_end();
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(NotACall);
        }
        self.arguments.insert(JsonValidator::default()).push(c, arguments)?;
        Ok(Some(name.to_owned()))
    }

    pub fn is_done(&self) -> bool {
        self.arguments.as_ref().is_some_and(JsonValidator::is_done)
    }

    pub fn is_announced(&self) -> bool {
        self.arguments.is_some()
    }
}

/// True for characters of a tool name.
pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}
