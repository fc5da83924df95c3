//! The functions that every template can call.

use super::arguments::Arguments;
use super::containers::{DictBuilder, ListBuilder, Text};
use super::error::{Error, ErrorKind};
use super::meter::Meter;
use super::methods::missing;
use super::objects::{Cycler, Joiner};
use super::operators::{items, to_text};
use super::renderer::Renderer;
use super::value::{Function, Value};
use std::rc::Rc;
use std::time::SystemTime;

impl Renderer {
    pub(super) fn call_function(&mut self, function: Function, arguments: &Arguments) -> Result<Value, Error> {
        let meter = &Rc::clone(self.meter());
        match function {
            Function::Range => self.range(arguments),
            Function::Cycler => {
                let mut list = ListBuilder::new(meter)?;
                list.extend(arguments.positional.iter().cloned())?;
                Cycler::value(meter, items(meter, &list.finish())?)
            }
            Function::Joiner => {
                let [separator] = arguments.bind(["sep"])?;
                match separator {
                    None => Joiner::value(meter, Text::owned(meter, ", ".to_owned())?),
                    Some(Value::Str(separator)) => Joiner::value(meter, separator.clone()),
                    Some(other) => Err(Error::failed(format!("a separator is a text, not a {}", other.type_name()))),
                }
            }
            Function::Dict => {
                let mut dict = DictBuilder::new(meter)?;
                each_entry(meter, arguments, |key, value| dict.insert(key, value))?;
                for (name, value) in &arguments.keywords {
                    dict.insert(Value::Str(name.clone()), value.clone())?;
                }
                Ok(dict.finish())
            }
            Function::Namespace => {
                let namespace = self.namespaces.make()?;
                each_entry(meter, arguments, |key, value| match key {
                    Value::Str(name) => namespace.set(name, value),
                    _ => Err(Error::failed("the name of a variable is a text")),
                })?;
                arguments.keywords.iter().try_for_each(|(name, value)| namespace.set(name.clone(), value.clone()))?;
                Ok(Value::Namespace(namespace))
            }
            Function::RaiseException => {
                let [message] = arguments.bind(["message"])?;
                let message = to_text(meter, message.unwrap_or(&Value::None))?;
                Err(Error::new(ErrorKind::Raised, message.as_str().unwrap_or_default()))
            }
            Function::StrftimeNow => {
                let [format] = arguments.bind(["format"])?;
                let format = format.and_then(Value::as_str).ok_or_else(|| missing("format"))?;
                Value::text(meter, &strftime(self.now, format)?)
            }
        }
    }

    fn range(&mut self, arguments: &Arguments) -> Result<Value, Error> {
        let integer = |value: &Value| value.as_int().ok_or_else(|| Error::failed("a range is of integers"));
        let numbers: Vec<i128> = arguments.positional.iter().take(4).map(integer).collect::<Result<_, _>>()?;
        let (start, stop, step) = match numbers[..] {
            [stop] => (0, stop, 1),
            [start, stop] => (start, stop, 1),
            [start, stop, step] if step != 0 => (start, stop, step),
            _ => return Err(Error::failed("a range is made of one to three integers, the third not zero")),
        };
        let mut list = ListBuilder::new(self.meter())?;
        let mut at = start;
        while if step > 0 { at < stop } else { at > stop } {
            list.push(Value::Int(at))?;
            at = at.saturating_add(step);
        }
        Ok(list.finish())
    }
}

/// Visits the entries of the dict, or of the pairs, that a dict or a namespace is made of.
fn each_entry(
    meter: &Rc<Meter>,
    arguments: &Arguments,
    mut visit: impl FnMut(Value, Value) -> Result<(), Error>,
) -> Result<(), Error> {
    match &arguments.positional[..] {
        [] => Ok(()),
        [Value::Dict(dict)] => dict.entries().iter().try_for_each(|(key, value)| visit(key.clone(), value.clone())),
        [pairs] => items(meter, pairs)?.iter().try_for_each(|pair| match &items(meter, pair)?[..] {
            [key, value] => visit(key.clone(), value.clone()),
            _ => Err(Error::failed("a dict is made of pairs")),
        }),
        _ => Err(Error::failed("a dict is made of one value")),
    }
}

/// Longer formats are refused, and widths: their text could be of any length.
const TIME_FORMAT_BYTES_MAX: usize = 256;

fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let has_width =
        |field: &str| field.trim_start_matches(['-', '_', '^', '#']).starts_with(|c: char| c.is_ascii_digit());
    if format.len() > TIME_FORMAT_BYTES_MAX || format.split('%').skip(1).any(has_width) {
        return Err(Error::failed("the format of strftime_now is too long, or has a width"));
    }
    let broken = |error: jiff::Error| Error::failed(format!("strftime_now: {error}"));
    let time = jiff::Timestamp::try_from(now).map_err(broken)?.to_zoned(jiff::tz::TimeZone::system());
    jiff::fmt::strtime::format(format, &time).map_err(broken)
}
