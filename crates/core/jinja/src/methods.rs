//! The methods of texts, lists and dicts, as Python has them.

use super::arguments::Arguments;
use super::characters::{change_case, is_decimal, is_digit, is_in_case, is_letter, is_numeric};
use super::containers::{Dict, List, ListBuilder, Text, TextBuilder};
use super::error::Error;
use super::format::braces;
use super::meter::Meter;
use super::operators::{equals, item, items, lookup};
use super::print::write_str;
use super::search;
use super::split::{lines, partition, split};
use super::value::Value;
use std::rc::Rc;

/// The methods of a text, separated by spaces.
pub(super) const TEXT_METHODS: &str = "\
    capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit \
    islower isnumeric isspace isupper join ljust lower lstrip partition removeprefix removesuffix replace \
    rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill";
pub(super) const LIST_METHODS: [&str; 3] = ["copy", "count", "index"];
pub(super) const DICT_METHODS: [&str; 5] = ["copy", "get", "items", "keys", "values"];
/// The methods that would change a dict.
pub(super) const CHANGING_METHODS: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// Whether a text, list or dict has this method. As an attribute, a method has precedence over a dict's entry.
pub(super) fn has_method(value: &Value, name: &str) -> bool {
    match value {
        Value::Str(_) => TEXT_METHODS.split(' ').any(|method| method == name),
        Value::List(_) => LIST_METHODS.contains(&name),
        Value::Dict(_) => DICT_METHODS.contains(&name),
        _ => false,
    }
}

/// Calls a method of a list. `None` if lists have no such method.
pub(super) fn list_method(
    meter: &Rc<Meter>,
    list: &List,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, Error> {
    if !LIST_METHODS.contains(&name) {
        return Ok(None);
    }
    if name == "copy" {
        let [] = arguments.bind([])?;
        return Ok(Some(Value::List(list.clone())));
    }
    let [wanted] = arguments.bind(["value"])?;
    let wanted = wanted.ok_or_else(|| missing("value"))?;
    let (mut first, mut count) = (None, 0);
    for (index, item) in list.iter().enumerate() {
        if equals(meter, item, wanted)? {
            first = first.or(Some(index as i128));
            count += 1;
        }
    }
    match (name, first) {
        ("count", _) => Ok(Some(Value::Int(count))),
        (_, Some(first)) => Ok(Some(Value::Int(first))),
        (_, None) => Err(Error::failed("the value is not in the list")),
    }
}

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
        "copy" => {
            let [] = arguments.bind([])?;
            return Ok(Some(Value::Dict(dict.clone())));
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
pub(super) fn needle<'v>(meter: &Rc<Meter>, value: Option<&'v Value>, name: &str) -> Result<&'v str, Error> {
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
        "isalnum" => all(|c| is_letter(c) || is_numeric(c)),
        "isalpha" => all(is_letter),
        "isdecimal" => all(is_decimal),
        "isdigit" => all(is_digit),
        "isnumeric" => all(is_numeric),
        "isspace" => all(char::is_whitespace),
        "isascii" => Value::Bool(text.is_ascii()),
        "islower" | "isupper" => Value::Bool(is_in_case(text, name == "islower")),
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
        "startswith" | "endswith" => search::has_affix(meter, text, name == "startswith", arguments)?,
        "count" => search::count(meter, text, arguments)?,
        "find" | "rfind" | "index" | "rindex" => search::find(meter, text, name, arguments)?,
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
