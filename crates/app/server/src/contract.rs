//! Checks request bodies against their schemas in `/openapi.json`, and writes integers as such: JSON does not tell 10 from 1e1
//! and 10.0, but the types of bodies do.
//!
//! Types alone accept too much. Serde reads a list as the fields of a struct, `{"user": null}` as the variant `user`, a
//! number as the variant with that index, and a float that is out of bounds by less than its rounding error. Clients rely on
//! the document, so the server refuses what the document forbids.

use std::sync::LazyLock;

use serde_json::{Map, Number, Value, json};
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};

use crate::error::{ApiError, ApiErrorKind};
use crate::excerpt::excerpt;
use crate::openapi;

/// Checks a body against the schema with this name. A number without a fraction becomes an integer where the schema asks for
/// one.
pub fn check(name: &str, body: &mut Value) -> Result<(), ApiError> {
    let schema = SCHEMAS.get(name).expect("the document describes every body that is read");
    validate(schema, body).map_err(|Violation { path, message, code }| {
        if path.is_empty() {
            return ApiError::new(ApiErrorKind::Invalid, format!("the body {message}")).code(code);
        }
        ApiError::invalid(&path, format!("`{path}` {message}")).code(code)
    })
}

/// The schema of a field that is not supported.
pub fn null() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

static SCHEMAS: LazyLock<Map<String, Value>> = LazyLock::new(|| {
    let document = serde_json::to_value(openapi::build()).expect("the document is JSON");
    document["components"]["schemas"].as_object().cloned().unwrap_or_default()
});

/// How a value breaks its schema.
struct Violation {
    /// `messages[0].role`; empty for the value itself.
    path: String,
    message: String,
    code: &'static str,
}

impl Violation {
    fn value(message: String) -> Self {
        Self { path: String::new(), message, code: "invalid_value" }
    }

    fn missing() -> Self {
        Self { code: "missing_required_parameter", ..Self::value("is missing".to_owned()) }
    }

    /// The same, with the path extended by an outer field.
    fn within(mut self, field: &str) -> Self {
        let dot = if self.path.is_empty() || self.path.starts_with('[') { "" } else { "." };
        self.path = format!("{field}{dot}{}", self.path);
        self
    }
}

fn validate(schema: &Value, value: &mut Value) -> Result<(), Violation> {
    let schema = resolve(schema);
    if let Some(alternatives) = schema["oneOf"].as_array() {
        return validate_one_of(alternatives, value);
    }
    has_type(&schema["type"], value)?;
    if let Some(words) = schema["enum"].as_array().filter(|words| !words.contains(value)) {
        return Err(Violation::value(format!("must be one of {}", list(words))));
    }
    match value {
        Value::Number(number) => {
            in_bounds(schema, number)?;
            if number.is_f64() && types_of(schema).iter().any(|name| name == "integer") {
                make_integer(number);
            }
            Ok(())
        }
        Value::String(text) => has_length(schema, ["minLength", "maxLength"], text.chars().count(), "characters"),
        Value::Array(items) => {
            has_length(schema, ["minItems", "maxItems"], items.len(), "items")?;
            let item = |(index, item)| {
                validate(&schema["items"], item).map_err(|violation| violation.within(&format!("[{index}]")))
            };
            items.iter_mut().enumerate().try_for_each(item)
        }
        Value::Object(fields) => has_fields(schema, fields),
        Value::Null | Value::Bool(_) => Ok(()),
    }
}

/// The schema that a reference names.
fn resolve(schema: &Value) -> &Value {
    let Some(path) = schema["$ref"].as_str() else { return schema };
    let name = path.rsplit('/').next().unwrap_or_default();
    resolve(SCHEMAS.get(name).expect("the document has what it refers to"))
}

/// The type of the value, or the `type` in it, says which alternative the client means: the violation is then of that one.
fn validate_one_of(alternatives: &[Value], value: &mut Value) -> Result<(), Violation> {
    let alternatives: Vec<&Value> = alternatives.iter().map(resolve).collect();
    let types: Vec<Vec<Value>> = alternatives.iter().map(|schema| types_of(schema)).collect();
    // A schema without types allows all of them.
    if !types.iter().any(Vec::is_empty) {
        has_type(&Value::Array(types.concat()), value)?;
    }
    let meant = |schema: &&Value| has_type(&Value::Array(types_of(schema)), value).is_ok();
    let meant: Vec<&Value> = alternatives.into_iter().filter(meant).collect();
    let tagged = match &*value {
        Value::Object(fields) if meant.iter().all(|schema| tags(schema).is_some()) => Some(tagged(&meant, fields)?),
        _ => None,
    };
    match tagged {
        Some(schema) => validate(schema, value),
        None => validate_any(&meant, value),
    }
}

