//! JSON that arrives a character at a time: what has come so far is checked at once, and known to be the beginning of
//! valid JSON.
//!
//! Models write line ends into strings, and escapes that JSON does not have. Both have one meaning only, and are written
//! out as JSON wants them.

/// Deeper nesting is taken for nonsense. Readers of JSON have such a limit too.
const DEPTH_MAX: usize = 100;

/// Checks one value. It ends with its last character: numbers, which do not show their end, only occur inside.
#[derive(Debug, Default)]
pub(crate) struct JsonScan {
    containers: Vec<Container>,
    state: State,
}

/// The text is not JSON.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NotJson;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    Array,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    InString {
        key: bool,
        escape: Escape,
    },
    /// The letters that are missing of `true`, `false` or `null`.
    Word(&'static str),
    Number(Number),
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Escape {
    None,
    Began,
    /// So many hexadecimal digits are missing.
    Digits(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    Sign,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl JsonScan {
    /// Takes the next character and appends what it comes to.
    pub fn push(&mut self, c: char, out: &mut String) -> Result<(), NotJson> {
        if let State::Number(number) = self.state {
            if let Some(next) = number.next(c) {
                self.state = State::Number(next);
                out.push(c);
                return Ok(());
            }
            if !number.may_end() {
                return Err(NotJson);
            }
            self.state = State::CommaOrEnd;
        }
        if let State::InString { key, escape } = self.state {
            self.state = in_string(key, escape, c, out)?;
            return Ok(());
        }
        if !matches!(self.state, State::Word(_)) && matches!(c, ' ' | '\n' | '\r' | '\t') {
            out.push(c);
            return Ok(());
        }
        self.state = self.next(c)?;
        if self.state == State::CommaOrEnd && self.containers.is_empty() {
            self.state = State::Done;
        }
        out.push(c);
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// How many objects and lists are open.
    pub fn depth(&self) -> usize {
        self.containers.len()
    }

    fn next(&mut self, c: char) -> Result<State, NotJson> {
        let container = self.containers.last().copied();
        Ok(match (self.state, c) {
            (State::ValueOrEnd, ']') => self.close(),
            (State::Value | State::ValueOrEnd, '{') => self.open(Container::Object)?,
            (State::Value | State::ValueOrEnd, '[') => self.open(Container::Array)?,
            (State::Value | State::ValueOrEnd, _) => value(c)?,
            (State::KeyOrEnd, '}') => self.close(),
            (State::Key | State::KeyOrEnd, '"') => State::InString { key: true, escape: Escape::None },
            (State::Colon, ':') => State::Value,
            (State::CommaOrEnd, ',') if container == Some(Container::Object) => State::Key,
            (State::CommaOrEnd, ',') if container == Some(Container::Array) => State::Value,
            (State::CommaOrEnd, '}') if container == Some(Container::Object) => self.close(),
            (State::CommaOrEnd, ']') if container == Some(Container::Array) => self.close(),
            (State::Word(rest), _) => match rest.strip_prefix(c) {
                Some("") => State::CommaOrEnd,
                Some(rest) => State::Word(rest),
                None => return Err(NotJson),
            },
            _ => return Err(NotJson),
        })
    }

    fn open(&mut self, container: Container) -> Result<State, NotJson> {
        if self.containers.len() == DEPTH_MAX {
            return Err(NotJson);
        }
        self.containers.push(container);
        Ok(if container == Container::Object { State::KeyOrEnd } else { State::ValueOrEnd })
    }

    fn close(&mut self) -> State {
        self.containers.pop();
        State::CommaOrEnd
    }
}

/// The state after the first character of a value that is neither object nor list.
fn value(c: char) -> Result<State, NotJson> {
    Ok(match c {
        '"' => State::InString { key: false, escape: Escape::None },
        't' => State::Word("rue"),
        'f' => State::Word("alse"),
        'n' => State::Word("ull"),
        '-' => State::Number(Number::Sign),
        '0' => State::Number(Number::Zero),
        '1'..='9' => State::Number(Number::Whole),
        _ => return Err(NotJson),
    })
}

fn in_string(key: bool, escape: Escape, c: char, out: &mut String) -> Result<State, NotJson> {
    let escape = match (escape, c) {
        (Escape::None, '"') => {
            out.push('"');
            return Ok(if key { State::Colon } else { State::CommaOrEnd });
        }
        (Escape::None, '\\') => Escape::Began, // written when it is known what it begins
        (Escape::None, c) if c < ' ' => {
            out.push_str(&format!("\\u{:04x}", u32::from(c)));
            Escape::None
        }
        (Escape::None, c) => {
            out.push(c);
            Escape::None
        }
        (Escape::Began, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' | 'u') => {
            out.extend(['\\', c]);
            if c == 'u' { Escape::Digits(4) } else { Escape::None }
        }
        (Escape::Began, '\'') => {
            out.push('\'');
            Escape::None
        }
        // A backslash that escapes nothing is meant as one.
        (Escape::Began, c) if c >= ' ' => {
            out.extend(['\\', '\\', c]);
            Escape::None
        }
        (Escape::Digits(missing), c) if c.is_ascii_hexdigit() => {
            out.push(c);
            if missing == 1 { Escape::None } else { Escape::Digits(missing - 1) }
        }
        _ => return Err(NotJson),
    };
    Ok(State::InString { key, escape })
}

impl Number {
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

    /// What the text comes to as one value, if it is one and nothing follows.
    fn scan(text: &str) -> Option<String> {
        let (mut scan, mut out) = (JsonScan::default(), String::new());
        for c in text.chars() {
            if scan.is_done() {
                return None;
            }
            scan.push(c, &mut out).ok()?;
        }
        scan.is_done().then_some(out)
    }

    #[test]
    fn mistakes_that_have_one_meaning_are_mended() {
        assert_eq!(scan("[\"a\nb\"]").as_deref(), Some(r#"["a\u000ab"]"#));
        assert_eq!(scan(r#"["it\'s \d+"]"#).as_deref(), Some(r#"["it's \\d+"]"#));
    }

    #[test]
    fn nesting_has_a_limit() {
        let nested = |depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(scan(&nested(DEPTH_MAX)).is_some());
        assert!(scan(&nested(DEPTH_MAX + 1)).is_none());
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
            prop_assert_eq!(scan(&text).is_some(), valid);
        }
    }
}
