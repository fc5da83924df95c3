//! Parses one tool call as an object, `{"name": …, "arguments": {…}}`, one character at a time.
//!
//! The call is announced when it is certain to be one: when its name is known and its arguments start. From then on the
//! arguments are streamed. Keys may come in any order; arguments that precede the name are held back.

use super::json_validator::{JsonState, JsonValidator, NotACall};
use serde_json::{Map, Value};

/// Longer names are an error.
pub(super) const NAME_BYTES_MAX: usize = 256;

#[derive(Debug, Default)]
pub(super) struct ObjectCallParser {
    json: JsonValidator,
    field: CallField,
    key: CallKey,
    /// The key, name or arguments that are being read.
    taken: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    announced: bool,
    bare: bool,
}

/// The field that the current characters belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CallField {
    #[default]
    Nothing,
    Key,
    Name,
    /// Arguments that are streamed.
    Arguments,
    /// Arguments that are held back until they are complete.
    HeldArguments,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CallKey {
    #[default]
    Other,
    Name,
    Arguments,
}

impl ObjectCallParser {
    /// For an object without tags, which may not be a call: only the keys of a call are allowed.
    pub fn bare() -> Self {
        Self { bare: true, ..Self::default() }
    }

    /// Takes the next character; the first is the opening brace. Returns the name when the call is certain, and appends to
    /// `arguments` their final part.
    pub fn push(&mut self, c: char, arguments: &mut String) -> Result<Option<String>, NotACall> {
        self.begin(c)?;
        let start = arguments.len();
        if self.field == CallField::Arguments {
            self.json.push(c, arguments)?;
        } else {
            let mut mended = std::mem::take(&mut self.taken);
            self.json.push(c, &mut mended)?;
            self.taken = mended;
            if matches!(self.field, CallField::Key | CallField::Name) && self.taken.len() > NAME_BYTES_MAX {
                return Err(NotACall);
            }
        }
        let known = self.end(arguments)?;
        debug_assert!(known.is_none() || arguments.len() > start);
        Ok(known)
    }

    pub fn is_done(&self) -> bool {
        self.json.is_done()
    }

    /// True after the name was returned.
    pub fn is_announced(&self) -> bool {
        self.announced
    }

    /// Sets the field that starts with `c`, if `c` is at the level of the call's keys.
    fn begin(&mut self, c: char) -> Result<(), NotACall> {
        if self.json.depth() != 1 || self.field != CallField::Nothing {
            return Ok(());
        }
        self.taken.clear();
        self.field = match (self.json.state(), self.key, c) {
            (_, _, ' ' | '\n' | '\r' | '\t') => CallField::Nothing,
            (JsonState::Key | JsonState::KeyOrEnd, _, '"') => CallField::Key,
            (JsonState::Value, CallKey::Name, '"') => CallField::Name,
            (JsonState::Value, CallKey::Arguments, '{') if self.name.is_some() => CallField::Arguments,
            (JsonState::Value, CallKey::Arguments, '{' | '"' | 'n') => CallField::HeldArguments,
            (JsonState::Value, CallKey::Name | CallKey::Arguments, _) => return Err(NotACall),
            _ => CallField::Nothing,
        };
        Ok(())
    }

    /// Handles the end of a field.
    fn end(&mut self, arguments: &mut String) -> Result<Option<String>, NotACall> {
        let (state, depth) = (self.json.state(), self.json.depth());
        let ended = match self.field {
            CallField::Nothing => return if self.json.is_done() { self.finish(arguments) } else { Ok(None) },
            CallField::Key => state == JsonState::Colon,
            _ => state == JsonState::CommaOrEnd && depth == 1,
        };
        let field = self.field;
        if ended {
            self.field = CallField::Nothing;
        }
        match field {
            // The opening brace of the arguments makes the object a call.
            CallField::Arguments if !self.announced => return Ok(self.announce(None, arguments)),
            CallField::Key if ended => {
                self.key = self.key_taken();
                if self.bare
                    && !self.announced
                    && self.key == CallKey::Other
                    && !matches!(self.taken.as_str(), "\"type\"" | "\"id\"")
                {
                    return Err(NotACall);
                }
            }
            CallField::Name if ended => {
                self.name = Some(serde_json::from_str(&self.taken).map_err(|_| NotACall)?);
                if let Some(early) = self.early.take() {
                    return Ok(self.announce(Some(early), arguments));
                }
            }
            CallField::HeldArguments if ended => {
                let object = object_in(&self.taken).ok_or(NotACall)?;
                if self.name.is_some() {
                    return Ok(self.announce(Some(object), arguments));
                }
                self.early = Some(object);
            }
            _ => {}
        }
        Ok(None)
    }

