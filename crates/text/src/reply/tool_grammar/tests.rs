use super::super::{Delta, ReplyParser};
use super::*;
use crate::grammar::GrammarCompiler;
use std::path::PathBuf;
use types::TokenId;

fn tokenizer() -> Tokenizer {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2/tokenizer.json");
    let tokenizer = Tokenizer::from_file(path).unwrap();
    let end = tokenizer.id_of("<|im_end|>");
    tokenizer.with_eos_ids(end)
}

fn tools() -> Vec<Tool> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
        "additionalProperties": false,
    });
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters, strict: true };
    vec![tool("weather", Some(weather)), tool("now", None)]
}

const ALL: [ToolSyntax; 5] =
    [ToolSyntax::Tagged, ToolSyntax::Functions, ToolSyntax::Bare, ToolSyntax::List, ToolSyntax::Named];

fn format(tools: ToolSyntax) -> ReplyFormat {
    ReplyFormat { reasoning: None, tools }
}

/// The calls of `weather` with `arguments` and of `now`, in each syntax.
fn written(syntax: ToolSyntax) -> [&'static str; 2] {
    match syntax {
        ToolSyntax::Tagged => [
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>",
        ],
        ToolSyntax::Functions => [
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ],
        ToolSyntax::Bare => [
            r#"{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}"#,
            r#"{"name": "now", "parameters": {}}"#,
        ],
        ToolSyntax::List => [
            r#"[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}]"#,
            r#"[TOOL_CALLS][{"name": "now", "arguments": {}}]"#,
        ],
        ToolSyntax::Named => [r#"[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 3}"#, "[TOOL_CALLS]now[ARGS]{}"],
    }
}

fn accepts(tokenizer: &Tokenizer, grammars: &GrammarCompiler, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammars.compile(grammar).unwrap();
    let mut words = vec![0_u32; tokenizer.vocab_size().div_ceil(32)];
    let mut rest = text.as_bytes();
    let mut allowed = |matcher: &mut crate::Matcher| -> Vec<TokenId> {
        matcher.mask(&mut words).unwrap();
        let ids = 0..tokenizer.vocab_size() as u32;
        ids.filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).map(TokenId).collect()
    };
    while !rest.is_empty() {
        let tokens = allowed(&mut matcher).into_iter().map(|id| (tokenizer.token_bytes(id), id));
        let fitting = tokens.filter(|(bytes, _)| !bytes.is_empty() && rest.starts_with(bytes));
        let Some((bytes, token)) = fitting.max_by_key(|(bytes, _)| bytes.len()) else { return false };
        matcher.accept(token).unwrap();
        rest = &rest[bytes.len()..];
    }
    matcher.is_complete() || allowed(&mut matcher).iter().any(|id| tokenizer.eos_ids().contains(id))
}

#[test]
fn what_a_grammar_demands_is_what_the_parser_reads() {
    let tokenizer = tokenizer();
    let grammars = GrammarCompiler::new(&tokenizer).unwrap();
    for syntax in ALL {
        let format = format(syntax);
        let grammar = format.tool_grammar(&tokenizer, &tools(), &ToolChoice::Required, false).unwrap().unwrap();
        for (text, want) in written(syntax).into_iter().zip(["weather", "now"]) {
            assert!(accepts(&tokenizer, &grammars, &grammar, text), "{text}");
            let mut parser = ReplyParser::new(&format, tools());
            let mut deltas = parser.push(text);
            deltas.extend(parser.finish());
            assert_eq!(deltas[0], Delta::ToolCall { index: 0, name: want.to_owned() });
            assert!(matches!(&deltas[1..], [Delta::Arguments { .. }]), "{deltas:?}");
        }
        for text in [
            "",
            "hello",
            "<tool_call>\n",
            "{}",
            &written(syntax)[0].replace('3', "8"),
            &written(syntax)[1].replace("now", "then"),
        ] {
            assert!(!accepts(&tokenizer, &grammars, &grammar, text), "{syntax:?}: {text}");
        }
    }
}

#[test]
fn several_calls_only_where_they_are_wanted() {
    let tokenizer = tokenizer();
    let grammars = GrammarCompiler::new(&tokenizer).unwrap();
    for syntax in ALL {
        let [weather, now] = written(syntax);
        let both = match syntax {
            ToolSyntax::Bare => format!("{weather}; {now}"),
            ToolSyntax::List => {
                format!("{}, {}", weather.trim_end_matches(']'), now.trim_start_matches("[TOOL_CALLS]["))
            }
            ToolSyntax::Named => format!("{weather}{now}"),
            _ => format!("{weather}\n{now}"),
        };
        for parallel in [true, false] {
            let grammar = format(syntax).tool_grammar(&tokenizer, &tools(), &ToolChoice::Required, parallel);
            assert_eq!(accepts(&tokenizer, &grammars, &grammar.unwrap().unwrap(), &both), parallel, "{both}");
        }
    }
}

#[test]
fn a_named_tool_is_the_only_one() {
    let tokenizer = tokenizer();
    let grammars = GrammarCompiler::new(&tokenizer).unwrap();
    for syntax in ALL {
        let choice = ToolChoice::Named("now".to_owned());
        let grammar = format(syntax).tool_grammar(&tokenizer, &tools(), &choice, true).unwrap().unwrap();
        let [weather, now] = written(syntax);
        assert!(accepts(&tokenizer, &grammars, &grammar, now), "{now}");
        assert!(!accepts(&tokenizer, &grammars, &grammar, weather), "{weather}");
    }
}

#[test]
fn a_choice_that_cannot_be_made_is_an_error() {
    let tokenizer = tokenizer();
    let grammar = |tools: &[Tool], choice| format(ToolSyntax::Tagged).tool_grammar(&tokenizer, tools, &choice, true);
    assert!(matches!(grammar(&tools(), ToolChoice::Named("x".to_owned())), Err(ToolGrammarError::Unknown(_))));
    assert!(matches!(grammar(&[], ToolChoice::Required), Err(ToolGrammarError::NoTools)));
    let odd = Tool { name: "odd".to_owned(), parameters: Some(json!(true)), strict: true };
    assert!(matches!(grammar(&[odd], ToolChoice::Required), Err(ToolGrammarError::Parameters { .. })));
    assert!(grammar(&tools(), ToolChoice::Auto).unwrap().is_none());
    assert!(grammar(&tools(), ToolChoice::None).unwrap().is_none());
}
