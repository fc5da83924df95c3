//! The filters over lists.

use super::arguments::Arguments;
use super::containers::{List, ListBuilder, TextBuilder};
use super::error::Error;
use super::meter::{Charge, Meter};
use super::methods::{attribute, count_of, missing, pair, text_method};
use super::operators::{arithmetic, equals, item, items, order, to_text};
use super::print::write_str;
use super::renderer::Renderer;
use super::value::Value;
use crate::ast::Operator;
use std::cmp::Ordering;
use std::rc::Rc;

impl Renderer {
    /// `map('filter', …)` or `map(attribute='name', default=…)`.
    pub(super) fn map(&mut self, value: &Value, arguments: Arguments) -> Result<Value, Error> {
        let meter = &Rc::clone(self.meter());
        let list = items_or_none(meter, value)?;
        let mut mapped = ListBuilder::new(meter)?;
        if let Some(path) = arguments.keyword("attribute")? {
            let default = arguments.keyword("default")?;
            for item in list.iter() {
                let found = attribute(meter, item, path)?;
                let default = default.filter(|_| found.is_undefined());
                mapped.push(default.cloned().unwrap_or(found))?;
            }
            return Ok(mapped.finish());
        }
        let name = arguments.positional.first().cloned();
        let name = name.as_ref().and_then(Value::as_str).ok_or_else(|| missing("filter"))?;
        for item in list.iter() {
            let mut rest = Arguments::new(meter)?;
            arguments.positional[1..].iter().try_for_each(|value| rest.push(value.clone()))?;
            arguments.keywords.iter().try_for_each(|(name, value)| rest.push_keyword(name.clone(), value.clone()))?;
            mapped.push(self.nested(|renderer| renderer.filter(name, item.clone(), rest))?)?;
        }
        Ok(mapped.finish())
    }

    /// `select`, `reject`, `selectattr` and `rejectattr`: the items whose value, or attribute, passes the test or not.
    pub(super) fn select(
        &mut self,
        value: &Value,
        arguments: Arguments,
        by_attribute: bool,
        wanted: bool,
    ) -> Result<Value, Error> {
        let meter = &Rc::clone(self.meter());
        let list = items_or_none(meter, value)?;
        let (path, arguments) = if by_attribute { arguments.without_first() } else { (None, arguments) };
        if by_attribute && path.is_none() {
            return Err(missing("attribute"));
        }
        let (test, arguments) = arguments.without_first();
        let mut selected = ListBuilder::new(meter)?;
        for item in list.iter() {
            let subject = match &path {
                Some(path) => attribute(meter, item, path)?,
                None => item.clone(),
            };
            let passes = match &test {
                None => subject.is_true(),
                Some(test) => {
                    let test = test.as_str().ok_or_else(|| Error::failed("the name of a test is a text"))?;
                    self.test(test, &subject, &arguments)?
                }
            };
            if passes == wanted {
                selected.push(item.clone())?;
            }
        }
        Ok(selected.finish())
    }
}

/// As in Jinja, what is not true has no items here.
fn items_or_none(meter: &Rc<Meter>, value: &Value) -> Result<List, Error> {
    items(meter, if value.is_true() { value } else { &Value::Undefined(None) })
}

pub(super) fn apply(
    meter: &Rc<Meter>,
    name: &str,
    value: &Value,
    arguments: &Arguments,
) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "first" | "last" => match (value, name) {
            (Value::Str(_), "first") => item(meter, value, &Value::Int(0))?,
            (Value::Str(_), _) => item(meter, value, &Value::Int(-1))?,
            (value, "first") => items(meter, value)?.first().cloned().unwrap_or(Value::Undefined(None)),
            (value, _) => items(meter, value)?.last().cloned().unwrap_or(Value::Undefined(None)),
        },
        "list" => {
            let mut list = ListBuilder::new(meter)?;
            list.extend(items(meter, value)?.iter().cloned())?;
            list.finish()
        }
        "reverse" => reverse(meter, value)?,
        "join" => join(meter, value, arguments)?,
        "sum" => {
            let [path, start] = arguments.bind(["attribute", "start"])?;
            let mut sum = start.cloned().unwrap_or(Value::Int(0));
            for item in items(meter, value)?.iter() {
                let item = match path {
                    None | Some(Value::None) => item.clone(),
                    Some(path) => attribute(meter, item, path)?,
                };
                sum = arithmetic(meter, &sum, Operator::Add, &item)?;
            }
            sum
        }
        "min" | "max" => {
            let [case_sensitive, path] = arguments.bind(["case_sensitive", "attribute"])?;
            let case_sensitive = case_sensitive.is_some_and(Value::is_true);
            let key = |item: &Value| sort_key(meter, item, path, case_sensitive);
            let sorted = sorted(meter, &items(meter, value)?, key, name == "max")?;
            sorted.pairs.first().map_or(Value::Undefined(None), |(_, item)| item.clone())
        }
        "sort" => {
            let [reverse, case_sensitive, path] = arguments.bind(["reverse", "case_sensitive", "attribute"])?;
            let [reverse, case_sensitive] = [reverse, case_sensitive].map(|flag| flag.is_some_and(Value::is_true));
            let key = |item: &Value| sort_keys(meter, item, path, case_sensitive);
            in_order(meter, &sorted(meter, &items(meter, value)?, key, reverse)?)?
        }
        "dictsort" => dict_sort(meter, value, arguments)?,
        "unique" => unique(meter, value, arguments)?,
        "groupby" => group_by(meter, value, arguments)?,
        "batch" => batch(meter, value, arguments)?,
        "slice" => slices(meter, value, arguments)?,
        _ => return Ok(None),
    }))
}

