//! The filters that transform one value. Those over lists are in `list_filters`.

use super::arguments::Arguments;
use super::characters::{count_words, title_of_words};
use super::containers::{DictBuilder, ListBuilder, Text, TextBuilder};
use super::error::{Error, quoted};
use super::format::percent_with;
use super::list_filters;
use super::meter::Meter;
use super::methods::{attribute, count_of, has_method, missing, pad, pair, replace, strip, text_method, text_of};
use super::operators::{concat, items, text, to_text, undefined};
use super::print::{JsonStyle, write_repr};
use super::renderer::Renderer;
use super::split::{line_length, split};
use super::value::Value;
use std::rc::Rc;

impl Renderer {
    pub(super) fn filter(&mut self, name: &str, value: Value, arguments: Arguments) -> Result<Value, Error> {
        let meter = &Rc::clone(self.meter());
        let filtered = match name {
            "map" => return self.map(&value, arguments),
            "select" => return self.select(&value, arguments, false, true),
            "reject" => return self.select(&value, arguments, false, false),
            "selectattr" => return self.select(&value, arguments, true, true),
            "rejectattr" => return self.select(&value, arguments, true, false),
            _ => match apply(meter, name, &value, &arguments)? {
                Some(filtered) => Some(filtered),
                None => list_filters::apply(meter, name, &value, &arguments)?,
            },
        };
        filtered.ok_or_else(|| Error::failed(format!("there is no filter {}", quoted(name))))
    }
}

fn apply(meter: &Rc<Meter>, name: &str, value: &Value, arguments: &Arguments) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "safe" | "string" => to_text(meter, value)?,
        "upper" | "lower" | "capitalize" => {
            let text = text(meter, value)?;
            text_method(meter, &text, name, arguments)?.unwrap_or(Value::None)
        }
        "title" => {
            let text = text(meter, value)?;
            meter.read(text.len())?;
            title_of_words(meter, &text)?
        }
        "trim" => {
            let [characters] = arguments.bind(["chars"])?;
            strip(meter, &text(meter, value)?, characters, true, true)?
        }
        "replace" => {
            let [old, new, count] = arguments.bind(["old", "new", "count"])?;
            let count = count.and_then(Value::as_int).filter(|count| *count >= 0);
            let (old, new) = (argument_text(meter, old, "old")?, argument_text(meter, new, "new")?);
            meter.read(old.len())?;
            replace(meter, &text(meter, value)?, &old, &new, count)?
        }
        "center" => {
            let [width] = arguments.bind(["width"])?;
            pad(meter, &text(meter, value)?, count_of(width, "width", 80)?, " ", name)?
        }
        "indent" => indent(meter, &text(meter, value)?, arguments)?,
        "split" => {
            let [separator, limit] = arguments.bind(["sep", "maxsplit"])?;
            split(meter, &text(meter, value)?, separator, limit, false)?
        }
        "truncate" => truncate(meter, &text(meter, value)?, arguments)?,
        "format" => {
            let mut names = DictBuilder::new(meter)?;
            for (name, value) in &arguments.keywords {
                names.insert(Value::Str(name.clone()), value.clone())?;
            }
            percent_with(meter, &text(meter, value)?, &arguments.positional, &names.finish())?
        }
        "escape" | "e" | "forceescape" => escape(meter, &text(meter, value)?)?,
        "wordcount" => {
            let text = text(meter, value)?;
            meter.read(text.len())?;
            Value::Int(count_words(&text) as i128)
        }
        "length" | "count" => Value::Int(length(meter, value)? as i128),
        "default" | "d" => {
            let [default, boolean] = arguments.bind(["default_value", "boolean"])?;
            let replaces = value.is_undefined() || (boolean.is_some_and(Value::is_true) && !value.is_true());
            match default {
                _ if !replaces => value.clone(),
                Some(default) => default.clone(),
                None => Value::text(meter, "")?,
            }
        }
        "abs" => match value {
            Value::Float(value) => Value::Float(value.abs()),
            value => Value::Int(value.as_int().and_then(i128::checked_abs).ok_or_else(|| no_number(value))?),
        },
        "int" => {
            meter.read(value.as_str().map_or(0, str::len))?;
            integer(value, arguments)?
        }
        "float" => {
            let [default] = arguments.bind(["default"])?;
            meter.read(value.as_str().map_or(0, str::len))?;
            let parsed = value.as_float().or_else(|| value.as_str()?.trim().parse().ok());
            parsed.map(Value::Float).or_else(|| default.cloned()).unwrap_or(Value::Float(0.0))
        }
        "round" => round(value, arguments)?,
        "bool" => Value::Bool(value.is_true()),
        "attr" => {
            let [name] = arguments.bind(["name"])?;
            let name = name.ok_or_else(|| missing("name"))?;
            meter.read(name.as_str().map_or(0, str::len))?;
            match (value, name) {
                (Value::Undefined(missing), _) => return Err(undefined(missing)),
                // The entries of a dict are no attributes.
                (Value::Dict(_), Value::Str(name)) if !has_method(value, name) => Value::Undefined(Some(name.clone())),
                _ => attribute(meter, value, name)?,
            }
        }
        "items" => {
            let mut list = ListBuilder::new(meter)?;
            match value {
                Value::Undefined(_) => {}
                Value::Dict(dict) => {
                    for (key, value) in dict.entries() {
                        list.push(pair(meter, key.clone(), value.clone())?)?;
                    }
                }
                _ => return Err(Error::failed(format!("a {} has no items", value.type_name()))),
            }
            list.finish()
        }
        "tojson" => to_json(meter, value, arguments)?,
        "pprint" => {
            let mut text = TextBuilder::new(meter)?;
            write_repr(&mut text, value)?;
            text.finish()
        }
        _ => return Ok(None),
    }))
}

