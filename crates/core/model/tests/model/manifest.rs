//! A part of a model that is loaded from a manifest and one file for each tensor gives the same bits as from the model's files.
//! Manifests and files that are wrong get a clear error.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Block, Checkpoint, Embedding, LmHead, LoadError, Manifest, ModelPart};
use proptest::prelude::*;
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use testing::driver::{Driver, Fixture, MODELS, load_options};
use types::{LayerRange, Rank};

/// A folder with one file for each tensor.
struct TensorFolder {
    folder: TempDir,
    manifest: Manifest,
}

impl TensorFolder {
    /// Writes all tensors. The manifest has been through JSON.
    fn new(from: &Checkpoint) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = from.manifest().unwrap();
        for index in 0..manifest.tensors().len() {
            let bytes = from.tensor_bytes(&manifest.tensors()[index]).unwrap();
            assert_eq!(bytes.len() as u64, manifest.tensors()[index].bytes);
            manifest.set_hash(index, blake3::hash(bytes).into());
            fs::write(folder.path().join(manifest.tensors()[index].file_name().unwrap()), bytes).unwrap();
        }
        let received = Manifest::from_json(&manifest.to_json()).unwrap();
        assert_eq!(received, manifest);
        assert_eq!(received.description(), from.description());
        Self { folder, manifest: received }
    }

    fn open(&self, part: ModelPart) -> Result<Checkpoint, LoadError> {
        Checkpoint::from_tensor_folder(&self.manifest, part, self.folder.path())
    }

    fn path(&self, index: usize) -> PathBuf {
        self.folder.path().join(self.manifest.tensors()[index].file_name().unwrap())
    }
}

fn backend() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap()
}

/// Every variant of every fixture, and the GGUF files.
fn paths() -> Vec<PathBuf> {
    let mut paths = Vec::new();
    for fixture in MODELS.map(Fixture::open) {
        paths.extend(["f32", "bf16", "bf16-sharded"].into_iter().filter_map(|name| fixture.variant(name)));
        let files = fs::read_dir(fixture.path("gguf")).into_iter().flatten();
        paths.extend(files.map(|file| file.unwrap().path()));
    }
    assert!(paths.len() >= 15, "{paths:?}");
    paths
}

fn stage(start: usize, end: usize) -> LayerRange {
    LayerRange::new(start as u32, end as u32).unwrap()
}

/// The coordinator with the first layer, and a stage with the rest, each from its own checkpoint.
#[test]
fn parts_from_a_manifest_give_the_bits_of_the_files() {
    let (backend, rank) = (backend(), Rank::SINGLE);
    for path in paths() {
        let from = Checkpoint::open(&path).unwrap();
        let (layers, options) = (from.description().layers.len(), load_options(&from, None));
        let prompt: Vec<u32> = (0..40).map(|i| (i * 7 + 3) % from.description().vocab as u32).collect();
        let mut driver = Driver::split(&backend, &from, None, &[1, layers as u32], rank);
        let expected = driver.greedy(&prompt, 4);

        let tensors = TensorFolder::new(&from);
        let coordinator = tensors.open(ModelPart::coordinator(1)).unwrap();
        let last = tensors.open(ModelPart::stage(stage(1, layers))).unwrap();
        let load =
            |from: &Checkpoint, layers| Block::load(&backend, from, layers, rank, &options, &mut |_| {}).unwrap();
        driver.embedding = Embedding::load(&backend, &coordinator, &options, rank).unwrap();
        driver.lm_head = LmHead::load(&backend, &coordinator, &options, rank, &driver.embedding).unwrap();
        driver.blocks = vec![load(&coordinator, stage(0, 1)), load(&last, stage(1, layers))];
        assert_eq!(driver.greedy(&prompt, 4), expected, "{}", path.display());

        assert_eq!(coordinator.digest(), last.digest());
        assert_eq!(coordinator.stored_formats(), from.stored_formats());
    }
}

