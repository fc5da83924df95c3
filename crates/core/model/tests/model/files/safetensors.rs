//! Tests of safetensors files, folders and indexes, one property each.

use std::fs;
use std::path::Path;

use model::files::{FileError, SafeTensors};
use tempfile::TempDir;
use types::DType;

use crate::files::message;
use testing::model_files::{floats, safetensors, safetensors_sample};

#[track_caller]
fn refused<E: std::error::Error + 'static>(result: Result<SafeTensors, E>, expected: &str) {
    let text = message(result.err().expect("a refusal"));
    assert!(text.contains(expected), "{text:?} does not mention {expected:?}");
    assert!(text.len() < 600, "a message of {} bytes", text.len());
}

/// Checks that a header with one entry is refused.
#[track_caller]
fn entry_refused(entry: &str, data: &[u8], expected: &str) {
    refused(SafeTensors::parse(safetensors(&format!(r#"{{"the.tensor":{entry}}}"#), data)), expected);
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn one_tensor(name: &str, value: f32) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    safetensors(&header, &value.to_le_bytes())
}

#[test]
fn tensors_read_back() {
    let file = SafeTensors::parse(safetensors_sample()).unwrap();
    let view = |name| file.tensor(name).unwrap().unwrap();
    let norm = view("model.norm.weight");
    assert_eq!((norm.dtype, norm.shape, norm.bytes), (DType::F32, &[2, 3][..], &floats(6)[..]));
    assert_eq!((view("half").dtype, view("half").bytes), (DType::F16, &[1; 4][..]));
    assert_eq!((view("brain").dtype, view("brain").shape, view("brain").bytes), (DType::BF16, &[][..], &[1; 2][..]));
    assert_eq!((view("none").shape, view("none").bytes), (&[0, 4][..], &[][..]));
    assert!(file.tensor("absent").unwrap().is_none());
    let names: Vec<_> = file.tensor_names().collect();
    assert_eq!(names, ["brain", "half", "model.norm.weight", "none", "scale"]);
}

#[test]
fn another_number_format_is_refused_when_asked_for() {
    let file = SafeTensors::parse(safetensors_sample()).unwrap();
    let error = file.tensor("scale").unwrap_err();
    assert!(matches!(&error, FileError::TensorDType { tensor, dtype } if tensor == "scale" && dtype == "F8_E4M3"));
}

#[test]
fn the_reference_writer_is_understood() {
    use safetensors::tensor::{Dtype, TensorView};
    let (weights, bias) = (floats(12), vec![3u8; 8]);
    let tensors = [
        ("w", TensorView::new(Dtype::F32, vec![3, 4], &weights).unwrap()),
        ("b", TensorView::new(Dtype::BF16, vec![4], &bias).unwrap()),
        ("i", TensorView::new(Dtype::I64, vec![1], &bias).unwrap()),
    ];
    let bytes = safetensors::serialize(tensors, None).unwrap();
    let file = SafeTensors::parse(bytes).unwrap();
    assert_eq!(file.tensor("w").unwrap().unwrap().bytes, weights);
    assert_eq!(file.tensor("b").unwrap().unwrap().bytes, bias);
    assert!(file.tensor("i").is_err());
}

#[test]
fn a_broken_header_is_refused() {
    let header = |json: &str| SafeTensors::parse(safetensors(json, b""));
    refused(header(""), "the header is not valid");
    refused(header("[]"), "an object with a member for each tensor");
    refused(header("{} x"), "trailing characters");
    refused(header(&"[".repeat(100_000)), "the header is not valid");
    refused(header(&format!(r#"{{"t":{}"#, r#"{"a":"#.repeat(100_000))), "the header is not valid");
    refused(SafeTensors::parse(vec![1, 2, 3]), "ends inside the length of the header");
    refused(SafeTensors::parse(100u64.to_le_bytes().to_vec()), "ends inside the header");
    refused(SafeTensors::parse(vec![255; 64]), "18446744073709551615 bytes of header are more than the limit");
    let mut bad_text = one_tensor("xx", 1.0);
    bad_text[10] = 0xff;
    refused(SafeTensors::parse(bad_text), "the header is not valid");
}

#[test]
fn an_entry_that_contradicts_itself_is_refused() {
    entry_refused(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, &[0; 4], "has 4 bytes");
    entry_refused(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,5]}"#, &[0; 4], "past the end of the file");
    entry_refused(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, &[0; 4], "past the end of the file");
    entry_refused(r#"{"dtype":"I8","shape":[1],"data_offsets":[0,18446744073709551615]}"#, &[0], "past the end");
    entry_refused(
        r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#,
        &[0; 4],
        "impossible shape",
    );
    entry_refused(r#"{"dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,4]}"#, &[0; 4], "impossible shape");
    entry_refused(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, &[0; 4], "the header is not valid");
    entry_refused(
        r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#,
        &[0; 4],
        "at most 8 dimensions",
    );
    entry_refused(r#"{"dtype":"F32","shape":[1]}"#, &[0; 4], "missing field `data_offsets`");
    entry_refused(r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#, &[0; 4], "the header is not valid");
    entry_refused(r#"{"dtype":7,"shape":[1],"data_offsets":[0,4]}"#, &[0; 4], "the name of a number format");
    entry_refused(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, &[0; 8], "cover 4 of the 8 bytes");
    entry_refused(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#, &[0; 8], "cover 4 of the 8 bytes");
}

#[test]
fn tensors_have_their_own_names_and_bytes() {
    let two = |a: &str, b: &str, range: &str| {
        let header = format!(
            r#"{{"{a}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}},"{b}":{{"dtype":"F32","shape":[1],"data_offsets":{range}}}}}"#
        );
        SafeTensors::parse(safetensors(&header, &[0; 8]))
    };
    assert!(two("a", "b", "[4,8]").is_ok());
    refused(two("a", "a", "[4,8]"), r#"two tensors have the name "a""#);
    refused(two("a", "\\u0061", "[4,8]"), r#"two tensors have the name "a""#);
    refused(two("a", "b", "[2,6]"), r#"tensors "a" and "b" overlap"#);
    refused(two("a", "b", "[0,4]"), "overlap");
}

#[test]
fn a_folder_opens_by_its_single_file_or_its_index() {
    let index = br#"{"metadata":{"total_size":8},"weight_map":{"a":"x.safetensors","b":"y.safetensors"}}"#;
    let shards = [("x.safetensors", one_tensor("a", 1.0)), ("y.safetensors", one_tensor("b", 2.0))];
    let mut files: Vec<(&str, &[u8])> = shards.iter().map(|(name, bytes)| (*name, &bytes[..])).collect();
    files.push(("model.safetensors.index.json", index));
    let value = |model: &SafeTensors, name: &str| model.tensor(name).unwrap().map(|view| view.bytes.to_vec());

    let sharded = folder(&files);
    for path in [sharded.path().to_owned(), sharded.path().join("model.safetensors.index.json")] {
        let model = SafeTensors::open(&path).unwrap();
        assert_eq!(value(&model, "a").unwrap(), 1f32.to_le_bytes());
        model.release();
        model.prefetch("b");
        assert_eq!(value(&model, "b").unwrap(), 2f32.to_le_bytes());
        assert_eq!(model.tensor_names().count(), 2);
    }

    let single = one_tensor("c", 3.0);
    files.push(("model.safetensors", &single));
    let both = folder(&files);
    for path in [both.path().to_owned(), both.path().join("model.safetensors")] {
        assert_eq!(value(&SafeTensors::open(&path).unwrap(), "c").unwrap(), 3f32.to_le_bytes());
    }
}

#[test]
fn the_index_decides_which_tensors_there_are() {
    let both = r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
    let folder = folder(&[
        ("model.safetensors.index.json", br#"{"weight_map":{"a":"x","b":"y"}}"#),
        ("x", &safetensors(both, &[1; 8])),
        ("y", &safetensors(both, &[2; 8])),
    ]);
    let model = SafeTensors::open(folder.path()).unwrap();
    assert_eq!(model.tensor("a").unwrap().unwrap().bytes, [1; 4]);
    assert_eq!(model.tensor("b").unwrap().unwrap().bytes, [2; 4]);
}

#[test]
fn an_index_that_leads_elsewhere_is_refused() {
    let outside = TempDir::new().unwrap();
    fs::write(outside.path().join("x"), one_tensor("a", 1.0)).unwrap();
    let inside = outside.path().join("model");
    fs::create_dir_all(inside.join("sub")).unwrap();
    fs::write(inside.join("sub/x"), one_tensor("a", 1.0)).unwrap();
    let index = |shard: &str| {
        let json = serde_json::json!({"weight_map": {"a": shard}}).to_string();
        fs::write(inside.join("model.safetensors.index.json"), json).unwrap();
        SafeTensors::open(&inside)
    };
    let absolute = outside.path().join("x");
    for shard in ["../x", "sub/x", "sub\\x", "", ".", "..", "./x", "x/", "c:x", "x\0", absolute.to_str().unwrap()] {
        refused(index(shard), "which is not a file beside it");
    }
    refused(index("sub"), "names the shard \"sub\", which cannot be opened");
}

#[test]
fn an_index_that_contradicts_its_shards_is_refused() {
    let open = |index: &str, shard: &[u8]| {
        SafeTensors::open(folder(&[("model.safetensors.index.json", index.as_bytes()), ("x", shard)]).path())
    };
    let shard = one_tensor("a", 1.0);
    refused(open(r#"{"weight_map":{"a":"x","b":"x"}}"#, &shard), r#"places tensor "b" in "x", which does not hold it"#);
    refused(open(r#"{"weight_map":{"a":"x","a":"x"}}"#, &shard), r#"two tensors have the name "a""#);
    refused(open(r#"{"weight_map":{"a":"x"}}"#, &shard[..20]), "ends inside the header");
    refused(open(r#"{"weight_map":["a"]}"#, &shard), "an object from tensor to shard");
    refused(open("{}", &shard), "missing field `weight_map`");
    refused(open("", &shard), "the header is not valid");
}

#[test]
fn a_shard_that_is_missing_matters_only_to_who_needs_it() {
    let folder = folder(&[
        ("model.safetensors.index.json", br#"{"weight_map":{"a":"x","b":"y","c":"z"}}"#),
        ("x", &one_tensor("a", 1.0)),
        ("z", &one_tensor("c", 3.0)),
    ]);
    let model = SafeTensors::open(folder.path()).unwrap();
    for (name, value) in [("a", 1f32), ("c", 3.0)] {
        assert_eq!(model.tensor(name).unwrap().unwrap().bytes, value.to_le_bytes());
        assert_eq!(model.missing_file(name), None);
    }
    let error = message(model.tensor("b").unwrap_err());
    assert!(error.contains("names the shard \"y\", which cannot be opened"), "{error}");
    assert!(model.tensor("d").unwrap().is_none());
    assert_eq!(model.tensor_names().collect::<Vec<_>>(), ["a", "c"]);
    assert_eq!(model.missing_names().collect::<Vec<_>>(), ["b"]);
    assert_eq!(
        (model.missing_file("b"), model.shards().unwrap()),
        (Some("y"), &["x", "y", "z"].map(str::to_owned)[..])
    );
    fs::write(folder.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"x","b":"y","a":"y"}}"#)
        .unwrap();
    refused(SafeTensors::open(folder.path()), r#"two tensors have the name "a""#);
}

#[test]
fn what_is_not_there_is_named() {
    let empty = TempDir::new().unwrap();
    refused(SafeTensors::open(empty.path()), "has neither model.safetensors nor model.safetensors.index.json");
    refused(SafeTensors::open(&empty.path().join("absent.safetensors")), "absent.safetensors");
    refused(SafeTensors::open(Path::new("/dev/null")), "not a regular file");
    fs::write(empty.path().join("model.safetensors"), b"").unwrap();
    refused(SafeTensors::open(empty.path()), "ends inside the length of the header");
}
