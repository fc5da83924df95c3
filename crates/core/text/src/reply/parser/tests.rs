use super::super::{BRACKET_THINK, THINK};
use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn format(tools: ToolSyntax) -> ReplyFormat {
    let reasoning = if matches!(tools, ToolSyntax::List | ToolSyntax::Named) { BRACKET_THINK } else { THINK };
    ReplyFormat { reasoning: Some(reasoning), tools }
}

fn tools() -> Arc<[Tool]> {
    let tool = |name: &str, parameters| Tool { name: name.to_owned(), parameters, strict: false, input: None };
    let typed = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"anyOf": [{"type": "null"}]},
    }});
    [tool("weather", Some(typed)), tool("now", None)].into()
}

fn text(text: &str) -> Delta {
    Delta::Text(text.to_owned())
}

fn reasoning(text: &str) -> Delta {
    Delta::Reasoning(text.to_owned())
}

fn call(index: usize, name: &str, json: &str) -> [Delta; 2] {
    [Delta::ToolCall { index, name: name.to_owned() }, Delta::Arguments { index, json: json.to_owned() }]
}

/// Merges adjacent deltas of one kind.
fn joined(deltas: impl IntoIterator<Item = Delta>) -> Vec<Delta> {
    let mut all: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (all.last_mut(), delta) {
            (Some(Delta::Text(last)), Delta::Text(more)) => last.push_str(&more),
            (Some(Delta::Reasoning(last)), Delta::Reasoning(more)) => last.push_str(&more),
            (Some(Delta::Arguments { index: a, json: last }), Delta::Arguments { index: b, json }) if *a == b => {
                last.push_str(&json);
            }
            (_, delta) => all.push(delta),
        }
    }
    all
}

fn parse<'t>(mut parser: ReplyParser, pieces: impl IntoIterator<Item = &'t str>) -> Vec<Delta> {
    let mut deltas: Vec<Delta> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    deltas.extend(parser.finish());
    joined(deltas)
}

fn check_prompted(tools_of: ToolSyntax, prompt: &str, reply: &str, want: impl IntoIterator<Item = Delta>) {
    let new = || ReplyParser::new(&format(tools_of), tools()).after_prompt(prompt);
    let want: Vec<Delta> = want.into_iter().collect();
    assert_eq!(parse(new(), [reply]), want, "{reply}");
    for cut in (0..=reply.len()).filter(|&cut| reply.is_char_boundary(cut)) {
        let (head, tail) = reply.split_at(cut);
        assert_eq!(parse(new(), [head, tail]), want, "{head:?} and {tail:?}");
    }
    assert_eq!(parse(new(), reply.split_inclusive(|_| true)), want, "{reply}");
    for delta in &want {
        if let Delta::Arguments { json, .. } = delta {
            assert!(serde_json::from_str::<Value>(json).is_ok(), "{json}");
        }
    }
}

fn check(tools_of: ToolSyntax, reply: &str, want: impl IntoIterator<Item = Delta>) {
    check_prompted(tools_of, "", reply, want);
}