/// The parts of a chain together need every tensor that the whole model needs, and none twice.
#[test]
fn the_tensors_of_all_parts_are_those_of_the_model() {
    for path in paths() {
        let from = Checkpoint::open(&path).unwrap();
        let (manifest, layers) = (from.manifest().unwrap(), from.description().layers.len());
        let whole = manifest.tensors_of(ModelPart::whole(from.description())).unwrap();
        let mut parts = manifest.tensors_of(ModelPart::coordinator(0)).unwrap();
        (0..layers)
            .for_each(|layer| parts.extend(manifest.tensors_of(ModelPart::stage(stage(layer, layer + 1))).unwrap()));
        parts.sort_unstable();
        assert_eq!(parts, whole, "{}", path.display());
        // Of the fixtures' tensors a part needs all but this one, which became a part of the description.
        let names = (0..manifest.tensors().len()).filter(|index| !whole.contains(index));
        let mut others = names.map(|index| &manifest.tensors()[index].name);
        assert!(others.all(|name| name == "rope_freqs.weight"), "{}", path.display());
        assert!(matches!(manifest.tensors_of(ModelPart::stage(stage(1, layers + 1))), Err(LoadError::Layers { .. })));
    }
}

/// A manifest that was written to a file is read again; another file is refused.
#[test]
fn a_manifest_is_read_from_its_file() {
    let (folder, manifest) = (tempfile::tempdir().unwrap(), llama().manifest().unwrap());
    let path = folder.path().join("manifest.json");
    fs::write(&path, manifest.to_json()).unwrap();
    assert_eq!(Manifest::read(&path).unwrap(), manifest);
    fs::write(&path, b"{").unwrap();
    assert!(matches!(Manifest::read(&path), Err(LoadError::Manifest(_))));
    assert!(matches!(Manifest::read(folder.path()), Err(LoadError::Open { .. })));
}

#[test]
fn a_tensor_is_found_in_the_file_that_holds_it() {
    for path in paths() {
        let from = Checkpoint::open(&path).unwrap();
        for entry in from.manifest().unwrap().tensors() {
            let (file, range) = from.tensor_location(entry).unwrap();
            assert!(file.starts_with(&path));
            assert_eq!(fs::read(file).unwrap()[range], *from.tensor_bytes(entry).unwrap(), "{}", entry.name);
        }
    }
}

fn llama() -> Checkpoint {
    Checkpoint::open(&Fixture::open("llama").primary().0).unwrap()
}

fn error_of(result: Result<Checkpoint, LoadError>) -> String {
    let error = result.err().expect("it is refused");
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[test]
fn files_that_are_missing_or_of_another_length_get_an_error_that_names_the_tensor() {
    let tensors = TensorFolder::new(&llama());
    let part = ModelPart::stage(stage(1, 2));
    let needed = tensors.manifest.tensors_of(part).unwrap();
    let (index, path) = (needed[3], tensors.path(needed[3]));
    let name = &tensors.manifest.tensors()[index].name;
    let check = |expected: &str| {
        let error = error_of(tensors.open(part));
        assert!(error.contains(name) && error.contains(expected), "{error}");
    };
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[1..]).unwrap();
    check(&format!("has {} bytes, not {}", bytes.len() - 1, bytes.len()));
    fs::write(&path, b"").unwrap();
    check("has 0 bytes");
    fs::remove_file(&path).unwrap();
    check("open the file");
    fs::create_dir(&path).unwrap();
    check("not a regular file");
    let refused = Checkpoint::from_manifest(&tensors.manifest, part, |_, _| Err(io::Error::other("the store is full")));
    assert!(error_of(refused).contains("the store is full"));
    let unhashed = llama().manifest().unwrap();
    let refused = Checkpoint::from_tensor_folder(&unhashed, part, tensors.folder.path());
    assert!(error_of(refused).contains("does not state its hash"));
    // Files of other parts need not be there.
    let other = tensors.open(ModelPart::stage(stage(2, 3))).unwrap();
    let options = load_options(&other, None);
    let loaded = Block::load(&backend(), &other, stage(1, 2), Rank::SINGLE, &options, &mut |_| {});
    assert!(matches!(loaded.err(), Some(LoadError::NotOpened { .. })));
}

