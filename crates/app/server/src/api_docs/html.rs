//! Renders an OpenAPI document to HTML.

use std::fmt::Write;

use serde_json::{Map, Value};

/// The sections of the page: tags of the document, with their titles.
const SECTIONS: [(&str, &str); 5] = [
    ("openai", "OpenAI's API"),
    ("anthropic", "Anthropic's API"),
    ("ollama", "Ollama's API"),
    ("tokens", "Tokens"),
    ("server", "The server"),
];

pub fn render(document: &Value) -> String {
    let version = escape(text(&document["info"]["version"]));
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>consort: API</title>\n\
         <link rel=\"icon\" href=\"/page/icon.svg\">\n<link rel=\"stylesheet\" href=\"/docs/style.css\">\n</head>\n<body>\n\
         <header><h1>consort <small>{version}</small></h1><p>The HTTP API of this server. \
         <a href=\"/openapi.json\">OpenAPI document</a> · <a href=\"/\">Chat</a></p></header>\n<main>\n"
    );
    for (tag, title) in SECTIONS {
        let _ = writeln!(out, "<section id=\"{tag}\"><h2>{title}</h2>");
        let paths = document["paths"].as_object().into_iter().flatten();
        for (path, item) in paths {
            let operations = item.as_object().into_iter().flatten();
            let tagged = |operation: &Value| operation["tags"].as_array().is_some_and(|tags| tags[0] == tag);
            for (method, operation) in operations.filter(|(_, operation)| tagged(operation)) {
                operation_details(&mut out, method, path, operation);
            }
        }
        out += "</section>\n";
    }
    out += "<section id=\"schemas\"><h2>Schemas</h2>\n";
    for (name, schema) in document["components"]["schemas"].as_object().into_iter().flatten() {
        let name = escape(name);
        let _ = write!(out, "<article id=\"{name}\"><h3>{name}</h3>");
        body(&mut out, schema);
        out += "</article>\n";
    }
    out += "</section>\n</main>\n</body>\n</html>\n";
    out
}

fn operation_details(out: &mut String, method: &str, path: &str, operation: &Value) {
    let (path, summary) = (escape(path), prose(text(&operation["summary"])));
    let _ = write!(
        out,
        "<details><summary><b class=\"{method}\">{method}</b> <code>{path}</code> <span>{summary}</span></summary>"
    );
    paragraph(out, &prose(text(&operation["description"])));
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        let (name, description) = (escape(text(&parameter["name"])), prose(text(&parameter["description"])));
        paragraph(out, &format!("<code>{name}</code> in the {}: {description}", escape(text(&parameter["in"]))));
    }
    let request = &operation["requestBody"]["content"]["application/json"]["schema"];
    if request.is_object() {
        paragraph(out, &format!("Body: {}", type_of(request)));
    }
    out.push_str("<table><tr><th>Status</th><th>Response</th><th>Body</th></tr>");
    for (status, response) in operation["responses"].as_object().into_iter().flatten() {
        let bodies = response["content"].as_object().into_iter().flatten();
        let bodies: Vec<_> = bodies
            .map(|(media, content)| format!("<code>{}</code> {}", escape(media), type_of(&content["schema"])))
            .collect();
        let description = prose(text(&response["description"]));
        let _ = write!(out, "<tr><td>{status}</td><td>{description}</td><td>{}</td></tr>", bodies.join("<br>"));
    }
    out.push_str("</table></details>\n");
}

/// What a schema of the document says: its description, and its fields or its type.
fn body(out: &mut String, schema: &Value) {
    paragraph(out, &prose(text(&schema["description"])));
    let variants = ["oneOf", "allOf"].into_iter().find_map(|keyword| schema[keyword].as_array());
    match (schema["properties"].as_object(), variants) {
        (Some(properties), _) => fields(out, properties, &schema["required"]),
        (None, Some(variants)) if variants.iter().any(|variant| variant["properties"].is_object()) => {
            variants.iter().for_each(|variant| body(out, variant));
        }
        _ => paragraph(out, &type_of(schema)),
    }
}

