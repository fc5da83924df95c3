//! Anything that a rank with the cluster key sends to another is parsed or rejected.
#![no_main]

use collectives::tcp::fuzzing::read_any;
use libfuzzer_sys::fuzz_target;

fuzz_target!(
    init: fuzz::plant("tcp_wire", &seeds()),
    |input: &[u8]| read_any(input)
);

/// Inputs in the form that [`read_any`] parses.
fn seeds() -> Vec<Vec<u8>> {
    let hello = vec![0, 1, 3, 0, 2, 0, 1, 0, 9, 0, 0, 0];
    let scripts: [&[u8]; 5] = [
        // Three messages of one record each, and of two.
        &[1, 3, 0xff, 0x0f, 0, 0, 0],
        &[1, 255, 0xff, 0xff, 0, 0, 0, 0, 0, 0],
        // A record that is too short; one with other bytes; the peer's goodbye; bytes that are not a record.
        &[1, 3, 0xff, 0x0f, 1, 15, 0, 0],
        &[1, 0, 1, 0, 2, 3, 1, 2, 3],
        &[1, 3, 0xff, 0x0f, 0, 2, 16, 255, 255, 255, 255, 255, 255, 255, 255, 1, 0, 0, 0, 0, 0, 0, 255, 3, 2, 1, 0],
    ];
    let values = [&[2][..], &1.5f32.to_le_bytes(), &[127; 32], &f32::NAN.to_le_bytes(), &[1, 2, 3]].concat();
    scripts.iter().map(|script| script.to_vec()).chain([hello, values]).collect()
}
