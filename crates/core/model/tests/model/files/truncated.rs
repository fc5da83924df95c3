//! A file that loses bytes between the check of its header and the load of its weights is an error that names the file. The
//! process goes on.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use kernels::StepLimits;
use model::files::FileError;
use model::{Block, Checkpoint, Embedding, Limits, LmHead, LoadError, LoadOptions};
use tempfile::TempDir;
use testing::driver::Fixture;
use testing::reference::Reference;
use types::{LayerRange, Rank};

/// A copy of a fixture's model in a folder of its own.
fn copy(of: &Path) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    if of.is_file() {
        let to = folder.path().join(of.file_name().unwrap());
        fs::copy(of, &to).unwrap();
        return (folder, to);
    }
    for entry in fs::read_dir(of).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = folder.path().to_owned();
    (folder, path)
}

fn load(checkpoint: &Checkpoint) -> Result<(), LoadError> {
    let step = StepLimits { rows: 4, sequences: 1, pages: 4 };
    let options = LoadOptions { keep: None, limits: Limits { step, logit_rows: 4, kv_pages: 4, positions: 64 } };
    let layers = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
    let embedding = Embedding::load(&Reference, checkpoint, &options, Rank::SINGLE)?;
    Block::load(&Reference, checkpoint, layers, Rank::SINGLE, &options, &mut |_| {})?;
    LmHead::load(&Reference, checkpoint, &options, Rank::SINGLE, &embedding)?;
    Ok(())
}

/// Opens the model, shortens one of its files, and loads it.
fn check(model: &str, file: &str, length: impl Fn(u64) -> u64) {
    let (_folder, path) = copy(&Fixture::open("llama").path(model));
    let file = if path.is_file() { path.clone() } else { path.join(file) };
    let checkpoint = Checkpoint::open(&path).unwrap();
    let writer = OpenOptions::new().write(true).open(&file).unwrap();
    let whole = writer.metadata().unwrap().len();
    writer.set_len(length(whole)).unwrap();
    let error = load(&checkpoint).unwrap_err();
    let named = matches!(&error, LoadError::File(FileError::Damaged { path }) if *path == file);
    assert!(named && error.to_string().contains(file.to_str().unwrap()), "{model}: {error}");
}

#[test]
fn a_file_that_is_cut_while_it_is_loaded_is_an_error_that_names_it() {
    check("gguf/tiny-llama-q8_0.gguf", "", |whole| whole / 2);
    check("model-f32", "model.safetensors", |whole| whole / 3);
    check("model-bf16-sharded", "model-00002-of-00002.safetensors", |whole| whole / 2);
    // Nothing of it is left.
    check("model-f32", "model.safetensors", |_| 0);
    // The rest of the last page can still be read, as zeros.
    check("model-f32", "model.safetensors", |whole| whole - 1);
}

#[test]
fn a_file_that_is_removed_or_replaced_while_it_is_loaded_stays_what_it_was() {
    let (folder, path) = copy(&Fixture::open("llama").path("model-f32"));
    let checkpoint = Checkpoint::open(&path).unwrap();
    let weights = path.join("model.safetensors");
    fs::remove_file(&weights).unwrap();
    load(&checkpoint).unwrap();
    fs::write(&weights, "another").unwrap();
    load(&checkpoint).unwrap();
    drop(folder);
}
