//! Templates that attack the process end with an error and take little memory. This test is alone in its process, because
//! the allocator counts for all threads.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use cap::Cap;
use std::alloc::System;
use text::{ChatTemplate, Message, RENDERED_BYTES_MAX, RenderOptions};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// What is not charged: parsed sources, and a text that is copied while it grows.
const OVERHEAD_BYTES: usize = 32 << 20;

#[test]
fn hostile_templates_are_refused_within_their_memory() {
    // The seeds of the fuzz target, each with a byte of flags first.
    let folder = testing::repository("fuzz/seeds/chat_template");
    let mut attacks = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let source = std::fs::read_to_string(&path).unwrap();
        if !name.starts_with("attack-") {
            continue;
        }
        let before = MEMORY.allocated();
        // A process that asks for more is aborted.
        MEMORY.set_limit(before + RENDERED_BYTES_MAX + OVERHEAD_BYTES).unwrap();
        let rendered = ChatTemplate::new(&source[1..], "<s>", "</s>")
            .and_then(|template| template.render(&[Message::new("user", "hi")], &RenderOptions::default()));
        MEMORY.set_limit(usize::MAX).unwrap();
        let error = rendered.expect_err(&name).to_string();
        assert!(error.len() < 600 && !error.contains('\n'), "{name}: {error}");
        // The error's own text is all that remains.
        assert!(MEMORY.allocated() < before + (64 << 10), "{name} leaks {} bytes", MEMORY.allocated() - before);
        attacks += 1;
    }
    assert!(attacks >= 12);
}
