//! Splits the source of a template into tokens.
//!
//! As in Hugging Face's environment, a block tag removes the white space before it on its line and the newline after it
//! (`lstrip_blocks`, `trim_blocks`), and one newline at the end of the source is dropped.

use super::error::Error;

/// More than any template has; bounds the memory of a parsed template.
const TOKENS_MAX: usize = 250_000;
/// A variable is looked up by its name in every scope around it, in one step each.
const NAME_BYTES_MAX: usize = 256;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TokenKind {
    /// Text outside of tags.
    Data(String),
    BlockBegin,
    BlockEnd,
    VariableBegin,
    VariableEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

#[derive(Clone, Debug)]
pub(super) struct Token {
    pub kind: TokenKind,
    pub line: u32,
}

/// The longer operators come first.
const OPERATORS: [&str; 27] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "~", "(", ")", "[", "]", "{", "}", ">", "<", "=", ".",
    ":", "|", ",", ";", "!",
];

pub(super) fn tokenize(source: &str) -> Result<Vec<Token>, Error> {
    let normalised = source.contains('\r').then(|| source.replace("\r\n", "\n").replace('\r', "\n"));
    let source = normalised.as_deref().unwrap_or(source);
    let source = source.strip_suffix('\n').unwrap_or(source);
    let mut lexer = Lexer { rest: source, line: 1, line_start: true, tokens: Vec::new() };
    while !lexer.rest.is_empty() {
        lexer.data()?;
    }
    lexer.push(TokenKind::End)?;
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    rest: &'s str,
    line: u32,
    /// The text that was consumed last ended a line.
    line_start: bool,
    tokens: Vec<Token>,
}

/// The sign within a tag's delimiter: `{%-`, `{%+`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    None,
    Minus,
    Plus,
}

impl<'s> Lexer<'s> {
    fn push(&mut self, kind: TokenKind) -> Result<(), Error> {
        if self.tokens.len() == TOKENS_MAX {
            return Err(Error::syntax(self.line, format!("there are more than {TOKENS_MAX} tokens")));
        }
        self.tokens.push(Token { kind, line: self.line });
        Ok(())
    }

    fn error(&self, message: impl AsRef<str>) -> Error {
        Error::syntax(self.line, message)
    }

