use super::*;
use std::path::PathBuf;

fn tokenizer(name: &str) -> Tokenizer {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let end = ["<|im_end|>", "<|eot_id|>", "<eos>", "</s>"].into_iter().find_map(|end| tokenizer.id_of(end));
    tokenizer.with_eos_ids(end)
}

struct Case {
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
}

impl Case {
    fn new(name: &str) -> Self {
        let tokenizer = tokenizer(name);
        let grammars = GrammarCompiler::new(&tokenizer).unwrap();
        Self { tokenizer, grammars }
    }

    fn allowed(&self, matcher: &mut Matcher) -> Vec<TokenId> {
        // Logit rows beyond the vocabulary are never allowed.
        let mut words = vec![u32::MAX; self.tokenizer.vocab_size() / 32 + 3];
        matcher.mask(&mut words).unwrap();
        let ids = (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1);
        ids.map(TokenId).collect()
    }

    /// True if the grammar accepts exactly this text, token by token as the mask allows.
    fn accepts(&self, grammar: &Grammar, text: &str) -> bool {
        let mut matcher = self.grammars.compile(grammar).unwrap();
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let allowed = self.allowed(&mut matcher);
            let fits = |id: &TokenId| {
                let bytes = self.tokenizer.token_bytes(*id);
                !self.tokenizer.is_special(*id) && !bytes.is_empty() && rest.starts_with(bytes)
            };
            let Some(token) = allowed.into_iter().filter(fits).max_by_key(|&id| self.tokenizer.token_bytes(id).len())
            else {
                return false;
            };
            matcher.accept(token).unwrap();
            rest = &rest[self.tokenizer.token_bytes(token).len()..];
        }
        matcher.is_complete() || self.allowed(&mut matcher).iter().any(|id| self.tokenizer.eos_ids().contains(id))
    }
}

const NAMES: [&str; 6] = ["qwen2", "llama3", "qwen3_5", "llama2", "gemma", "mistral"];

fn schema() -> Grammar {
    Grammar::JsonSchema(json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    }))
}

