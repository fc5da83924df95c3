//! Texts in parts: `split`, `splitlines`, `partition`, as in Python.

use super::containers::ListBuilder;
use super::error::Error;
use super::meter::Meter;
use super::methods::needle;
use super::value::Value;
use std::rc::Rc;

pub(super) fn split(
    meter: &Rc<Meter>,
    text: &str,
    separator: Option<&Value>,
    limit: Option<&Value>,
    from_end: bool,
) -> Result<Value, Error> {
    meter.read(text.len())?;
    let limit = limit.and_then(Value::as_int).filter(|limit| *limit >= 0);
    let parts_max = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX).saturating_add(1));
    let mut list = ListBuilder::new(meter)?;
    let mut push = |part: &str| list.push(Value::text(meter, part)?);
    // A limited number of parts is collected first.
    let collected = if limit.is_some() { parts_max.min(text.len() + 1) } else { 0 };
    let _charge = meter.charge(collected.saturating_mul(size_of::<&str>()))?;
    match separator {
        None | Some(Value::None) if parts_max == usize::MAX => text.split_whitespace().try_for_each(&mut push)?,
        None | Some(Value::None) => split_words(text, parts_max, from_end).into_iter().try_for_each(&mut push)?,
        Some(separator) => match needle(meter, Some(separator), "sep")? {
            "" => return Err(Error::failed("the separator is empty")),
            separator if from_end && parts_max < usize::MAX => {
                let parts: Vec<&str> = text.rsplitn(parts_max.min(text.len() + 1), separator).collect();
                parts.into_iter().rev().try_for_each(&mut push)?;
            }
            separator => text.splitn(parts_max, separator).try_for_each(&mut push)?,
        },
    }
    Ok(list.finish())
}

/// At most `parts_max` parts, separated by white space. The last one keeps the white space on its other side.
fn split_words(text: &str, parts_max: usize, from_end: bool) -> Vec<&str> {
    let (mut rest, mut words) = (text, Vec::new());
    loop {
        rest = if from_end { rest.trim_end() } else { rest.trim_start() };
        let cut = if from_end { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        match cut.filter(|_| words.len() + 1 < parts_max) {
            _ if rest.is_empty() => break,
            None => {
                words.push(rest);
                break;
            }
            Some(at) if from_end => {
                words.push(rest[at..].trim_start());
                rest = &rest[..at];
            }
            Some(at) => {
                words.push(&rest[..at]);
                rest = &rest[at..];
            }
        }
    }
    if from_end {
        words.reverse();
    }
    words
}

/// What ends a line, besides `\r\n`.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

pub(super) fn lines(meter: &Rc<Meter>, text: &str, keep_ends: bool) -> Result<Value, Error> {
    let mut list = ListBuilder::new(meter)?;
    let mut rest = text;
    while !rest.is_empty() {
        let (length, end) = line_length(rest);
        list.push(Value::text(meter, &rest[..if keep_ends { length + end } else { length }])?)?;
        rest = &rest[length + end..];
    }
    Ok(list.finish())
}

/// The bytes of the first line, and of what ends it.
pub(super) fn line_length(text: &str) -> (usize, usize) {
    let length = text.find(LINE_ENDS).unwrap_or(text.len());
    let end = &text[length..];
    (length, if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) })
}

pub(super) fn partition(meter: &Rc<Meter>, text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    let mut list = ListBuilder::new(meter)?;
    for part in parts {
        list.push(Value::text(meter, part)?)?;
    }
    Ok(list.finish_tuple())
}
