//! Whether a body is what `/openapi.json` says that it is.
//!
//! Types alone are too generous. Serde takes a list for the fields of a struct, `{"user": null}` for the word `user`, a number for the
//! kind that has it, and a float that is out of bounds by less than its rounding. Clients go by the document, so what it rules out is
//! refused, whatever the types would make of it.

use std::sync::LazyLock;

use serde_json::{Map, Number, Value};
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaType, Type};

use crate::error::{ApiError, ErrorKind};
use crate::openapi;

/// Checks a body against the schema with this name.
pub fn check(name: &str, body: &Value) -> Result<(), ApiError> {
    let schema = SCHEMAS.get(name).expect("the document describes every body that is read");
    fits(schema, body).map_err(|Breach { at, what, code }| {
        if at.is_empty() {
            return ApiError::new(ErrorKind::Invalid, format!("the body {what}")).code(code);
        }
        ApiError::invalid(&at, format!("`{at}` {what}")).code(code)
    })
}

/// The schema of a field that cannot be honoured.
pub fn null() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// The schema of a switch that stays off.
pub fn never() -> Object {
    // Without this it would be an object, which neither of the two is.
    let values = [Value::Bool(false), Value::Null];
    ObjectBuilder::new().schema_type(SchemaType::AnyValue).enum_values(Some(values)).build()
}

static SCHEMAS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let document = serde_json::to_value(openapi::whole()).expect("the document is JSON");
    document["components"]["schemas"].as_object().cloned().unwrap_or_default()
});

/// What is wrong, and where: `messages[0].role`, or nothing for the value itself.
struct Breach {
    at: String,
    what: String,
    code: &'static str,
}

impl Breach {
    fn value(what: String) -> Self {
        Self { at: String::new(), what, code: "invalid_value" }
    }

    /// The same, seen from outside.
    fn within(mut self, part: &str) -> Self {
        let dot = if self.at.is_empty() || self.at.starts_with('[') { "" } else { "." };
        self.at = format!("{part}{dot}{}", self.at);
        self
    }
}

