//! Anything that either side of a connection for weights sends is decoded or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weights::fuzzing::read_any;

fuzz_target!(
    init: fuzz::plant("weights_wire", &seeds()),
    |input: &[u8]| read_any(input)
);

/// Messages: the first byte is the kind.
fn seeds() -> Vec<Vec<u8>> {
    let request = [&[1, 7, 0, 0, 0][..], &[5; 32], &[0, 0, 16, 0, 0, 0, 0, 0], &[0, 0, 1, 0]].concat();
    let data = [&[2, 3, 0, 0, 0][..], &[0, 0, 16, 0, 0, 0, 0, 0], &[9; 40]].concat();
    let wrong_bytes = [&[5, 2][..], &[5; 32]].concat();
    vec![request, data, vec![3, 7, 0, 0, 0, 1], vec![4], vec![5, 1], wrong_bytes]
}
