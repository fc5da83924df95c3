//! Objects that list their properties and say nothing of others get no others, as in llama.cpp, Ollama and vLLM: a schema
//! made from a class means the fields of that class. JSON Schema itself allows any.
//!
//! Schemas that together describe one object stay as they are: those of `allOf`, and alternatives beside properties.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

type Schema = Map<String, Value>;

/// Keywords that say more about the same object.
const COMPOSING: [&str; 8] = ["$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas"];
/// Keywords that allow other properties.
const OTHERS: [&str; 4] = ["additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"];

/// Adds `"additionalProperties": false` where it is meant.
pub(super) fn close(schema: &mut Schema) {
    // References of definitions that describe a part of an object only. Such a definition may refer to others.
    let mut parts = BTreeSet::new();
    loop {
        let known = parts.len();
        let mut found = parts.clone();
        walk(schema, false, &parts, &mut |schema, is_part| {
            if let Some(reference) = schema.get("$ref").and_then(Value::as_str).filter(|_| is_part) {
                found.insert(reference.to_owned());
            }
        });
        parts = found;
        if parts.len() == known {
            break;
        }
    }
    walk(schema, false, &parts, &mut |schema, is_part| {
        if !is_part && lists_all(schema) {
            schema.insert("additionalProperties".to_owned(), json!(false));
        }
    });
}

/// Whether a schema describes an object by a list of properties alone.
fn lists_all(schema: &Schema) -> bool {
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else { return false };
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    !properties.is_empty()
        && !COMPOSING.iter().chain(&OTHERS).any(|keyword| schema.contains_key(*keyword))
        && required.filter_map(Value::as_str).all(|name| properties.contains_key(name))
}

/// Calls `visit` with a schema and those within it, and whether each describes a part of an object only.
fn walk(schema: &mut Schema, is_part: bool, parts: &BTreeSet<String>, visit: &mut dyn FnMut(&mut Schema, bool)) {
    visit(schema, is_part);
    let has_properties = schema.contains_key("properties");
    for (keyword, value) in schema.iter_mut() {
        match keyword.as_str() {
            // Values, not schemas; and what must not match.
            "const" | "default" | "enum" | "example" | "examples" | "not" | "required" => {}
            "$defs" | "definitions" => {
                for (name, definition) in value.as_object_mut().into_iter().flatten() {
                    let is_part = parts.contains(&format!("#/{keyword}/{name}"));
                    definition.as_object_mut().into_iter().for_each(|schema| walk(schema, is_part, parts, visit));
                }
            }
            "properties" | "patternProperties" => {
                let schemas = value.as_object_mut().into_iter().flat_map(Map::values_mut);
                schemas.filter_map(Value::as_object_mut).for_each(|schema| walk(schema, false, parts, visit));
            }
            "dependentSchemas" => {
                let schemas = value.as_object_mut().into_iter().flat_map(Map::values_mut);
                schemas.filter_map(Value::as_object_mut).for_each(|schema| walk(schema, true, parts, visit));
            }
            "if" | "then" | "else" => {
                value.as_object_mut().into_iter().for_each(|schema| walk(schema, true, parts, visit));
            }
            "allOf" | "anyOf" | "oneOf" => {
                let Some(schemas) = value.as_array_mut() else { continue };
                let is_part = is_part || has_properties || (keyword == "allOf" && schemas.len() > 1);
                schemas.iter_mut().filter_map(Value::as_object_mut).for_each(|s| walk(s, is_part, parts, visit));
            }
            _ => match value {
                Value::Object(schema) => walk(schema, false, parts, visit),
                Value::Array(schemas) => {
                    schemas.iter_mut().filter_map(Value::as_object_mut).for_each(|s| walk(s, false, parts, visit));
                }
                _ => {}
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paths of the objects that are closed.
    fn closed(schema: Value) -> Vec<String> {
        fn find(value: &Value, path: &str, found: &mut Vec<String>) {
            if value.get("additionalProperties") == Some(&json!(false)) {
                found.push(path.to_owned());
            }
            match value {
                Value::Object(fields) => fields.iter().for_each(|(name, v)| find(v, &format!("{path}/{name}"), found)),
                Value::Array(items) => {
                    items.iter().enumerate().for_each(|(at, v)| find(v, &format!("{path}/{at}"), found));
                }
                _ => {}
            }
        }
        let Value::Object(mut schema) = schema else { panic!("a schema is an object") };
        close(&mut schema);
        let mut found = Vec::new();
        find(&Value::Object(schema), "", &mut found);
        found
    }

    #[test]
    fn objects_that_list_their_properties_are_closed() {
        let person = json!({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]});
        assert_eq!(closed(person.clone()), [""]);
        assert_eq!(closed(json!({"type": "array", "items": person})), ["/items"]);
        assert_eq!(closed(json!({"anyOf": [person, {"type": "null"}]})), ["/anyOf/0"]);
        let nested = json!({"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": person}});
        assert_eq!(closed(nested), ["", "/$defs/A"]);
        let with_default = json!({"properties": {"a": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": person}});
        assert_eq!(closed(with_default), ["", "/$defs/A"]);
        // The names of properties are no keywords.
        let named = json!({"properties": {"enum": person, "allOf": person}});
        assert_eq!(closed(named), ["", "/properties/enum", "/properties/allOf"]);
    }

    #[test]
    fn what_says_something_of_other_properties_stays() {
        let one = json!({"a": {"type": "string"}});
        for schema in [
            json!({"type": "object"}),
            json!({"type": "object", "properties": {}}),
            json!({"properties": one, "additionalProperties": true}),
            json!({"properties": one, "additionalProperties": {"type": "integer"}}),
            json!({"properties": one, "patternProperties": {"^x": {}}}),
            json!({"properties": one, "required": ["b"]}),
            json!({"default": {"properties": one}}),
        ] {
            assert_eq!(closed(schema.clone()), Vec::<String>::new(), "{schema}");
        }
    }

    #[test]
    fn parts_of_one_object_are_left_open() {
        let (a, b) = (json!({"properties": {"a": {}}}), json!({"properties": {"b": {}}}));
        assert!(closed(json!({"allOf": [a, b]})).is_empty());
        assert!(closed(json!({"properties": {"a": {}}, "anyOf": [b]})).is_empty());
        assert!(closed(json!({"properties": {"a": {}}, "if": a, "then": b})).is_empty());
        let inherited = json!({
            "allOf": [{"$ref": "#/$defs/Base"}, b],
            "$defs": {"Base": {"allOf": [{"$ref": "#/$defs/Root"}, a]}, "Root": a, "Other": a},
        });
        assert_eq!(closed(inherited), ["/$defs/Other"]);
    }
}
