//! Validates JSON one character at a time: all characters so far are always a prefix of valid JSON.
//!
//! Models write line breaks into strings, and escapes that JSON does not have. Both have only one possible meaning, and are
//! rewritten as valid JSON.

/// Deeper nesting is an error, as in JSON parsers.
const DEPTH_MAX: usize = 100;

/// Validates one value. The top-level value must not be a number, because a number has no final character.
#[derive(Debug, Default)]
pub(crate) struct JsonValidator {
    containers: Vec<Container>,
    state: JsonState,
}

/// The text is not JSON.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotACall;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    Array,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum JsonState {
    #[default]
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    InString {
        key: bool,
        escape: EscapeState,
    },
    /// The missing letters of `true`, `false` or `null`.
    Word(&'static str),
    Number(NumberState),
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EscapeState {
    None,
    Began,
    /// The number of missing hexadecimal digits.
    Digits(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberState {
    Sign,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl JsonValidator {
    /// Takes the next character and appends its valid form to `out`.
    pub fn push(&mut self, c: char, out: &mut String) -> Result<(), NotACall> {
        if let JsonState::Number(number) = self.state {
            if let Some(next) = number.next(c) {
                self.state = JsonState::Number(next);
                out.push(c);
                return Ok(());
            }
            if !number.may_end() {
                return Err(NotACall);
            }
            self.state = JsonState::CommaOrEnd;
        }
        if let JsonState::InString { key, escape } = self.state {
            self.state = in_string(key, escape, c, out)?;
            return Ok(());
        }
        if !matches!(self.state, JsonState::Word(_)) && matches!(c, ' ' | '\n' | '\r' | '\t') {
            out.push(c);
            return Ok(());
        }
        self.state = self.next(c)?;
        if self.state == JsonState::CommaOrEnd && self.containers.is_empty() {
            self.state = JsonState::Done;
        }
        out.push(c);
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.state == JsonState::Done
    }

    pub fn state(&self) -> JsonState {
        self.state
    }

    /// The number of open objects and lists.
    pub fn depth(&self) -> usize {
        self.containers.len()
    }

    fn next(&mut self, c: char) -> Result<JsonState, NotACall> {
        let container = self.containers.last().copied();
        Ok(match (self.state, c) {
            (JsonState::ValueOrEnd, ']') => self.close(),
            (JsonState::Value | JsonState::ValueOrEnd, '{') => self.open(Container::Object)?,
            (JsonState::Value | JsonState::ValueOrEnd, '[') => self.open(Container::Array)?,
            (JsonState::Value | JsonState::ValueOrEnd, _) => value(c)?,
            (JsonState::KeyOrEnd, '}') => self.close(),
            (JsonState::Key | JsonState::KeyOrEnd, '"') => JsonState::InString { key: true, escape: EscapeState::None },
            (JsonState::Colon, ':') => JsonState::Value,
            (JsonState::CommaOrEnd, ',') if container == Some(Container::Object) => JsonState::Key,
            (JsonState::CommaOrEnd, ',') if container == Some(Container::Array) => JsonState::Value,
            (JsonState::CommaOrEnd, '}') if container == Some(Container::Object) => self.close(),
            (JsonState::CommaOrEnd, ']') if container == Some(Container::Array) => self.close(),
            (JsonState::Word(rest), _) => match rest.strip_prefix(c) {
                Some("") => JsonState::CommaOrEnd,
                Some(rest) => JsonState::Word(rest),
                None => return Err(NotACall),
            },
            _ => return Err(NotACall),
        })
    }

    fn open(&mut self, container: Container) -> Result<JsonState, NotACall> {
        if self.containers.len() == DEPTH_MAX {
            return Err(NotACall);
        }
        self.containers.push(container);
        Ok(if container == Container::Object { JsonState::KeyOrEnd } else { JsonState::ValueOrEnd })
    }

    fn close(&mut self) -> JsonState {
        self.containers.pop();
        JsonState::CommaOrEnd
    }
}

/// The state after the first character of a scalar value.
fn value(c: char) -> Result<JsonState, NotACall> {
    Ok(match c {
        '"' => JsonState::InString { key: false, escape: EscapeState::None },
        't' => JsonState::Word("rue"),
        'f' => JsonState::Word("alse"),
        'n' => JsonState::Word("ull"),
        '-' => JsonState::Number(NumberState::Sign),
        '0' => JsonState::Number(NumberState::Zero),
        '1'..='9' => JsonState::Number(NumberState::Whole),
        _ => return Err(NotACall),
    })
}

fn in_string(key: bool, escape: EscapeState, c: char, out: &mut String) -> Result<JsonState, NotACall> {
    let escape = match (escape, c) {
        (EscapeState::None, '"') => {
            out.push('"');
            return Ok(if key { JsonState::Colon } else { JsonState::CommaOrEnd });
        }
        (EscapeState::None, '\\') => EscapeState::Began, // written when the next character is known
        (EscapeState::None, c) if c < ' ' => {
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
            EscapeState::None
        }
        (EscapeState::None, c) => {
            out.push(c);
            EscapeState::None
        }
        (EscapeState::Began, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' | 'u') => {
            out.extend(['\\', c]);
            if c == 'u' { EscapeState::Digits(4) } else { EscapeState::None }
        }
        (EscapeState::Began, '\'') => {
            out.push('\'');
            EscapeState::None
        }
        // A backslash before any other character is a literal backslash.
        (EscapeState::Began, c) if c >= ' ' => {
            out.extend(['\\', '\\', c]);
            EscapeState::None
        }
        (EscapeState::Digits(missing), c) if c.is_ascii_hexdigit() => {
            out.push(c);
            if missing == 1 { EscapeState::None } else { EscapeState::Digits(missing - 1) }
        }
        _ => return Err(NotACall),
    };
    Ok(JsonState::InString { key, escape })
}

impl NumberState {
    fn next(self, c: char) -> Option<Self> {
        Some(match (self, c) {
            (Self::Sign, '0') => Self::Zero,
            (Self::Sign, '1'..='9') | (Self::Whole, '0'..='9') => Self::Whole,
            (Self::Zero | Self::Whole, '.') => Self::Point,
            (Self::Point | Self::Fraction, '0'..='9') => Self::Fraction,
            (Self::Zero | Self::Whole | Self::Fraction, 'e' | 'E') => Self::Exponent,
            (Self::Exponent, '+' | '-') => Self::ExponentSign,
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => Self::ExponentDigits,
            _ => return None,
        })
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::ExponentDigits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The valid form of the text, if it is one value and nothing follows.
    fn validated(text: &str) -> Option<String> {
        let (mut validator, mut out) = (JsonValidator::default(), String::new());
        for c in text.chars() {
            if validator.is_done() {
                return None;
            }
            validator.push(c, &mut out).ok()?;
        }
        validator.is_done().then_some(out)
    }

    #[test]
    fn mistakes_that_have_one_meaning_are_mended() {
        assert_eq!(validated("[\"a\nb\"]").as_deref(), Some(r#"["a\u000ab"]"#));
        assert_eq!(validated(r#"["it\'s \d+"]"#).as_deref(), Some(r#"["it's \\d+"]"#));
    }

    #[test]
    fn nesting_has_a_limit() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(validated(&nested(DEPTH_MAX)).is_some());
        assert!(validated(&nested(DEPTH_MAX + 1)).is_none());
    }

    /// JSON, and text that is nearly JSON.
    fn nearly_json() -> impl Strategy<Value = String> {
        let pieces = [
            "{", "}", "[", "]", ":", ",", "\"a\"", "\"", "\\u12", "0", "1", "-", ".5", "e", "E+3", "true", "null", "x",
            " ",
        ];
        prop::collection::vec(prop::sample::select(pieces.to_vec()), 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_what_serde_json_accepts(text in nearly_json()) {
            let text = format!("[{text}]");
            let valid = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(validated(&text).is_some(), valid);
        }
    }
}