#[test]
fn answers_that_follow_a_schema_are_allowed_and_others_are_not() {
    for name in NAMES {
        let case = Case::new(name);
        let good = [r#"{"name":"Ada","age":36}"#, "{\"name\": \"é\\n\",\n  \"age\": 0}"];
        let bad = [r#"{"name":"Ada"}"#, r#"{"name":"Ada","age":-1}"#, r#"{"age":1,"name":"x"}"#, "[]", "hello", ""];
        for text in good {
            assert!(case.accepts(&schema(), text), "{name}: {text}");
        }
        for text in bad {
            assert!(!case.accepts(&schema(), text), "{name}: {text}");
        }
    }
}

#[test]
fn any_object_is_one_and_nothing_else_is() {
    let case = Case::new("llama2");
    for (text, want) in [("{}", true), (r#"{"a": [1, {"b": null}]}"#, true), ("[]", false), ("1", false), ("{", false)]
    {
        assert_eq!(case.accepts(&Grammar::JsonObject, text), want, "{text}");
    }
}

#[test]
fn expressions_and_lark_grammars_are_followed() {
    let case = Case::new("qwen2");
    let regex = Grammar::Regex(r"(yes|no)/\d{2}".to_owned());
    let lark = Grammar::Lark("start: \"<\" /[ab]+/ (\",\" NUMBER)*\nNUMBER: /[0-9]+/".to_owned());
    for (grammar, text, want) in [
        (&regex, "yes/42", true),
        (&regex, "yes/4", false),
        (&regex, "maybe", false),
        (&lark, "<ab,12,3", true),
        (&lark, "<ab,", false),
    ] {
        assert_eq!(case.accepts(grammar, text), want, "{text}");
    }
}

#[test]
fn reasoning_may_come_before_the_answer() {
    let case = Case::new("qwen3_5");
    let tags = |open: Option<&str>| ReasoningTags { open: open.map(str::to_owned), close: "</think>".to_owned() };
    let after = |open| Grammar::Reasoned { reasoning: tags(open), answer: Box::new(schema()) };
    let answer = r#"{"name":"Ada","age":36}"#;
    let thought = format!("I think {{ }} that\n</think>\n\n{answer}");
    assert!(case.accepts(&after(Some("<think>")), answer));
    assert!(case.accepts(&after(Some("<think>")), &format!("<think>{thought}")));
    assert!(!case.accepts(&after(Some("<think>")), &thought));
    assert!(case.accepts(&after(None), &thought));
    assert!(!case.accepts(&after(None), answer));
}

#[test]
fn tags_that_are_control_tokens_are_meant_as_such() {
    let case = Case::new("qwen2");
    let token = |text| case.tokenizer.id_of(text).unwrap();
    let [open, close] = ["<|im_start|>", "<|vision_start|>"];
    assert!(case.tokenizer.is_special(token(open)) && case.tokenizer.is_special(token(close)));
    let reasoning = ReasoningTags { open: Some(open.to_owned()), close: close.to_owned() };
    let grammar = Grammar::Reasoned { reasoning, answer: Box::new(Grammar::JsonObject) };
    let mut matcher = case.grammars.compile(&grammar).unwrap();
    let allowed = case.allowed(&mut matcher);
    assert!(allowed.contains(&token(open)) && allowed.contains(&token("{")) && !allowed.contains(&token(close)));
    for text in [open, "a", close] {
        assert!(case.allowed(&mut matcher).contains(&token(text)), "{text}");
        matcher.accept(token(text)).unwrap();
    }
    let allowed = case.allowed(&mut matcher);
    assert!(allowed.contains(&token("{")) && !allowed.contains(&token("a")) && !allowed.contains(&token(close)));
}

#[test]
fn the_answer_ends_where_nothing_may_follow_and_only_there() {
    let case = Case::new("qwen2");
    let mut matcher = case.grammars.compile(&Grammar::Regex("ab?".to_owned())).unwrap();
    let token = |text| case.tokenizer.id_of(text).unwrap();
    let end = case.tokenizer.eos_ids()[0];
    assert!(!case.allowed(&mut matcher).contains(&end));
    matcher.accept(token("a")).unwrap();
    assert!(!matcher.is_complete() && case.allowed(&mut matcher).contains(&end));
    matcher.accept(token("b")).unwrap();
    assert!(matcher.is_complete());
    assert_eq!(case.allowed(&mut matcher), [end]);
}

#[test]
fn control_tokens_are_no_text() {
    for name in NAMES {
        let case = Case::new(name);
        let mut matcher = case.grammars.compile(&Grammar::Regex("(?s:.*)x".to_owned())).unwrap();
        let allowed = case.allowed(&mut matcher);
        assert!(allowed.len() > 100, "{name}");
        assert!(allowed.iter().all(|&id| !case.tokenizer.is_special(id)), "{name}");
    }
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_stays_one() {
    let case = Case::new("qwen2");
    let mut matcher = case.grammars.compile(&Grammar::JsonObject).unwrap();
    assert!(matcher.accept(case.tokenizer.id_of("a").unwrap()).is_err());
    assert!(matcher.accept(case.tokenizer.id_of("{").unwrap()).is_err());
    assert!(!matcher.is_complete());
    let mut matcher = case.grammars.compile(&Grammar::JsonObject).unwrap();
    assert!(matcher.accept(TokenId(u32::MAX)).is_err());
}

#[test]
fn a_schema_cannot_bring_its_own_settings() {
    let case = Case::new("qwen2");
    let schema = json!({"type": "object", "x-guidance": {"whitespace_pattern": "z+"}});
    assert!(!case.accepts(&Grammar::JsonSchema(schema), "{z}"));
}

#[test]
fn white_space_does_not_go_on_for_ever() {
    let case = Case::new("qwen2");
    let padded = |count: usize| format!("{{{}}}", " ".repeat(count));
    assert!(case.accepts(&Grammar::JsonObject, &padded(WHITE_SPACE_MAX)));
    assert!(!case.accepts(&Grammar::JsonObject, &padded(WHITE_SPACE_MAX + 1)));
}

#[test]
fn grammars_that_are_too_large_are_refused_before_they_are_compiled() {
    let case = Case::new("qwen2");
    let refusal = |grammar: Grammar| case.grammars.compile(&grammar).err().unwrap();
    let nested = (0..SCHEMA_DEPTH_MAX).fold(json!({}), |inner, _| json!({"items": inner}));
    let wide = json!({"anyOf": vec![json!({"type": "null"}); SCHEMA_PARTS_MAX]});
    let patterns: Schemas = (0..=SCHEMA_PATTERNS_MAX).map(|n| (format!("^{n}$"), json!({}))).collect();
    let lark = |schema: &Value| Grammar::Lark(format!("start: %json {schema}"));
    assert!(matches!(refusal(Grammar::Regex("a".repeat(GRAMMAR_BYTES_MAX + 1))), GrammarError::TooLong { .. }));
    assert!(matches!(refusal(Grammar::Lark("\n".repeat(GRAMMAR_LINES_MAX + 1))), GrammarError::TooManyLines { .. }));
    assert!(matches!(refusal(Grammar::JsonSchema(nested)), GrammarError::TooDeep));
    assert!(matches!(refusal(lark(&wide)), GrammarError::TooManyParts));
    assert!(matches!(refusal(Grammar::JsonSchema(wide)), GrammarError::TooManyParts));
    let patterns = Grammar::JsonSchema(json!({"patternProperties": patterns}));
    assert!(matches!(refusal(patterns), GrammarError::TooManyPatterns));
}

#[test]
fn formats_that_nobody_knows_are_ignored_and_the_others_hold() {
    let case = Case::new("qwen2");
    let object = |schema: Value| {
        let named = json!({"type": "object", "properties": {"format": schema}, "required": ["format"], "additionalProperties": false});
        Grammar::JsonSchema(json!({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [named]}}}))
    };
    for format in [json!("password"), json!("binary"), json!("path"), json!("int32"), json!(7)] {
        let schema = object(json!({"type": "string", "format": format}));
        assert!(case.accepts(&schema, r#"{"format":"any text"}"#), "{format}");
    }
    let date = object(json!({"type": "string", "format": "date"}));
    assert!(case.accepts(&date, r#"{"format":"2024-02-29"}"#) && !case.accepts(&date, r#"{"format":"any text"}"#));
    let value = object(json!({"const": {"format": "password"}}));
    assert!(case.accepts(&value, r#"{"format":{"format":"password"}}"#));
}

#[test]
fn grammars_that_contradict_themselves_are_refused_before_the_answer_starts() {
    let case = Case::new("qwen2");
    for schema in [
        json!({"allOf": [{"type": "string"}, {"type": "integer"}]}),
        json!({"type": "string", "minLength": 5, "maxLength": 2}),
        json!({"type": "integer", "minimum": 5, "maximum": 2}),
        json!({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 1}),
        json!({"type": "string", "pattern": "^a$", "enum": ["b"]}),
        json!({"type": "object", "properties": {"a": false}, "required": ["a"]}),
        json!({"type": "string", "pattern": "^a$", "minLength": 2}),
    ] {
        let refused = case.grammars.compile(&Grammar::JsonSchema(schema.clone()));
        assert!(matches!(refused, Err(GrammarError::Refused(_))), "{schema}");
    }
    let nothing = Grammar::Regex(r"[^\s\S]".to_owned());
    let reasoning = ReasoningTags { open: None, close: "</think>".to_owned() };
    let reasoned = Grammar::Reasoned { reasoning, answer: Box::new(nothing.clone()) };
    for grammar in [nothing, reasoned] {
        assert!(matches!(case.grammars.compile(&grammar), Err(GrammarError::Refused(_))), "{grammar:?}");
    }
    // The empty answer is an answer.
    assert!(case.accepts(&Grammar::Regex("a?".to_owned()), ""));
}

#[test]
fn grammars_that_mean_nothing_are_refused() {
    let case = Case::new("qwen2");
    assert!(matches!(case.grammars.compile(&Grammar::JsonSchema(json!(true))), Err(GrammarError::NoObject)));
    for grammar in [
        Grammar::Regex("(".to_owned()),
        Grammar::Lark("start: x".to_owned()),
        Grammar::Lark(String::new()),
        Grammar::JsonSchema(json!({"if": {}})),
        Grammar::JsonSchema(json!({"type": "wish"})),
    ] {
        assert!(matches!(case.grammars.compile(&grammar), Err(GrammarError::Refused(_))), "{grammar:?}");
    }
}

type Schemas = serde_json::Map<String, Value>;

/// Without limits, each of these grammars would take all memory or never finish.
#[test]
fn hostile_grammars_come_to_an_end() {
    let case = Case::new("qwen2");
    let name = |n: usize| format!("d{n}");
    let to = |n: usize| json!({"$ref": format!("#/$defs/d{n}")});
    let chain = |count: usize, rule: &dyn Fn(usize) -> Value| {
        let definitions: Schemas = (0..count).map(|n| (name(n), rule((n + 1) % count))).collect();
        json!({"$ref": "#/$defs/d0", "$defs": definitions})
    };
    let object = |count: usize, schema: Value| {
        let properties: Schemas = (0..count).map(|n| (name(n), schema.clone())).collect();
        json!({"type": "object", "properties": properties})
    };
    let many = |count: usize, schema: &dyn Fn(usize) -> Value| -> Value { (0..count).map(schema).collect() };
    let patterns: Schemas =
        (0..SCHEMA_PATTERNS_MAX).map(|n| (format!("^{n}(a|b)*a(a|b){{{n}}}$"), json!({}))).collect();
    let schemas = [
        chain(1_500, &|n| to(n)),
        chain(400, &|n| json!({"allOf": [to(n), {"minLength": n}]})),
        chain(60, &|n| json!({"anyOf": [to(n), to((n + 1) % 60)]})),
        chain(60, &|n| json!({"allOf": [to(n), to((n + 1) % 60)]})),
        json!({"allOf": many(40, &|n| json!({"anyOf": [{"minLength": n}, {"maxLength": n + 50}]}))}),
        json!({"oneOf": many(900, &|n| json!({"const": n}))}),
        json!({"oneOf": many(900, &|n| json!({"pattern": format!("^(a|b)*{n}$")}))}),
        json!({"type": "array", "minItems": 1_000_000_000, "items": {"type": "string"}}),
        json!({"type": "array", "minItems": 1_000_000_000, "items": {"const": 1}}),
        json!({"type": "string", "minLength": 1_000_000_000}),
        json!({"type": "string", "pattern": "^(a|b|ab)*c{1000}(.*x){50}$", "minLength": 999}),
        json!({"type": "number", "multipleOf": 0.000001, "minimum": 0.1, "maximum": 99_999_999}),
        json!({"enum": many(20_000, &|n| json!(n))}),
        json!({"type": "object", "patternProperties": patterns}),
        object(1_900, json!(true)),
        object(900, json!({"type": "string", "pattern": "^(x+x+)+y$"})),
    ];
    let rules: String = (1..GRAMMAR_LINES_MAX - 1).map(|n| format!("r{n}: r{} \"a\"\n", n + 1)).collect();
    let lark = [
        format!("start: r1\n{rules}r{}: \"b\"", GRAMMAR_LINES_MAX - 1),
        "start: start start | \"a\" | ".to_owned(),
        "start: ((\"a\"{1,60000}){1,60000}){1,60000}".to_owned(),
        format!("start: {}\"a\"{}", "(".repeat(10_000), ")".repeat(10_000)),
    ];
    let regex = [
        "((a{1000}){1000}){1000}".to_owned(),
        "(a|b)*a(a|b){10000}".to_owned(),
        r"(\w+\s*){500}\pL{300}".to_owned(),
        (0..30_000).map(|n| n.to_string()).collect::<Vec<_>>().join("|"),
        format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000)),
    ];
    let grammars = schemas.into_iter().map(Grammar::JsonSchema);
    let grammars = grammars.chain(lark.into_iter().map(Grammar::Lark)).chain(regex.into_iter().map(Grammar::Regex));
    let mut words = vec![0; case.tokenizer.vocab_size().div_ceil(32)];
    for grammar in grammars {
        let Ok(mut matcher) = case.grammars.compile(&grammar) else { continue };
        for _ in 0..50 {
            if matcher.is_complete() || matcher.mask(&mut words).is_err() {
                break;
            }
            let allowed = |id: &u32| words[*id as usize / 32] >> (id % 32) & 1 == 1;
            let last = (0..case.tokenizer.vocab_size() as u32).rev().find(allowed).expect("a mask allows something");
            if matcher.accept(TokenId(last)).is_err() {
                break; // too expensive from here on
            }
        }
    }
}

#[test]
fn multiples_of_small_numbers_are_followed_and_those_of_large_ones_refused() {
    let case = Case::new("qwen2");
    let multiple = |of: Value| Grammar::JsonSchema(json!({"type": "number", "multipleOf": of}));
    for (of, good, bad) in [
        (json!(7), "21", "22"),
        (json!(1000), "25000", "25500"),
        (json!(9973), "19946", "19947"),
        (json!(1_000_000), "12000000", "12000001"),
        (json!(0.01), "0.25", "0.255"),
    ] {
        let grammar = multiple(of.clone());
        assert!(case.accepts(&grammar, good) && !case.accepts(&grammar, bad), "{of}");
    }
    for of in [json!(10_007), json!(1_000_003), json!(100_000_007), json!(1e300), json!(1e-10), json!(1_000_000_000)] {
        let schema = json!({"type": "object", "properties": {"a": {"multipleOf": of}}});
        let tool = Grammar::Lark(format!("start: %json {schema}"));
        for grammar in [multiple(of.clone()), Grammar::JsonSchema(schema), tool] {
            let refused = case.grammars.compile(&grammar);
            assert!(matches!(refused, Err(GrammarError::Multiple { .. })), "{of}");
        }
    }
    // A value, not a keyword.
    let value = Grammar::JsonSchema(json!({"enum": [{"multipleOf": 1_000_003}]}));
    assert!(case.accepts(&value, r#"{"multipleOf":1000003}"#));
}

/// Each of these is small and can be followed, but to find that out takes a minute or more.
#[test]
fn grammars_that_take_too_much_to_compile_are_refused() {
    let case = Case::new("qwen2");
    let multiples = json!({"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]});
    let cycles = "start: A\nA: /x|(a{997})*b/ & /x|(a{991})*b/";
    for grammar in [Grammar::JsonSchema(multiples), Grammar::Lark(cycles.to_owned())] {
        let refused = case.grammars.compile(&grammar).err();
        assert!(matches!(refused, Some(GrammarError::TooExpensive)), "{refused:?}");
    }
}

#[test]
fn patterns_are_not_multiplied_with_alternatives_without_end() {
    let case = Case::new("qwen2");
    let lengths = |count: usize| -> Value { (0..count).map(|n| json!({"minLength": n})).collect() };
    let long = json!({"type": "string", "pattern": format!("^{}$", "x".repeat(60_000))});
    let (few, many) = (json!({"anyOf": lengths(2)}), json!({"anyOf": lengths(60)}));
    let object = |schema: Value| json!({"type": "object", "properties": {"a": schema}, "required": ["a"]});
    let named = json!({"allOf": [many, {"$ref": "#/$defs/long"}], "$defs": {"long": long}});
    for schema in [
        json!({"allOf": [many, long]}),
        json!({"allOf": [few, few, few, long]}),
        json!({"type": "string", "pattern": long["pattern"], "anyOf": lengths(60)}),
        json!({"allOf": [object(many), object(long)]}),
        named,
        json!({"anyOf": vec![json!({"type": "string", "format": "date"}); 1_100]}),
    ] {
        let refused = case.grammars.compile(&Grammar::JsonSchema(schema)).err();
        assert!(matches!(refused, Some(GrammarError::TooManyCombinations)), "{refused:?}");
    }
    let date = json!({"type": "string", "pattern": "^[0-9-]*$"});
    let dates: Schemas =
        (0..200).map(|n| (format!("d{n}"), json!({"anyOf": [{"$ref": "#/$defs/date"}, {"type": "null"}]}))).collect();
    let usual = json!({"type": "object", "properties": dates, "$defs": {"date": date}, "allOf": [{"type": "object"}]});
    assert!(case.grammars.compile(&Grammar::JsonSchema(usual)).is_ok());
}

#[test]
fn compiling_ends_when_nobody_waits_or_its_time_is_over() {
    let case = Case::new("qwen2");
    let compile = |cancelled: bool, time_max: Duration| {
        let cancelled = AtomicBool::new(cancelled);
        let compiler = thread::Builder::new().stack_size(COMPILER_STACK_BYTES);
        thread::scope(|scope| {
            let compile = || case.grammars.compile_here(&schema(), &cancelled, time_max).map(drop);
            compiler.spawn_scoped(scope, compile).unwrap().join().unwrap()
        })
    };
    assert!(compile(false, COMPILE_TIME_MAX).is_ok());
    assert!(matches!(compile(true, COMPILE_TIME_MAX), Err(GrammarError::Cancelled)));
    assert!(matches!(compile(false, Duration::ZERO), Err(GrammarError::OutOfTime)));
}
