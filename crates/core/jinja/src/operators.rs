//! The operators: arithmetic, comparison, containment, items and slices, as in Python.

use super::ast::{Comparison, Operator};
use super::containers::{Dict, List, ListBuilder, Text, TextBuilder};
use super::error::{Error, quoted};
use super::format::percent;
use super::meter::Meter;
use super::methods::has_method;
use super::objects::Method;
use super::print::write_str;
use super::value::Value;
use std::cmp::Ordering;
use std::rc::Rc;

pub(super) fn arithmetic(meter: &Rc<Meter>, left: &Value, operator: Operator, right: &Value) -> Result<Value, Error> {
    match (left, operator, right) {
        (Value::Str(a), Operator::Add, Value::Str(b)) => concat(meter, &[a, b]),
        (Value::Str(text), Operator::Multiply, count) | (count, Operator::Multiply, Value::Str(text)) => {
            let count = count.as_int().ok_or_else(|| unsupported(left, operator, right))?;
            let mut repeated = TextBuilder::new(meter)?;
            repeated.repeat(text, usize::try_from(count.max(0)).unwrap_or(usize::MAX))?;
            Ok(repeated.finish())
        }
        (Value::Str(pattern), Operator::Remainder, values) => percent(meter, pattern, values),
        (Value::List(a), Operator::Add, Value::List(b)) if a.is_tuple() == b.is_tuple() => {
            let mut list = ListBuilder::new(meter)?;
            list.extend(a.iter().chain(b.iter()).cloned())?;
            Ok(if a.is_tuple() { list.finish_tuple() } else { list.finish() })
        }
        (Value::List(items), Operator::Multiply, count) | (count, Operator::Multiply, Value::List(items)) => {
            let count = count.as_int().ok_or_else(|| unsupported(left, operator, right))?;
            let mut list = ListBuilder::new(meter)?;
            if !items.is_empty() {
                (0..count).try_for_each(|_| list.extend(items.iter().cloned()))?;
            }
            Ok(if items.is_tuple() { list.finish_tuple() } else { list.finish() })
        }
        _ => match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => integers(a, operator, b),
            _ => match (left.as_float(), right.as_float()) {
                (Some(a), Some(b)) => floats(a, operator, b),
                _ => Err(unsupported(left, operator, right)),
            },
        },
    }
}

fn unsupported(left: &Value, operator: Operator, right: &Value) -> Error {
    for value in [left, right] {
        if let Value::Undefined(name) = value {
            return undefined(name);
        }
    }
    let (left, right) = (left.type_name(), right.type_name());
    Error::failed(format!("{operator:?} does not apply to {left} and {right}").to_lowercase())
}

/// The error of using an undefined value.
pub(super) fn undefined(name: &Option<Text>) -> Error {
    match name {
        Some(name) => Error::failed(format!("{} is undefined", quoted(name))),
        None => Error::failed("a value is undefined"),
    }
}

fn integers(a: i128, operator: Operator, b: i128) -> Result<Value, Error> {
    let value = match operator {
        Operator::Add => a.checked_add(b),
        Operator::Subtract => a.checked_sub(b),
        Operator::Multiply => a.checked_mul(b),
        Operator::Power if b >= 0 => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
        Operator::Divide | Operator::Power => return floats(a as f64, operator, b as f64),
        Operator::FloorDivide | Operator::Remainder if b == 0 => return Err(Error::failed("division by zero")),
        Operator::FloorDivide => {
            a.checked_div_euclid(b).map(|quotient| if b < 0 && a.rem_euclid(b) != 0 { quotient - 1 } else { quotient })
        }
        Operator::Remainder => a.checked_rem_euclid(b).map(|rest| if b < 0 && rest != 0 { rest + b } else { rest }),
    };
    value.map(Value::Int).ok_or_else(|| Error::failed("a number is too large"))
}

fn floats(a: f64, operator: Operator, b: f64) -> Result<Value, Error> {
    let value = match operator {
        Operator::Add => a + b,
        Operator::Subtract => a - b,
        Operator::Multiply => a * b,
        Operator::Power => a.powf(b),
        Operator::Divide | Operator::FloorDivide | Operator::Remainder if b == 0.0 => {
            return Err(Error::failed("division by zero"));
        }
        Operator::Divide => a / b,
        Operator::FloorDivide => (a / b).floor(),
        Operator::Remainder => a - b * (a / b).floor(),
    };
    Ok(Value::Float(value))
}

pub(super) fn concat(meter: &Rc<Meter>, texts: &[&str]) -> Result<Value, Error> {
    let mut text = TextBuilder::new(meter)?;
    texts.iter().try_for_each(|part| text.push_str(part))?;
    Ok(text.finish())
}

/// The text of any value, as `str` writes it.
pub(super) fn to_text(meter: &Rc<Meter>, value: &Value) -> Result<Value, Error> {
    if let Value::Str(_) = value {
        return Ok(value.clone());
    }
    let mut text = TextBuilder::new(meter)?;
    write_str(&mut text, value)?;
    Ok(text.finish())
}

