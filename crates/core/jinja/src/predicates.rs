//! The tests: `value is defined`.

use super::arguments::Arguments;
use super::ast::{Comparison, Operator};
use super::characters::is_in_case;
use super::error::{Error, quoted};
use super::methods::{missing, text_of};
use super::operators::{arithmetic, compare, text};
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
        let remainder = |divisor: &Value| match value.as_float().and(divisor.as_float()) {
            Some(_) => arithmetic(&meter, value, Operator::Remainder, divisor),
            None => Err(Error::failed(format!("a {} is divided by a {}", value.type_name(), divisor.type_name()))),
        };
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
            "mapping" => matches!(value, Value::Dict(_)),
            "sequence" => matches!(value, Value::Undefined(_) | Value::Str(_) | Value::List(_) | Value::Dict(_)),
            "iterable" => matches!(value, Value::Undefined(_) | Value::Str(_) | Value::List(_) | Value::Dict(_)),
            // As in Jinja, what is undefined can be called, which is then an error.
            "callable" => matches!(
                value,
                Value::Undefined(_)
                    | Value::Macro(_)
                    | Value::Function(_)
                    | Value::Loop(_)
                    | Value::Method(_)
                    | Value::Joiner(_)
            ),
            "odd" => remainder(&Value::Int(2))?.as_float() == Some(1.0),
            "even" => remainder(&Value::Int(2))?.as_float() == Some(0.0),
            "divisibleby" => {
                let [number] = arguments.bind(["num"])?;
                remainder(number.ok_or_else(|| missing("num"))?)?.as_float() == Some(0.0)
            }
            "lower" | "upper" => {
                let text = text(&meter, value)?;
                meter.read(text.len())?;
                is_in_case(&text, name == "lower")
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
