//! Bytes from outside never panic, and never take more memory than a small multiple of their number. This test is alone in
//! its process, because the allocator counts for all threads.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::alloc::System;

use cap::Cap;
use kwaai::{KwaaiInput, KwaaiReply, KwaaiRequest, KwaaiWireError, frame_header, local_frame_header};
use testing::kwaai_input::{read_any, seeds};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// As in the fuzz targets: should it ask for more, the process aborts.
fn within_memory(input: &[u8], read: impl FnOnce(&[u8])) {
    MEMORY.set_limit(MEMORY.allocated() + (64 << 10) + 32 * input.len()).unwrap();
    read(input);
    MEMORY.set_limit(usize::MAX).unwrap();
}

#[test]
fn no_bytes_panic_or_take_more_memory_than_they_are_worth() {
    let seeds = seeds();
    for seed in &seeds {
        read_any_damaged(seed);
    }
    // All values of the first bytes: every tag and every marker, with huge lengths behind them.
    for first in 0..=u8::MAX {
        for tail in [[0xff; 16], [0; 16], [0x7f; 16], [0x91; 16]] {
            within_memory(&[&[first][..], &tail].concat(), read_any);
            within_memory(&[&[0x81, 0xa0, first][..], &tail].concat(), read_any);
        }
    }
    lengths_alone_allocate_nothing();
    megabytes_take_a_small_multiple();
}

/// The seed, cut anywhere and with every byte replaced by some that matter in a format.
fn read_any_damaged(seed: &[u8]) {
    within_memory(seed, read_any);
    for at in 0..seed.len() {
        within_memory(&seed[..at], read_any);
        for byte in [0, 1, 0x0f, 0x1f, 0x7f, 0x80, 0x8f, 0x9f, 0xc0, 0xc6, 0xc9, 0xdb, 0xdd, 0xdf, 0xff, !seed[at]] {
            let mut damaged = seed.to_vec();
            damaged[at] = byte;
            within_memory(&damaged, read_any);
        }
    }
}

fn lengths_alone_allocate_nothing() {
    // Claims 4 G elements of data, and 4 GiB.
    for marker in [0xdd, 0xc6] {
        let head = b"\x95\x05\x00\xa9token_ids\x91\x01";
        let input = [&head[..], &[marker, 0xff, 0xff, 0xff, 0xff, 1, 2, 3]].concat();
        let before = MEMORY.total_allocated();
        assert_eq!(KwaaiRequest::decode(&input), Err(KwaaiWireError::Truncated("data")));
        // A shape, and which fields were read.
        assert!(MEMORY.total_allocated() - before < 64);
    }
    let before = MEMORY.total_allocated();
    let frame = frame_header(&[0x81, 0x80, 0x80, 0x05], usize::MAX);
    assert!(matches!(frame, Err(KwaaiWireError::FrameTooLong { .. })));
    let frame = local_frame_header(&[0xff; 4], usize::MAX);
    assert!(matches!(frame, Err(KwaaiWireError::FrameTooLong { .. })));
    assert_eq!(MEMORY.total_allocated() - before, 0);
}

fn megabytes_take_a_small_multiple() {
    const BYTES: usize = 1 << 20;
    let length = (BYTES as u32).to_be_bytes();
    let tokens = [b"\x95\x05\x00\xa9token_ids\x90\xdd", &length[..], &[1; BYTES]].concat();
    within_memory(&tokens, |input| {
        let request = KwaaiRequest::decode(input).unwrap();
        assert!(matches!(request.input, KwaaiInput::Tokens(tokens) if tokens.len() == BYTES / 4));
    });
    // A failure with a long text keeps the beginning of it.
    let failure = [b"\x95\x00\xadhidden_states\x90\x90\xdb", &length[..], &[b'x'; BYTES]].concat();
    let before = MEMORY.total_allocated();
    assert!(matches!(KwaaiReply::decode(&failure), Ok(KwaaiReply::Failed(_))));
    assert!(MEMORY.total_allocated() - before < 4096);
    // Entries, fields and elements of one byte or two.
    for pattern in [&[0x12, 0][..], &[0x22, 0], &[0x2a, 0], &[0x93], &[0], &[0xa0], &[0x90]] {
        within_memory(&pattern.repeat(BYTES / pattern.len()), read_any);
    }
    let entries = b"\x93\xa0\xc4\x00\x00".repeat(BYTES / 5);
    let count = ((BYTES / 5) as u32).to_be_bytes();
    let data = [b"\x93\xc0\x00\xdd", &count[..], &entries].concat();
    let dictionary = [b"\xc9", &(data.len() as u32).to_be_bytes()[..], b"\x50", &data].concat();
    within_memory(&dictionary, read_any);
}
