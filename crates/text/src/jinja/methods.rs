//! The methods of texts and dicts, as Python has them.

use super::arguments::Arguments;
use super::containers::{Dict, ListBuilder, Text, TextBuilder};
use super::error::Error;
use super::format::braces;
use super::meter::Meter;
use super::operators::{item, items, lookup};
use super::print::write_str;
use super::value::Value;
use std::rc::Rc;

/// Calls a method of a dict. `None` if dicts have no such method.
pub(super) fn dict_method(
    meter: &Rc<Meter>,
    dict: &Dict,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, Error> {
    let mut list = ListBuilder::new(meter)?;
    match name {
        "get" => {
            let [key, default] = arguments.bind(["key", "default"])?;
            let key = key.ok_or_else(|| missing("key"))?;
            return Ok(Some(lookup(meter, dict, key)?.or(default).cloned().unwrap_or(Value::None)));
        }
        "keys" => list.extend(dict.entries().iter().map(|(key, _)| key.clone()))?,
        "values" => list.extend(dict.entries().iter().map(|(_, value)| value.clone()))?,
        "items" => {
            for (key, value) in dict.entries() {
                list.push(pair(meter, key.clone(), value.clone())?)?;
            }
        }
        _ => return Ok(None),
    }
    let [] = arguments.bind([])?;
    Ok(Some(list.finish()))
}

pub(super) fn pair(meter: &Rc<Meter>, first: Value, second: Value) -> Result<Value, Error> {
    let mut pair = ListBuilder::new(meter)?;
    pair.extend([first, second])?;
    Ok(pair.finish_tuple())
}

pub(super) fn missing(argument: &str) -> Error {
    Error::failed(format!("the argument {argument:?} is missing"))
}

/// A text argument.
pub(super) fn text_of<'v>(value: Option<&'v Value>, name: &str) -> Result<&'v str, Error> {
    match value {
        Some(Value::Str(text)) => Ok(text),
        Some(other) => Err(Error::failed(format!("{name:?} is a {}, not a text", other.type_name()))),
        None => Err(missing(name)),
    }
}

/// A text argument that is searched for or compared, which reads all of it.
fn needle<'v>(meter: &Rc<Meter>, value: Option<&'v Value>, name: &str) -> Result<&'v str, Error> {
    let text = text_of(value, name)?;
    meter.read(text.len())?;
    Ok(text)
}

/// An argument that is a size or a count, and not negative.
pub(super) fn count_of(value: Option<&Value>, name: &str, default: usize) -> Result<usize, Error> {
    match value {
        None => Ok(default),
        Some(value) => {
            let value = value.as_int().ok_or_else(|| Error::failed(format!("{name:?} is no integer")))?;
            Ok(usize::try_from(value.max(0)).unwrap_or(usize::MAX))
        }
    }
}

/// Calls a method of a text. `None` if texts have no such method.
pub(super) fn text_method(
    meter: &Rc<Meter>,
    text: &Text,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, Error> {
    meter.read(text.len())?;
    let all = |test: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(test));
    Ok(Some(match name {
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isdigit" | "isnumeric" | "isdecimal" => all(char::is_numeric),
        "isspace" => all(char::is_whitespace),
        "isascii" => Value::Bool(text.is_ascii()),
        "islower" => Value::Bool(text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)),
        "isupper" => Value::Bool(text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)),
        "upper" | "lower" | "casefold" | "capitalize" | "title" | "swapcase" => change_case(meter, text, name)?,
        "strip" | "lstrip" | "rstrip" => {
            let [characters] = arguments.bind(["chars"])?;
            strip(meter, text, characters, name != "rstrip", name != "lstrip")?
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = arguments.bind(["affix"])?;
            let affix = needle(meter, affix, "affix")?;
            let stripped = if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Value::text(meter, stripped.unwrap_or(text))?
        }
        "replace" => {
            let [old, new, count] = arguments.bind(["old", "new", "count"])?;
            let count = count.and_then(Value::as_int).filter(|count| *count >= 0);
            replace(meter, text, needle(meter, old, "old")?, text_of(new, "new")?, count)?
        }
        "split" | "rsplit" => {
            let [separator, limit] = arguments.bind(["sep", "maxsplit"])?;
            split(meter, text, separator, limit, name == "rsplit")?
        }
        "splitlines" => {
            let [keep] = arguments.bind(["keepends"])?;
            lines(meter, text, keep.is_some_and(Value::is_true))?
        }
        "partition" | "rpartition" => {
            let [separator] = arguments.bind(["sep"])?;
            partition(meter, text, needle(meter, separator, "sep")?, name == "rpartition")?
        }
        "startswith" | "endswith" => {
            let [affix] = arguments.bind(["affix"])?;
            Value::Bool(has_affix(meter, text, affix.ok_or_else(|| missing("affix"))?, name == "startswith")?)
        }
        "count" => {
            let [part] = arguments.bind(["sub"])?;
            Value::Int(text.matches(needle(meter, part, "sub")?).count() as i128)
        }
        "find" | "rfind" | "index" | "rindex" => {
            let [part] = arguments.bind(["sub"])?;
            let part = needle(meter, part, "sub")?;
            let found = if name.starts_with('r') { text.rfind(part) } else { text.find(part) };
            match found {
                None if name.ends_with("index") => return Err(Error::failed("the text is not found")),
                found => Value::Int(found.map_or(-1, |at| text[..at].chars().count() as i128)),
            }
        }
        "join" => {
            let [values] = arguments.bind(["iterable"])?;
            let values = items(meter, values.ok_or_else(|| missing("iterable"))?)?;
            let mut joined = TextBuilder::new(meter)?;
            for (index, value) in values.iter().enumerate() {
                joined.push_str(if index == 0 { "" } else { text })?;
                write_str(&mut joined, value)?;
            }
            joined.finish()
        }
        "format" => braces(meter, text, arguments)?,
        "ljust" | "rjust" | "center" | "zfill" => {
            let [width, fill] = arguments.bind(["width", "fillchar"])?;
            let fill =
                if name == "zfill" { "0" } else { fill.map_or(Ok(" "), |fill| text_of(Some(fill), "fillchar"))? };
            pad(meter, text, count_of(width, "width", 0)?, fill, name)?
        }
        _ => return Ok(None),
    }))
}

