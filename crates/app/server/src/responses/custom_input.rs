//! `CustomInput`: the text of a custom tool's call, from the JSON in which the model writes it.

use serde_json::Value;
use text::TEXT_INPUT;

/// Decodes `{"input": "…"}` as it arrives.
#[derive(Debug, Default)]
pub struct CustomInput {
    json: String,
    state: CustomInputState,
}

#[derive(Clone, Copy, Debug, Default)]
enum CustomInputState {
    /// The text has not begun.
    #[default]
    Before,
    /// The JSON before this index is decoded.
    Text(usize),
    After,
}

impl CustomInput {
    /// Takes the next part of the JSON and returns the text that is final.
    pub fn push(&mut self, json: &str) -> String {
        self.json += json;
        if let CustomInputState::Before = self.state
            && let Some(start) = text_start(&self.json)
        {
            self.state = CustomInputState::Text(start);
        }
        let CustomInputState::Text(start) = self.state else { return String::new() };
        let (length, closed) = whole_characters(&self.json[start..]);
        let end = start + length;
        self.state = if closed { CustomInputState::After } else { CustomInputState::Text(end) };
        decode(&self.json[start..end])
    }

    /// The text that is left at the end of the call: all of it if the model wrote something else than was asked for.
    pub fn finish(self) -> String {
        let CustomInputState::Before = self.state else { return String::new() };
        let Ok(Value::Object(mut fields)) = serde_json::from_str(&self.json) else { return self.json };
        let only = if fields.len() == 1 { fields.keys().next().cloned() } else { None };
        let text = fields.remove(TEXT_INPUT).or_else(|| fields.remove(&only?));
        match text {
            Some(Value::String(text)) => text,
            _ => self.json,
        }
    }
}

/// Where the text begins in `{"input": "…`, if the JSON comes that far.
fn text_start(json: &str) -> Option<usize> {
    let mut rest = json;
    for token in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_start().strip_prefix(token)?;
    }
    Some(json.len() - rest.len())
}

/// The bytes at the start of a JSON string's content that are whole characters and escapes, and whether its end follows.
fn whole_characters(json: &str) -> (usize, bool) {
    let mut end = 0;
    while let Some(c) = json[end..].chars().next() {
        let length = match c {
            '"' => return (end, true),
            '\\' => match escape_length(&json[end..]) {
                Some(length) => length,
                None => break,
            },
            c => c.len_utf8(),
        };
        end += length;
    }
    (end, false)
}

/// The length of an escape; `None` if it is not complete. Two halves of a surrogate pair are one.
fn escape_length(json: &str) -> Option<usize> {
    let unit = |at: usize| json.get(at + 2..at + 6).and_then(|digits| u16::from_str_radix(digits, 16).ok());
    let second = json[1..].chars().next()?;
    if second != 'u' {
        return Some(1 + second.len_utf8());
    }
    if json.len() < 6 {
        return None;
    }
    match (unit(0), json.get(6..8)) {
        (None, _) => Some(2),
        (Some(0xd800..0xdc00), _) if json.len() < 8 => None,
        (Some(0xd800..0xdc00), Some("\\u")) if json.len() < 12 => None,
        (Some(0xd800..0xdc00), Some("\\u")) if unit(6).is_some() => Some(12),
        _ => Some(6),
    }
}

/// Half of a surrogate pair, or a control character, is no JSON: such a text is returned as it is.
fn decode(json: &str) -> String {
    serde_json::from_str(&format!("\"{json}\"")).unwrap_or_else(|_| json.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces of text, for JSON that arrives in pieces of `length` characters.
    fn decoded(json: &str, length: usize) -> String {
        let mut input = CustomInput::default();
        let characters: Vec<char> = json.chars().collect();
        let text: String = characters.chunks(length).map(|piece| input.push(&String::from_iter(piece))).collect();
        text + &input.finish()
    }

    fn check(json: &str, text: &str) {
        for length in 1..json.len() + 1 {
            assert_eq!(decoded(json, length), text, "{json} in pieces of {length}");
        }
    }

    #[test]
    fn the_text_does_not_depend_on_the_pieces() {
        check(r#"{"input": "*** Begin\n\"a\"\\ \u00e9 \ud83d\ude00 é"}"#, "*** Begin\n\"a\"\\ é 😀 é");
        check(r#"{ "input" :"" }"#, "");
    }

    #[test]
    fn the_text_comes_as_soon_as_it_is_final() {
        let mut input = CustomInput::default();
        assert_eq!(input.push(r#"{"input": "a\"#), "a");
        assert_eq!(input.push("n"), "\n");
        assert_eq!(input.push(r#"b\ud83d"#), "b");
        assert_eq!(input.push(r#"\ude00c"#), "😀c");
    }

    #[test]
    fn other_arguments_are_taken_as_well_as_they_can_be() {
        check(r#"{"patch": "x\ny"}"#, "x\ny");
        check(r#"{"a": 1, "input": "x"}"#, "x");
        check(r#"{"a": 1}"#, r#"{"a": 1}"#);
        check(r#"{"a": "#, r#"{"a": "#);
    }

    #[test]
    fn a_text_that_was_cut_off_keeps_what_is_whole() {
        assert_eq!(decoded(r#"{"input": "ab\u00"#, 3), "ab");
        assert_eq!(decoded(r#"{"input": "\ud83dx"}"#, 100), r"\ud83dx");
    }
}
