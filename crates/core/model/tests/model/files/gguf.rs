//! Tests of GGUF files, one property each.

use model::files::{Gguf, Value};
use types::DType;

use crate::files::message;
use testing::model_files::{GgufWriter, array, floats, gguf_sample, string};

/// Checks that `bytes` are refused with a message that contains `expected`.
#[track_caller]
fn refused(bytes: Vec<u8>, expected: &str) {
    let text = message(Gguf::parse(bytes).err().expect("a refusal"));
    assert!(text.contains(expected), "{text:?} does not mention {expected:?}");
    assert!(text.len() < 600, "a message of {} bytes", text.len());
}

#[test]
fn every_value_type_reads_back() {
    let file = Gguf::parse(gguf_sample().bytes()).unwrap();
    let get = |key: &str| file.get(key).unwrap();
    assert_eq!(get("u8").as_u64(), Some(200));
    assert_eq!(get("i8").as_i64(), Some(-3));
    assert_eq!(get("u16").as_u64(), Some(60_000));
    assert_eq!(get("i16").as_i64(), Some(-300));
    assert_eq!(get("u32").as_u64(), Some(4_000_000_000));
    assert_eq!(get("i32").as_i64(), Some(-70_000));
    assert_eq!(get("i32").as_u64(), None);
    assert_eq!(get("f32").as_f32(), Some(1.5));
    assert_eq!(get("bool").as_bool(), Some(true));
    assert_eq!(get("general.architecture").as_str(), Some("llama ✓"));
    assert_eq!(get("u64").as_u64(), Some(u64::MAX));
    assert_eq!(get("u64").as_i64(), None);
    assert_eq!(get("i64").as_i64(), Some(i64::MIN));
    assert_eq!(get("f64").as_f64(), Some(0.1));
    assert_eq!(get("tokens").as_strings().unwrap().iter().collect::<Vec<_>>(), ["a", "", "ß"]);
    assert_eq!(get("tokens").as_strings().unwrap().get(3), None);
    assert_eq!(get("types").as_ints(), Some(&[1, -2][..]));
    assert_eq!(get("scores").as_floats(), Some(&[0.5, -1.0][..]));
    assert_eq!(get("flags").as_bools(), Some(&[false, true][..]));
    assert_eq!(file.get("absent"), None);
    assert_eq!(file.metadata().count(), 17);
}

#[test]
fn arrays_of_every_width_read_back() {
    let ints = |code, bytes: &[u8]| {
        let file = GgufWriter::default().key(b"k", 9, &array(code, 1, bytes)).bytes();
        Gguf::parse(file).unwrap().get("k").cloned().unwrap()
    };
    assert_eq!(ints(0, &[255]), Value::Ints(vec![255]));
    assert_eq!(ints(1, &[255]), Value::Ints(vec![-1]));
    assert_eq!(ints(2, &[255, 255]), Value::Ints(vec![65535]));
    assert_eq!(ints(3, &[254, 255]), Value::Ints(vec![-2]));
    assert_eq!(ints(4, &[255; 4]), Value::Ints(vec![u32::MAX.into()]));
    assert_eq!(ints(10, &5u64.to_le_bytes()), Value::Ints(vec![5]));
    assert_eq!(ints(11, &(-5i64).to_le_bytes()), Value::Ints(vec![-5]));
    assert_eq!(ints(12, &0.25f64.to_le_bytes()), Value::Floats(vec![0.25]));
}

#[test]
fn dimensions_are_given_outermost_first() {
    let file = Gguf::parse(gguf_sample().bytes()).unwrap();
    let view = file.tensor("token_embd.weight").unwrap();
    assert_eq!((view.dtype, view.shape, view.bytes), (DType::F32, &[3, 2][..], &floats(6)[..]));
    let view = file.tensor("blk.0.attn_q.weight").unwrap();
    assert_eq!((view.dtype, view.shape, view.bytes), (DType::Q8_0, &[2, 32][..], &[7; 68][..]));
    assert!(file.tensor("blk.1.attn_q.weight").is_none());
    let names: Vec<_> = file.tensor_names().collect();
    assert_eq!(names, ["blk.0.attn_norm.weight", "blk.0.attn_q.weight", "token_embd.weight"]);
}

