//! Tests of GGUF models that are split into several files.

use std::fs;
use std::path::PathBuf;

use model::files::Gguf;
use tempfile::TempDir;

use crate::files::message;
use testing::model_files::GgufWriter;

/// A folder with the parts `m-0000N-of-00003.gguf`, numbered and counted as given, and the path of the first.
fn parts(numbers: [u16; 3], counts: [u16; 3], tensors: [&str; 3]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    for part in 0..3 {
        let mut file = GgufWriter::default()
            .key(b"split.no", 2, &numbers[part].to_le_bytes())
            .key(b"split.count", 2, &counts[part].to_le_bytes())
            .key(b"split.tensors.count", 5, &3i32.to_le_bytes())
            .tensor(tensors[part].as_bytes(), &[1], 0, &(part as f32).to_le_bytes());
        if part == 0 {
            file = file.key(b"general.architecture", 8, &testing::model_files::string(b"llama"));
        }
        fs::write(folder.path().join(format!("m-{:05}-of-00003.gguf", part + 1)), file.bytes()).unwrap();
    }
    let first = folder.path().join("m-00001-of-00003.gguf");
    (folder, first)
}

#[test]
fn the_first_part_opens_all() {
    let (_folder, first) = parts([0, 1, 2], [3; 3], ["a", "b", "c"]);
    let model = Gguf::open(&first).unwrap();
    assert_eq!(model.get("general.architecture").unwrap().as_str(), Some("llama"));
    for round in 0..2 {
        for (name, value) in [("a", 0f32), ("b", 1.0), ("c", 2.0)] {
            assert_eq!(model.tensor(name).unwrap().bytes, value.to_le_bytes(), "round {round}");
            model.prefetch(name);
        }
        model.release();
    }
}

#[test]
fn another_part_names_the_one_to_open() {
    let (_folder, first) = parts([0, 1, 2], [3; 3], ["a", "b", "c"]);
    let second = first.with_file_name("m-00002-of-00003.gguf");
    let text = message(Gguf::open(&second).err().unwrap());
    assert!(text.contains("part 2 of 3") && text.contains("-00001-of-00003.gguf"), "{text}");
    let text = message(Gguf::parse(fs::read(&first).unwrap()).err().unwrap());
    assert!(text.contains("split over 3 files"), "{text}");
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let refused = |(_folder, first): (TempDir, PathBuf), expected: &str| {
        let text = message(Gguf::open(&first).err().unwrap());
        assert!(text.contains(expected), "{text:?} does not mention {expected:?}");
    };
    refused(parts([0, 2, 1], [3; 3], ["a", "b", "c"]), "does not say that it is part 2 of 3");
    refused(parts([0, 1, 2], [3, 3, 2], ["a", "b", "c"]), "does not say that it is part 3 of 3");
    refused(parts([0, 1, 2], [3; 3], ["a", "b", "a"]), r#"two tensors have the name "a""#);
    refused(parts([0, 1, 2], [4; 3], ["a", "b", "c"]), "its name must end in -00001-of-00004.gguf");
    refused(parts([0, 1, 2], [65535; 3], ["a", "b", "c"]), "its name must end in");

    let (folder, first) = parts([0, 1, 2], [3; 3], ["a", "b", "c"]);
    fs::remove_file(folder.path().join("m-00003-of-00003.gguf")).unwrap();
    refused((folder, first), "m-00003-of-00003.gguf");

    let (folder, first) = parts([0, 1, 2], [3; 3], ["a", "b", "c"]);
    let empty = GgufWriter::default().key(b"split.no", 2, &[2, 0]).key(b"split.count", 2, &[3, 0]);
    fs::write(folder.path().join("m-00003-of-00003.gguf"), empty.bytes()).unwrap();
    refused((folder, first), "hold 2 tensors, not the 3");
}
