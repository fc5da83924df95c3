//! The tools of a request of `/v1/responses`, as the model sees them, and the form of their calls in the response.
//!
//! Models call functions with JSON. A custom tool, whose input is a text, is therefore offered as a function with one
//! parameter, and the shell as one with a command; their calls are converted back.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};
use text::{InputGrammar, TEXT_INPUT};

use super::request::ResponsesShellAction;
use super::tool_types::{ResponsesCustomFormat, ResponsesGrammarSyntax, ResponsesTool};
use crate::error::ApiError;
use crate::hosted_tools::HostedTools;
use crate::tool_names::{NAME_BYTES_MAX, ToolNames, no_name};

/// The name under which the model sees the shell.
pub const SHELL: &str = "local_shell";

/// The tools that the model is offered.
#[derive(Debug, Default)]
pub struct OfferedTools {
    tools: Vec<OfferedTool>,
    names: ToolNames,
    hosted: HostedTools,
}

#[derive(Debug)]
struct OfferedTool {
    /// The name that the model sees.
    name: String,
    /// In OpenAI's format for chats.
    definition: Value,
    form: CallForm,
    /// For a custom tool.
    input_grammar: Option<InputGrammar>,
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

    /// The definitions of the tools; with `allowed`, only of those with these names.
    pub fn definitions(&self, allowed: Option<&HashSet<&str>>) -> Vec<Value> {
        let is_allowed = |tool: &&OfferedTool| allowed.is_none_or(|names| names.contains(tool.name.as_str()));
        self.tools.iter().filter(is_allowed).map(|tool| tool.definition.clone()).collect()
    }

    /// The grammars of custom tools, by the names that the model sees.
    pub fn input_grammars(&self) -> HashMap<String, InputGrammar> {
        let grammar = |tool: &OfferedTool| Some((tool.name.clone(), tool.input_grammar.clone()?));
        self.tools.iter().filter_map(grammar).collect()
    }

    pub fn into_forms(self) -> CallForms {
        CallForms(self.tools.into_iter().map(|tool| (tool.name, tool.form)).collect())
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
        self.names.add(&visible, &format!("{at}.name"))?;
        self.tools.push(OfferedTool::new(tool, visible, namespace.map(str::to_owned)));
        Ok(())
    }
}

impl OfferedTool {
    /// `visible` is the name that the model sees.
    fn new(tool: &ResponsesTool, visible: String, namespace: Option<String>) -> Self {
        let mut input_grammar = None;
        let (definition, form) = match tool {
            ResponsesTool::Function { name, description, parameters, strict } => {
                let mut definition = function(&visible, description.as_deref(), parameters.clone());
                if let Some(strict) = strict {
                    definition["function"]["strict"] = json!(strict);
                }
                (definition, CallForm::Function { namespace, name: name.clone() })
            }
            ResponsesTool::Custom { name, description, format } => {
                if let Some(ResponsesCustomFormat::Grammar { syntax, definition }) = format {
                    input_grammar = Some(match syntax {
                        ResponsesGrammarSyntax::Lark => InputGrammar::Lark(definition.clone()),
                        ResponsesGrammarSyntax::Regex => InputGrammar::Regex(definition.clone()),
                    });
                }
                let definition = custom(&visible, description.as_deref(), format.as_ref());
                (definition, CallForm::Custom { namespace, name: name.clone() })
            }
            _ => (shell(), CallForm::Shell),
        };
        Self { name: visible, definition, form, input_grammar }
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

fn function(name: &str, description: Option<&str>, parameters: Option<Map<String, Value>>) -> Value {
    let mut function = Map::from_iter([("name".to_owned(), json!(name))]);
    function.extend(description.map(|text| ("description".to_owned(), json!(text))));
    function.extend(parameters.map(|schema| ("parameters".to_owned(), json!(schema))));
    json!({"type": "function", "function": function})
}

fn custom(name: &str, description: Option<&str>, format: Option<&ResponsesCustomFormat>) -> Value {
    let mut input = json!({"type": "string"});
    match format {
        Some(ResponsesCustomFormat::Grammar { syntax: ResponsesGrammarSyntax::Regex, definition }) => {
            input["pattern"] = json!(format!("^(?:{definition})$"));
        }
        Some(ResponsesCustomFormat::Grammar { syntax: ResponsesGrammarSyntax::Lark, definition }) => {
            input["description"] = json!(format!("Text that follows this Lark grammar:\n{definition}"));
        }
        Some(ResponsesCustomFormat::Text {}) | None => {}
    }
    let parameters = json!({
        "type": "object", "properties": {TEXT_INPUT: input}, "required": [TEXT_INPUT], "additionalProperties": false,
    });
    let mut tool = function(name, description, None);
    tool["function"]["parameters"] = parameters;
    tool
}

fn shell() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments"},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": false,
    });
    let mut tool = function(SHELL, Some("Runs a command and returns its output."), None);
    tool["function"]["parameters"] = parameters;
    tool
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
        let names: Vec<_> =
            tools.definitions(None).iter().map(|tool| tool["function"]["name"].as_str().unwrap().to_owned()).collect();
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
        let function = &tools.definitions(None)[0]["function"];
        assert_eq!((&function["name"], &function["description"]), (&json!("patch"), &json!("d")));
        let input = &function["parameters"]["properties"]["input"];
        assert!(input["description"].as_str().unwrap().ends_with("start: \"x\""), "{input}");
    }

    #[test]
    fn tools_that_the_server_cannot_have_are_left_out() {
        let tools =
            offered(json!([{"type": "web_search", "external_web_access": false}, {"type": "function", "name": "f"}]));
        assert_eq!(tools.definitions(None).len(), 1);
        assert_eq!(tools.definitions(Some(&HashSet::from(["g"]))), [] as [Value; 0]);
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
