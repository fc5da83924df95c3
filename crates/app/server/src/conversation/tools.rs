//! `Tools`: the tools that a model is offered, which all APIs check and describe alike.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use text::{InputGrammar, Tool, ToolChoice};

use crate::error::ApiError;
use crate::excerpt::excerpt;

/// The maximum tools that a model is offered.
pub const TOOLS_MAX: usize = 512;
/// The maximum length of a name, as the model sees it.
pub const NAME_BYTES_MAX: usize = 256;

#[derive(Clone, Debug, Default)]
pub struct Tools {
    tools: Vec<ToolDefinition>,
    names: HashSet<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolDefinition {
    /// As the model sees it.
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of the arguments.
    pub parameters: Option<Map<String, Value>>,
    /// Whether unsupported keywords of the schema are an error.
    pub strict: Option<bool>,
    /// The grammar of the input, for a tool that takes a text.
    pub input: Option<InputGrammar>,
}

impl Tools {
    /// `at` is the field that contains the tool's name.
    pub fn add(&mut self, tool: ToolDefinition, at: &str) -> Result<(), ApiError> {
        let name = tool.name.as_str();
        if self.tools.len() >= TOOLS_MAX {
            return Err(ApiError::invalid("tools", format!("there are more than {TOOLS_MAX} tools")));
        }
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(no_name(at));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(ApiError::invalid(at, format!("there are two tools with the name `{}`", excerpt(name))));
        }
        self.tools.push(tool);
        Ok(())
    }

    /// Keeps the tools with these names.
    pub fn retain(&mut self, names: &HashSet<&str>) {
        self.tools.retain(|tool| names.contains(tool.name.as_str()));
        self.names.retain(|name| names.contains(name.as_str()));
    }

    /// Refuses a choice that cannot be made.
    pub fn check_choice(&self, choice: &ToolChoice) -> Result<(), ApiError> {
        let refused = |message: String| Err(ApiError::invalid("tool_choice", message));
        match choice {
            ToolChoice::Required if self.tools.is_empty() => refused("there are no tools to choose from".to_owned()),
            ToolChoice::Named(name) if !self.names.contains(name) => {
                refused(format!("there is no tool with the name `{}`", excerpt(name)))
            }
            _ => Ok(()),
        }
    }

    /// The tools as templates get them, in OpenAI's format.
    pub fn definitions(&self) -> Vec<Value> {
        self.tools.iter().map(ToolDefinition::to_json).collect()
    }

    /// The tools as replies are parsed.
    pub fn callable(&self) -> Arc<[Tool]> {
        let tool = |tool: &ToolDefinition| Tool {
            name: tool.name.clone(),
            parameters: tool.parameters.clone().map(Value::Object),
            strict: tool.strict.unwrap_or(false),
            input: tool.input.clone(),
        };
        self.tools.iter().map(tool).collect()
    }
}

impl ToolDefinition {
    fn to_json(&self) -> Value {
        let mut function = Map::from_iter([("name".to_owned(), json!(self.name))]);
        function.extend(self.description.as_ref().map(|text| ("description".to_owned(), json!(text))));
        function.extend(self.parameters.as_ref().map(|schema| ("parameters".to_owned(), json!(schema))));
        function.extend(self.strict.map(|strict| ("strict".to_owned(), json!(strict))));
        json!({"type": "function", "function": function})
    }
}

/// The error of a tool whose name cannot be used.
pub fn no_name(at: &str) -> ApiError {
    ApiError::invalid(at, format!("the name of a tool is a word of at most {NAME_BYTES_MAX} bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> ToolDefinition {
        ToolDefinition { name: name.to_owned(), ..ToolDefinition::default() }
    }

    #[test]
    fn a_name_is_one_short_word_and_no_two_tools_share_it() {
        let mut tools = Tools::default();
        tools.add(named("find"), "a").unwrap();
        for name in ["find", "", "two words", "line\nbreak", "x\u{7}", &"x".repeat(NAME_BYTES_MAX + 1)] {
            let refused = tools.add(named(name), "tools[1].name").unwrap_err();
            assert_eq!(refused.param.as_deref(), Some("tools[1].name"), "{name}");
        }
        tools.add(named(&"x".repeat(NAME_BYTES_MAX)), "b").unwrap();
    }

    #[test]
    fn there_is_a_limit_on_their_number() {
        let mut tools = Tools::default();
        (0..TOOLS_MAX).for_each(|number| tools.add(named(&number.to_string()), "a").unwrap());
        assert_eq!(tools.add(named("more"), "a").unwrap_err().param.as_deref(), Some("tools"));
    }

    #[test]
    fn a_choice_is_one_of_the_tools_that_are_left() {
        let mut tools = Tools::default();
        ["a", "b"].into_iter().for_each(|name| tools.add(named(name), "at").unwrap());
        let can = |tools: &Tools, choice: ToolChoice| tools.check_choice(&choice).is_ok();
        let choose = |name: &str| ToolChoice::Named(name.to_owned());
        tools.retain(&HashSet::from(["a", "c"]));
        assert!(can(&tools, choose("a")) && !can(&tools, choose("b")) && !can(&tools, choose("c")));
        assert!(can(&tools, ToolChoice::Required));
        tools.retain(&HashSet::new());
        assert!(can(&tools, ToolChoice::Auto) && can(&tools, ToolChoice::None) && !can(&tools, ToolChoice::Required));
    }
}
