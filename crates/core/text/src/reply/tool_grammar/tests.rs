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
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters, strict: true, input: None };
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
    let odd = Tool { name: "odd".to_owned(), parameters: Some(json!(true)), strict: true, input: None };
    assert!(matches!(grammar(&[odd], ToolChoice::Required), Err(ToolGrammarError::Parameters { .. })));
    assert!(grammar(&tools(), ToolChoice::Auto).unwrap().is_none());
    assert!(grammar(&tools(), ToolChoice::None).unwrap().is_none());
}

/// What Codex' tool for patches accepts, in short.
const PATCH: &str = r#"start: begin hunk+ end // a patch
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"#;

/// A call of the tool `patch` with this input.
fn patch_call(syntax: ToolSyntax, input: &str) -> String {
    let json = json!(input);
    match syntax {
        ToolSyntax::Tagged => {
            format!("<tool_call>\n{{\"name\": \"patch\", \"arguments\": {{\"input\": {json}}}}}\n</tool_call>")
        }
        ToolSyntax::Functions => format!(
            "<tool_call>\n<function=patch>\n<parameter=input>\n{input}\n</parameter>\n</function>\n</tool_call>"
        ),
        ToolSyntax::Bare => format!("{{\"name\": \"patch\", \"parameters\": {{\"input\": {json}}}}}"),
        ToolSyntax::List => {
            format!("[TOOL_CALLS][{{\"name\": \"patch\", \"arguments\": {{\"input\": {json}}}}}]")
        }
        ToolSyntax::Named => format!("[TOOL_CALLS]patch[ARGS]{{\"input\": {json}}}"),
    }
}