fn argument_text(meter: &Rc<Meter>, value: Option<&Value>, name: &str) -> Result<Text, Error> {
    text(meter, value.ok_or_else(|| missing(name))?)
}

fn no_number(value: &Value) -> Error {
    Error::failed(format!("a {} is no number", value.type_name()))
}

fn length(meter: &Rc<Meter>, value: &Value) -> Result<usize, Error> {
    Ok(match value {
        Value::Str(text) => {
            meter.read(text.len())?;
            text.chars().count()
        }
        Value::Dict(dict) => dict.entries().len(),
        value => items(meter, value)?.len(),
    })
}

fn indent(meter: &Rc<Meter>, text: &str, arguments: &Arguments) -> Result<Value, Error> {
    let [width, first, blank] = arguments.bind(["width", "first", "blank"])?;
    let (prefix, count) = match width {
        Some(Value::Str(prefix)) => (&**prefix, 1),
        width => (" ", count_of(width, "width", 4)?),
    };
    let (first, blank) = (first.is_some_and(Value::is_true), blank.is_some_and(Value::is_true));
    let mut indented = TextBuilder::new(meter)?;
    let (mut rest, mut is_first) = (text, true);
    loop {
        let (length, end) = line_length(rest);
        if if is_first { first } else { blank || length > 0 } {
            indented.repeat(prefix, count)?;
        }
        indented.push_str(&rest[..length])?;
        if end == 0 {
            return Ok(indented.finish());
        }
        indented.push_str("\n")?;
        (rest, is_first) = (&rest[length + end..], false);
    }
}