    /// The key that was read. A repeated key is ignored.
    fn key_taken(&self) -> CallKey {
        let arguments_are_open = !self.announced && self.early.is_none();
        match self.taken.as_str() {
            "\"name\"" if self.name.is_none() => CallKey::Name,
            "\"arguments\"" | "\"parameters\"" if arguments_are_open => CallKey::Arguments,
            _ => CallKey::Other,
        }
    }

    fn announce(&mut self, held: Option<String>, arguments: &mut String) -> Option<String> {
        self.announced = true;
        arguments.push_str(held.as_deref().unwrap_or_default());
        self.name.clone()
    }

    /// An object without arguments is announced as a call at its end.
    fn finish(&mut self, arguments: &mut String) -> Result<Option<String>, NotACall> {
        match (self.announced, &self.name) {
            (true, _) => Ok(None),
            (false, Some(_)) => Ok(self.announce(Some("{}".to_owned()), arguments)),
            (false, None) => Err(NotACall),
        }
    }
}

/// Complete arguments: an object, an object written as a string, or null.
fn object_in(text: &str) -> Option<String> {
    match serde_json::from_str(text).ok()? {
        Value::Object(_) => Some(text.to_owned()),
        Value::Null => Some("{}".to_owned()),
        Value::String(inner) => serde_json::from_str::<Map<String, Value>>(&inner).ok().map(|_| inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Option<(String, String)> {
        let (mut call, mut name, mut arguments) = (ObjectCallParser::default(), None, String::new());
        for c in text.chars() {
            name = name.or(call.push(c, &mut arguments).ok()?);
        }
        call.is_done().then_some((name?, arguments))
    }

    fn check(text: &str, want: Option<(&str, &str)>) {
        let got = parsed(text);
        assert_eq!(got.as_ref().map(|(name, arguments)| (name.as_str(), arguments.as_str())), want, "{text}");
    }

    #[test]
    fn names_and_arguments_are_found_in_any_order() {
        let want = Some(("f", r#"{"x": [1, {"name": "g"}]}"#));
        check(r#"{"name": "f", "arguments": {"x": [1, {"name": "g"}]}}"#, want);
        check(r#"{"parameters": {"x": [1, {"name": "g"}]}, "name": "f"}"#, want);
        check(r#"{"type": "function", "n": -1.5, "ok": true, "name":"f" , "parameters" : {} }"#, Some(("f", "{}")));
    }

    #[test]
    fn arguments_may_be_absent_or_null_or_an_object_in_a_string() {
        check(r#"{"name": "f"}"#, Some(("f", "{}")));
        check(r#"{"name": "f", "arguments": null}"#, Some(("f", "{}")));
        check(r#"{"name": "f", "arguments": "{\"x\": \"\\n\"}"}"#, Some(("f", r#"{"x": "\n"}"#)));
    }

    #[test]
    fn what_is_no_call_is_refused() {
        for text in [
            r#"{"city": "Paris"}"#,
            r#"{"name": 5}"#,
            r#"{"name": "f", "arguments": 5}"#,
            r#"{"name": "f", "arguments": "5"}"#,
            r#"{"name": "f", "arguments": [1]}"#,
            r#"{"name": "f", }"#,
            r#"{'name': 'f'}"#,
            "{}",
        ] {
            check(text, None);
        }
        check(&format!(r#"{{"name": "{}"}}"#, "f".repeat(NAME_BYTES_MAX)), None);
    }

    #[test]
    fn a_key_counts_once() {
        check(
            r#"{"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}, "name": "g"}"#,
            Some(("f", r#"{"a": 1}"#)),
        );
    }

    #[test]
    fn a_bare_object_with_other_keys_is_no_call() {
        let (mut call, mut arguments) = (ObjectCallParser::bare(), String::new());
        let refused = r#"{"type": "x", "city": "#.chars().position(|c| call.push(c, &mut arguments).is_err());
        assert_eq!(refused, Some(r#"{"type": "x", "city"#.len()));
    }

    #[test]
    fn the_name_is_known_when_the_arguments_begin() {
        let (mut call, mut arguments) = (ObjectCallParser::default(), String::new());
        for c in r#"{"name": "f", "arguments": "#.chars() {
            assert_eq!(call.push(c, &mut arguments), Ok(None));
        }
        assert_eq!(call.push('{', &mut arguments), Ok(Some("f".to_owned())));
        assert_eq!(arguments, "{");
    }
}
