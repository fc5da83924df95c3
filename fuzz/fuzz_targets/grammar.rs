//! Any grammar is rejected or compiled within its limits, and accepts every token of its masks.
//!
//! An input is a byte for the kind of grammar, its text up to a line of `===`, and a byte for each choice among the
//! tokens of a mask.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use text::{GgufVocab, Grammar, GrammarCompiler, Matcher, ReasoningTags, Tokenizer};
use types::TokenId;

/// Tokens in addition to those of one byte. The first one ends an answer.
const TOKENS: [&str; 12] =
    ["</s>", "<think>", "{\"", "\":", "\",", "true", "null", "a", "abc", "▁", "▁the", "<tool_call>"];

static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    let bytes: Vec<String> = (0..=255).map(|byte| format!("<0x{byte:02X}>")).collect();
    let tokens: Vec<&str> = TOKENS.into_iter().chain(bytes.iter().map(String::as_str)).collect();
    let (scores, eos) = (vec![0.0; tokens.len()], Some(0));
    let vocab = GgufVocab { model: "llama", tokens, scores, eos, bos: Some(1), ..GgufVocab::default() };
    let tokenizer = Tokenizer::from_gguf(&vocab).expect("a small vocabulary");
    GrammarCompiler::new(&tokenizer).expect("a vocabulary is ready to compile for")
});

fuzz_target!(
    init: {
        fuzz::plant("grammar", &fuzz::seed_files("grammar"));
        // libFuzzer's hook would abort on any panic. The compiler's panics are caught and become errors; others still
        // abort.
        drop(std::panic::take_hook());
    },
    |input: &[u8]| {
        let Some((&kind, input)) = input.split_first() else { return };
        let input = String::from_utf8_lossy(input);
        let (source, choices) = input.split_once("\n===\n").unwrap_or((&input, ""));
        let Some(grammar) = grammar(kind, source.to_owned()) else { return };
        if let Ok(matcher) = COMPILER.compile(&grammar) {
            follow(matcher, choices.as_bytes());
        }
    }
);

fn grammar(kind: u8, source: String) -> Option<Grammar> {
    Some(match kind % 4 {
        0 => Grammar::JsonSchema(serde_json::from_str(&source).ok()?),
        1 => Grammar::Regex(source),
        2 => Grammar::Lark(source),
        _ => {
            let reasoning = ReasoningTags { open: Some("<think>".to_owned()), close: "</think>".to_owned() };
            Grammar::Reasoned { reasoning, answer: Box::new(Grammar::Regex(source)) }
        }
    })
}

/// Generates an answer, token by token, until the grammar or its limits end it.
fn follow(mut matcher: Matcher, choices: &[u8]) {
    let mut words = [u32::MAX; 10];
    for &choice in choices {
        if matcher.is_complete() || matcher.mask(&mut words).is_err() {
            return;
        }
        let allowed: Vec<u32> =
            (0..words.len() as u32 * 32).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty(), "a mask allows something, or is an error");
        assert!(allowed.iter().all(|&id| (id as usize) < TOKENS.len() + 256), "outside of the vocabulary: {allowed:?}");
        let token = TokenId(allowed[usize::from(choice) % allowed.len()]);
        if let Err(error) = matcher.accept(token) {
            // `accept` may fail because the effort of a step is limited, but not because of the grammar.
            let error = error.to_string();
            assert!(!error.contains("doesn't satisfy the grammar"), "{token:?} is in the mask: {error}");
            return;
        }
    }
}