fn change_case(meter: &Rc<Meter>, text: &str, name: &str) -> Result<Value, Error> {
    let mut changed = TextBuilder::new(meter)?;
    let mut in_word = false;
    for character in text.chars() {
        let upper = match name {
            "upper" => true,
            "lower" | "casefold" => false,
            "swapcase" => character.is_lowercase(),
            _ => !in_word,
        };
        in_word = if name == "title" { character.is_alphanumeric() || character == '\'' } else { true };
        if upper {
            character.to_uppercase().try_for_each(|c| changed.push(c))?;
        } else {
            character.to_lowercase().try_for_each(|c| changed.push(c))?;
        }
    }
    Ok(changed.finish())
}

pub(super) fn strip(
    meter: &Rc<Meter>,
    text: &str,
    characters: Option<&Value>,
    start: bool,
    end: bool,
) -> Result<Value, Error> {
    let characters = match characters {
        None | Some(Value::None) => None,
        Some(value) => Some(text_of(Some(value), "chars")?),
    };
    // Each character is searched for in `characters`.
    meter.steps((text.len() / 64 + 1).saturating_mul(characters.map_or(0, str::len) + 1))?;
    let strips = |c: char| characters.map_or(c.is_whitespace(), |characters| characters.contains(c));
    let text = if start { text.trim_start_matches(strips) } else { text };
    Value::text(meter, if end { text.trim_end_matches(strips) } else { text })
}

pub(super) fn replace(
    meter: &Rc<Meter>,
    text: &str,
    old: &str,
    new: &str,
    count: Option<i128>,
) -> Result<Value, Error> {
    meter.read(text.len())?;
    let mut replaced = TextBuilder::new(meter)?;
    let mut copied = 0;
    let matches =
        text.match_indices(old).take(count.map_or(usize::MAX, |count| count.try_into().unwrap_or(usize::MAX)));
    for (at, found) in matches {
        replaced.push_str(&text[copied..at])?;
        replaced.push_str(new)?;
        copied = at + found.len();
    }
    replaced.push_str(&text[copied..])?;
    Ok(replaced.finish())
}

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

/// At most `parts_max` parts, separated by white space.
fn split_words(text: &str, parts_max: usize, from_end: bool) -> Vec<&str> {
    let (mut rest, mut words) = (text.trim(), Vec::new());
    while !rest.is_empty() {
        let cut = if from_end { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        match cut.filter(|_| words.len() + 1 < parts_max) {
            None => {
                words.push(rest);
                break;
            }
            Some(at) => {
                let (head, tail) = (rest[..at].trim_end(), rest[at..].trim_start());
                words.push(if from_end { tail } else { head });
                rest = if from_end { head } else { tail };
            }
        }
    }
    if from_end {
        words.reverse();
    }
    words
}

fn lines(meter: &Rc<Meter>, text: &str, keep_ends: bool) -> Result<Value, Error> {
    let mut list = ListBuilder::new(meter)?;
    for line in text.split_inclusive('\n') {
        let bare = line.strip_suffix('\n').map_or(line, |line| line.strip_suffix('\r').unwrap_or(line));
        list.push(Value::text(meter, if keep_ends { line } else { bare })?)?;
    }
    Ok(list.finish())
}

fn partition(meter: &Rc<Meter>, text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
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

fn has_affix(meter: &Rc<Meter>, text: &str, affix: &Value, at_start: bool) -> Result<bool, Error> {
    let affixes = match affix {
        Value::List(affixes) => affixes,
        affix => std::slice::from_ref(affix),
    };
    for affix in affixes {
        let affix = needle(meter, Some(affix), "affix")?;
        if if at_start { text.starts_with(affix) } else { text.ends_with(affix) } {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Pads a text to a width: `ljust`, `rjust`, `center`, `zfill`.
pub(super) fn pad(meter: &Rc<Meter>, text: &str, width: usize, fill: &str, name: &str) -> Result<Value, Error> {
    meter.read(text.len())?;
    let padding = width.saturating_sub(text.chars().count());
    let signed = if name == "zfill" { text.len() - text.trim_start_matches(['-', '+']).len() } else { 0 };
    let (before, after) = match name {
        "ljust" => (0, padding),
        "center" => {
            let before = padding / 2 + (padding & width & 1);
            (before, padding - before)
        }
        _ => (padding, 0),
    };
    let mut padded = TextBuilder::new(meter)?;
    padded.push_str(&text[..signed])?;
    padded.repeat(fill, before)?;
    padded.push_str(&text[signed..])?;
    padded.repeat(fill, after)?;
    Ok(padded.finish())
}

/// `value.a.b`, or `value[0]` for a number: what filters call an attribute.
pub(super) fn attribute(meter: &Rc<Meter>, value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return item(meter, value, path) };
    let mut value = value.clone();
    for part in path.split('.') {
        let key = match part.parse::<i128>() {
            Ok(index) => Value::Int(index),
            Err(_) => Value::text(meter, part)?,
        };
        value = item(meter, &value, &key)?;
    }
    Ok(value)
}