#[test]
fn the_input_of_a_tool_that_takes_a_text_follows_its_grammar() {
    let tokenizer = tokenizer();
    let grammars = GrammarCompiler::new(&tokenizer).unwrap();
    let check = |grammar: InputGrammar, accepted: &[&str], refused: &[&str]| {
        for syntax in ALL {
            let input = Some(grammar.clone());
            let tool = Tool { name: "patch".to_owned(), parameters: None, strict: false, input };
            let grammar = format(syntax).tool_grammar(&tokenizer, &[tool], &ToolChoice::Required, false);
            let grammar = grammar.unwrap().unwrap();
            for text in accepted {
                let call = patch_call(syntax, text);
                assert!(accepts(&tokenizer, &grammars, &grammar, &call), "{syntax:?}: {call}");
            }
            for text in refused {
                let call = patch_call(syntax, text);
                assert!(!accepts(&tokenizer, &grammars, &grammar, &call), "{syntax:?}: {call}");
            }
        }
    };
    let patch = |lines: &str| format!("*** Begin Patch\n*** Add File: a \"b\".txt\n{lines}*** End Patch\n");
    let odd = patch("+say(\"hi\\n\") é 😀\n+\ttab\n+\n");
    let (bare, none) = (patch("no plus\n"), patch(""));
    let lark = |source: &str| InputGrammar::Lark(source.to_owned());
    check(lark(PATCH), &[&patch("+x\n"), &odd], &["", "hello", &bare, &none]);
    let small = r#"start: ("a".."c" | "Z"i)+ sign? /[0-9]{2}/ "\"" W
        ?sign: "-" | "+"
        W: /\w+|\\/"#;
    check(lark(small), &["abzZ-12\"word", "c07\"\\"], &["d12\"x", "a1\"x", "a123\"x", "a12\"", "a12\"\\\\"]);
    check(lark("start: /a|é b/i /c d # e/x"), &["Acd", "É Bcd"], &["Ac d", "acD", "bcd"]);
    let sum = "start: NUMBER (\"+\" NUMBER)* \";\"?\nNUMBER: DIGIT+ (\".\" DIGIT+)?\n\
        %import common (DIGIT, WS)\n%ignore WS";
    check(lark(sum), &["1", " 12.5 +\n3\t;", "1+2+3"], &["", "1 2", "1. 5", "1+;", "+"]);
    let regex = InputGrammar::Regex(r#"(red|blue), "[^x]*""#.to_owned());
    check(regex, &["red, \"\"", "blue, \"\\ \n\""], &["green, \"\"", "red, \"x\"", "red"]);
}

#[test]
fn a_grammar_that_cannot_be_part_of_another_is_an_error() {
    let tokenizer = tokenizer();
    for source in ["start: \"a\"\n%declare X", "start: @other", "start: /(/", "start: \"a", "start: \"ab\"..\"c\""] {
        let tool = Tool {
            name: "t".to_owned(),
            parameters: None,
            strict: false,
            input: Some(InputGrammar::Lark(source.to_owned())),
        };
        let grammar = format(ToolSyntax::Tagged).tool_grammar(&tokenizer, &[tool], &ToolChoice::Required, true);
        assert!(matches!(grammar, Err(ToolGrammarError::Parameters { .. })), "{source}");
    }
}

/// A printed `\w` is thousands of bytes; white space is looked at once.
#[test]
fn rewriting_a_grammar_takes_little_memory_and_time() {
    let tokenizer = tokenizer();
    let tool = |name: &str, source: &str| Tool {
        name: name.to_owned(),
        parameters: None,
        strict: false,
        input: Some(InputGrammar::Lark(source.to_owned())),
    };
    let grammar = |tools: &[Tool]| {
        ALL.map(|syntax| match format(syntax).tool_grammar(&tokenizer, tools, &ToolChoice::Required, true) {
            Ok(Some(Grammar::Lark(lark))) => Ok(lark),
            Ok(other) => panic!("{other:?}"),
            Err(ToolGrammarError::Parameters { source, .. }) => Err(source),
            Err(error) => panic!("{error}"),
        })
    };
    let words = format!("start: {}", "/\\w+/ /[\\w-]/i ".repeat(50));
    for lark in grammar(&[tool("words", &words)]) {
        assert!(lark.unwrap().len() < 3 * words.len());
    }
    let spaces = format!("start: \"a\"{}", " ".repeat(200_000));
    for lark in grammar(&[tool("spaces", &spaces)]) {
        assert!(lark.unwrap().len() < 2 * spaces.len());
    }
    let both = [tool("first", &spaces), tool("second", &spaces)];
    let long = format!("start: {}", "/\\w\"/ ".repeat(1_000));
    let too_long = |error: &GrammarError| matches!(error, GrammarError::TooLong { .. });
    assert!(grammar(&both).iter().all(|lark| lark.as_ref().is_err_and(too_long)));
    let json = grammar(&[tool("long", &long)]).into_iter().filter(|lark| lark.as_ref().is_err_and(too_long));
    assert_eq!(json.count(), ALL.len() - 1, "without JSON it stays as it is");
    let classes = format!("start: /{}/", "\\w".repeat(100_000));
    assert!(grammar(&[tool("classes", &classes)]).iter().all(|lark| matches!(lark, Err(GrammarError::TooManyClasses))));
}

#[test]
fn a_model_that_decides_itself_is_bound_by_the_grammars_of_its_tools() {
    let tokenizer = tokenizer();
    let grammars = GrammarCompiler::new(&tokenizer).unwrap();
    let patch = Tool {
        name: "patch".to_owned(),
        parameters: None,
        strict: false,
        input: Some(InputGrammar::Lark(PATCH.to_owned())),
    };
    let tools: Vec<Tool> = tools().into_iter().chain([patch]).collect();
    for syntax in [ToolSyntax::Tagged, ToolSyntax::Functions] {
        let grammar = format(syntax).tool_grammar(&tokenizer, &tools, &ToolChoice::Auto, true).unwrap().unwrap();
        let good = patch_call(syntax, "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch");
        let free = written(syntax)[0].replace('3', "8");
        for text in ["Well, \"no\" {call}.", &good, &free, &format!("I look.\n{good}"), &format!("{free}\n{good}")] {
            assert!(accepts(&tokenizer, &grammars, &grammar, text), "{syntax:?}: {text}");
        }
        for text in [&patch_call(syntax, "x"), &good.replace("patch", "match"), &format!("I look.\n{good}")[..40]] {
            assert!(!accepts(&tokenizer, &grammars, &grammar, text), "{syntax:?}: {text}");
        }
    }
    let bare = format(ToolSyntax::Bare).tool_grammar(&tokenizer, &tools, &ToolChoice::Auto, true);
    assert!(bare.unwrap().is_none());
}

proptest::proptest! {
    #[test]
    fn any_grammar_is_rewritten_or_refused(source in "([a-zA-Z_:|()*+?~.é\\\\ \n]|\"|/|%import common|%ignore|->|\"a\"|/[^b]/){0,40}") {
        for form in [InputForm::Json, InputForm::Raw] {
            // The result does not matter: it must not panic.
            let _ = lark_input::rules(&source, "input", form);
        }
    }
}
