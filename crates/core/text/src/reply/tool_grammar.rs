//! Grammars that force a model to call tools, in the format of its family.

use super::lark_input::{self, InputForm};
use super::{ARGUMENTS, CALL, CALLS, InputGrammar, ReplyFormat, TEXT_INPUT, Tool, ToolSyntax};
use crate::grammar::{Grammar, GrammarError, check_lark, check_length, lark_literal, lark_marker, prepare_schema};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Whether and which tools the model must call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// Call no tool.
    None,
    /// Call at least one tool.
    Required,
    /// Call this tool.
    Named(String),
}

/// Why a grammar cannot be built from tools.
#[derive(Debug, thiserror::Error)]
pub enum ToolGrammarError {
    #[error("there is no tool to call")]
    NoTools,
    #[error("there is no tool {0:?}")]
    Unknown(String),
    #[error("the parameters of tool {tool:?} cannot be used")]
    Parameters { tool: String, source: GrammarError },
}

impl ReplyFormat {
    /// The grammar of a reply with this tool choice; `None` if the choice does not constrain the reply. If the model decides,
    /// only tools with a grammar of their own constrain it. Without `parallel` at most one call is allowed. Arguments follow
    /// the tools' schemas. Use [`ReplyFormat::reasoned`] for a model that reasons first.
    pub fn tool_grammar(
        &self,
        tokenizer: &Tokenizer,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
    ) -> Result<Option<Grammar>, ToolGrammarError> {
        let tools: Vec<&Tool> = match choice {
            ToolChoice::Auto => return self.auto_grammar(tokenizer, tools, parallel),
            ToolChoice::None => return Ok(None),
            ToolChoice::Required => tools.iter().collect(),
            ToolChoice::Named(name) => {
                let tool = tools.iter().find(|tool| tool.name == *name);
                vec![tool.ok_or_else(|| ToolGrammarError::Unknown(name.clone()))?]
            }
        };
        if tools.is_empty() {
            return Err(ToolGrammarError::NoTools);
        }
        // A named tool is called only once.
        let parallel = parallel && !matches!(choice, ToolChoice::Named(_));
        let mut lark = self.replies(tokenizer, parallel);
        let alternatives: Vec<String> = (0..tools.len()).map(|number| format!("tool_{number}")).collect();
        lark += &format!("tool: {}\n", alternatives.join(" | "));
        for (number, tool) in tools.into_iter().enumerate() {
            append_rules(&mut lark, tool, self.rules(tokenizer, number, tool))?;
        }
        Ok(Some(Grammar::Lark(lark)))
    }