fn fits(schema: &Value, value: &Value) -> Result<(), Breach> {
    if let Some(path) = schema["$ref"].as_str() {
        let name = path.rsplit('/').next().unwrap_or_default();
        return fits(SCHEMAS.get(name).expect("the document has what it refers to"), value);
    }
    if let Some(alternatives) = schema["oneOf"].as_array() {
        return fits_one(alternatives, value);
    }
    has_type(&schema["type"], value)?;
    if let Some(words) = schema["enum"].as_array().filter(|words| !words.contains(value)) {
        return Err(Breach::value(format!("must be one of {}", list(words))));
    }
    match value {
        Value::Number(number) => in_bounds(schema, number),
        Value::String(text) => has_length(schema, ["minLength", "maxLength"], text.chars().count(), "characters"),
        Value::Array(items) => {
            has_length(schema, ["minItems", "maxItems"], items.len(), "items")?;
            let item =
                |(index, item)| fits(&schema["items"], item).map_err(|breach| breach.within(&format!("[{index}]")));
            items.iter().enumerate().try_for_each(item)
        }
        Value::Object(fields) => has_fields(schema, fields),
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

/// Of several complaints the one that came furthest says best what was meant, and a wrong value was closer than a wrong type.
fn fits_one(alternatives: &[Value], value: &Value) -> Result<(), Breach> {
    let breaches: Vec<_> = alternatives.iter().filter_map(|schema| fits(schema, value).err()).collect();
    match alternatives.len() - breaches.len() {
        1 => Ok(()),
        0 => {
            let breach = breaches.into_iter().max_by_key(|breach| (breach.at.len(), breach.code == "invalid_value"));
            Err(breach.unwrap_or_else(|| Breach::value("cannot be given".to_owned())))
        }
        _ => Err(Breach::value("can be read in more than one way".to_owned())),
    }
}

fn has_type(types: &Value, value: &Value) -> Result<(), Breach> {
    let types = match types {
        Value::Array(types) => types.as_slice(),
        Value::Null => return Ok(()),
        one => std::slice::from_ref(one),
    };
    let is = |name: &Value| match name.as_str().unwrap_or_default() {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    };
    if types.iter().any(is) {
        return Ok(());
    }
    Err(Breach { code: "invalid_type", ..Breach::value(format!("must be of type {}", list(types))) })
}

fn in_bounds(schema: &Value, number: &Number) -> Result<(), Breach> {
    let number = number.as_f64().unwrap_or(f64::NAN);
    let bound = |keyword: &str| schema[keyword].as_f64();
    if let Some(min) = bound("minimum").filter(|min| number < *min) {
        return Err(Breach::value(format!("must be at least {min}")));
    }
    if let Some(min) = bound("exclusiveMinimum").filter(|min| number <= *min) {
        return Err(Breach::value(format!("must be more than {min}")));
    }
    if let Some(max) = bound("maximum").filter(|max| number > *max) {
        return Err(Breach::value(format!("must be at most {max}")));
    }
    Ok(())
}

fn has_length(schema: &Value, [min, max]: [&str; 2], length: usize, what: &str) -> Result<(), Breach> {
    let bound = |keyword: &str| schema[keyword].as_u64();
    if let Some(min) = bound(min).filter(|min| (length as u64) < *min) {
        return Err(Breach::value(format!("must have at least {min} {what}")));
    }
    if let Some(max) = bound(max).filter(|max| length as u64 > *max) {
        return Err(Breach::value(format!("must have at most {max} {what}")));
    }
    Ok(())
}

fn has_fields(schema: &Value, fields: &Map<String, Value>) -> Result<(), Breach> {
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(name) = required.into_iter().find(|name| !fields.contains_key(*name)) {
        return Err(Breach { code: "invalid_type", ..Breach::value(format!("lacks `{name}`")) });
    }
    for (name, value) in fields {
        let listed = schema["properties"].get(name);
        // Whoever refuses what is always off can say why.
        if listed.is_some_and(stays_off) {
            continue;
        }
        if let Some(schema) = listed.or_else(|| schema.get("additionalProperties")) {
            fits(schema, value).map_err(|breach| breach.within(name))?;
        }
    }
    Ok(())
}

/// Whether it is [`null`] or [`never`].
fn stays_off(schema: &Value) -> bool {
    let is_off = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
    schema["type"] == "null" || schema["enum"].as_array().is_some_and(|values| values.iter().all(is_off))
}

fn list(values: &[Value]) -> String {
    let values: Vec<_> =
        values.iter().map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned)).collect();
    values.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(name: &str, body: Value, code: &str, param: Option<&str>) {
        let error = super::check(name, &body).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), (Some(code), param), "{body}: {error}");
    }

    #[test]
    fn what_a_type_would_read_and_nobody_means_is_refused_where_it_stands() {
        let said = |message: Value| json!({"messages": [{"role": "user", "content": "x"}, message]});
        check("ChatRequest", json!([[]]), "invalid_type", None);
        check("ChatRequest", json!({}), "invalid_type", None);
        check("ChatRequest", said(json!(["user", "x"])), "invalid_type", Some("messages[1]"));
        check("ChatRequest", said(json!({"role": {"user": null}})), "invalid_type", Some("messages[1].role"));
        check("ChatRequest", json!({"messages": []}), "invalid_value", Some("messages"));
        check("EmbeddingRequest", json!({"input": "x", "pooling": "most"}), "invalid_value", Some("pooling"));
        check("MessagesCountRequest", json!({"model": "m", "messages": [7]}), "invalid_type", Some("messages[0]"));
        let part = json!({"type": 0, "text": "x"});
        let body = json!({"model": "m", "input": [{"role": "user", "content": [part]}]});
        check("ResponsesRequest", body, "invalid_type", Some("input[0].content[0].type"));
    }

    #[test]
    fn a_bound_is_that_of_the_number_that_was_sent() {
        let body = |top_p: f64| json!({"prompt": "x", "top_p": top_p});
        check("CompletionRequest", body(1.000_000_001), "invalid_value", Some("top_p"));
        check("CompletionRequest", body(0.0), "invalid_value", Some("top_p"));
        assert!(super::check("CompletionRequest", &body(1.0)).is_ok());
    }

    #[test]
    fn what_cannot_be_honoured_is_left_to_those_who_say_why() {
        let body = json!({"model": "m", "input": "x", "background": true, "previous_response_id": "r"});
        assert!(super::check("ResponsesRequest", &body).is_ok());
    }
}