fn reverse(meter: &Rc<Meter>, value: &Value) -> Result<Value, Error> {
    if let Value::Str(text) = value {
        let mut reversed = TextBuilder::new(meter)?;
        text.chars().rev().try_for_each(|character| reversed.push(character))?;
        return Ok(reversed.finish());
    }
    let mut reversed = ListBuilder::new(meter)?;
    reversed.extend(items(meter, value)?.iter().rev().cloned())?;
    Ok(reversed.finish())
}

fn join(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [separator, path] = arguments.bind(["d", "attribute"])?;
    let separator = separator.map(|separator| to_text(meter, separator)).transpose()?;
    let separator = separator.as_ref().and_then(Value::as_str).unwrap_or_default();
    let mut joined = TextBuilder::new(meter)?;
    for (index, item) in items(meter, value)?.iter().enumerate() {
        joined.push_str(if index == 0 { "" } else { separator })?;
        match path {
            Some(path) if !matches!(path, Value::None) => write_str(&mut joined, &attribute(meter, item, path)?)?,
            _ => write_str(&mut joined, item)?,
        }
    }
    Ok(joined.finish())
}

/// What an item is sorted by: its attribute, in lower case unless case counts.
fn sort_key(meter: &Rc<Meter>, item: &Value, path: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let key = match path {
        None | Some(Value::None) => item.clone(),
        Some(path) => attribute(meter, item, path)?,
    };
    in_one_case(meter, key, case_sensitive)
}

/// A text in lower case, unless case counts.
fn in_one_case(meter: &Rc<Meter>, value: Value, case_sensitive: bool) -> Result<Value, Error> {
    match &value {
        Value::Str(text) if !case_sensitive => {
            let lower = text_method(meter, text, "lower", &Arguments::new(meter)?)?;
            Ok(lower.unwrap_or(Value::None))
        }
        _ => Ok(value),
    }
}

/// The same for several attributes: `sort(attribute='age,name')`.
fn sort_keys(meter: &Rc<Meter>, item: &Value, paths: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let Some(names) = paths.and_then(Value::as_str).filter(|names| names.contains(',')) else {
        return sort_key(meter, item, paths, case_sensitive);
    };
    let mut keys = ListBuilder::new(meter)?;
    for name in names.split(',') {
        keys.push(sort_key(meter, item, Some(&Value::text(meter, name)?), case_sensitive)?)?;
    }
    Ok(keys.finish())
}

/// Items with the keys that they are sorted by.
struct Sorted {
    pairs: Vec<(Value, Value)>,
    _charge: Charge,
}

/// The items in order of their keys, or in the reverse one. Equal ones keep their order.
fn sorted(
    meter: &Rc<Meter>,
    list: &[Value],
    key: impl Fn(&Value) -> Result<Value, Error>,
    reverse: bool,
) -> Result<Sorted, Error> {
    // Merging takes a second copy.
    let charge = meter.charge(2 * size_of_val(list) * 2)?;
    let keyed = list.iter().map(|item| Ok((key(item)?, item.clone())));
    let pairs = merge_sort(meter, keyed.collect::<Result<_, Error>>()?, reverse)?;
    Ok(Sorted { pairs, _charge: charge })
}