    fn advance(&mut self, bytes: usize) -> &'s str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.bytes().filter(|&byte| byte == b'\n').count() as u32;
        if let Some(last) = taken.chars().next_back() {
            self.line_start = last == '\n';
        }
        self.rest = rest;
        taken
    }

    /// Text up to the next tag, and that tag.
    fn data(&mut self) -> Result<(), Error> {
        let Some(start) = next_tag(self.rest) else {
            let text = self.advance(self.rest.len());
            return self.push(TokenKind::Data(text.to_owned()));
        };
        let (text, tag) = self.rest.split_at(start);
        let (kind, sign) = (tag.as_bytes()[1], sign_of(&tag[2..]));
        let text = self.before_tag(text, kind != b'{', sign);
        if !text.is_empty() {
            self.push(TokenKind::Data(text.to_owned()))?;
        }
        self.advance(start + 2 + usize::from(sign != Sign::None));
        match kind {
            b'#' => self.comment(),
            b'%' => match raw_tag(self.rest, "raw") {
                Some(length) => self.raw(length),
                None => {
                    self.push(TokenKind::BlockBegin)?;
                    self.expression("%}", TokenKind::BlockEnd)
                }
            },
            _ => {
                self.push(TokenKind::VariableBegin)?;
                self.expression("}}", TokenKind::VariableEnd)
            }
        }
    }

    /// The text without the white space that the following tag removes.
    fn before_tag<'t>(&self, text: &'t str, is_block: bool, sign: Sign) -> &'t str {
        match sign {
            Sign::Minus => text.trim_end(),
            Sign::None if is_block => {
                let line = text.rfind('\n').map_or(0, |newline| newline + 1);
                let begins_line = line > 0 || self.line_start;
                if begins_line && text[line..].chars().all(char::is_whitespace) { &text[..line] } else { text }
            }
            _ => text,
        }
    }

    /// Skips the white space that a tag removes after it.
    fn after_tag(&mut self, sign: Sign) {
        let trimmed = match sign {
            Sign::Minus => self.rest.len() - self.rest.trim_start().len(),
            Sign::None => usize::from(self.rest.starts_with('\n')),
            Sign::Plus => 0,
        };
        self.advance(trimmed);
    }

    fn comment(&mut self) -> Result<(), Error> {
        let end = self.rest.find("#}").ok_or_else(|| self.error("a comment does not end"))?;
        let sign = match self.advance(end + 2).as_bytes() {
            [.., b'-', b'#', b'}'] => Sign::Minus,
            [.., b'+', b'#', b'}'] => Sign::Plus,
            _ => Sign::None,
        };
        self.after_tag(sign);
        Ok(())
    }

    /// Text in which tags mean nothing. `length` is that of the rest of the opening tag.
    fn raw(&mut self, length: usize) -> Result<(), Error> {
        if self.advance(length).ends_with("-%}") {
            self.after_tag(Sign::Minus);
        }
        let mut at = 0;
        let (end, sign, length) = loop {
            let start = self.rest[at..].find("{%").ok_or_else(|| self.error("a raw block does not end"))? + at;
            let sign = sign_of(&self.rest[start + 2..]);
            let name = start + 2 + usize::from(sign != Sign::None);
            if let Some(length) = raw_tag(&self.rest[name..], "endraw") {
                break (start, sign, name + length);
            }
            at = start + 2;
        };
        let text = self.before_tag(&self.rest[..end], true, sign).to_owned();
        self.push(TokenKind::Data(text))?;
        let sign = match self.advance(length).as_bytes() {
            [.., b'-', b'%', b'}'] => Sign::Minus,
            [.., b'+', b'%', b'}'] => Sign::Plus,
            _ => Sign::None,
        };
        self.after_tag(sign);
        Ok(())
    }

    /// The tokens within a tag, up to its end.
    fn expression(&mut self, end: &'static str, end_kind: TokenKind) -> Result<(), Error> {
        let mut open: Vec<&'static str> = Vec::new();
        loop {
            self.advance(self.rest.len() - self.rest.trim_start().len());
            let sign = sign_of(self.rest);
            let signed = usize::from(sign != Sign::None);
            if open.is_empty() && self.rest.get(signed..).is_some_and(|rest| rest.starts_with(end)) {
                self.advance(signed + end.len());
                self.push(end_kind.clone())?;
                match (sign, &end_kind) {
                    (Sign::Minus, _) | (_, TokenKind::BlockEnd) => self.after_tag(sign),
                    _ => {}
                }
                return Ok(());
            }
            let Some(first) = self.rest.chars().next() else { return Err(self.error("a tag does not end")) };
            match first {
                '"' | '\'' => self.string(first)?,
                _ if first.is_ascii_digit() => self.number()?,
                _ if is_name(first) => {
                    let length = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
                    if length > NAME_BYTES_MAX {
                        return Err(self.error(format!("a name is longer than {NAME_BYTES_MAX} bytes")));
                    }
                    let name = self.advance(length).to_owned();
                    self.push(TokenKind::Name(name))?;
                }
                _ => self.operator(&mut open)?,
            }
        }
    }

    fn operator(&mut self, open: &mut Vec<&'static str>) -> Result<(), Error> {
        let found = OPERATORS.into_iter().find(|operator| self.rest.starts_with(operator));
        let Some(operator) = found else {
            let first: String = self.rest.chars().take(1).collect();
            return Err(self.error(format!("unexpected {first:?}")));
        };
        let closing = match operator {
            "(" => Some(")"),
            "[" => Some("]"),
            "{" => Some("}"),
            _ => None,
        };
        open.extend(closing);
        if matches!(operator, ")" | "]" | "}") && open.pop() != Some(operator) {
            return Err(self.error(format!("unexpected {operator:?}")));
        }
        self.advance(operator.len());
        self.push(TokenKind::Operator(operator))
    }

    fn number(&mut self) -> Result<(), Error> {
        let bytes = self.rest.as_bytes();
        let digits = |from: usize| {
            let end = bytes[from..].iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
            end.map_or(bytes.len(), |end| from + end)
        };
        let decimals = |from: usize| {
            let end = bytes[from..].iter().position(|byte| !byte.is_ascii_digit() && *byte != b'_');
            end.map_or(bytes.len(), |end| from + end)
        };
        let radix = match bytes {
            [b'0', b'x' | b'X', ..] => 16,
            [b'0', b'o' | b'O', ..] => 8,
            [b'0', b'b' | b'B', ..] => 2,
            _ => 10,
        };
        if radix != 10 {
            let text = self.advance(digits(2)).replace('_', "");
            let value = i128::from_str_radix(&text[2..], radix).map_err(|_| self.error("a number is malformed"))?;
            return self.push(TokenKind::Int(value));
        }
        let mut end = decimals(0);
        let mut is_float = false;
        // After a dot, as in `list.0.1`, a number is an index.
        let is_index = matches!(self.tokens.last(), Some(Token { kind: TokenKind::Operator("."), .. }));
        if !is_index && bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit) {
            end = decimals(end + 1);
            is_float = true;
        }
        if !is_index && matches!(bytes.get(end), Some(b'e' | b'E')) {
            let signed = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
            if bytes.get(end + 1 + signed).is_some_and(u8::is_ascii_digit) {
                end = decimals(end + 1 + signed);
                is_float = true;
            }
        }
        let text = self.advance(end).replace('_', "");
        let kind = match is_float {
            true => text.parse().ok().map(TokenKind::Float),
            false => text.parse().ok().map(TokenKind::Int),
        };
        let kind = kind.ok_or_else(|| self.error("a number is malformed"))?;
        self.push(kind)
    }

    fn string(&mut self, quote: char) -> Result<(), Error> {
        let mut text = String::new();
        let mut characters = self.rest.char_indices().skip(1);
        let end = loop {
            match characters.next() {
                None => return Err(self.error("a string does not end")),
                Some((at, c)) if c == quote => break at + 1,
                Some((at, '\\')) => {
                    let length = unescape(&self.rest[at + 1..], &mut text);
                    // `length` counts bytes of whole characters.
                    let after = at + 1 + length;
                    while characters.clone().next().is_some_and(|(next, _)| next < after) {
                        characters.next();
                    }
                }
                Some((_, c)) => text.push(c),
            }
        };
        self.advance(end);
        self.push(TokenKind::Str(text))
    }
}