/// The types that a schema allows.
fn types_of(schema: &Value) -> Vec<Value> {
    match (&schema["oneOf"], &schema["type"]) {
        (Value::Array(alternatives), _) => alternatives.iter().flat_map(|schema| types_of(resolve(schema))).collect(),
        (_, Value::Array(types)) => types.clone(),
        (_, Value::Null) => Vec::new(),
        (_, one) => vec![one.clone()],
    }
}

/// The values of `type` in the objects of this schema.
fn tags(schema: &Value) -> Option<&Vec<Value>> {
    schema["properties"]["type"]["enum"].as_array()
}

/// The alternative for the `type` of an object.
fn tagged<'a>(alternatives: &[&'a Value], fields: &Map<String, Value>) -> Result<&'a Value, Violation> {
    let requires_tag =
        |schema: &Value| schema["required"].as_array().is_some_and(|names| names.contains(&json!("type")));
    let (found, violation) = match fields.get("type") {
        None => (alternatives.iter().find(|schema| !requires_tag(schema)), Violation::missing()),
        Some(Value::String(tag)) => {
            let has = |schema: &&&Value| tags(schema).is_some_and(|tags| tags.iter().any(|known| known == tag));
            let message = format!("is `{}`, which is not supported", excerpt(tag));
            (alternatives.iter().find(has), Violation::value(message))
        }
        Some(other) => (None, has_type(&json!("string"), other).err().unwrap_or_else(Violation::missing)),
    };
    found.copied().ok_or_else(|| violation.within("type"))
}

/// If no alternative matches, returns the violation with the longest path, which is most likely the alternative that the
/// client meant. A wrong value has precedence over a wrong type.
fn validate_any(alternatives: &[&Value], value: &mut Value) -> Result<(), Violation> {
    let violations: Vec<_> = alternatives.iter().filter_map(|schema| validate(schema, value).err()).collect();
    match alternatives.len() - violations.len() {
        1 => Ok(()),
        0 => {
            let violation = violations
                .into_iter()
                .max_by_key(|violation| (violation.path.len(), violation.code == "invalid_value"));
            Err(violation.unwrap_or_else(|| Violation::value("cannot be given".to_owned())))
        }
        _ => Err(Violation::value("can be read in more than one way".to_owned())),
    }
}

fn has_type(types: &Value, value: &Value) -> Result<(), Violation> {
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
    if types.is_empty() || types.iter().any(is) {
        return Ok(());
    }
    let mut named: Vec<Value> = Vec::new();
    for name in types.iter().filter(|name| *name != "null") {
        if !named.contains(name) {
            named.push(name.clone());
        }
    }
    let message = format!("must be of type {}", list(&named).replace(", ", " or "));
    Err(Violation { code: "invalid_type", ..Violation::value(message) })
}

/// Writes a number that has no fraction as an integer, if it is one of 64 bits.
fn make_integer(number: &mut Number) {
    const END: f64 = 18_446_744_073_709_551_616.0; // 2^64
    let Some(value) = number.as_f64().filter(|value| value.fract() == 0.0) else { return };
    if (0.0..END).contains(&value) {
        *number = Number::from(value as u64);
    } else if (-END / 2.0..0.0).contains(&value) {
        *number = Number::from(value as i64);
    }
}

fn in_bounds(schema: &Value, number: &Number) -> Result<(), Violation> {
    let number = number.as_f64().unwrap_or(f64::NAN);
    let bound = |keyword: &str| schema[keyword].as_f64();
    if let Some(min) = bound("minimum").filter(|min| number < *min) {
        return Err(Violation::value(format!("must be at least {min}")));
    }
    if let Some(min) = bound("exclusiveMinimum").filter(|min| number <= *min) {
        return Err(Violation::value(format!("must be more than {min}")));
    }
    if let Some(max) = bound("maximum").filter(|max| number > *max) {
        return Err(Violation::value(format!("must be at most {max}")));
    }
    Ok(())
}

fn has_length(schema: &Value, [min, max]: [&str; 2], length: usize, what: &str) -> Result<(), Violation> {
    let bound = |keyword: &str| schema[keyword].as_u64();
    if let Some(min) = bound(min).filter(|min| (length as u64) < *min) {
        return Err(Violation::value(format!("must have at least {min} {what}")));
    }
    if let Some(max) = bound(max).filter(|max| length as u64 > *max) {
        return Err(Violation::value(format!("must have at most {max} {what}")));
    }
    Ok(())
}

