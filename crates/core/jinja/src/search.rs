//! A text within another one: `find`, `count`, `startswith`, as in Python, between two places if they are given.

use super::arguments::Arguments;
use super::error::Error;
use super::meter::Meter;
use super::methods::{missing, needle};
use super::value::Value;
use std::rc::Rc;

/// `find`, `rfind`, `index` and `rindex`.
pub(super) fn find(meter: &Rc<Meter>, text: &str, name: &str, arguments: &Arguments) -> Result<Value, Error> {
    let [part, start, end] = arguments.bind(["sub", "start", "end"])?;
    let part = needle(meter, part, "sub")?;
    let found = window(text, start, end)?.and_then(|(before, within)| {
        let at = if name.starts_with('r') { within.rfind(part) } else { within.find(part) };
        at.map(|at| before + within[..at].chars().count())
    });
    match found {
        None if name.ends_with("index") => Err(Error::failed("the text is not found")),
        found => Ok(Value::Int(found.map_or(-1, |at| at as i128))),
    }
}

pub(super) fn count(meter: &Rc<Meter>, text: &str, arguments: &Arguments) -> Result<Value, Error> {
    let [part, start, end] = arguments.bind(["sub", "start", "end"])?;
    let part = needle(meter, part, "sub")?;
    let count = window(text, start, end)?.map_or(0, |(_, within)| within.matches(part).count());
    Ok(Value::Int(count as i128))
}

/// `startswith` and `endswith`.
pub(super) fn has_affix(meter: &Rc<Meter>, text: &str, at_start: bool, arguments: &Arguments) -> Result<Value, Error> {
    let [affix, start, end] = arguments.bind(["affix", "start", "end"])?;
    let affix = affix.ok_or_else(|| missing("affix"))?;
    let affixes = match affix {
        Value::List(affixes) => affixes,
        affix => std::slice::from_ref(affix),
    };
    let within = window(text, start, end)?.map(|(_, within)| within);
    for affix in affixes {
        let affix = needle(meter, Some(affix), "affix")?;
        if within.is_some_and(|text| if at_start { text.starts_with(affix) } else { text.ends_with(affix) }) {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

/// The part of a text between two places, and how many characters are before it. `None` if it would end before it starts.
fn window<'t>(text: &'t str, start: Option<&Value>, end: Option<&Value>) -> Result<Option<(usize, &'t str)>, Error> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let length = text.chars().count();
    let bound = |value: Option<&Value>, default: usize| match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => {
            let at = value.as_int().ok_or_else(|| Error::failed("the bounds of a search are integers"))?;
            let at = if at < 0 { at.saturating_add(length as i128).max(0) } else { at };
            Ok(usize::try_from(at).unwrap_or(usize::MAX))
        }
    };
    let (start, end) = (bound(start, 0)?, bound(end, length)?.min(length));
    let place = |count: usize| text.char_indices().nth(count).map_or(text.len(), |(at, _)| at);
    Ok((start <= end).then(|| (start, &text[place(start)..place(end)])))
}