#[test]
fn tagged_calls_are_found_after_reasoning_and_text() {
    let reply = "<think>\nParis, é <tool\n</think>\n\nLet me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let mut want = vec![reasoning("Paris, é <tool"), text("Let me look.")];
    want.extend(call(0, "weather", r#"{"city": "Paris"}"#));
    want.extend(call(1, "now", "{}"));
    check(ToolSyntax::Tagged, reply, want);
}

#[test]
fn a_list_of_calls_may_stand_in_one_pair_of_tags() {
    let reply = r#"<tool_call>[{"name": "now"}, {"name": "weather", "arguments": {"days": 3}}]</tool_call>"#;
    let want = || call(0, "now", "{}").into_iter().chain(call(1, "weather", r#"{"days": 3}"#));
    check(ToolSyntax::Tagged, reply, want());
    check(ToolSyntax::Tagged, &reply.replace("}, {", "}\n{").replace(['[', ']'], ""), want());
    check(ToolSyntax::Tagged, &reply.replace("</tool_call>", ""), want());
    check(ToolSyntax::Tagged, &format!("{reply} Done. "), want().chain([text("Done. ")]));
}

#[test]
fn reasoning_may_have_been_opened_by_the_prompt() {
    let prompt = "<|assistant|><think>\n";
    let want = || [reasoning("so it is"), text("Yes.")];
    check_prompted(ToolSyntax::Tagged, prompt, "so it is\n</think>\n\nYes.", want());
    check_prompted(ToolSyntax::Tagged, "<think>\n\n</think>\n\n", "so it is", [text("so it is")]);
    check_prompted(ToolSyntax::Tagged, prompt, "so it </thin", [reasoning("so it </thin")]);
    check_prompted(ToolSyntax::Tagged, "", " <think>so it is</think>Yes.", want());
    check(ToolSyntax::Tagged, "TagPair: <think>x</think>", [text("TagPair: <think>x</think>")]);
}

#[test]
fn a_bare_object_is_a_call_if_it_names_a_tool() {
    let weather = r#"{"name": "weather", "parameters": {"city": "Paris"}}"#;
    let one = || call(0, "weather", r#"{"city": "Paris"}"#).into_iter();
    check(ToolSyntax::Bare, weather, one());
    check(ToolSyntax::Bare, &format!("\n<|python_tag|>{weather}"), one());
    let two = format!(r#"{weather}; {{"type": "function", "name": "now", "parameters": {{}}}}"#);
    check(ToolSyntax::Bare, &two, one().chain(call(1, "now", "{}")));
    for reply in [
        r#" {"name": "Ada", "parameters": {"age": 36}} is a person"#,
        r#"{"a": [1]}"#,
        "{x}",
        "{",
        "<|python_tag|>print(1)",
    ] {
        check(ToolSyntax::Bare, reply, [text(reply)]);
    }
    let later = format!("It is {weather}");
    check(ToolSyntax::Bare, &later, [text(&later)]);
}

#[test]
fn calls_in_brackets_are_lists_or_have_their_name_in_front() {
    let want = || call(0, "weather", r#"{"city": "["}"#).into_iter().chain(call(1, "now", "{}"));
    let list = r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "["}}, {"name": "now", "arguments": {}, "id": "x"}]"#;
    check(ToolSyntax::List, list, want());
    let named = r#"[TOOL_CALLS]weather[ARGS]{"city": "["}[TOOL_CALLS]now[CALL_ID]a1[ARGS]{}"#;
    check(ToolSyntax::Named, named, want());
    let thought = format!("[THINK]a [b][/THINK]Well[1] {named}");
    check(ToolSyntax::Named, &thought, [reasoning("a [b]"), text("Well[1]")].into_iter().chain(want()));
}

#[test]
fn calls_in_function_tags_have_values_of_the_schema() {
    let reply = "<tool_call>\n<function=weather>\n<parameter=city>\nSão \"Paulo\"\n<x>\n</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>";
    let json = r#"{"city": "São \"Paulo\"\n<x>", "days": 3, "units": null}"#;
    check(ToolSyntax::Functions, reply, call(0, "weather", json).into_iter().chain(call(1, "now", "{}")));
}

#[test]
fn what_is_no_call_is_given_back_as_text() {
    for reply in [
        "<tool_call>oops</tool_call>",
        "a\n <tool_call>\n{\"city\": 1}</tool_call> b",
        "<tool_call>{\"name\": \"weather\", \"argum",
        "<tool_call>",
        "<tool_cal",
        " \n",
        "2 < 3 <",
        "",
    ] {
        check(ToolSyntax::Tagged, reply, (!reply.is_empty()).then(|| text(reply)));
    }
    let named = "[TOOL_CALLS]I cannot do that";
    check(ToolSyntax::Named, named, [text(named)]);
    let functions = "<tool_call>\n<fun>";
    check(ToolSyntax::Functions, functions, [text(functions)]);
    // The next call is still found.
    let again = "<tool_call><tool_call>{\"name\": \"now\"}";
    check(ToolSyntax::Tagged, again, [text("<tool_call>")].into_iter().chain(call(0, "now", "{}")));
}

#[test]
fn broken_arguments_are_not_lost() {
    let reply = r#"<tool_call>{"name": "now", "arguments": {"a": oops}}"#;
    let want = [
        Delta::ToolCall { index: 0, name: "now".to_owned() },
        Delta::Arguments { index: 0, json: "{\"a\": ".to_owned() },
        text("oops}}"),
    ];
    assert_eq!(parse(ReplyParser::new(&format(ToolSyntax::Tagged), tools()), [reply]), want);
}

#[test]
fn without_tools_nothing_is_a_call() {
    let reply = "<tool_call>{\"name\": \"now\"}</tool_call> ";
    let parser = || ReplyParser::new(&format(ToolSyntax::Tagged), []);
    assert_eq!(parse(parser(), [reply]), [text(reply)]);
    let mut parser = parser();
    let pieces: Vec<_> = ["a", " ", "\n", "<", "t"].iter().map(|piece| parser.push(piece)).collect();
    assert_eq!(pieces, ["a", " ", "\n", "<", "t"].map(|piece| vec![text(piece)]));
}

#[test]
fn names_and_arguments_flow_as_they_come() {
    let mut parser = ReplyParser::new(&format(ToolSyntax::Tagged), tools());
    assert_eq!(parser.push("<tool_call>{\"name\": \"weather\", \"arguments\": "), []);
    assert_eq!(parser.push("{\"ci"), call(0, "weather", "{\"ci"));
    assert_eq!(parser.push("ty\": \"Par"), [Delta::Arguments { index: 0, json: "ty\": \"Par".to_owned() }]);
    assert_eq!(parser.push("is\"}}</tool"), [Delta::Arguments { index: 0, json: "is\"}".to_owned() }]);
    assert_eq!(parser.push("_call>"), []);
}

#[test]
fn long_and_deep_replies_are_taken_in_one_go() {
    let long = "x\n".repeat(1 << 19);
    let reply = format!(r#"<tool_call>{{"name": "now", "arguments": {{"a": "{long}"}}}}</tool_call>"#);
    let deltas = parse(ReplyParser::new(&format(ToolSyntax::Tagged), tools()), [reply.as_str()]);
    let Delta::Arguments { json, .. } = &deltas[1] else { panic!("{:?}", deltas[1]) };
    assert_eq!(serde_json::from_str::<Value>(json).unwrap()["a"], long.as_str());
    for unit in [
        "<tool_call>",
        "{\"a\":",
        "[",
        "<think>",
        "<",
        "[TOOL_CALLS]",
        "<tool_call>{\"name\":\"now\",\"arguments\":{\"a\":[",
    ] {
        for tools_of in ALL {
            let reply = unit.repeat(10_000);
            let deltas = parse(ReplyParser::new(&format(tools_of), tools()), [reply.as_str()]);
            assert!(!deltas.is_empty(), "{unit}");
        }
    }
}

const ALL: [ToolSyntax; 5] =
    [ToolSyntax::Tagged, ToolSyntax::Functions, ToolSyntax::Bare, ToolSyntax::List, ToolSyntax::Named];

fn nearly_a_reply() -> impl Strategy<Value = String> {
    let pieces = [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "<function=now>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "{\"name\": \"now\", \"arguments\": {",
        "{\"name\": \"now\"}",
        "\"a\": 1",
        "}",
        "{",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "\"",
        "é",
        "now",
        "<",
        "x",
    ];
    let piece = (prop::sample::select(pieces.to_vec()), 1..12_usize);
    // Often complete, sometimes cut off.
    let piece =
        piece.prop_map(|(text, keep)| if keep < 4 { text.chars().take(keep).collect() } else { text.to_owned() });
    prop::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn pieces_never_matter_and_text_is_never_invented(reply in nearly_a_reply(), cuts in prop::collection::vec(1..9_usize, 1..8)) {
        for tools_of in ALL {
            let parser = || ReplyParser::new(&format(tools_of), tools());
            let whole = parse(parser(), [reply.as_str()]);
            let mut rest: Vec<char> = reply.chars().collect();
            let mut pieces = Vec::new();
            for &cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                pieces.push(rest.drain(..cut.min(rest.len())).collect::<String>());
            }
            prop_assert_eq!(&parse(parser(), pieces.iter().map(String::as_str)), &whole);
            let mut seen = reply.as_str();
            for delta in &whole {
                // Text and reasoning are substrings of the reply, in order.
                if let Delta::Text(text) | Delta::Reasoning(text) = delta {
                    for word in text.split_whitespace() {
                        let offset = seen.find(word);
                        prop_assert!(offset.is_some(), "{:?} in {:?}", word, seen);
                        seen = &seen[offset.unwrap() + word.len()..];
                    }
                }
            }
        }
    }
}
