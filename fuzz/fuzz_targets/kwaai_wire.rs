//! Anything that a KwaaiNet peer or DHT node sends is parsed or rejected, within memory in proportion to its size; what is
//! parsed is written and read again without a change.
#![no_main]

#[path = "../../crates/wires/kwaai/tests/limits/any_input.rs"]
mod any_input;

use any_input::{read_any, seeds};
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: fuzz::plant("kwaai_wire", &seeds()),
    |input: &[u8]| fuzz::within_memory(input, read_any)
);