/// The start of the next tag.
fn next_tag(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    (0..bytes.len().saturating_sub(1)).find(|&at| bytes[at] == b'{' && matches!(bytes[at + 1], b'{' | b'%' | b'#'))
}

fn sign_of(text: &str) -> Sign {
    match text.as_bytes().first() {
        Some(b'-') => Sign::Minus,
        Some(b'+') => Sign::Plus,
        _ => Sign::None,
    }
}

/// The length of ` name %}`, if `text` starts with that.
fn raw_tag(text: &str, name: &str) -> Option<usize> {
    let rest = text.trim_start().strip_prefix(name)?.trim_start();
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix("%}")?;
    Some(text.len() - rest.len())
}

fn is_name(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// Appends the character that is escaped at the start of `text`, and returns the length of the escape. As in Python, an
/// unknown escape stays as it is.
fn unescape(text: &str, out: &mut String) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let simple = match first {
        'n' => '\n',
        't' => '\t',
        'r' => '\r',
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'v' => '\u{b}',
        '\\' | '\'' | '"' => first,
        '\n' => return 1,
        '0'..='7' => {
            let length = text.bytes().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
            let code = u32::from_str_radix(&text[..length], 8).ok();
            out.extend(code.and_then(char::from_u32));
            return length;
        }
        'x' | 'u' | 'U' => {
            let length = match first {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let code = text.get(1..=length).and_then(|digits| u32::from_str_radix(digits, 16).ok());
            match code.and_then(char::from_u32) {
                Some(c) => {
                    out.push(c);
                    return 1 + length;
                }
                None => {
                    out.extend(['\\', first]);
                    return 1;
                }
            }
        }
        other => {
            out.extend(['\\', other]);
            return other.len_utf8();
        }
    };
    out.push(simple);
    1
}