fn json_of(from: &Checkpoint) -> Json {
    serde_json::from_slice(&from.manifest().unwrap().to_json()).unwrap()
}

/// The error of llama's manifest after a change to it.
fn refused(from: &Json, change: impl FnOnce(&mut Json)) -> String {
    let mut manifest = from.clone();
    change(&mut manifest);
    let error = Manifest::from_json(&serde_json::to_vec(&manifest).unwrap()).expect_err("it is refused");
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[test]
fn a_manifest_that_lies_is_refused_with_a_reason() {
    let from = json_of(&llama());
    let check = |expected: &str, change: &dyn Fn(&mut Json)| {
        let error = refused(&from, change);
        assert!(error.contains(expected), "{expected}: {error}");
    };
    check("impossible shape", &|m| m["tensors"][0]["shape"] = json!([u64::MAX, 2]));
    check("impossible shape", &|m| m["tensors"][0]["shape"] = json!([1u64 << 32, 1u64 << 32]));
    check("impossible shape", &|m| m["tensors"][0]["dtype"] = json!("q4_k"));
    check("its shape and format make", &|m| m["tensors"][0]["bytes"] = json!(7));
    check("its shape and format make", &|m| m["tensors"][0]["shape"] = json!([]));
    check("a list of at most 8 entries", &|m| m["tensors"][0]["shape"] = json!([1, 1, 1, 1, 1, 1, 1, 1, 1]));
    check("the name of a number format", &|m| m["tensors"][0]["dtype"] = json!("f8"));
    check("64 hexadecimal digits", &|m| m["tensors"][0]["hash"] = json!("../../etc/passwd"));
    check("bytes of a tensor's name", &|m| m["tensors"][0]["name"] = json!("x".repeat(2000)));
    check("have the name", &|m| m["tensors"][0]["name"] = m["tensors"][1]["name"].clone());
    check("larger than any memory", &|m| {
        let large = json!({ "name": "a", "dtype": "f32", "shape": [1u64 << 60], "bytes": 1u64 << 62 });
        let other = json!({ "name": "b", "dtype": "f32", "shape": [1u64 << 60], "bytes": 1u64 << 62 });
        m["tensors"].as_array_mut().unwrap().extend([large, other]);
    });
    check("not valid JSON", &|m| m["model"]["config"] = json!("{"));
    check("bytes of config.json", &|m| m["model"]["config"] = json!(" ".repeat(2 << 20)));
    check("model_type", &|m| m["model"]["config"] = json!("{}"));
    check("num_hidden_layers", &|m| {
        let config = m["model"]["config"].as_str().unwrap();
        let mut config: Json = serde_json::from_str(config).unwrap();
        config["num_hidden_layers"] = json!(1u64 << 40);
        m["model"]["config"] = json!(config.to_string());
    });
    check("the manifest is not valid", &|m| m["model"] = json!({ "folder": "/" }));
    check("the manifest is not valid", &|m| m["tensors"] = json!({}));
}

#[test]
fn a_manifest_of_gguf_that_lies_is_refused_with_a_reason() {
    let from = json_of(&Checkpoint::open(&Fixture::open("llama").path("gguf/tiny-llama-q8_0.gguf")).unwrap());
    let keys: Vec<_> = from["model"]["gguf"]["metadata"].as_array().unwrap().iter().map(|pair| &pair[0]).collect();
    assert!(!keys.is_empty() && keys.iter().all(|key| !key.as_str().unwrap().starts_with("tokenizer.")), "{keys:?}");
    let check = |expected: &str, change: &dyn Fn(&mut Json)| {
        let error = refused(&from, change);
        assert!(error.contains(expected), "{expected}: {error}");
    };
    check("have the name", &|m| {
        let metadata = m["model"]["gguf"]["metadata"].as_array_mut().unwrap();
        metadata.push(metadata[0].clone());
    });
    check("entries of a metadata value", &|m| {
        m["model"]["gguf"]["metadata"][0][1] = json!({ "string": "x".repeat(1 << 15) });
    });
    check("a list of at most", &|m| m["model"]["gguf"]["metadata"][0][1] = json!({ "ints": vec![0; 1 << 15] }));
    check("a list of at most", &|m| {
        m["model"]["gguf"]["metadata"] = json!(vec![("k", json!({ "u64": 1 })); 1 << 11]);
    });
    check("general.architecture", &|m| m["model"]["gguf"]["metadata"] = json!([]));
    check("rope_freqs.weight", &|m| m["model"]["gguf"]["rope_divisors"] = json!([1, 2, 3]));
    check("token_embd.weight", &|m| m["tensors"] = json!([]));
}

/// A model without a tensor that it needs is a valid manifest, from which that part cannot be loaded.
#[test]
fn a_tensor_that_is_not_listed_is_missing() {
    let from = llama();
    let mut json = json_of(&from);
    let listed = json["tensors"].as_array_mut().unwrap();
    let at = listed.iter().position(|entry| entry["name"] == "model.layers.1.mlp.up_proj.weight").unwrap();
    listed.remove(at);
    let manifest = Manifest::from_json(&serde_json::to_vec(&json).unwrap()).unwrap();
    let refused = manifest.tensors_of(ModelPart::whole(from.description()));
    assert!(matches!(refused, Err(LoadError::Missing { tensor }) if tensor == "model.layers.1.mlp.up_proj.weight"));
    assert!(manifest.tensors_of(ModelPart::coordinator(1)).is_ok());
}

/// A tensor whose shape is not the one that the description requires is refused when it is loaded.
#[test]
fn a_shape_that_the_model_does_not_have_is_refused() {
    let tensors = TensorFolder::new(&llama());
    let mut json: Json = serde_json::from_slice(&tensors.manifest.to_json()).unwrap();
    for entry in json["tensors"].as_array_mut().unwrap() {
        if entry["name"].as_str().unwrap().ends_with("layers.1.self_attn.q_proj.weight") {
            let elements: u64 = entry["shape"].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap()).product();
            entry["shape"] = json!([1, elements]);
        }
    }
    let manifest = Manifest::from_json(&serde_json::to_vec(&json).unwrap()).unwrap();
    let lying = TensorFolder { manifest, ..tensors };
    let opened = lying.open(ModelPart::stage(stage(1, 2))).unwrap();
    let options = load_options(&opened, None);
    let loaded = Block::load(&backend(), &opened, stage(1, 2), Rank::SINGLE, &options, &mut |_| {});
    assert!(matches!(loaded.err(), Some(LoadError::Shape { .. })));
}