fn has_fields(schema: &Value, fields: &mut Map<String, Value>) -> Result<(), Violation> {
    for (name, value) in fields.iter_mut() {
        let listed = schema["properties"].get(name);
        // Handlers refuse these fields themselves, with an error that gives the reason.
        if listed.is_some_and(is_unsupported_field) {
            continue;
        }
        if let Some(schema) = listed.or_else(|| schema.get("additionalProperties")) {
            validate(schema, value).map_err(|violation| violation.within(name))?;
        }
    }
    let mut required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    match required.find(|name| !fields.contains_key(*name)) {
        Some(name) => Err(Violation::missing().within(name)),
        None => Ok(()),
    }
}

/// Whether it is the schema of [`null`] or [`never`].
fn is_unsupported_field(schema: &Value) -> bool {
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

    fn check(name: &str, body: Value, code: &str, param: Option<&str>) {
        let error = super::check(name, &mut body.clone()).unwrap_err();
        assert_eq!((error.code, error.param.as_deref()), (Some(code), param), "{body}: {error}");
    }

    #[test]
    fn what_serde_accepts_and_the_schema_does_not_is_refused() {
        let said = |message: Value| json!({"messages": [{"role": "user", "content": "x"}, message]});
        check("ChatRequest", json!([[]]), "invalid_type", None);
        check("ChatRequest", json!({}), "missing_required_parameter", Some("messages"));
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
    fn a_violation_is_told_in_a_sentence_that_names_the_field() {
        let told = |name: &str, body: Value| super::check(name, &mut body.clone()).unwrap_err().to_string();
        let said = |message: Value| json!({"messages": [message]});
        let chat = |message: Value| told("ChatRequest", said(message));
        assert_eq!(told("ChatRequest", json!([])), "the body must be of type object");
        assert_eq!(told("ChatRequest", json!({})), "`messages` is missing");
        assert_eq!(chat(json!({"content": "x"})), "`messages[0].role` is missing");
        let roles = "`messages[0].role` must be one of system, developer, user, assistant, tool";
        assert_eq!(chat(json!({"role": "king"})), roles);
        assert_eq!(
            chat(json!({"role": "user", "content": 7})),
            "`messages[0].content` must be of type string or array"
        );
        let messages = |block: Value| {
            let body = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}]});
            told("MessagesRequest", body)
        };
        let at = "`messages[0].content[0]";
        assert_eq!(messages(json!({"type": "image"})), format!("{at}.type` is `image`, which is not supported"));
        assert_eq!(messages(json!({"text": "x"})), format!("{at}.type` is missing"));
        assert_eq!(messages(json!({"type": "text"})), format!("{at}.text` is missing"));
        assert_eq!(messages(json!({"type": 7})), format!("{at}.type` must be of type string"));
        let item = |item: Value| told("ResponsesRequest", json!({"model": "m", "input": [item]}));
        assert_eq!(item(json!({"role": "user"})), "`input[0].content` is missing");
        let long = item(json!({"type": "x".repeat(1 << 20)}));
        assert!(long.len() < 300 && long.ends_with("…`, which is not supported"), "{long}");
    }

    #[test]
    fn a_bound_is_that_of_the_number_that_was_sent() {
        let body = |top_p: f64| json!({"prompt": "x", "top_p": top_p});
        check("CompletionRequest", body(1.000_000_001), "invalid_value", Some("top_p"));
        check("CompletionRequest", body(0.0), "invalid_value", Some("top_p"));
        assert!(super::check("CompletionRequest", &mut body(1.0)).is_ok());
    }

    #[test]
    fn unsupported_fields_are_left_to_the_handler() {
        let mut body = json!({"model": "m", "input": "x", "background": true, "previous_response_id": "r"});
        assert!(super::check("ResponsesRequest", &mut body).is_ok());
    }

    #[test]
    fn a_number_without_a_fraction_is_an_integer_where_one_is_asked_for() {
        let written = |name: &str, body: &str| {
            let mut body: Value = serde_json::from_str(body).unwrap();
            super::check(name, &mut body).unwrap();
            body
        };
        let body = r#"{"prompt": [[1.0, 2e0]], "max_tokens": 1e1, "seed": -1.0, "temperature": 1.0, "n": 2}"#;
        let expected = json!({"prompt": [[1, 2]], "max_tokens": 10, "seed": -1, "temperature": 1.0, "n": 2});
        assert_eq!(written("CompletionRequest", body), expected);
        // What the client writes of its own stays as it is.
        let schema = r#"{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": 1.0}}"#;
        assert_eq!(written("ChatRequest", schema)["chat_template_kwargs"]["x"].to_string(), "1.0");
        check("CompletionRequest", json!({"prompt": "x", "seed": 1e30}), "invalid_value", Some("seed"));
        check("CompletionRequest", json!({"prompt": "x", "max_tokens": 1.5}), "invalid_type", Some("max_tokens"));
    }
}
