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
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        let message = message.as_ref().chars().take(MESSAGE_CHARACTERS_MAX).collect();
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
