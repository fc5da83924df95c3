//! Values as text: as Python's `str`, `repr` and `json.dumps` write them.

use super::containers::{Dict, TextBuilder};
use super::error::Error;
use super::value::Value;

/// Appends a value as `str` does.
pub(super) fn write_str(out: &mut TextBuilder, value: &Value) -> Result<(), Error> {
    match value {
        Value::Undefined(_) => Ok(()),
        Value::Str(text) => out.push_str(text),
        _ => write_repr(out, value),
    }
}

/// Appends a value as `repr` does.
pub(super) fn write_repr(out: &mut TextBuilder, value: &Value) -> Result<(), Error> {
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(value) => out.push_str(&value.to_string()),
        Value::Float(value) => out.push_str(&number(*value)),
        Value::Str(text) => quote(out, text),
        Value::List(list) => {
            let (open, close) = if list.is_tuple() { ("(", ")") } else { ("[", "]") };
            out.push_str(open)?;
            for (index, item) in list.iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " })?;
                write_repr(out, item)?;
            }
            out.push_str(if list.is_tuple() && list.len() == 1 { ",)" } else { close })
        }
        Value::Dict(dict) => {
            out.push_str("{")?;
            for (index, (key, value)) in dict.entries().iter().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " })?;
                write_repr(out, key)?;
                out.push_str(": ")?;
                write_repr(out, value)?;
            }
            out.push_str("}")
        }
        Value::Namespace(_)
        | Value::Loop(_)
        | Value::Macro(_)
        | Value::Function(_)
        | Value::Method(_)
        | Value::Cycler(_)
        | Value::Joiner(_) => out.push_str(&format!("<{}>", value.type_name())),
    }
}

/// A float as Python writes it.
pub(super) fn number(value: f64) -> String {
    match value {
        _ if value.is_nan() => "nan".to_owned(),
        _ if value.is_infinite() => if value > 0.0 { "inf" } else { "-inf" }.to_owned(),
        _ => float(value),
    }
}

/// The shortest digits that parse to the same value, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    match scientific.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?))) {
        Some((digits, exponent)) if value != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

fn quote(out: &mut TextBuilder, text: &str) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote)?;
    let mut plain = 0;
    for (at, character) in text.char_indices() {
        let escaped = match character {
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\\' => "\\\\".to_owned(),
            _ if character == quote => format!("\\{quote}"),
            _ if is_printable(character) => continue,
            ..='\u{ff}' => format!("\\x{:02x}", u32::from(character)),
            ..='\u{ffff}' => format!("\\u{:04x}", u32::from(character)),
            _ => format!("\\U{:08x}", u32::from(character)),
        };
        out.push_str(&text[plain..at])?;
        out.push_str(&escaped)?;
        plain = at + character.len_utf8();
    }
    out.push_str(&text[plain..])?;
    out.push(quote)
}

/// Whether Python shows a character as it is. Rust escapes the same ones, and at the start of a text also those that combine
/// with the character before them.
fn is_printable(character: char) -> bool {
    match character.is_ascii() {
        true => !character.is_ascii_control(),
        false => String::from_iter(['a', character]).escape_debug().nth(1) != Some('\\'),
    }
}

/// The options of `tojson`.
pub(super) struct JsonStyle {
    /// Spaces of one level; `None` writes one line.
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub sort_keys: bool,
    pub ensure_ascii: bool,
}

impl JsonStyle {
    pub fn write(&self, out: &mut TextBuilder, value: &Value) -> Result<(), Error> {
        self.write_at(out, value, 0)
    }

    fn write_at(&self, out: &mut TextBuilder, value: &Value, level: usize) -> Result<(), Error> {
        match value {
            Value::Undefined(_) | Value::None => out.push_str("null"),
            Value::Bool(true) => out.push_str("true"),
            Value::Bool(false) => out.push_str("false"),
            Value::Int(value) => out.push_str(&value.to_string()),
            Value::Float(value) if value.is_nan() => out.push_str("NaN"),
            Value::Float(value) if value.is_infinite() => {
                out.push_str(if *value > 0.0 { "Infinity" } else { "-Infinity" })
            }
            Value::Float(value) => out.push_str(&float(*value)),
            Value::Str(text) => self.string(out, text),
            Value::List(list) if list.is_empty() => out.push_str("[]"),
            Value::List(list) => {
                out.push_str("[")?;
                for (index, item) in list.iter().enumerate() {
                    self.separate(out, index, level + 1)?;
                    self.write_at(out, item, level + 1)?;
                }
                self.line(out, level)?;
                out.push_str("]")
            }
            Value::Dict(dict) => self.dict(out, dict, level),
            _ => Err(Error::failed(format!("a {} has no JSON form", value.type_name()))),
        }
    }

    fn dict(&self, out: &mut TextBuilder, dict: &Dict, level: usize) -> Result<(), Error> {
        let mut entries: Vec<&(Value, Value)> = Vec::new();
        let entries: &mut dyn Iterator<Item = &(Value, Value)> = if self.sort_keys {
            // The order of references is as large as the dict, which is charged.
            entries.extend(dict.entries());
            out.meter().steps(entries.len())?;
            entries.sort_by(|(a, _), (b, _)| a.as_str().cmp(&b.as_str()));
            &mut entries.into_iter()
        } else {
            &mut dict.entries().iter()
        };
        if dict.entries().is_empty() {
            return out.push_str("{}");
        }
        out.push_str("{")?;
        for (index, (key, value)) in entries.enumerate() {
            self.separate(out, index, level + 1)?;
            match key {
                Value::Str(text) => self.string(out, text)?,
                key => {
                    out.push_str("\"")?;
                    self.write_at(out, key, level)?;
                    out.push_str("\"")?;
                }
            }
            out.push_str(&self.key_separator)?;
            self.write_at(out, value, level + 1)?;
        }
        self.line(out, level)?;
        out.push_str("}")
    }

    fn separate(&self, out: &mut TextBuilder, index: usize, level: usize) -> Result<(), Error> {
        if index > 0 {
            // With lines of their own, items are not separated by a space.
            let separator = self.item_separator.as_str();
            out.push_str(if self.indent.is_some() { separator.trim_end() } else { separator })?;
        }
        self.line(out, level)
    }

    fn line(&self, out: &mut TextBuilder, level: usize) -> Result<(), Error> {
        let Some(indent) = self.indent else { return Ok(()) };
        out.push_str("\n")?;
        out.repeat(" ", indent * level)
    }

    fn string(&self, out: &mut TextBuilder, text: &str) -> Result<(), Error> {
        out.push('"')?;
        let mut plain = 0;
        for (at, character) in text.char_indices() {
            let escaped = match character {
                '"' => "\\\"".to_owned(),
                '\\' => "\\\\".to_owned(),
                '\n' => "\\n".to_owned(),
                '\r' => "\\r".to_owned(),
                '\t' => "\\t".to_owned(),
                '\u{8}' => "\\b".to_owned(),
                '\u{c}' => "\\f".to_owned(),
                ..='\u{1f}' => format!("\\u{:04x}", u32::from(character)),
                '\u{7f}'.. if self.ensure_ascii => {
                    let mut units = [0; 2];
                    character.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect()
                }
                _ => continue,
            };
            out.push_str(&text[plain..at])?;
            out.push_str(&escaped)?;
            plain = at + character.len_utf8();
        }
        out.push_str(&text[plain..])?;
        out.push('"')
    }
}
