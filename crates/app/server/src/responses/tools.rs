//! The tools of a request of `/v1/responses`, as the model sees them, and the form of their calls in the response.
//!
//! Models call functions with JSON. A custom tool, whose input is a text, is therefore offered as a function with one
//! parameter, and the shell as one with a command; their calls are converted back.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};
use text::{InputGrammar, TEXT_INPUT};

use super::request::ResponsesShellAction;
use super::tool_types::{ResponsesCustomFormat, ResponsesGrammarSyntax, ResponsesTool};
use crate::conversation::{NAME_BYTES_MAX, ToolDefinition, Tools, no_name};
use crate::error::ApiError;
use crate::hosted_tools::HostedTools;

/// The name under which the model sees the shell.
pub const SHELL: &str = "local_shell";

/// The tools that the model is offered.
#[derive(Debug, Default)]
pub struct OfferedTools {
    tools: Tools,
    forms: CallForms,
    hosted: HostedTools,
}

/// How a call is written in a response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallForm {
    Function { namespace: Option<String>, name: String },
    Custom { namespace: Option<String>, name: String },
    Shell,
}

/// The forms of the calls of all tools, by the names that the model sees.
#[derive(Debug, Default)]
pub struct CallForms(HashMap<String, CallForm>);

impl CallForms {
    /// The form of a call of the tool that the model sees under this name.
    pub fn form(&self, name: &str) -> CallForm {
        let unknown = || CallForm::Function { namespace: None, name: name.to_owned() };
        self.0.get(name).cloned().unwrap_or_else(unknown)
    }
}

impl OfferedTools {
    /// Tools that need OpenAI's services are left out.
    pub fn new(tools: &[ResponsesTool]) -> Result<Self, ApiError> {
        let mut offered = Self::default();
        offered.add_all(tools, None, "tools")?;
        offered.hosted.log();
        Ok(offered)
    }

    /// The tools; with `allowed`, only those with these names.
    pub fn allowed(&self, allowed: Option<&HashSet<&str>>) -> Tools {
        let mut tools = self.tools.clone();
        if let Some(names) = allowed {
            tools.retain(names);
        }
        tools
    }

    pub fn into_forms(self) -> CallForms {
        self.forms
    }

    /// `at` is the field that contains `tools`.
    fn add_all(&mut self, tools: &[ResponsesTool], namespace: Option<&str>, at: &str) -> Result<(), ApiError> {
        for (index, tool) in tools.iter().enumerate() {
            self.add(tool, namespace, &format!("{at}[{index}]"))?;
        }
        Ok(())
    }

    fn add(&mut self, tool: &ResponsesTool, namespace: Option<&str>, at: &str) -> Result<(), ApiError> {
        let visible = match tool {
            ResponsesTool::Function { name, .. }
            | ResponsesTool::Custom { name, .. }
            | ResponsesTool::Namespace { name, .. } => bounded_name(namespace, name, &format!("{at}.name"))?,
            ResponsesTool::LocalShell {} => SHELL.to_owned(),
            hosted => {
                self.hosted.add(json!(hosted)["type"].as_str().unwrap_or_default());
                return Ok(());
            }
        };
        if let ResponsesTool::Namespace { tools, .. } = tool {
            return self.add_all(tools, Some(&visible), &format!("{at}.tools"));
        }
        let (definition, form) = definition(tool, visible, namespace.map(str::to_owned));
        self.forms.0.insert(definition.name.clone(), form);
        self.tools.add(definition, &format!("{at}.name"))
    }
}

/// `visible` is the name that the model sees.
fn definition(tool: &ResponsesTool, visible: String, namespace: Option<String>) -> (ToolDefinition, CallForm) {
    match tool {
        ResponsesTool::Function { name, description, parameters, strict } => {
            let (description, parameters) = (description.clone(), parameters.clone());
            let tool = ToolDefinition { name: visible, description, parameters, strict: *strict, input: None };
            (tool, CallForm::Function { namespace, name: name.clone() })
        }
        ResponsesTool::Custom { name, description, format } => {
            let tool = custom(visible, description.clone(), format.as_ref());
            (tool, CallForm::Custom { namespace, name: name.clone() })
        }
        _ => (shell(visible), CallForm::Shell),
    }
}

impl ResponsesTool {
    /// Whether the model can be offered this tool.
    pub fn is_offered(&self) -> bool {
        matches!(self, Self::Function { .. } | Self::Custom { .. } | Self::Namespace { .. } | Self::LocalShell {})
    }
}

/// The name of a tool that may be in a namespace, as the model sees it.
pub fn visible_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
}

/// The same, if it is short enough. It is checked before it is built: a namespace is repeated in the names of all its tools.
fn bounded_name(namespace: Option<&str>, name: &str, at: &str) -> Result<String, ApiError> {
    let bytes = namespace.map_or(0, |namespace| namespace.len() + 1) + name.len();
    if bytes > NAME_BYTES_MAX { Err(no_name(at)) } else { Ok(visible_name(namespace, name)) }
}

/// The arguments of the call of a custom tool, as the model writes them.
pub fn custom_arguments(input: &str) -> Value {
    json!({TEXT_INPUT: input})
}

/// The arguments of the call of a shell, as the model writes them.
pub fn shell_arguments(action: &ResponsesShellAction) -> Value {
    let mut arguments = json!(action);
    if let Value::Object(arguments) = &mut arguments {
        arguments.retain(|name, value| !value.is_null() && name != "type");
    }
    arguments
}

