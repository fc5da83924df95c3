//! For any template and messages, rendering ends within its limits of steps and memory, with text or an error.
//!
//! An input is a byte of flags, and parts separated by lines of `===`: the template, the messages, the tools and
//! further variables, the latter three as JSON. Invalid JSON is left out.
#![no_main]

use libfuzzer_sys::fuzz_target;
use text::{ChatTemplate, Message, RENDERED_BYTES_MAX, RenderOptions};

/// What is not charged: parsed sources, and a text that is copied while it grows.
const OVERHEAD_BYTES: usize = 32 << 20;

fuzz_target!(
    init: fuzz::plant("chat_template", &fuzz::seed_files("chat_template")),
    |input: &[u8]| {
        let Some((&flags, input)) = input.split_first() else { return };
        let input = String::from_utf8_lossy(input);
        let mut parts = input.split("\n===\n");
        let source = parts.next().unwrap_or_default();
        let mut json = || parts.next().unwrap_or_default();
        let messages: Option<Vec<Message>> = serde_json::from_str(json()).ok();
        let options = RenderOptions {
            add_generation_prompt: flags & 1 != 0,
            continue_final_message: flags & 2 != 0,
            tools: serde_json::from_str(json()).unwrap_or_default(),
            extra: serde_json::from_str(json()).unwrap_or_default(),
            now: Some(std::time::UNIX_EPOCH),
        };
        let messages = messages.unwrap_or_else(|| vec![Message::new("user", "hi"), Message::new("assistant", "hello")]);
        fuzz::within_bytes(RENDERED_BYTES_MAX + OVERHEAD_BYTES, || {
            let Ok(template) = ChatTemplate::new(source, "<s>", "</s>") else { return };
            if let Ok(text) = template.render(&messages, &options) {
                assert!(text.len() <= RENDERED_BYTES_MAX);
            }
        });
    }
);
