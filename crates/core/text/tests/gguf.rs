//! A vocabulary from `tokenizer.json` and the same one as GGUF metadata give the same tokens.
#![allow(clippy::unwrap_used)] // test helpers may panic

use serde_json::Value;
use std::collections::HashMap;
use std::path::PathBuf;
use text::{GgufVocab, SpecialTokens, Tokenizer};
use types::TokenId;

struct Fixture {
    file: Value,
    manifest: Value,
    tokenizer: Tokenizer,
}

fn fixture(name: &str) -> Fixture {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let json = |file: &str| serde_json::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap();
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    Fixture { file: json("tokenizer.json"), manifest: json("manifest.json"), tokenizer }
}

/// The metadata that a converter would write.
struct Converted {
    tokens: Vec<String>,
    types: Vec<i32>,
    scores: Vec<f32>,
    merges: Vec<String>,
}

fn converted(file: &Value) -> Converted {
    let vocab = file["model"]["vocab"].as_object().unwrap();
    let added = file["added_tokens"].as_array().unwrap();
    let size =
        vocab.len() + added.iter().filter(|token| !vocab.contains_key(token["content"].as_str().unwrap())).count();
    let (mut tokens, mut types) = (vec![String::new(); size], vec![1; size]);
    for (token, id) in vocab {
        let id = id.as_u64().unwrap() as usize;
        tokens[id] = token.clone();
        types[id] = if file["model"]["byte_fallback"] == true && token.starts_with("<0x") { 6 } else { 1 };
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        types[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merges: Vec<(String, String)> = serde_json::from_value(file["model"]["merges"].clone()).unwrap();
    let ranks: HashMap<String, usize> =
        merges.iter().enumerate().rev().map(|(i, (a, b))| (format!("{a}{b}"), i)).collect();
    let scores = tokens.iter().map(|token| ranks.get(token).map_or(-1e6, |&rank| -(rank as f32))).collect();
    Converted { tokens, types, scores, merges: merges.iter().map(|(a, b)| format!("{a} {b}")).collect() }
}

impl Converted {
    fn gguf<'a>(&'a self, model: &'a str, pre: Option<&'a str>) -> GgufVocab<'a> {
        GgufVocab {
            model,
            pre,
            tokens: self.tokens.iter().map(String::as_str).collect(),
            token_types: self.types.clone(),
            scores: if model == "llama" { self.scores.clone() } else { Vec::new() },
            merges: if model == "llama" { Vec::new() } else { self.merges.iter().map(String::as_str).collect() },
            ..GgufVocab::default()
        }
    }
}

fn check_same(name: &str, fixture: &Fixture, gguf: &GgufVocab<'_>) {
    let tokenizer = Tokenizer::from_gguf(gguf).unwrap();
    assert_eq!(tokenizer.vocab_size(), fixture.tokenizer.vocab_size());
    for case in fixture.manifest["encode"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let want = fixture.tokenizer.encode(text, false).unwrap();
        assert_eq!(tokenizer.encode(text, false).unwrap(), want, "{name}: {text:?}");
        assert_eq!(tokenizer.encode_plain(text, false).unwrap(), fixture.tokenizer.encode_plain(text, false).unwrap());
        for special in [SpecialTokens::Show, SpecialTokens::Hide] {
            assert_eq!(tokenizer.decode(&want, special), fixture.tokenizer.decode(&want, special), "{name}: {text:?}");
        }
    }
}

#[test]
fn byte_level_vocabularies_agree() {
    for (name, pre) in [("qwen2", "qwen2"), ("llama3", "llama-bpe"), ("qwen3_5", "qwen35")] {
        let fixture = fixture(name);
        check_same(name, &fixture, &converted(&fixture.file).gguf("gpt2", Some(pre)));
    }
}

#[test]
fn sentence_piece_vocabularies_agree_by_scores_and_by_merges() {
    for (name, add_space_prefix) in [("llama2", true), ("gemma", false)] {
        let fixture = fixture(name);
        let converted = converted(&fixture.file);
        let scored = GgufVocab { add_space_prefix: Some(add_space_prefix), ..converted.gguf("llama", None) };
        check_same(name, &fixture, &scored);
        let merges = converted.merges.iter().map(String::as_str).collect();
        check_same(name, &fixture, &GgufVocab { scores: Vec::new(), merges, ..scored });
    }
}

#[test]
fn begin_and_end_tokens_follow_the_file_and_otherwise_the_kind_of_model() {
    let converted = converted(&fixture("llama2").file);
    let base = GgufVocab { bos: Some(1), eos: Some(2), ..converted.gguf("llama", None) };
    let encode = |gguf: GgufVocab<'_>| {
        let ids = Tokenizer::from_gguf(&gguf).unwrap().encode("the", true).unwrap();
        (ids.first() == Some(&TokenId(1)), ids.last() == Some(&TokenId(2)))
    };
    assert_eq!(encode(base.clone()), (true, false));
    assert_eq!(encode(GgufVocab { add_bos: Some(false), add_eos: Some(true), ..base }), (false, true));
}

#[test]
fn every_token_that_ends_a_turn_is_known() {
    let converted = converted(&fixture("qwen2").file);
    let gguf = GgufVocab { eos: Some(702), ..converted.gguf("gpt2", Some("qwen2")) };
    assert_eq!(Tokenizer::from_gguf(&gguf).unwrap().eos_ids(), [TokenId(700), TokenId(702)]);
}