/// The command that the model has written. Arguments that were cut off have none.
pub fn shell_action(arguments: &str) -> ResponsesShellAction {
    let mut arguments: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
    arguments.insert("type".to_owned(), json!("exec"));
    arguments.entry("env").or_insert_with(|| json!({}));
    let empty = || ResponsesShellAction::Exec {
        command: Vec::new(),
        env: Some(Map::new()),
        working_directory: None,
        timeout_ms: None,
    };
    serde_json::from_value(Value::Object(arguments)).unwrap_or_else(|_| empty())
}

fn custom(name: String, description: Option<String>, format: Option<&ResponsesCustomFormat>) -> ToolDefinition {
    let mut text = json!({"type": "string"});
    let input = match format {
        Some(ResponsesCustomFormat::Grammar { syntax: ResponsesGrammarSyntax::Regex, definition }) => {
            text["pattern"] = json!(format!("^(?:{definition})$"));
            Some(InputGrammar::Regex(definition.clone()))
        }
        Some(ResponsesCustomFormat::Grammar { syntax: ResponsesGrammarSyntax::Lark, definition }) => {
            text["description"] = json!(format!("Text that follows this Lark grammar:\n{definition}"));
            Some(InputGrammar::Lark(definition.clone()))
        }
        Some(ResponsesCustomFormat::Text {}) | None => None,
    };
    let parameters = object(json!({TEXT_INPUT: text}), TEXT_INPUT);
    ToolDefinition { name, description, parameters: Some(parameters), strict: None, input }
}

fn shell(name: String) -> ToolDefinition {
    let properties = json!({
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "number"},
    });
    let description = Some("Runs a command and returns its output.".to_owned());
    ToolDefinition { name, description, parameters: Some(object(properties, "command")), strict: None, input: None }
}

/// The schema of an object with these properties, of which one is required.
fn object(properties: Value, required: &str) -> Map<String, Value> {
    let keywords = [
        ("type", json!("object")),
        ("properties", properties),
        ("required", json!([required])),
        ("additionalProperties", json!(false)),
    ];
    keywords.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(tools: Value) -> OfferedTools {
        try_offered(tools).unwrap()
    }

    fn try_offered(tools: Value) -> Result<OfferedTools, ApiError> {
        OfferedTools::new(&serde_json::from_value::<Vec<ResponsesTool>>(tools).unwrap())
    }

    #[test]
    fn tools_of_a_namespace_are_offered_under_its_name() {
        let tools = offered(json!([{"type": "namespace", "name": "agents", "description": "d", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object"}},
            {"type": "custom", "name": "patch", "description": "edits files"},
        ]}]));
        let names: Vec<_> = tools
            .allowed(None)
            .definitions()
            .iter()
            .map(|tool| tool["function"]["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["agents.spawn", "agents.patch"]);
        let (namespace, name) = (Some("agents".to_owned()), "spawn".to_owned());
        let tools = tools.into_forms();
        assert_eq!(tools.form("agents.spawn"), CallForm::Function { namespace, name });
        let unknown = CallForm::Function { namespace: None, name: "spawn".to_owned() };
        assert_eq!(tools.form("spawn"), unknown);
    }

    #[test]
    fn a_custom_tool_has_one_parameter_and_shows_its_grammar() {
        let format = json!({"type": "grammar", "syntax": "lark", "definition": "start: \"x\""});
        let tools = offered(json!([{"type": "custom", "name": "patch", "description": "d", "format": format}]));
        let function = &tools.allowed(None).definitions()[0]["function"];
        assert_eq!((&function["name"], &function["description"]), (&json!("patch"), &json!("d")));
        let input = &function["parameters"]["properties"]["input"];
        assert!(input["description"].as_str().unwrap().ends_with("start: \"x\""), "{input}");
    }

    #[test]
    fn tools_that_the_server_cannot_have_are_left_out() {
        let tools =
            offered(json!([{"type": "web_search", "external_web_access": false}, {"type": "function", "name": "f"}]));
        assert_eq!(tools.allowed(None).definitions().len(), 1);
        assert_eq!(tools.allowed(Some(&HashSet::from(["g"]))).definitions(), [] as [Value; 0]);
    }

    #[test]
    fn a_namespace_cannot_multiply_a_long_name() {
        let tool = |name: String| json!({"type": "custom", "name": name});
        let namespace = |name: String, tools: Value| json!([{"type": "namespace", "name": name, "tools": tools}]);
        let many = (0..513).map(|number| tool(number.to_string())).collect();
        let nested = namespace("x".repeat(200), namespace("x".repeat(200), json!([])));
        for (tools, param) in [
            (namespace("x".repeat(1 << 20), json!([])), "tools[0].name"),
            (namespace("x".repeat(255), json!([tool("y".to_owned())])), "tools[0].tools[0].name"),
            (nested, "tools[0].tools[0].name"),
            (namespace("x".to_owned(), many), "tools"),
            (
                json!([tool("a.b".to_owned()), namespace("a".to_owned(), json!([tool("b".to_owned())]))[0]]),
                "tools[1].tools[0].name",
            ),
            (json!([{"type": "local_shell"}, {"type": "local_shell"}]), "tools[1].name"),
        ] {
            assert_eq!(try_offered(tools).unwrap_err().param.as_deref(), Some(param));
        }
    }

    #[test]
    fn a_shell_s_call_is_read_and_written() {
        let action = shell_action(r#"{"command": ["ls", "-l"], "timeout_ms": 5}"#);
        assert_eq!(
            serde_json::to_value(&action).unwrap(),
            json!({"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5.0})
        );
        assert_eq!(shell_arguments(&action), json!({"command": ["ls", "-l"], "env": {}, "timeout_ms": 5.0}));
        let cut_off = shell_action(r#"{"command": ["l"#);
        assert!(matches!(cut_off, ResponsesShellAction::Exec { command, .. } if command.is_empty()));
    }
}
