//! Formatted text: `'%s' % value` and `'{}'.format(value)`, as in Python.

use super::arguments::Arguments;
use super::containers::TextBuilder;
use super::error::{Error, quoted};
use super::meter::Meter;
use super::operators;
use super::print::{number, write_repr, write_str};
use super::value::Value;
use std::rc::Rc;

/// How one value is written: `>08.3f`.
#[derive(Default)]
struct Style {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
    /// What stands between thousands.
    grouping: Option<char>,
}

/// `pattern % values`. Values are a tuple, a dict for `%(name)s`, or a single value.
pub(super) fn percent(meter: &Rc<Meter>, pattern: &str, values: &Value) -> Result<Value, Error> {
    let tuple = match values {
        Value::List(list) if list.is_tuple() => Some(&**list),
        _ => None,
    };
    let values_left = tuple.unwrap_or(std::slice::from_ref(values));
    percent_with(meter, pattern, values_left, values)
}

/// The same with a slice of values; `names` is where `%(name)s` looks.
pub(super) fn percent_with(meter: &Rc<Meter>, pattern: &str, values: &[Value], names: &Value) -> Result<Value, Error> {
    let mut out = TextBuilder::new(meter)?;
    let mut values = values.iter();
    let mut rest = pattern;
    while let Some(start) = rest.find('%') {
        out.push_str(&rest[..start])?;
        rest = &rest[start + 1..];
        if let Some(after) = rest.strip_prefix('%') {
            out.push('%')?;
            rest = after;
            continue;
        }
        let mut named = None;
        if let Some((name, after)) = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) {
            named = Some(operators::item(meter, names, &Value::text(meter, name)?)?);
            rest = after;
        }
        let mut style = Style::default();
        rest = style.read_flags(rest);
        rest = read_number(rest, &mut style.width);
        rest = style.read_precision(rest);
        style.kind = rest.chars().next();
        rest = &rest[style.kind.map_or(0, char::len_utf8)..];
        let value = match named {
            Some(value) => value,
            None => values.next().cloned().ok_or_else(|| Error::failed("a format has too few values"))?,
        };
        style.align.get_or_insert('>');
        style.write(&mut out, &value)?;
    }
    out.push_str(rest)?;
    Ok(out.finish())
}

/// `pattern.format(…)`.
pub(super) fn braces(meter: &Rc<Meter>, pattern: &str, arguments: &Arguments) -> Result<Value, Error> {
    Ok(fields(meter, pattern, arguments, &mut 0, true)?.finish())
}

/// The pattern with its fields replaced. The style of a field may contain fields, but not those of another one.
fn fields(
    meter: &Rc<Meter>,
    pattern: &str,
    arguments: &Arguments,
    automatic: &mut usize,
    may_nest: bool,
) -> Result<TextBuilder, Error> {
    let mut out = TextBuilder::new(meter)?;
    let mut rest = pattern;
    while let Some(start) = rest.find(['{', '}']) {
        out.push_str(&rest[..start])?;
        let (brace, after) = rest[start..].split_at(1);
        if let Some(after) = after.strip_prefix(brace) {
            out.push_str(brace)?;
            rest = after;
            continue;
        }
        let end =
            field_end(after).filter(|_| brace == "{").ok_or_else(|| Error::failed("a format has an odd brace"))?;
        let field = &after[..end];
        rest = &after[end + 1..];
        let (path, spec) = field.split_once(':').unwrap_or((field, ""));
        let (path, as_repr) = path.strip_suffix("!r").map_or((path, false), |path| (path, true));
        let path = path.strip_suffix("!s").unwrap_or(path);
        let value = match field_value(meter, path, arguments, automatic)? {
            Value::Bool(value) if !spec.is_empty() => Value::Int(value.into()),
            value => value,
        };
        let style = match spec.contains('{') {
            true if may_nest => Style::parse(fields(meter, spec, arguments, automatic, false)?.as_str())?,
            _ => Style::parse(spec)?,
        };
        if as_repr {
            let mut text = TextBuilder::new(meter)?;
            write_repr(&mut text, &value)?;
            style.write(&mut out, &text.finish())?;
        } else {
            style.write(&mut out, &value)?;
        }
    }
    out.push_str(rest)?;
    Ok(out)
}

/// Where a field ends, which may contain others.
fn field_end(text: &str) -> Option<usize> {
    let mut open = 1_usize;
    text.bytes().position(|byte| {
        match byte {
            b'{' => open += 1,
            b'}' => open -= 1,
            _ => {}
        }
        open == 0
    })
}

