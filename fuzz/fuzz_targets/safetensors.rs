//! For any bytes, a safetensors file is rejected or read, and all that is read is in bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model::files::SafeTensors;
use testing::model_files::{safetensors, safetensors_sample};

fuzz_target!(
    init: fuzz::plant("safetensors", &seeds()),
    |input: &[u8]| fuzz::within_memory(input, |input| {
        let Ok(file) = SafeTensors::parse(input.to_vec()) else { return };
        for name in file.tensor_names() {
            let Ok(view) = file.tensor(name) else { continue };
            let view = view.expect("a listed tensor");
            let elements = view.shape.iter().product();
            assert_eq!(view.dtype.row_bytes(elements), Some(view.bytes.len()), "{name:?}");
        }
    })
);

fn seeds() -> Vec<Vec<u8>> {
    vec![
        safetensors("{}", b""),
        safetensors_sample(),
        safetensors(r#"{"\u0041\n":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":[{"x":[[]]}]}}"#, b"data"),
    ]
}
