//! Anything that a KwaaiNet peer or DHT node sends is parsed or rejected, within memory in proportion to its size; what is
//! parsed is written and read again without a change.
#![no_main]

use libfuzzer_sys::fuzz_target;
use testing::kwaai_input::{read_any, seeds};

fuzz_target!(
    init: fuzz::plant("kwaai_wire", &seeds()),
    |input: &[u8]| fuzz::within_memory(input, read_any)
);
