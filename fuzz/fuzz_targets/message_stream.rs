//! The start of a connection from anyone, and the messages of a peer with the cluster key, are parsed or rejected.
#![no_main]

use libfuzzer_sys::fuzz_target;
use net::fuzzing::read_any;

/// What the messages of an input may take, beside the buffers of a connection.
const MEMORY_BYTES: usize = 16 << 20;

fuzz_target!(
    init: fuzz::plant("message_stream", &seeds()),
    |input: &[u8]| fuzz::within_bytes(MEMORY_BYTES, || read_any(input))
);

/// Inputs in the form that [`read_any`] parses.
fn seeds() -> Vec<Vec<u8>> {
    let hello = [&[0][..], b"consort\0", &[4, 0, 1, 3, 0, 2, 0, 1, 0, 9, 0, 0, 0, 0x10, 0x27, 0, 0]].concat();
    let scripts: [&[u8]; 5] = [
        // A message in one record and one in three, with a heartbeat between them, and the end.
        &[1, 0xff, 0x0f, 0, 3, 8, 0, 64, 0, 1, 0, 9, 24, 0, 16, 0, 2],
        // A message of two full records.
        &[1, 0xff, 0xff, 0, 8, 0xff, 0xff, 0xff, 0xff],
        // A header and its body, as records with other bytes; an unexpected kind; bytes that are not a record.
        &[1, 3, 0, 3, 5, 7, 4, 0, 0, 0, 3, 3, 7, 7, 7, 3, 1, 7],
        &[1, 3, 0, 3, 5, 200, 4, 0, 0, 0],
        &[1, 9, 0, 1, 4, 5, 3, 0, 1, 2, 3],
    ];
    let handshake = [&hello[..], &[7; 48], &[3]].concat();
    scripts.iter().map(|script| script.to_vec()).chain([hello, handshake]).collect()
}
