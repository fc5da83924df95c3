//! One tool call with its name in front: `NAME[ARGS]{…}`, with `[CALL_ID]…` in between or not.

use super::call_scan::NAME_BYTES_MAX;
use super::json_scan::{JsonScan, NotJson};
use super::{ARGUMENTS, CALL_ID};

#[derive(Default)]
pub(super) struct NamedScan {
    /// All before the arguments.
    head: String,
    arguments: Option<JsonScan>,
}

impl NamedScan {
    /// As [`CallScan::push`](super::call_scan::CallScan::push).
    pub fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotJson> {
        if let Some(json) = &mut self.arguments {
            json.push(c, arguments)?;
            return Ok(None);
        }
        if c != '{' {
            self.head.push(c);
            return if self.head.len() > NAME_BYTES_MAX { Err(NotJson) } else { Ok(None) };
        }
        let head = self.head.trim_end();
        let head = head.strip_suffix(ARGUMENTS).unwrap_or(head);
        let name = head.split(CALL_ID).next().unwrap_or_default().trim_end();
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(NotJson);
        }
        self.arguments.insert(JsonScan::default()).push(c, arguments)?;
        Ok(Some(name.to_owned()))
    }

    pub fn is_done(&self) -> bool {
        self.arguments.as_ref().is_some_and(JsonScan::is_done)
    }

    pub fn is_announced(&self) -> bool {
        self.arguments.is_some()
    }
}

/// True for what the name of a tool is made of.
pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/')
}
