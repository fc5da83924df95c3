//! Checks that the server refuses every request that violates `/openapi.json` in one place.
//!
//! Valid requests are traversed together with their schemas, and broken at every constraint on the way. The test also checks
//! that every constraint was reached, so a new field needs an entry in `contract/answered.rs`.

mod answered;

use std::collections::HashSet;
use std::ptr;

use axum::http::{Method, StatusCode};
use serde_json::{Map, Number, Value, json};

use crate::client::Client;

#[tokio::test]
async fn a_request_that_breaks_the_document_in_one_place_is_refused() {
    let client = Client::new();
    let document = client.get("/openapi.json").await.json();
    let mut walk = Walk { document: &document, met: HashSet::new(), broken: Vec::new() };
    let mut wrong = Vec::new();
    let answered = answered::requests();
    for (path, body) in &answered {
        client.post(path, body.clone()).await;
        walk.visit(schema_of(&document, path), body, "");
        for (how, body) in walk.broken.drain(..) {
            let answer = client.call(Method::POST, path, body.to_string()).await;
            let error = &answer.json()["error"];
            let message = if path.starts_with("/api/") { error } else { &error["message"] };
            if answer.status != StatusCode::BAD_REQUEST || !message.is_string() {
                wrong.push(format!("{path}: {how}: {} {:.200}", answer.status, answer.text()));
            }
        }
    }
    assert!(wrong.is_empty(), "{} were not refused:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test]
async fn no_constraint_of_the_document_is_left_out() {
    let document = Client::new().get("/openapi.json").await.json();
    let mut walk = Walk { document: &document, met: HashSet::new(), broken: Vec::new() };
    for (path, body) in &answered::requests() {
        walk.visit(schema_of(&document, path), body, "");
    }
    let mut missed = Vec::new();
    let posts =
        document["paths"].as_object().unwrap().iter().filter(|(_, item)| item["post"]["requestBody"].is_object());
    for (path, _) in posts {
        walk.miss(schema_of(&document, path), path, &mut HashSet::new(), &mut missed);
    }
    assert!(missed.is_empty(), "no request of `answered.rs` meets:\n{}", missed.join("\n"));
}

#[tokio::test]
async fn the_document_contains_what_it_refers_to() {
    fn check(document: &Value, part: &Value) {
        match part {
            Value::Object(fields) => {
                if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
                    assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
                }
                fields.values().for_each(|part| check(document, part));
            }
            Value::Array(items) => items.iter().for_each(|part| check(document, part)),
            _ => {}
        }
    }
    let document = Client::new().get("/openapi.json").await.json();
    check(&document, &document);
}

fn schema_of<'a>(document: &'a Value, path: &str) -> &'a Value {
    &document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
}

struct Walk<'a> {
    document: &'a Value,
    /// The schemas that some request has reached.
    met: HashSet<*const Value>,
    /// Bodies that violate one constraint each, with a description of it.
    broken: Vec<(String, Value)>,
}