/// The value of `0`, `name`, `name.attribute` or `name[key]`.
fn field_value(meter: &Rc<Meter>, path: &str, arguments: &Arguments, automatic: &mut usize) -> Result<Value, Error> {
    let end = path.find(['.', '[']).unwrap_or(path.len());
    let (first, mut rest) = path.split_at(end);
    let missing = || Error::failed(format!("a format has no value {}", quoted(first)));
    let mut value = match first.parse::<usize>() {
        Ok(index) => arguments.positional.get(index).cloned().ok_or_else(missing)?,
        Err(_) if first.is_empty() => {
            *automatic += 1;
            arguments.positional.get(*automatic - 1).cloned().ok_or_else(missing)?
        }
        Err(_) => arguments.keyword(first)?.cloned().ok_or_else(missing)?,
    };
    while !rest.is_empty() {
        let (key, after) = match rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some(found) => found,
            None => {
                let rest = rest.strip_prefix('.').ok_or_else(missing)?;
                rest.split_at(rest.find(['.', '[']).unwrap_or(rest.len()))
            }
        };
        let key = match key.parse::<i128>() {
            Ok(index) => Value::Int(index),
            Err(_) => Value::text(meter, key)?,
        };
        value = operators::item(meter, &value, &key)?;
        rest = after;
    }
    Ok(value)
}

fn read_number<'s>(text: &'s str, number: &mut usize) -> &'s str {
    let length = text.bytes().take_while(u8::is_ascii_digit).count();
    if length > 0 {
        // A width that is too large for any number is refused when it is written.
        *number = text[..length].parse().unwrap_or(usize::MAX);
    }
    &text[length..]
}

impl Style {
    fn parse(spec: &str) -> Result<Self, Error> {
        let mut style = Self::default();
        let mut rest = spec;
        let mut characters = rest.chars();
        if let (Some(fill), Some(align @ ('<' | '>' | '^' | '='))) = (characters.next(), characters.next()) {
            (style.fill, style.align) = (Some(fill), Some(align));
            rest = &rest[fill.len_utf8() + 1..];
        } else if let Some(align @ ('<' | '>' | '^' | '=')) = rest.chars().next() {
            style.align = Some(align);
            rest = &rest[1..];
        }
        rest = style.read_flags(rest);
        rest = read_number(rest, &mut style.width);
        if let Some(after) = rest.strip_prefix([',', '_']) {
            style.grouping = rest.chars().next();
            rest = after;
        }
        rest = style.read_precision(rest);
        style.kind = rest.chars().next();
        match &rest[style.kind.map_or(0, char::len_utf8)..] {
            "" => Ok(style),
            _ => Err(Error::failed(format!("the format {} is malformed", quoted(spec)))),
        }
    }