/// `sort_by` may panic if values have no order; this one returns the error.
fn merge_sort(meter: &Rc<Meter>, mut items: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>, Error> {
    let (mut width, wrong) = (1, if reverse { Ordering::Less } else { Ordering::Greater });
    while width < items.len() {
        let mut merged = Vec::with_capacity(items.len());
        for pair in items.chunks(2 * width) {
            let (mut left, mut right) = pair.split_at(width.min(pair.len()));
            while let (Some(a), Some(b)) = (left.first(), right.first()) {
                let side = if order(meter, &a.0, &b.0)? == wrong { &mut right } else { &mut left };
                merged.push(side[0].clone());
                *side = &side[1..];
            }
            merged.extend(left.iter().chain(right).cloned());
        }
        items = merged;
        width *= 2;
    }
    Ok(items)
}

fn in_order(meter: &Rc<Meter>, sorted: &Sorted) -> Result<Value, Error> {
    let mut list = ListBuilder::new(meter)?;
    list.extend(sorted.pairs.iter().map(|(_, item)| item.clone()))?;
    Ok(list.finish())
}

fn dict_sort(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = arguments.bind(["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else {
        return Err(Error::failed(format!("a {} is no dict", value.type_name())));
    };
    let mut pairs = ListBuilder::new(meter)?;
    for (key, value) in dict.entries() {
        pairs.push(pair(meter, key.clone(), value.clone())?)?;
    }
    let by = Value::Int(i128::from(by.and_then(Value::as_str) == Some("value")));
    let pairs = items(meter, &pairs.finish())?;
    let [reverse, case_sensitive] = [reverse, case_sensitive].map(|flag| flag.is_some_and(Value::is_true));
    in_order(meter, &sorted(meter, &pairs, |pair| sort_key(meter, pair, Some(&by), case_sensitive), reverse)?)
}

fn unique(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [case_sensitive, path] = arguments.bind(["case_sensitive", "attribute"])?;
    let case_sensitive = case_sensitive.is_some_and(Value::is_true);
    let (mut seen, mut list) = (ListBuilder::new(meter)?, ListBuilder::new(meter)?);
    for item in items(meter, value)?.iter() {
        let key = sort_key(meter, item, path, case_sensitive)?;
        let mut is_new = true;
        for other in seen.items() {
            is_new &= !equals(meter, other, &key)?;
        }
        if is_new {
            seen.push(key)?;
            list.push(item.clone())?;
        }
    }
    Ok(list.finish())
}

/// Pairs of a key and the items that have it, in order of the keys.
fn group_by(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [path, default, case_sensitive] = arguments.bind(["attribute", "default", "case_sensitive"])?;
    let path = path.ok_or_else(|| missing("attribute"))?;
    let name_of = |item: &Value| {
        let name = attribute(meter, item, path)?;
        Ok(default.filter(|_| name.is_undefined()).cloned().unwrap_or(name))
    };
    let case_sensitive = case_sensitive.is_some_and(Value::is_true);
    let key = |item: &Value| in_one_case(meter, name_of(item)?, case_sensitive);
    let sorted = &sorted(meter, &items(meter, value)?, key, false)?.pairs;
    let mut groups = ListBuilder::new(meter)?;
    let mut at = 0;
    while at < sorted.len() {
        let (key, first) = &sorted[at];
        let mut members = ListBuilder::new(meter)?;
        while at < sorted.len() && equals(meter, &sorted[at].0, key)? {
            members.push(sorted[at].1.clone())?;
            at += 1;
        }
        groups.push(pair(meter, name_of(first)?, members.finish())?)?;
    }
    Ok(groups.finish())
}

/// Lists of `count` items each; the last is filled up.
fn batch(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [count, fill] = arguments.bind(["linecount", "fill_with"])?;
    let count = count_of(count, "linecount", 0)?.max(1);
    let mut batches = ListBuilder::new(meter)?;
    for chunk in items(meter, value)?.chunks(count) {
        let mut batch = ListBuilder::new(meter)?;
        batch.extend(chunk.iter().cloned())?;
        if let Some(fill) = fill {
            (chunk.len()..count).try_for_each(|_| batch.push(fill.clone()))?;
        }
        batches.push(batch.finish())?;
    }
    Ok(batches.finish())
}

/// `count` lists of about the same length.
fn slices(meter: &Rc<Meter>, value: &Value, arguments: &Arguments) -> Result<Value, Error> {
    let [count, fill] = arguments.bind(["slices", "fill_with"])?;
    let count = count_of(count, "slices", 0)?.max(1);
    let list = items(meter, value)?;
    let (length, longer) = (list.len() / count, list.len() % count);
    let mut lists = ListBuilder::new(meter)?;
    let mut at = 0;
    for index in 0..count {
        let end = at + length + usize::from(index < longer);
        let mut part = ListBuilder::new(meter)?;
        part.extend(list[at..end].iter().cloned())?;
        if let Some(fill) = fill.filter(|_| index >= longer) {
            part.push(fill.clone())?;
        }
        lists.push(part.finish())?;
        at = end;
    }
    Ok(lists.finish())
}
