//! Compares tokens, texts and rendered conversations with those of Hugging Face's libraries for the same input.
#![allow(clippy::unwrap_used)] // test helpers may panic

use serde_json::Value;
use std::path::PathBuf;
use text::{Message, RenderOptions, SpecialTokens, Tokenizer, TokenizerConfig};
use types::TokenId;

const BYTE_LEVEL: [&str; 3] = ["qwen2", "llama3", "qwen3_5"];
const SENTENCE_PIECE: [&str; 3] = ["llama2", "gemma", "mistral"];

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_file(fixture(name).join("tokenizer.json")).unwrap()
}

fn json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<TokenId> {
    value.as_array().unwrap().iter().map(|id| TokenId(id.as_u64().unwrap() as u32)).collect()
}

fn cases(value: &Value) -> &[Value] {
    let cases = value.as_array().unwrap();
    assert!(!cases.is_empty());
    cases
}

/// Checks decoding, at once and as a stream.
fn check_decoded(tokenizer: &Tokenizer, ids: &[TokenId], special: SpecialTokens, want: &str) {
    assert_eq!(tokenizer.decode(ids, special), want);
    let mut stream = tokenizer.detokenizer(special);
    let mut text = String::new();
    for &id in ids {
        text += &stream.push(id);
        assert!(want.starts_with(&text), "{text:?} is not how {want:?} begins");
    }
    assert_eq!(text + &stream.finish(), want);
}

#[test]
fn texts_encode_and_decode_as_with_hugging_face() {
    for name in BYTE_LEVEL.into_iter().chain(SENTENCE_PIECE) {
        let (tokenizer, manifest) = (tokenizer(name), json(&format!("{name}/manifest.json")));
        for case in cases(&manifest["encode"]) {
            let (text, want) = (case["text"].as_str().unwrap(), ids(&case["ids"]));
            assert_eq!(tokenizer.encode(text, false).unwrap(), want, "{name}: {text:?}");
            if case["ids_with_special"].is_array() {
                assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&case["ids_with_special"]), "{name}: {text:?}");
            }
            check_decoded(&tokenizer, &want, SpecialTokens::Show, case["decoded"].as_str().unwrap());
            check_decoded(&tokenizer, &want, SpecialTokens::Hide, case["decoded_skip_special"].as_str().unwrap());
        }
    }
}

#[test]
fn tokens_in_any_order_decode_as_with_hugging_face() {
    for name in BYTE_LEVEL {
        let (tokenizer, manifest) = (tokenizer(name), json(&format!("{name}/manifest.json")));
        for case in cases(&manifest["decode_random"]) {
            check_decoded(&tokenizer, &ids(&case["ids"]), SpecialTokens::Show, case["decoded"].as_str().unwrap());
        }
    }
}

#[test]
fn conversations_render_and_encode_as_with_transformers() {
    let config: TokenizerConfig = serde_json::from_value(json("tokenizer_config.json")).unwrap();
    let template = config.template().unwrap().unwrap();
    for name in BYTE_LEVEL {
        let (tokenizer, manifest) = (tokenizer(name), json(&format!("{name}/manifest.json")));
        for case in cases(&manifest["chat"]) {
            let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
            let mut options = RenderOptions {
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                tools: case["tools"].as_array().cloned().unwrap_or_default(),
                ..RenderOptions::default()
            };
            if let Some(value) = case.get("enable_thinking") {
                options.extra.insert("enable_thinking".to_owned(), value.clone());
            }
            let text = template.render(&messages, &options).unwrap();
            assert_eq!(text, case["rendered"].as_str().unwrap(), "{name}");
            assert_eq!(tokenizer.encode(&text, false).unwrap(), ids(&case["ids"]), "{name}");
        }
    }
}

#[test]
fn the_chat_prompts_of_every_architecture_match() {
    let config: TokenizerConfig = serde_json::from_value(json("tokenizer_config.json")).unwrap();
    let template = config.template().unwrap().unwrap();
    for (name, case) in json("tiny/chats.json").as_object().unwrap() {
        let tokenizer = tokenizer(case["tokenizer"].as_str().unwrap());
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let text = template.render(&messages, &options).unwrap();
        assert_eq!(text, case["text"].as_str().unwrap(), "{name}");
        assert_eq!(tokenizer.encode(&text, false).unwrap(), ids(&case["ids"]), "{name}");
        for generated in cases(&case["generated"]) {
            let want = generated["text"].as_str().unwrap();
            check_decoded(&tokenizer, &ids(&generated["ids"]), SpecialTokens::Show, want);
        }
    }
}