    fn read_flags<'s>(&mut self, text: &'s str) -> &'s str {
        let mut rest = text;
        loop {
            match rest.chars().next() {
                Some(sign @ ('+' | ' ')) => self.sign = Some(sign),
                Some('-') => self.align = Some('<'),
                Some('#') => self.alternate = true,
                Some('0') => {
                    self.fill.get_or_insert('0');
                    self.align.get_or_insert('=');
                }
                _ => return rest,
            }
            rest = &rest[1..];
        }
    }

    fn read_precision<'s>(&mut self, text: &'s str) -> &'s str {
        let Some(rest) = text.strip_prefix('.') else { return text };
        let mut precision = 0;
        let rest = read_number(rest, &mut precision);
        self.precision = Some(precision);
        rest
    }

    /// Appends the value, padded to the width.
    fn write(&self, out: &mut TextBuilder, value: &Value) -> Result<(), Error> {
        let mut written = TextBuilder::new(out.meter())?;
        self.write_unpadded(&mut written, value)?;
        let text = written.as_str();
        let padding = self.width.saturating_sub(text.chars().count());
        let fill = self.fill.unwrap_or(' ').to_string();
        let is_number = value.as_float().is_some() && !matches!(self.kind, Some('s' | 'r'));
        let default = if is_number { '>' } else { '<' };
        let (before, inner, after) = match self.align.unwrap_or(default) {
            '<' => (0, 0, padding),
            '^' => (padding / 2, 0, padding - padding / 2),
            '=' if is_number => (0, padding, 0),
            _ => (padding, 0, 0),
        };
        let signed = text.len() - text.trim_start_matches(['-', '+', ' ']).len();
        let (sign, digits) = if inner > 0 { text.split_at(signed) } else { ("", text) };
        out.repeat(&fill, before)?;
        out.push_str(sign)?;
        out.repeat(&fill, inner)?;
        out.push_str(digits)?;
        out.repeat(&fill, after)
    }

    fn write_unpadded(&self, out: &mut TextBuilder, value: &Value) -> Result<(), Error> {
        let expected = || Error::failed(format!("a format wants a number, found {}", value.type_name()));
        match self.kind {
            Some('d' | 'i' | 'u') => {
                let number = value.as_int().or_else(|| value.as_float().map(|value| value as i128));
                self.signed(out, number.ok_or_else(expected)?, |number| number.to_string(), "")
            }
            Some('x') => self.signed(out, value.as_int().ok_or_else(expected)?, |number| format!("{number:x}"), "0x"),
            Some('X') => self.signed(out, value.as_int().ok_or_else(expected)?, |number| format!("{number:X}"), "0X"),
            Some('o') => self.signed(out, value.as_int().ok_or_else(expected)?, |number| format!("{number:o}"), "0o"),
            Some('b') => self.signed(out, value.as_int().ok_or_else(expected)?, |number| format!("{number:b}"), "0b"),
            Some('f' | 'F' | 'e' | 'E' | 'g' | 'G' | '%') => self.float(out, value.as_float().ok_or_else(expected)?),
            Some('c') if value.as_int().is_some() => {
                let character = value.as_int().and_then(|number| u32::try_from(number).ok()).and_then(char::from_u32);
                out.push(character.ok_or_else(|| Error::failed("a number is no character"))?)
            }
            Some('r') => write_repr(out, value),
            Some('c' | 's') | None => match (value, self.precision) {
                (Value::Int(number), _) if self.kind.is_none() => self.signed(out, *number, |n| n.to_string(), ""),
                (Value::Float(number), _) if self.kind.is_none() => self.float(out, *number),
                (value, Some(precision)) => {
                    let mut text = TextBuilder::new(out.meter())?;
                    write_str(&mut text, value)?;
                    let end = text.as_str().char_indices().nth(precision).map_or(text.as_str().len(), |(at, _)| at);
                    out.push_str(&text.as_str()[..end])
                }
                (value, None) => write_str(out, value),
            },
            Some(kind) => Err(Error::failed(format!("the format {kind:?} is unknown"))),
        }
    }

    fn signed(
        &self,
        out: &mut TextBuilder,
        number: i128,
        digits: fn(u128) -> String,
        prefix: &str,
    ) -> Result<(), Error> {
        match (number < 0, self.sign) {
            (true, _) => out.push('-')?,
            (false, Some(sign)) => out.push(sign)?,
            _ => {}
        }
        if self.alternate {
            out.push_str(prefix)?;
        }
        let digits = digits(number.unsigned_abs());
        out.repeat("0", self.precision.unwrap_or(0).saturating_sub(digits.len()))?;
        out.push_str(&self.grouped(&digits))
    }

    fn float(&self, out: &mut TextBuilder, value: f64) -> Result<(), Error> {
        match (value.is_sign_negative() && !value.is_nan(), self.sign) {
            (true, _) => out.push('-')?,
            (false, Some(sign)) => out.push(sign)?,
            _ => {}
        }
        let text = self.digits(value.abs());
        let whole = text.bytes().take_while(u8::is_ascii_digit).count();
        let text = format!("{}{}", self.grouped(&text[..whole]), &text[whole..]);
        out.push_str(&if matches!(self.kind, Some('F' | 'E' | 'G')) { text.to_uppercase() } else { text })
    }

    /// A number without its sign, as `f`, `e`, `g` and `%` write it.
    fn digits(&self, value: f64) -> String {
        // More digits than a float has; longer ones would be zeros.
        const PRECISION_MAX: usize = 400;
        let precision = self.precision.unwrap_or(6).min(PRECISION_MAX);
        let point = if self.alternate && precision == 0 { "." } else { "" };
        match self.kind {
            _ if !value.is_finite() => number(value),
            Some('f' | 'F') => format!("{value:.precision$}{point}"),
            Some('%') => format!("{:.precision$}{point}%", value * 100.0),
            Some('e' | 'E') => {
                let (digits, exponent) = scientific(value, precision);
                format!("{digits}{point}{}", exponent_text(exponent))
            }
            None if self.precision.is_none() => number(value),
            _ => self.general(value, precision.max(1)),
        }
    }

    /// `precision` digits in all, with an exponent where that is shorter. Without a kind, there is a digit after the point.
    fn general(&self, value: f64, precision: usize) -> String {
        let (digits, exponent) = scientific(value, precision - 1);
        let exponent_max = precision as i32 - if self.kind.is_none() { 1 } else { 0 };
        let (mut digits, exponent) = match (-4..exponent_max).contains(&exponent) {
            true => (format!("{value:.0$}", (precision as i32 - 1 - exponent).max(0) as usize), String::new()),
            false => (digits, exponent_text(exponent)),
        };
        match (digits.contains('.'), self.alternate) {
            (true, false) => digits.truncate(digits.trim_end_matches('0').trim_end_matches('.').len()),
            (false, true) => digits.push('.'),
            _ => {}
        }
        if self.kind.is_none() && exponent.is_empty() && !digits.contains('.') {
            digits.push_str(".0");
        }
        digits + &exponent
    }

    /// Digits in groups of three.
    fn grouped(&self, digits: &str) -> String {
        let Some(separator) = self.grouping else { return digits.to_owned() };
        let mut text = String::new();
        for (index, digit) in digits.chars().enumerate() {
            if index > 0 && (digits.len() - index).is_multiple_of(3) {
                text.push(separator);
            }
            text.push(digit);
        }
        text
    }
}

/// The digits of a finite number with one before the point, and the exponent.
fn scientific(value: f64, precision: usize) -> (String, i32) {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (digits.to_owned(), exponent.parse().unwrap_or(0))
}

fn exponent_text(exponent: i32) -> String {
    format!("e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}
