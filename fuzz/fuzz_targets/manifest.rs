//! For any bytes, a manifest is rejected or read; what was read is written and read again as the same, and costs little memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model::{Checkpoint, Manifest, ModelPart};

/// The layers of a description, and a config.json as a tree, take more than the text that they are read from.
const BASE_BYTES: usize = 8 << 20;
const BYTES_PER_BYTE: usize = 128;

fuzz_target!(
    init: fuzz::plant("manifest", &fuzz::seed_files("manifest")),
    |input: &[u8]| fuzz::within_bytes(BASE_BYTES + BYTES_PER_BYTE * input.len(), || {
        let Ok(manifest) = Manifest::from_json(input) else { return };
        let part = ModelPart::whole(manifest.description());
        if let Ok(needed) = manifest.tensors_of(part) {
            assert!(needed.is_sorted() && needed.iter().all(|&index| index < manifest.tensors().len()));
            let opened = Checkpoint::from_manifest(&manifest, part, |_, _| Err(std::io::ErrorKind::NotFound.into()));
            assert!(opened.is_err(), "a model has tensors");
        }
        let json = manifest.to_json();
        let again = Manifest::from_json(&json).expect("what was written is read");
        assert_eq!(again.to_json(), json);
    })
);