/// The value as a text.
pub(super) fn text(meter: &Rc<Meter>, value: &Value) -> Result<Text, Error> {
    match to_text(meter, value)? {
        Value::Str(text) => Ok(text),
        other => Err(Error::failed(format!("a {} is no text", other.type_name()))),
    }
}

pub(super) fn compare(meter: &Rc<Meter>, left: &Value, by: Comparison, right: &Value) -> Result<bool, Error> {
    Ok(match by {
        Comparison::Equal => equals(meter, left, right)?,
        Comparison::NotEqual => !equals(meter, left, right)?,
        Comparison::Less => order(meter, left, right)?.is_lt(),
        Comparison::LessOrEqual => order(meter, left, right)?.is_le(),
        Comparison::Greater => order(meter, left, right)?.is_gt(),
        Comparison::GreaterOrEqual => order(meter, left, right)?.is_ge(),
        Comparison::In => contains(meter, right, left)?,
        Comparison::NotIn => !contains(meter, right, left)?,
    })
}

pub(super) fn equals(meter: &Rc<Meter>, left: &Value, right: &Value) -> Result<bool, Error> {
    meter.steps(1)?;
    Ok(match (left, right) {
        (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
        (Value::Str(a), Value::Str(b)) => {
            meter.read(a.len().min(b.len()))?;
            **a == **b
        }
        (Value::List(a), Value::List(b)) => a.is_tuple() == b.is_tuple() && all_equal(meter, a, b)?,
        (Value::Dict(a), Value::Dict(b)) => dicts_equal(meter, a, b)?,
        (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
        (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
        (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
        (Value::Function(a), Value::Function(b)) => a == b,
        (Value::Cycler(a), Value::Cycler(b)) => Rc::ptr_eq(a, b),
        (Value::Joiner(a), Value::Joiner(b)) => Rc::ptr_eq(a, b),
        _ => match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => a == b,
            _ => matches!((left.as_float(), right.as_float()), (Some(a), Some(b)) if a == b),
        },
    })
}

fn all_equal(meter: &Rc<Meter>, left: &[Value], right: &[Value]) -> Result<bool, Error> {
    if left.len() != right.len() {
        return Ok(false);
    }
    for (a, b) in left.iter().zip(right) {
        if !equals(meter, a, b)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn dicts_equal(meter: &Rc<Meter>, left: &Dict, right: &Dict) -> Result<bool, Error> {
    if left.entries().len() != right.entries().len() {
        return Ok(false);
    }
    for (key, value) in left.entries() {
        match lookup(meter, right, key)? {
            Some(other) if equals(meter, value, other)? => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}

pub(super) fn order(meter: &Rc<Meter>, left: &Value, right: &Value) -> Result<Ordering, Error> {
    meter.steps(1)?;
    match (left, right) {
        (Value::Str(a), Value::Str(b)) => {
            meter.read(a.len().min(b.len()))?;
            Ok((**a).cmp(b))
        }
        (Value::List(a), Value::List(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                // The first pair that differs decides; the others need no order.
                if !equals(meter, a, b)? {
                    return order(meter, a, b);
                }
            }
            Ok(a.len().cmp(&b.len()))
        }
        (Value::Undefined(name), _) | (_, Value::Undefined(name)) => Err(undefined(name)),
        _ => match (left.as_int(), right.as_int()) {
            (Some(a), Some(b)) => Ok(a.cmp(&b)),
            _ => match (left.as_float(), right.as_float()) {
                (Some(a), Some(b)) => Ok(a.partial_cmp(&b).unwrap_or(Ordering::Equal)),
                _ => {
                    let (left, right) = (left.type_name(), right.type_name());
                    Err(Error::failed(format!("{left} and {right} have no order")))
                }
            },
        },
    }
}

/// Whether `container` has `value`.
pub(super) fn contains(meter: &Rc<Meter>, container: &Value, value: &Value) -> Result<bool, Error> {
    match container {
        Value::Undefined(_) => Ok(false),
        Value::Str(text) => {
            let part = value.as_str().ok_or_else(|| Error::failed("only a text is within a text"))?;
            meter.read(text.len() + part.len())?;
            Ok(text.contains(part))
        }
        Value::List(items) => {
            for item in items.iter() {
                if equals(meter, item, value)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        Value::Dict(dict) => Ok(lookup(meter, dict, value)?.is_some()),
        Value::Namespace(namespace) => match value.as_str() {
            Some(name) => Ok(namespace.get(name)?.is_some()),
            None => Ok(false),
        },
        _ => Err(Error::failed(format!("a {} contains nothing", container.type_name()))),
    }
}

/// The value of a dict's key.
pub(super) fn lookup<'d>(meter: &Rc<Meter>, dict: &'d Dict, key: &Value) -> Result<Option<&'d Value>, Error> {
    meter.read(key.as_str().map_or(0, str::len))?;
    Ok(dict.get(key))
}

/// `value[key]`.
pub(super) fn item(meter: &Rc<Meter>, value: &Value, key: &Value) -> Result<Value, Error> {
    let found = match (value, key.as_int()) {
        (Value::Undefined(name), _) => return Err(undefined(name)),
        (Value::Dict(dict), _) => lookup(meter, dict, key)?.cloned(),
        (Value::Namespace(namespace), _) => match key.as_str() {
            Some(name) => namespace.get(name)?,
            None => None,
        },
        (Value::List(items), Some(index)) => position(index, items.len()).map(|at| items[at].clone()),
        (Value::Str(text), Some(index)) => {
            meter.read(text.len())?;
            let length = if index < 0 { text.chars().count() } else { text.len() };
            let character = position(index, length).and_then(|at| text.chars().nth(at));
            character.map(|c| Value::text(meter, c.encode_utf8(&mut [0; 4]))).transpose()?
        }
        _ => None,
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Str(name)) if has_method(value, name) => Method::value(meter, value, name.clone()),
        (None, Value::Str(name)) => Ok(Value::Undefined(Some(name.clone()))),
        (None, _) => Ok(Value::Undefined(None)),
    }
}

/// The place of an index that may count from the end.
fn position(index: i128, length: usize) -> Option<usize> {
    let length = length as i128;
    let index = if index < 0 { index + length } else { index };
    (0..length).contains(&index).then_some(index as usize)
}

/// `value[start:stop:step]`.
pub(super) fn slice(meter: &Rc<Meter>, value: &Value, bounds: &[Option<Value>; 3]) -> Result<Value, Error> {
    let bound = |index: usize| match &bounds[index] {
        None | Some(Value::None) => Ok(None),
        Some(value) => value.as_int().map(Some).ok_or_else(|| Error::failed("the bounds of a slice are integers")),
    };
    let (start, stop, step) = (bound(0)?, bound(1)?, bound(2)?.unwrap_or(1));
    if step == 0 {
        return Err(Error::failed("the step of a slice is zero"));
    }
    match value {
        Value::List(items) => {
            let mut list = ListBuilder::new(meter)?;
            for at in places(start, stop, step, items.len()) {
                list.push(items[at].clone())?;
            }
            Ok(if items.is_tuple() { list.finish_tuple() } else { list.finish() })
        }
        Value::Str(text) => slice_text(meter, text, start, stop, step),
        Value::Undefined(name) => Err(undefined(name)),
        _ => Ok(Value::Undefined(None)),
    }
}

fn slice_text(
    meter: &Rc<Meter>,
    text: &str,
    start: Option<i128>,
    stop: Option<i128>,
    step: i128,
) -> Result<Value, Error> {
    meter.read(text.len())?;
    let length = text.chars().count();
    let mut sliced = TextBuilder::new(meter)?;
    if step == 1 {
        let mut places = places(start, stop, 1, length);
        if let Some(first) = places.next() {
            let count = 1 + places.count();
            let from = text.char_indices().nth(first).map_or(text.len(), |(at, _)| at);
            let to = text[from..].char_indices().nth(count).map_or(text.len(), |(at, _)| from + at);
            sliced.push_str(&text[from..to])?;
        }
        return Ok(sliced.finish());
    }
    // Characters are copied to a list of four bytes each, which is charged.
    let _charge = meter.charge(length * size_of::<char>())?;
    let characters: Vec<char> = text.chars().collect();
    places(start, stop, step, length).try_for_each(|at| sliced.push(characters[at]))?;
    Ok(sliced.finish())
}

/// The places that a slice takes from a sequence.
fn places(start: Option<i128>, stop: Option<i128>, step: i128, length: usize) -> impl Iterator<Item = usize> {
    let length = length as i128;
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clamp = |bound: i128| (if bound < 0 { bound.saturating_add(length) } else { bound }).clamp(lowest, highest);
    let first = start.map_or(if step > 0 { lowest } else { highest }, clamp);
    let last = stop.map_or(if step > 0 { highest } else { lowest }, clamp);
    std::iter::successors(Some(first), move |at| at.checked_add(step))
        .take_while(move |&at| if step > 0 { at < last } else { at > last })
        .map(|at| at as usize)
}

/// The items that a loop over `value` visits.
pub(super) fn items(meter: &Rc<Meter>, value: &Value) -> Result<List, Error> {
    let mut list = ListBuilder::new(meter)?;
    match value {
        Value::List(items) => return Ok(items.clone()),
        Value::Undefined(_) => {}
        Value::Dict(dict) => list.extend(dict.entries().iter().map(|(key, _)| key.clone()))?,
        Value::Str(text) => {
            for character in text.chars() {
                list.push(Value::text(meter, character.encode_utf8(&mut [0; 4]))?)?;
            }
        }
        _ => return Err(Error::failed(format!("a {} has no items", value.type_name()))),
    }
    match list.finish() {
        Value::List(items) => Ok(items),
        _ => unreachable!("a builder of lists makes a list"),
    }
}