fn fields(out: &mut String, properties: &Map<String, Value>, required: &Value) {
    out.push_str("<table><tr><th>Field</th><th>Type</th><th></th></tr>");
    for (name, schema) in properties {
        let mark = match required.as_array().is_some_and(|names| names.iter().any(|other| other == name.as_str())) {
            true => " <em>required</em>",
            false => "",
        };
        let (name, kind, description) = (escape(name), type_of(schema), prose(text(&schema["description"])));
        let _ = write!(out, "<tr><td><code>{name}</code>{mark}</td><td>{kind}</td><td>{description}</td></tr>");
    }
    out.push_str("</table>");
}

/// A type on one line. Schemas with a name are links.
fn type_of(schema: &Value) -> String {
    if let Some(path) = schema["$ref"].as_str() {
        let name = escape(path.rsplit('/').next().unwrap_or_default());
        return format!("<a href=\"#{name}\">{name}</a>");
    }
    for (keyword, joint) in [("oneOf", " or "), ("allOf", " and ")] {
        if let Some(parts) = schema[keyword].as_array() {
            return parts.iter().map(type_of).collect::<Vec<_>>().join(joint);
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<_> =
            values.iter().map(|value| format!("<code>{}</code>", escape(&value.to_string()))).collect();
        return values.join(" or ");
    }
    let names: Vec<_> = match &schema["type"] {
        Value::Array(names) => names.iter().map(text).collect(),
        Value::String(name) => vec![name.as_str()],
        _ => vec!["any value"],
    };
    let name = |name: &str| match name {
        "array" => format!("list of {}", type_of(&schema["items"])),
        name => format!("{}{}", escape(name), bounds(schema, name)),
    };
    names.into_iter().map(name).collect::<Vec<_>>().join(" or ")
}

/// The limits of a number that are not those of its type.
fn bounds(schema: &Value, name: &str) -> String {
    let is_limit = |bound: &&Value| bound.as_f64().is_some_and(|bound| bound.abs() < 4e9);
    let bound = |keyword: &str| schema.get(keyword).filter(is_limit);
    if !matches!(name, "integer" | "number") {
        return String::new();
    }
    let low = bound("minimum").map(|bound| format!(" from {bound}"));
    let low = low.or_else(|| bound("exclusiveMinimum").map(|bound| format!(" above {bound}"))).unwrap_or_default();
    low + &bound("maximum").map_or_else(String::new, |bound| format!(" up to {bound}"))
}

/// Nothing if there is no text.
fn paragraph(out: &mut String, html: &str) {
    if !html.is_empty() {
        let _ = write!(out, "<p>{html}</p>");
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Text with code in backticks.
fn prose(text: &str) -> String {
    let part = |(index, part): (usize, &str)| match index % 2 {
        1 => format!("<code>{part}</code>"),
        _ => part.to_owned(),
    };
    escape(text).split('`').enumerate().map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(schema: Value, expected: &str) {
        assert_eq!(type_of(&schema), expected);
    }

    #[test]
    fn types_are_named_in_words() {
        check(json!({"$ref": "#/components/schemas/Stop"}), "<a href=\"#Stop\">Stop</a>");
        check(json!({"type": ["number", "null"], "minimum": 0, "maximum": 1}), "number from 0 up to 1 or null");
        check(json!({"type": "integer", "exclusiveMinimum": 0, "maximum": i64::MAX}), "integer above 0");
        check(json!({"type": "array", "items": {"enum": ["a<"]}}), "list of <code>&quot;a&lt;&quot;</code>");
        check(json!({}), "any value");
    }

    #[test]
    fn text_of_the_document_stays_text() {
        assert_eq!(prose("a `b<c>` & d"), "a <code>b&lt;c&gt;</code> &amp; d");
    }
}