    /// The rules around the calls, each of which is a `tool`.
    fn replies(&self, tokenizer: &Tokenizer, parallel: bool) -> String {
        let marker = |tag| lark_marker(tag, tokenizer);
        let several = |more: &str| if parallel { format!("({more})*") } else { String::new() };
        match self.tools {
            ToolSyntax::Tagged | ToolSyntax::Functions => {
                let call = format!("call: {} \"\\n\" tool \"\\n\" {}\n", marker(CALL.open), marker(CALL.close));
                format!("start: call {}\n{call}", several(r#""\n" call"#))
            }
            ToolSyntax::Bare => format!("start: tool {}\n", several(r#""; " tool"#)),
            ToolSyntax::List => format!("start: {} \"[\" tool {} \"]\"\n", marker(CALLS), several(r#"", " tool"#)),
            ToolSyntax::Named => {
                let call = format!("call: {} tool\n", marker(CALLS));
                format!("start: call {}\n{call}", several("call"))
            }
        }
    }

    /// The rule `tool_{number}` and its helper rules.
    pub(super) fn rules(&self, tokenizer: &Tokenizer, number: usize, tool: &Tool) -> Result<String, GrammarError> {
        let name = &tool.name;
        if let Some(grammar) = &tool.input {
            return self.text_rules(tokenizer, number, name, grammar);
        }
        let schema = parameters(tool)?;
        if self.tools == ToolSyntax::Functions {
            return function(number, name, &schema, !tool.strict);
        }
        self.argument_rules(tokenizer, number, name, &prepare_schema(&Value::Object(schema), !tool.strict)?)
    }

    /// The rules of a call whose arguments are one JSON object.
    pub(super) fn argument_rules(
        &self,
        tokenizer: &Tokenizer,
        number: usize,
        name: &str,
        schema: &Value,
    ) -> Result<String, GrammarError> {
        let (head, end) = self.call_head(tokenizer, name);
        let end = if end.is_empty() { String::new() } else { lark_literal(end) };
        Ok(format!("tool_{number}: {head} arguments_{number} {end}\narguments_{number}: %json {schema}\n"))
    }

    /// What a call has before its arguments, as Lark, and the text after them.
    fn call_head(&self, tokenizer: &Tokenizer, name: &str) -> (String, &'static str) {
        let key = match self.tools {
            ToolSyntax::Named => {
                return (format!("{} {}", lark_literal(name), lark_marker(ARGUMENTS, tokenizer)), "");
            }
            ToolSyntax::Bare => "parameters",
            _ => "arguments",
        };
        (lark_literal(&format!(r#"{{"name": {}, "{key}": "#, Value::from(name))), "}")
    }

    /// The rules of a tool that takes a text, with the grammar of the text.
    fn text_rules(
        &self,
        tokenizer: &Tokenizer,
        number: usize,
        name: &str,
        grammar: &InputGrammar,
    ) -> Result<String, GrammarError> {
        let rule = format!("input_{number}");
        let (InputGrammar::Lark(source) | InputGrammar::Regex(source)) = grammar;
        check_lark(source)?;
        if self.tools == ToolSyntax::Functions {
            let open = lark_literal(&format!("<function={name}>\n<parameter={TEXT_INPUT}>\n"));
            let close = r#""\n</parameter>\n""#;
            return Ok(match grammar {
                InputGrammar::Lark(source) => {
                    let rules = lark_input::rules(source, &rule, InputForm::Raw)?;
                    format!("tool_{number}: {open} {rule} {close} \"</function>\"\n{rules}\n")
                }
                InputGrammar::Regex(pattern) => {
                    let input = format!("{rule}[suffix={close}]: /{}/", llguidance::regex_to_lark(pattern, ""));
                    format!("tool_{number}: {open} {rule} \"</function>\"\n{input}\n")
                }
            });
        }
        let (quote, rules) = match grammar {
            InputGrammar::Lark(source) => ("\"", lark_input::rules(source, &rule, InputForm::Json)?),
            InputGrammar::Regex(pattern) => {
                let schema = json!({"type": "string", "pattern": format!("^(?:{pattern})$")});
                ("", format!("{rule}: %json {}", prepare_schema(&schema, false)?))
            }
        };
        let (head, end) = self.call_head(tokenizer, name);
        let open = lark_literal(&format!("{{\"{TEXT_INPUT}\": {quote}"));
        let close = lark_literal(&format!("{quote}}}{end}"));
        Ok(format!("tool_{number}: {head} {open} {rule} {close}\n{rules}\n"))
    }
}

/// Appends the rules of a tool. All tools together are limited like one grammar.
pub(super) fn append_rules(
    lark: &mut String,
    tool: &Tool,
    rules: Result<String, GrammarError>,
) -> Result<(), ToolGrammarError> {
    let appended = rules.and_then(|rules| {
        *lark += &rules;
        check_length(lark)
    });
    appended.map_err(|source| ToolGrammarError::Parameters { tool: tool.name.clone(), source })
}

/// The schema of the arguments, which are an object.
fn parameters(tool: &Tool) -> Result<Map<String, Value>, GrammarError> {
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let schema = tool.parameters.as_ref().filter(|schema| !schema.is_null()).unwrap_or(&none);
    let mut schema = schema.as_object().ok_or(GrammarError::NoObject)?.clone();
    schema.entry("type").or_insert_with(|| json!("object"));
    Ok(schema)
}

/// Each parameter in tags of its own, in the schema's order. Strings are written without quotes or escapes.
fn function(number: usize, name: &str, schema: &Map<String, Value>, lenient: bool) -> Result<String, GrammarError> {
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
    let required = schema.get("required").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let (mut body, mut rules) = (String::new(), String::new());
    for (index, (key, property)) in properties.iter().enumerate() {
        let rule = format!("parameter_{number}_{index}");
        let optional = if required.iter().any(|name| name == key) { "" } else { "?" };
        body += &format!(" {rule}{optional}");
        let open = lark_literal(&format!("<parameter={key}>\n"));
        let close = r#""\n</parameter>\n""#;
        let strings = property
            .get("enum")
            .and_then(Value::as_array)
            .map(|values| values.iter().filter_map(Value::as_str).map(lark_literal).collect::<Vec<_>>().join(" | "));
        rules += &match strings {
            _ if property.get("type").is_none_or(|kind| kind != "string") => {
                let mut value = property.as_object().ok_or(GrammarError::NoObject)?.clone();
                for definitions in ["$defs", "definitions"] {
                    if let Some(found) = schema.get(definitions) {
                        value.insert(definitions.to_owned(), found.clone());
                    }
                }
                let value = prepare_schema(&Value::Object(value), lenient)?;
                format!("{rule}: {open} {rule}_value {close}\n{rule}_value: %json {value}\n")
            }
            Some(strings) if !strings.is_empty() => format!("{rule}: {open} ({strings}) {close}\n"),
            _ => format!("{rule}: {open} {rule}_value\n{rule}_value[suffix={close}]: /(?s:.*)/\n"),
        };
    }
    let open = lark_literal(&format!("<function={name}>\n"));
    Ok(format!("tool_{number}: {open}{body} \"</function>\"\n{rules}"))
}

#[cfg(test)]
mod tests;