/// Reads any bytes as a manifest and uses what was accepted.
fn read(json: &[u8]) -> bool {
    let Ok(manifest) = Manifest::from_json(json) else { return false };
    let part = ModelPart::whole(manifest.description());
    if let Ok(needed) = manifest.tensors_of(part) {
        assert!(needed.is_sorted() && needed.iter().all(|&index| index < manifest.tensors().len()));
        let opened = Checkpoint::from_manifest(&manifest, part, |_, _| Ok(Path::new("/nonexistent").to_owned()));
        assert!(opened.is_err());
    }
    let again = Manifest::from_json(&manifest.to_json()).unwrap();
    assert_eq!(again.to_json(), manifest.to_json());
    true
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn a_damaged_manifest_is_read_or_refused(
        gguf: bool,
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
    ) {
        let path = if gguf { Fixture::open("llama").path("gguf/tiny-llama-q8_0.gguf") } else { Fixture::open("llama").primary().0 };
        let mut json = Checkpoint::open(&path).unwrap().manifest().unwrap().to_json();
        prop_assert!(read(&json));
        for (at, value, kind) in damage {
            let at = at.index(json.len());
            match kind {
                0 => json[at] = value,
                1 => json[at] = b"0123456789\"[]{},:"[usize::from(value) % 17],
                2 => drop(json.remove(at)),
                _ => json.insert(at, b'0' + value % 10),
            }
        }
        read(&json);
    }

    #[test]
    fn any_bytes_are_a_manifest_or_not(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        read(&bytes);
    }
}