#[test]
fn every_supported_type_number_is_known() {
    let codes = [
        (0, DType::F32),
        (1, DType::F16),
        (2, DType::Q4_0),
        (3, DType::Q4_1),
        (6, DType::Q5_0),
        (7, DType::Q5_1),
        (8, DType::Q8_0),
        (10, DType::Q2_K),
        (11, DType::Q3_K),
        (12, DType::Q4_K),
        (13, DType::Q5_K),
        (14, DType::Q6_K),
        (30, DType::BF16),
    ];
    assert_eq!(codes.len(), DType::ALL.len());
    for (code, dtype) in codes {
        let data = vec![code as u8; dtype.row_bytes(512).unwrap()];
        let file = Gguf::parse(GgufWriter::default().tensor(b"t", &[256, 2], code, &data).bytes()).unwrap();
        let view = file.tensor("t").unwrap();
        assert_eq!((view.dtype, view.bytes), (dtype, &data[..]));
    }
}

#[test]
fn another_type_number_is_refused_by_name() {
    refused(
        GgufWriter::default().tensor(b"odd.weight", &[32], 20, &[0; 18]).bytes(),
        r#""odd.weight" has the unsupported type number 20"#,
    );
}

#[test]
fn both_versions_read_and_others_are_refused() {
    Gguf::parse(GgufWriter { version: 2, ..gguf_sample() }.bytes()).unwrap();
    refused(GgufWriter { version: 1, ..gguf_sample() }.bytes(), "version 1");
    refused(GgufWriter { version: 4, ..gguf_sample() }.bytes(), "version 4");
    refused(GgufWriter { version: 3u32.swap_bytes(), ..gguf_sample() }.bytes(), "big-endian");
    refused(GgufWriter { magic: *b"GGML", ..gguf_sample() }.bytes(), "not a GGUF file");
    refused(vec![], "not a GGUF file");
}

#[test]
fn the_alignment_of_the_file_is_honoured() {
    let aligned = |stated: u32| {
        GgufWriter { alignment: 256, ..GgufWriter::default() }
            .key(b"general.alignment", 4, &stated.to_le_bytes())
            .tensor(b"a", &[1], 0, &1f32.to_le_bytes())
            .tensor(b"b", &[1], 0, &2f32.to_le_bytes())
            .bytes()
    };
    let file = Gguf::parse(aligned(256)).unwrap();
    assert_eq!(file.tensor("b").unwrap().bytes, 2f32.to_le_bytes());
    refused(aligned(0), "alignment 0");
    refused(aligned(24), "alignment 24");
    refused(aligned(512), "\"b\" starts at 256");
    let text = GgufWriter::default().key(b"general.alignment", 8, &string(b"32"));
    refused(text.bytes(), "general.alignment");
    let huge = GgufWriter::default().key(b"general.alignment", 10, &(1u64 << 63).to_le_bytes());
    Gguf::parse(huge.bytes()).unwrap(); // accepted, because there is no tensor to place
    refused(huge.entry(b"t", &[1], 0, 0).bytes(), "past the end");
}

