//! `format` in schemas. JSON Schema says that a format nobody knows is ignored; llguidance refuses it.

use serde_json::{Map, Value};

/// The formats that llguidance enforces.
const KNOWN: [&str; 10] = ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"];

/// Removes all other formats from a schema, and from the schemas within it.
pub(super) fn remove_unknown(schema: &mut Map<String, Value>) {
    if schema.get("format").is_some_and(|format| !format.as_str().is_some_and(|name| KNOWN.contains(&name))) {
        schema.remove("format");
    }
    for (keyword, value) in schema {
        match keyword.as_str() {
            // Values, not schemas.
            "const" | "default" | "enum" | "example" | "examples" => {}
            // Schemas by names of the client's choice.
            "properties" | "patternProperties" | "dependentSchemas" | "$defs" | "definitions" => {
                let schemas = value.as_object_mut().into_iter().flat_map(Map::values_mut);
                schemas.filter_map(Value::as_object_mut).for_each(remove_unknown);
            }
            _ => match value {
                Value::Object(schema) => remove_unknown(schema),
                Value::Array(schemas) => schemas.iter_mut().filter_map(Value::as_object_mut).for_each(remove_unknown),
                _ => {}
            },
        }
    }
}
