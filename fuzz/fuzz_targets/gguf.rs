//! For any bytes, a GGUF file is rejected or read, and all that is read is in bounds.
#![no_main]

use libfuzzer_sys::fuzz_target;
use model::files::{Gguf, Value};
use testing::model_files::{GgufWriter, array, gguf_sample, string};

fuzz_target!(
    init: fuzz::plant("gguf", &seeds()),
    |input: &[u8]| fuzz::within_memory(input, |input| {
        let Ok(file) = Gguf::parse(input.to_vec()) else { return };
        for name in file.tensor_names() {
            let view = file.tensor(name).expect("a listed tensor");
            let elements = view.shape.iter().product();
            assert_eq!(view.dtype.row_bytes(elements), Some(view.bytes.len()), "{name:?}");
        }
        for (key, value) in file.metadata() {
            assert!(file.get(key).is_some_and(|found| std::ptr::eq(found, value)), "{key:?}");
            if let Value::Strings(strings) = value {
                assert_eq!(strings.iter().count(), strings.len());
            }
        }
    })
);

fn seeds() -> Vec<Vec<u8>> {
    let plain = GgufWriter::default();
    let aligned =
        GgufWriter { alignment: 64, ..GgufWriter::default() }.key(b"general.alignment", 4, &64u32.to_le_bytes());
    let mut formats = GgufWriter::default();
    for code in [0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30] {
        formats = formats.tensor(format!("t{code}").as_bytes(), &[256], code, &[0; 1024]);
    }
    vec![
        plain.bytes(),
        gguf_sample().bytes(),
        GgufWriter { version: 2, ..gguf_sample() }.bytes(),
        aligned.tensor(b"a", &[16], 0, &[1; 64]).tensor(b"b", &[2, 2], 30, &[1; 8]).bytes(),
        formats.bytes(),
        GgufWriter::default().key(b"split.count", 2, &[3, 0]).key(b"split.no", 2, &[0, 0]).bytes(),
        GgufWriter::default().key(b"nested", 9, &array(9, 1, &array(8, 1, &string(b"x")))).bytes(),
    ]
}
