//! How a model family writes reasoning and tool calls in its output.
//!
//! The format is detected from the chat template. If the template does not show tools to the model, Hermes' format is used,
//! and [`ChatTemplate`](crate::ChatTemplate) explains it to the model.

mod auto_grammar;
mod function_call;
mod json_validator;
mod lark_input;
mod named_call;
mod object_call;
mod parser;
mod repeated_calls;
mod tool_grammar;

pub use parser::{Delta, ReplyParser};
pub use repeated_calls::RepeatedCalls;
pub use tool_grammar::{ToolChoice, ToolGrammarError};

use crate::grammar::{Grammar, ReasoningTags};
use crate::tokenizer::Tokenizer;
use serde_json::Value;
use types::TokenId;

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments; `None` if it takes none.
    pub parameters: Option<Value>,
    /// Whether unsupported keywords of the schema are an error; otherwise they are ignored.
    pub strict: bool,
    /// The grammar of the input, for a tool whose only argument is a text: the string [`TEXT_INPUT`].
    pub input: Option<InputGrammar>,
}

/// The grammar of a text that a tool takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputGrammar {
    Lark(String),
    /// The whole text matches this expression.
    Regex(String),
}

/// The argument of a tool that takes a text.
pub const TEXT_INPUT: &str = "input";

/// The format of a model's replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyFormat {
    pub(crate) reasoning: Option<TagPair>,
    pub(crate) tools: ToolSyntax,
}

/// An opening and a closing tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TagPair {
    pub open: &'static str,
    pub close: &'static str,
}

/// The syntax of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolSyntax {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, or a list in the tags. Hermes, Qwen, SmolLM2.
    Tagged,
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`. Qwen3-Coder.
    Functions,
    /// `{"name": …, "parameters": {…}}` as the whole reply; several are separated by semicolons. Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`. Mistral.
    List,
    /// `[TOOL_CALLS]NAME[ARGS]{…}`. Mistral since 2025.
    Named,
}

pub(crate) const CALL: TagPair = TagPair { open: "<tool_call>", close: "</tool_call>" };
pub(crate) const PYTHON: &str = "<|python_tag|>";
pub(crate) const CALLS: &str = "[TOOL_CALLS]";
pub(crate) const ARGUMENTS: &str = "[ARGS]";
pub(crate) const CALL_ID: &str = "[CALL_ID]";
const THINK: TagPair = TagPair { open: "<think>", close: "</think>" };
const BRACKET_THINK: TagPair = TagPair { open: "[THINK]", close: "[/THINK]" };

impl ReplyFormat {
    /// Detects the format from a chat template. `shows_tools`: whether the template shows tools to the model.
    pub fn detect(template: &str, shows_tools: bool) -> Self {
        let has = |text: &str| template.contains(text);
        let reasoning = [THINK, BRACKET_THINK].into_iter().find(|tags| has(tags.close));
        let tools = if !shows_tools {
            ToolSyntax::Tagged
        } else if has(CALLS) {
            if has(ARGUMENTS) { ToolSyntax::Named } else { ToolSyntax::List }
        } else if has(CALL.open) {
            if has("<function=") { ToolSyntax::Functions } else { ToolSyntax::Tagged }
        } else if has(PYTHON) || (has("<|start_header_id|>") && has("\"parameters\"")) {
            ToolSyntax::Bare
        } else {
            ToolSyntax::Tagged
        };
        Self { reasoning, tools }
    }

    /// Whether the model can reason before it answers.
    pub fn has_reasoning(&self) -> bool {
        self.reasoning.is_some()
    }

    /// True if a reply to this prompt starts within reasoning, because the template opened it.
    pub fn opens_reasoning(&self, prompt: &str) -> bool {
        self.reasoning.is_some_and(|tags| prompt.trim_end().ends_with(tags.open))
    }

    /// Extends a grammar of the answer to the whole reply to `prompt`, in which the model may reason first.
    pub fn reasoned(&self, answer: Grammar, prompt: &str) -> Grammar {
        let Some(tags) = self.reasoning.filter(|tags| !prompt.trim_end().ends_with(tags.close)) else { return answer };
        let open = (!self.opens_reasoning(prompt)).then(|| tags.open.to_owned());
        Grammar::Reasoned { reasoning: ReasoningTags { open, close: tags.close.to_owned() }, answer: Box::new(answer) }
    }

    /// The control tokens that the parser needs: a detokenizer that hides control tokens must show these.
    pub fn marker_ids(&self, tokenizer: &Tokenizer) -> Vec<TokenId> {
        let tools: &[&str] = match self.tools {
            ToolSyntax::Tagged | ToolSyntax::Functions => &[CALL.open, CALL.close],
            ToolSyntax::Bare => &[PYTHON],
            ToolSyntax::List | ToolSyntax::Named => &[CALLS, ARGUMENTS, CALL_ID],
        };
        let reasoning = self.reasoning.iter().flat_map(|tags| [tags.open, tags.close]);
        let ids = reasoning.chain(tools.iter().copied()).filter_map(|marker| tokenizer.id_of(marker));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(template: &str, shows_tools: bool, reasoning: Option<TagPair>, tools: ToolSyntax) {
        assert_eq!(ReplyFormat::detect(template, shows_tools), ReplyFormat { reasoning, tools }, "{template}");
    }

    #[test]
    fn the_form_of_replies_is_read_off_the_template() {
        let qwen = "{{ content.split('</think>')[-1] }}<tool_call>\n{\"name\": ";
        check(qwen, true, Some(THINK), ToolSyntax::Tagged);
        check("<tool_call>\n<function=example>", true, None, ToolSyntax::Functions);
        check("[TOOL_CALLS][{{ tool_calls }}]", true, None, ToolSyntax::List);
        check("[THINK][/THINK][TOOL_CALLS]{{ name }}[ARGS]", true, Some(BRACKET_THINK), ToolSyntax::Named);
        check("<|start_header_id|>{{ '<|python_tag|>' }}", true, None, ToolSyntax::Bare);
        check("<|start_header_id|>{\"name\": f, \"parameters\": p}", true, None, ToolSyntax::Bare);
        check("<|im_start|>", false, None, ToolSyntax::Tagged);
        // Tools that the template does not show are explained to the model in Hermes' format.
        check("<|python_tag|></think>", false, Some(THINK), ToolSyntax::Tagged);
    }

    #[test]
    fn an_answer_with_a_form_may_be_reasoned_first() {
        let format = ReplyFormat { reasoning: Some(THINK), tools: ToolSyntax::Tagged };
        let open = |prompt: &str| match format.reasoned(Grammar::JsonObject, prompt) {
            Grammar::Reasoned { reasoning, .. } => Some(reasoning.open),
            _ => None,
        };
        assert_eq!(open("<assistant>\n"), Some(Some("<think>".to_owned())));
        assert_eq!(open("<assistant><think>\n"), Some(None));
        assert_eq!(open("<assistant><think>\n\n</think>\n\n"), None);
    }
}