/// Cuts a text that is longer than `length` by more than `leeway`, between words unless `killwords`.
fn truncate(meter: &Rc<Meter>, text: &str, arguments: &Arguments) -> Result<Value, Error> {
    let [length, kill_words, end, leeway] = arguments.bind(["length", "killwords", "end", "leeway"])?;
    let (length, end) = (count_of(length, "length", 255)?, end.map_or(Ok("..."), |end| text_of(Some(end), "end"))?);
    let leeway = leeway.filter(|leeway| !matches!(leeway, Value::None));
    meter.read(text.len() + end.len())?;
    let kept_max = length.checked_sub(end.chars().count());
    let kept_max = kept_max.ok_or_else(|| Error::failed("a text is cut to the length of its end at least"))?;
    if leeway.is_some_and(|leeway| leeway.as_int() < Some(0)) {
        return Err(Error::failed("the leeway is zero at least"));
    }
    if text.chars().count() <= length.saturating_add(count_of(leeway, "leeway", 5)?) {
        return Value::text(meter, text);
    }
    let kept = &text[..text.char_indices().nth(kept_max).map_or(text.len(), |(at, _)| at)];
    match kept.rsplit_once(' ').filter(|_| !kill_words.is_some_and(Value::is_true)) {
        Some((words, _)) => concat(meter, &[words, end]),
        None => concat(meter, &[kept, end]),
    }
}

fn escape(meter: &Rc<Meter>, text: &str) -> Result<Value, Error> {
    let mut escaped = TextBuilder::new(meter)?;
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;")?,
            '<' => escaped.push_str("&lt;")?,
            '>' => escaped.push_str("&gt;")?,
            '"' => escaped.push_str("&#34;")?,
            '\'' => escaped.push_str("&#39;")?,
            other => escaped.push(other)?,
        }
    }
    Ok(escaped.finish())
}

fn integer(value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [default, base] = arguments.bind(["default", "base"])?;
    let base = base.and_then(Value::as_int).and_then(|base| u32::try_from(base).ok()).unwrap_or(10);
    let parsed = match value {
        Value::Float(value) => Some(*value as i128),
        Value::Str(text) if (2..=36).contains(&base) => {
            let text = text.trim();
            let whole = i128::from_str_radix(text, base).ok();
            whole.or_else(|| text.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| value as i128))
        }
        value => value.as_int(),
    };
    Ok(parsed.map(Value::Int).or_else(|| default.cloned()).unwrap_or(Value::Int(0)))
}

fn round(value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [precision, method] = arguments.bind(["precision", "method"])?;
    let precision = precision.and_then(Value::as_int).unwrap_or(0).clamp(-300, 300) as i32;
    let method = method.and_then(Value::as_str).unwrap_or("common");
    if let (Some(number), "common", 0..) = (value.as_int(), method, precision) {
        return Ok(Value::Int(number));
    }
    let number = value.as_float().ok_or_else(|| no_number(value))?;
    if let ("common", Ok(digits)) = (method, usize::try_from(precision)) {
        // Rounds the exact value, which a product with a power of ten is not.
        return Ok(Value::Float(format!("{number:.digits$}").parse().unwrap_or(number)));
    }
    let scale = 10_f64.powi(precision);
    let scaled = number * scale;
    let rounded = match method {
        "ceil" => scaled.ceil(),
        "floor" => scaled.floor(),
        _ => scaled.round_ties_even(),
    };
    Ok(Value::Float(rounded / scale))
}

/// `tojson` as Hugging Face defines it.
fn to_json(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    /// Wider indentation is not used by any template.
    const INDENT_MAX: usize = 16;
    let [ensure_ascii, indent, separators, sort_keys] =
        arguments.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = indent.filter(|indent| !matches!(indent, Value::None));
    let indent = indent.map(|indent| count_of(Some(indent), "indent", 0)).transpose()?;
    let [sort_keys, ensure_ascii] = [sort_keys, ensure_ascii].map(|flag| flag.is_some_and(Value::is_true));
    let (mut item_separator, mut key_separator) = (", ".to_owned(), ": ".to_owned());
    if let Some(Value::List(separators)) = separators {
        item_separator = text_of(separators.first(), "separators")?.chars().take(INDENT_MAX).collect();
        key_separator = text_of(separators.get(1), "separators")?.chars().take(INDENT_MAX).collect();
    }
    let indent = indent.map(|indent| indent.min(INDENT_MAX));
    let mut json = TextBuilder::new(meter)?;
    JsonStyle { indent, item_separator, key_separator, sort_keys, ensure_ascii }.write(&mut json, value)?;
    Ok(json.finish())
}