impl<'a> Walk<'a> {
    fn resolve(&self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(name) => self.resolve(self.document.pointer(name.trim_start_matches('#')).unwrap()),
            None => schema,
        }
    }

    /// Creates violations of this schema for the part of `body` at `at`, and for the parts inside it.
    fn visit(&mut self, schema: &'a Value, body: &Value, at: &str) {
        let value = body.pointer(at).unwrap();
        let (whole, schema) = (schema, self.meet(schema, value));
        for other in others(schema, value) {
            if !self.fits(whole, &other) {
                self.break_with(body, at, other);
            }
        }
        for other in beyond(schema, value) {
            self.break_with(body, at, other);
        }
        match value {
            Value::Array(items) => {
                (0..items.len()).for_each(|index| self.visit(&schema["items"], body, &format!("{at}/{index}")));
            }
            Value::Object(fields) => {
                for name in schema["required"].as_array().into_iter().flatten() {
                    let mut fields = fields.clone();
                    fields.remove(name.as_str().unwrap());
                    self.break_with(body, at, Value::Object(fields));
                }
                for name in fields.keys() {
                    let listed = schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
                    if let Some(schema) = listed {
                        self.visit(schema, body, &format!("{at}/{name}"));
                    }
                }
            }
            _ => {}
        }
    }

    /// Resolves a schema to the one alternative that describes this value.
    fn meet(&mut self, schema: &'a Value, value: &Value) -> &'a Value {
        let schema = self.resolve(schema);
        self.met.insert(ptr::from_ref(schema));
        let Some(alternatives) = schema["oneOf"].as_array() else { return schema };
        let fitting: Vec<_> = alternatives.iter().filter(|alternative| self.fits(alternative, value)).collect();
        assert_eq!(fitting.len(), 1, "{value} fits {fitting:?}");
        self.meet(fitting[0], value)
    }

    fn break_with(&mut self, body: &Value, at: &str, other: Value) {
        let mut broken = body.clone();
        let how = format!("{at} is {:.100}", other.to_string());
        *broken.pointer_mut(at).unwrap() = other;
        self.broken.push((how, broken));
    }

    /// Whether a value has the type that a schema describes, ignoring its bounds.
    fn fits(&self, schema: &'a Value, value: &Value) -> bool {
        let schema = self.resolve(schema);
        if let Some(alternatives) = schema["oneOf"].as_array() {
            return alternatives.iter().any(|alternative| self.fits(alternative, value));
        }
        let types = types(schema);
        let is_one = |name: &&str| match *name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "string" => value.is_string(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            other => panic!("an unknown type: {other}"),
        };
        let required = schema["required"].as_array().into_iter().flatten();
        (types.is_empty() || types.iter().any(is_one))
            && schema["enum"].as_array().is_none_or(|words| words.contains(value))
            && value.as_array().into_iter().flatten().all(|item| self.fits(&schema["items"], item))
            && value.as_object().is_none_or(|fields| {
                required.clone().all(|name| fields.contains_key(name.as_str().unwrap()))
                    && fields.iter().all(|(name, value)| self.fits(&schema["properties"][name], value))
            })
    }

    /// Lists the constraints that no request has reached.
    fn miss(&self, schema: &'a Value, at: &str, seen: &mut HashSet<*const Value>, missed: &mut Vec<String>) {
        let schema = self.resolve(schema);
        if !seen.insert(ptr::from_ref(schema)) {
            return;
        }
        let mut breakable = false;
        for (keyword, inner) in schema.as_object().unwrap() {
            match keyword.as_str() {
                "description" | "format" | "propertyNames" => continue,
                "type" | "enum" | "required" | "minimum" | "maximum" | "exclusiveMinimum" | "minLength"
                | "maxLength" | "minItems" | "maxItems" => {}
                "items" | "additionalProperties" => self.miss(inner, &format!("{at}/{keyword}"), seen, missed),
                "oneOf" => {
                    // Nullability is tested by the other types of values.
                    let others = inner.as_array().unwrap().iter().filter(|inner| **inner != json!({"type": "null"}));
                    others
                        .enumerate()
                        .for_each(|(index, inner)| self.miss(inner, &format!("{at}|{index}"), seen, missed));
                }
                "properties" => {
                    let fields = inner.as_object().unwrap();
                    fields.iter().for_each(|(name, inner)| self.miss(inner, &format!("{at}/{name}"), seen, missed));
                }
                other => panic!("{at}: `{other}` is a constraint that this test does not know how to break"),
            }
            breakable = true;
        }
        if breakable && !self.met.contains(&ptr::from_ref(schema)) {
            missed.push(at.to_owned());
        }
    }
}

fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

/// Values of every other type, and values that a lenient parser might accept: the fields of an object as a list, and an enum
/// value as a key with null or as an index.
fn others(schema: &Value, value: &Value) -> Vec<Value> {
    let mut others =
        vec![json!(null), json!(true), json!(0), json!(0.5), json!("no such word"), json!([]), json!([{}]), json!({})];
    match value {
        Value::Object(fields) => {
            let names = schema["properties"].as_object().into_iter().flat_map(Map::keys);
            let in_order: Vec<_> = names.map(|name| fields.get(name).cloned().unwrap_or_default()).collect();
            let tag_first = fields
                .get("type")
                .into_iter()
                .chain(fields.iter().filter(|(name, _)| *name != "type").map(|(_, value)| value));
            others.extend([Value::Array(in_order), tag_first.cloned().collect()]);
        }
        Value::String(word) => {
            others.push(json!({word: null}));
            others.extend((1..8).map(Value::from));
        }
        _ => {}
    }
    others
}

/// Values of the same type, beyond each of the bounds.
fn beyond(schema: &Value, value: &Value) -> Vec<Value> {
    let count = |keyword: &str| schema[keyword].as_u64().map(|count| usize::try_from(count).unwrap());
    let mut others = Vec::new();
    match value {
        Value::Number(_) => {
            let bound = |keyword: &str| schema[keyword].as_number();
            others.extend(bound("exclusiveMinimum").map(|bound| Value::Number(bound.clone())));
            others.extend(bound("minimum").map(|bound| past(bound, -1, types(schema).contains(&"integer"))));
            others.extend(bound("maximum").map(|bound| past(bound, 1, types(schema).contains(&"integer"))));
        }
        Value::String(text) => {
            let of = |count: usize| Value::from(text.chars().cycle().take(count).collect::<String>());
            others.extend(count("minLength").map(|min| of(min - 1)));
            others.extend(count("maxLength").map(|max| of(max + 1)));
        }
        Value::Array(items) => {
            let of = |count: usize| Value::from_iter(items.iter().cycle().take(count).cloned());
            others.extend(count("minItems").map(|min| of(min - 1)));
            others.extend(count("maxItems").map(|max| of(max + 1)));
        }
        _ => {}
    }
    others
}

/// A number just beyond a bound, so close that an f32 cannot distinguish them.
fn past(bound: &Number, side: i128, whole: bool) -> Value {
    let near = bound.as_f64().unwrap();
    let near = near + side as f64 * (near.abs() * 1e-12).max(1e-60);
    let next = bound.as_i128().filter(|_| whole).map(|bound| bound + side);
    let next = next
        .and_then(|next| i64::try_from(next).map(Value::from).or_else(|_| u64::try_from(next).map(Value::from)).ok());
    next.unwrap_or_else(|| json!(near))
}