#[test]
fn a_value_that_breaks_the_format_is_refused() {
    let value = |code, value: &[u8]| GgufWriter::default().key(b"the.key", code, value).bytes();
    refused(value(13, &[0; 8]), r#""the.key" has the unknown type 13"#);
    refused(value(9, &array(77, 1, &[0; 8])), r#""the.key" has the unknown type 77"#);
    refused(value(9, &array(9, 1, &array(0, 1, &[1]))), "array of arrays");
    refused(value(7, &[2]), "\"the.key\" is out of range");
    refused(value(9, &array(7, 1, &[2])), "\"the.key\" is out of range");
    refused(value(9, &array(10, 1, &[255; 8])), "\"the.key\" is out of range");
    refused(value(8, &string(b"\xff\xfe")), "not valid UTF-8");
    refused(value(9, &array(8, 2, &[string(b"fine"), string(b"\xc3")].concat())), "not valid UTF-8");
    refused(GgufWriter::default().key(b"\xc0", 0, &[0]).bytes(), "not valid UTF-8");
    refused(GgufWriter::default().tensor(b"\xc0", &[1], 0, &[0; 4]).bytes(), "not valid UTF-8");
}

#[test]
fn names_are_unique() {
    refused(
        GgufWriter::default().key(b"k", 0, &[0]).key(b"k", 7, &[0]).bytes(),
        r#"two metadata values have the name "k""#,
    );
    let twice = GgufWriter::default().tensor(b"t", &[1], 0, &[0; 4]).tensor(b"t", &[1], 0, &[0; 4]);
    refused(twice.bytes(), r#"two tensors have the name "t""#);
}

#[test]
fn absurd_counts_and_lengths_are_refused() {
    for count in [u64::MAX, 1 << 40] {
        refused(GgufWriter { tensor_count: Some(count), ..gguf_sample() }.bytes(), "tensors are more than the limit");
        refused(
            GgufWriter { key_count: Some(count), ..gguf_sample() }.bytes(),
            "metadata values are more than the limit",
        );
        refused(
            GgufWriter::default().key(b"k", 9, &array(8, count, &[])).bytes(),
            "array entries are more than the limit",
        );
        refused(GgufWriter::default().key(b"k", 8, &count.to_le_bytes()).bytes(), "ends inside a metadata value");
    }
    refused(GgufWriter { tensor_count: Some(1000), ..gguf_sample() }.bytes(), "ends inside tensors");
    refused(GgufWriter { key_count: Some(1000), ..gguf_sample() }.bytes(), "ends inside metadata values");
    refused(GgufWriter::default().key(b"k", 9, &array(11, 1000, &[0; 80])).bytes(), "ends inside array entries");
    refused(GgufWriter::default().key(&[b'x'; 70_000], 0, &[0]).bytes(), "70000 bytes of a name");
}

#[test]
fn an_impossible_shape_is_refused() {
    let shape = |dims: &[u64], code| GgufWriter::default().entry(b"the.tensor", dims, code, 0).bytes();
    refused(shape(&[1 << 32, 1 << 32], 0), "\"the.tensor\" has the impossible shape");
    refused(shape(&[u64::MAX], 0), "\"the.tensor\" has the impossible shape");
    refused(shape(&[1 << 62], 0), "\"the.tensor\" has the impossible shape");
    refused(shape(&[33], 8), "\"the.tensor\" has the impossible shape [33]");
    refused(shape(&[16, 2], 8), "\"the.tensor\" has the impossible shape [2, 16]");
    refused(shape(&[1; 9], 0), "\"the.tensor\" has 9 dimensions");
}

#[test]
fn tensors_stay_inside_the_file_and_apart() {
    let two =
        |offset| GgufWriter::default().entry(b"a", &[16], 0, 0).entry(b"b", &[16], 0, offset).data(&[0; 128]).bytes();
    Gguf::parse(two(64)).unwrap();
    refused(two(32), r#"tensors "a" and "b" overlap"#);
    refused(two(0), "overlap");
    refused(two(96), r#""b" ends past the end of the file"#);
    refused(two(u64::MAX - 31), r#""b" ends past the end of the file"#);
    refused(two(65), r#""b" starts at 65"#);
}

#[test]
fn a_name_from_the_file_is_cut_and_escaped_in_the_message() {
    let name = format!("\x1b[31m{}", "n".repeat(10_000));
    refused(GgufWriter::default().entry(name.as_bytes(), &[1], 99, 0).bytes(), r#""\u{1b}[31mnnn"#);
}

#[test]
fn a_large_vocabulary_reads_back() {
    let tokens: Vec<String> = (0..150_000).map(|number| format!("token {number}")).collect();
    let entries: Vec<u8> = tokens.iter().flat_map(|token| string(token.as_bytes())).collect();
    let file = GgufWriter::default().key(b"tokenizer.ggml.tokens", 9, &array(8, 150_000, &entries)).bytes();
    let file = Gguf::parse(file).unwrap();
    let read = file.get("tokenizer.ggml.tokens").unwrap().as_strings().unwrap();
    assert!(read.iter().eq(tokens.iter().map(String::as_str)));
}
