//! The tests: `value is defined`.

use super::arguments::Arguments;
use super::ast::Comparison;
use super::error::{Error, quoted};
use super::methods::{missing, text_of};
use super::operators::compare;
use super::renderer::Renderer;
use super::value::Value;
use std::rc::Rc;

impl Renderer {
    pub(super) fn test(&mut self, name: &str, value: &Value, arguments: &Arguments) -> Result<bool, Error> {
        let meter = Rc::clone(self.meter());
        meter.steps(1)?;
        if let Some(comparison) = comparison(name) {
            let [other] = arguments.bind(["other"])?;
            return compare(&meter, value, comparison, other.ok_or_else(|| missing("other"))?);
        }
        let integer = || value.as_int().ok_or_else(|| Error::failed(format!("a {} is no integer", value.type_name())));
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(_)),
            "float" => matches!(value, Value::Float(_)),
            // In Python a bool is a number.
            "number" => value.as_float().is_some(),
            "string" => matches!(value, Value::Str(_)),
            "mapping" => matches!(value, Value::Dict(_) | Value::Namespace(_)),
            "sequence" => matches!(value, Value::Undefined(_) | Value::Str(_) | Value::List(_) | Value::Dict(_)),
            "iterable" => matches!(value, Value::Undefined(_) | Value::Str(_) | Value::List(_) | Value::Dict(_)),
            "callable" => matches!(
                value,
                Value::Macro(_) | Value::Function(_) | Value::Loop(_) | Value::Method(_) | Value::Joiner(_)
            ),
            "odd" => integer()?.rem_euclid(2) == 1,
            "even" => integer()?.rem_euclid(2) == 0,
            "divisibleby" => {
                let [number] = arguments.bind(["num"])?;
                match number.and_then(Value::as_int) {
                    None | Some(0) => return Err(Error::failed("it is divided by an integer other than zero")),
                    Some(number) => integer()?.checked_rem(number) == Some(0),
                }
            }
            "lower" | "upper" => {
                let text = text_of(Some(value), "value")?;
                meter.read(text.len())?;
                match name {
                    "lower" => !text.chars().any(char::is_uppercase),
                    _ => !text.chars().any(char::is_lowercase),
                }
            }
            "startingwith" | "endingwith" => {
                let [affix] = arguments.bind(["affix"])?;
                let (text, affix) = (text_of(Some(value), "value")?, text_of(affix, "affix")?);
                meter.read(affix.len())?;
                if name == "startingwith" { text.starts_with(affix) } else { text.ends_with(affix) }
            }
            "sameas" => {
                let [other] = arguments.bind(["other"])?;
                let other = other.ok_or_else(|| missing("other"))?;
                value.type_name() == other.type_name() && compare(&meter, value, Comparison::Equal, other)?
            }
            "escaped" | "safe" => false,
            _ => return Err(Error::failed(format!("there is no test {}", quoted(name)))),
        })
    }
}

fn comparison(name: &str) -> Option<Comparison> {
    Some(match name {
        "eq" | "equalto" | "==" => Comparison::Equal,
        "ne" | "!=" => Comparison::NotEqual,
        "lt" | "lessthan" | "<" => Comparison::Less,
        "le" | "<=" => Comparison::LessOrEqual,
        "gt" | "greaterthan" | ">" => Comparison::Greater,
        "ge" | ">=" => Comparison::GreaterOrEqual,
        "in" => Comparison::In,
        _ => return None,
    })
}
