//! The grammar of a reply in which the model decides whether it calls a tool, for tools with a grammar of their own.
//!
//! Text is free, and so are the arguments of other tools. A format whose calls begin like any other JSON constrains nothing.

use super::tool_grammar::append_rules;
use super::{CALL, CALLS, ReplyFormat, Tool, ToolGrammarError, ToolSyntax};
use crate::grammar::{Grammar, GrammarError, lark_literal, lark_marker, prepare_schema};
use crate::tokenizer::Tokenizer;
use serde_json::json;

impl ReplyFormat {
    /// `None` if no tool has a grammar, or if it cannot be applied. Without `parallel` at most one call is allowed.
    pub(super) fn auto_grammar(
        &self,
        tokenizer: &Tokenizer,
        tools: &[Tool],
        parallel: bool,
    ) -> Result<Option<Grammar>, ToolGrammarError> {
        let marker = |tag| lark_marker(tag, tokenizer);
        let open = match self.tools {
            ToolSyntax::Tagged | ToolSyntax::Functions => marker(CALL.open),
            ToolSyntax::List | ToolSyntax::Named => marker(CALLS),
            ToolSyntax::Bare => return Ok(None),
        };
        if tools.iter().all(|tool| tool.input.is_none()) {
            return Ok(None);
        }
        let call = match self.tools {
            ToolSyntax::List if parallel => r#""[" tool (", " tool)* "]""#.to_owned(),
            ToolSyntax::List => r#""[" tool "]""#.to_owned(),
            ToolSyntax::Named => "tool".to_owned(),
            _ => format!(r#""\n" tool "\n" {}"#, marker(CALL.close)),
        };
        // A control token ends a text. A tag of plain text has to be found in it.
        let before = match open.starts_with('"') {
            true => format!("before[suffix={open}]: /(?s:.*)/"),
            false => format!("before: TEXT? {open}"),
        };
        let several = if parallel { "*" } else { "?" };
        let names: Vec<String> = (0..tools.len()).map(|number| format!("tool_{number}")).collect();
        let mut lark = format!("start: (before call){several} TEXT?\nTEXT: /(?s:.+)/\n{before}\ncall: {call}\n");
        lark += &format!("tool: {}\n", names.join(" | "));
        for (number, tool) in tools.iter().enumerate() {
            let rules = match tool.input {
                Some(_) => self.rules(tokenizer, number, tool),
                None => self.free_rules(tokenizer, number, &tool.name),
            };
            append_rules(&mut lark, tool, rules)?;
        }
        Ok(Some(Grammar::Lark(lark)))
    }

    /// The rule of a tool whose arguments are free.
    fn free_rules(&self, tokenizer: &Tokenizer, number: usize, name: &str) -> Result<String, GrammarError> {
        if self.tools == ToolSyntax::Functions {
            let open = lark_literal(&format!("<function={name}>\n"));
            let rest = "[suffix=\"</function>\"]: /(?s:.*)/";
            return Ok(format!("tool_{number}: {open} parameters_{number}\nparameters_{number}{rest}\n"));
        }
        self.argument_rules(tokenizer, number, name, &prepare_schema(&json!({"type": "object"}), true)?)
    }
}
