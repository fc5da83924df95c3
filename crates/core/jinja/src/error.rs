//! Why a template cannot be parsed or rendered.

/// An error, with the line of the template where it occurred.
#[derive(Debug)]
pub struct Error {
    pub kind: ErrorKind,
    pub message: String,
    pub line: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    Syntax,
    /// The template called `raise_exception`.
    Raised,
    /// A limit of the rendering is exceeded.
    Limit,
    Failed,
}

/// Characters of a message. Templates may raise whole conversations.
const MESSAGE_CHARACTERS_MAX: usize = 500;

impl Error {
    /// A message may be a text of the template or of the conversation, and ends up on terminals and in logs: it becomes one line
    /// without control characters.
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        let message = message.as_ref().chars().take(MESSAGE_CHARACTERS_MAX).map(harmless).collect();
        Self { kind, message, line: None }
    }

    pub fn failed(message: impl AsRef<str>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    pub fn limit(message: impl AsRef<str>) -> Self {
        Self::new(ErrorKind::Limit, message)
    }

    pub fn syntax(line: u32, message: impl AsRef<str>) -> Self {
        Self { line: Some(line), ..Self::new(ErrorKind::Syntax, message) }
    }

    /// The innermost line counts.
    pub fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

/// A space for white space, and a mark for other characters that move the cursor, change colours or turn the text around.
fn harmless(character: char) -> char {
    match character {
        '\n' | '\r' | '\t' | '\u{2028}' | '\u{2029}' => ' ',
        '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => char::REPLACEMENT_CHARACTER,
        other if other.is_control() => char::REPLACEMENT_CHARACTER,
        other => other,
    }
}

/// The start of a text of any length, in quotes.
pub(super) fn quoted(text: &str) -> String {
    const CHARACTERS_MAX: usize = 100;
    let start: String = text.chars().take(CHARACTERS_MAX).collect();
    format!("{start:?}")
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) if self.kind != ErrorKind::Raised => write!(f, "{} (line {line})", self.message),
            _ => f.write_str(&self.message),
        }
    }
}
