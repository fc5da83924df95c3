//! The Hugging Face cache layout on disk: `models--owner--name/{blobs,refs,snapshots}`, shared with other tools.
//!
//! A blob gets its final name only when it is complete, and `refs/main` is written last, so the snapshot that it names has all that
//! was fetched. Of a model with shards that may be a part; the links of its other shards lead to blobs that are missing. Links in a snapshot are relative, so the cache can be moved.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use model::{Checkpoint, ModelPart};
use serde::Deserialize;

use super::ModelFiles;
use super::catalogue::catalogue;
use super::choose::{ChoiceError, ChosenFiles, GgufParts, choice_of, choose};
use super::hub::Digest;
use super::name::{self, FileName, RepoId};

pub const INDEX: &str = "model.safetensors.index.json";
const REF_BYTES_MAX: u64 = 256;
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// The maximum number of entries that are read in one snapshot.
const SNAPSHOT_FILES_MAX: usize = 20_000;
const SNAPSHOT_DEPTH_MAX: usize = 4;

/// One `models--…` folder. It may not exist yet.
pub struct RepoCache {
    pub repo: RepoId,
    pub folder: PathBuf,
    locks: PathBuf,
}

/// A file of a snapshot.
#[derive(Debug)]
pub struct CachedFile {
    pub name: String,
    pub bytes: u64,
}

/// A model in the cache. It may be incomplete.
#[derive(Debug)]
pub struct StoredModel {
    /// Its one name: see [`super::name`].
    pub name: String,
    pub bytes: u64,
    pub complete: bool,
    pub path: PathBuf,
}

impl StoredModel {
    pub fn files(&self) -> ModelFiles {
        ModelFiles { name: self.name.clone(), path: self.path.clone() }
    }
}

impl RepoCache {
    pub fn new(hub_cache: &Path, repo: RepoId) -> Self {
        let folder = hub_cache.join(repo.folder());
        let locks = hub_cache.join(".locks").join(repo.folder());
        Self { repo, folder, locks }
    }

    /// All model repositories in a cache, ordered by name.
    pub fn all(hub_cache: &Path) -> Result<Vec<Self>> {
        let entries = match fs::read_dir(hub_cache) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.with_context(|| format!("list {}", hub_cache.display()))?,
        };
        let repos = entries.filter_map(|entry| RepoId::from_folder(entry.ok()?.file_name().to_str()?));
        Ok(repos.collect::<BTreeSet<_>>().into_iter().map(|repo| Self::new(hub_cache, repo)).collect())
    }

    pub fn exists(&self) -> bool {
        self.folder.is_dir()
    }

    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs").join(digest.hex())
    }

    /// A complete model in the snapshot of `refs/main`; `None` if the model or a part of it is missing.
    pub fn find(&self, choice: Option<&str>) -> Option<ModelFiles> {
        let (snapshot, files) = self.snapshot()?;
        let offered: Vec<_> = files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
        let chosen = choose(&offered, choice).ok()?;
        match chosen {
            ChosenFiles::Folder(_) if !is_complete_snapshot(&snapshot) => None,
            chosen => Some(self.files(&offered, &chosen, snapshot)),
        }
    }

    /// The name and the path of a model whose files are among those offered.
    pub fn files(&self, offered: &[(&str, u64)], chosen: &ChosenFiles, snapshot: PathBuf) -> ModelFiles {
        match chosen {
            ChosenFiles::Folder(_) => ModelFiles { name: name::of_hub(&self.repo, None), path: snapshot },
            ChosenFiles::Gguf(parts) => {
                let first = offered[parts[0]].0;
                ModelFiles { name: self.gguf_name(offered, first), path: snapshot.join(first) }
            }
        }
    }

    /// The name of the model that has this file.
    fn gguf_name(&self, offered: &[(&str, u64)], file: &str) -> String {
        let ggufs = GgufParts::all(offered);
        let one = ggufs.iter().find(|gguf| gguf.has(offered, file));
        name::of_hub(&self.repo, one.map(|one| choice_of(&ggufs, one)).as_deref())
    }

    /// The path of a model in the snapshot of `refs/main` whose shards may be missing, but not those that a part needs.
    pub fn find_part(&self, part: ModelPart) -> Option<ModelFiles> {
        if let Some(whole) = self.find(None) {
            return Some(whole);
        }
        let (snapshot, files) = self.snapshot()?;
        let has = |name: &str| files.iter().any(|file| file.name == name);
        let is_there = has("config.json") && has(INDEX) && has("tokenizer.json");
        let missing = Checkpoint::open(&snapshot).ok().filter(|_| is_there)?.missing_files(part).ok()?;
        missing.is_empty().then(|| ModelFiles { name: name::of_hub(&self.repo, None), path: snapshot })
    }

    /// Creates the folders and locks one blob, as Hugging Face's tools do. Dropping the file releases the lock.
    pub fn lock(&self, digest: &Digest) -> Result<File> {
        for folder in [&self.locks, &self.folder.join("blobs"), &self.folder.join("refs")] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        let path = self.locks.join(format!("{}.lock", digest.hex()));
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| format!("create {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) => eprintln!("another process is downloading {}: waiting for it", self.repo),
            Err(TryLockError::Error(error)) => return Err(error).with_context(|| format!("lock {}", path.display())),
        }
        lock.lock().with_context(|| format!("lock {}", path.display()))?;
        Ok(lock)
    }

    /// Links `name` in the snapshot of `commit` to a blob, which may be missing where links are symbolic.
    pub fn link(&self, commit: &str, name: &FileName, digest: &Digest) -> Result<()> {
        let link = self.snapshot_folder(commit).join(name.as_str());
        let parent = link.parent().context("a file lies in a folder")?;
        let linked = fs::create_dir_all(parent).and_then(|()| {
            let target = Path::new(&"../".repeat(2 + name.depth())).join("blobs").join(digest.hex());
            replace_link(&target, &self.blob(digest), &link)
        });
        linked.with_context(|| format!("create {}", link.display()))
    }

    /// Points `refs/main` to `commit`, and returns the folder of its snapshot.
    pub fn publish(&self, commit: &str) -> Result<PathBuf> {
        let refs = self.folder.join("refs");
        let write = || {
            let mut file = temporary_in(&refs)?;
            file.write_all(commit.as_bytes())?;
            file.persist(refs.join("main"))?;
            io::Result::Ok(())
        };
        write().with_context(|| format!("write {}", refs.join("main").display()))?;
        Ok(self.snapshot_folder(commit))
    }

    /// The models in this repository that are complete or partly downloaded.
    pub fn stored(&self) -> Vec<StoredModel> {
        let mut stored = Vec::new();
        if let Some((snapshot, files)) = self.snapshot() {
            let offered: Vec<_> = files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
            if let Ok(ChosenFiles::Folder(chosen)) = choose(&offered, None) {
                let bytes = chosen.iter().map(|&index| files[index].bytes).sum();
                let complete = is_complete_snapshot(&snapshot);
                stored.push(StoredModel { name: self.repo.to_string(), bytes, complete, path: snapshot.clone() });
            }
            let ggufs = GgufParts::all(&offered);
            for gguf in &ggufs {
                let name = name::of_hub(&self.repo, Some(&choice_of(&ggufs, gguf)));
                let parts = gguf.complete();
                let first = parts.as_ref().ok().and_then(|parts| parts.first());
                let path = first.map_or(snapshot.clone(), |&first| snapshot.join(&files[first].name));
                stored.push(StoredModel { name, bytes: gguf.bytes, complete: parts.is_ok(), path });
            }
        }
        if stored.is_empty() {
            // Which file of an entry's page was begun is not known, but it is most likely the entry's.
            let name =
                catalogue().of_repo(&self.repo).map_or_else(|| self.repo.to_string(), |(entry, _)| entry.name.clone());
            let path = self.folder.clone();
            stored.push(StoredModel { name, bytes: self.bytes(), complete: false, path });
        }
        stored
    }

    /// Deletes the whole repository, or only the GGUF that `choice` names. Returns the number of bytes freed.
    pub fn remove(&self, choice: Option<&str>) -> Result<u64> {
        if !self.exists() {
            bail!("{} is not in the cache; `consort list` shows what is", self.repo);
        }
        let before = self.bytes();
        // Without a snapshot there is only what was begun.
        if let Some(choice) = choice.filter(|_| !self.snapshots().is_empty()) {
            self.unlink(choice)?;
            if !self.snapshots().iter().any(|snapshot| has_weights(snapshot)) {
                return self.remove(None);
            }
            self.remove_unused()?;
            return Ok(before.saturating_sub(self.bytes()));
        }
        fs::remove_dir_all(&self.folder).with_context(|| format!("delete {}", self.folder.display()))?;
        match fs::remove_dir_all(&self.locks) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("delete {}", self.locks.display()))
            }
            _ => Ok(before),
        }
    }

    /// Deletes the links of one GGUF from every snapshot.
    fn unlink(&self, choice: &str) -> Result<()> {
        let mut found = false;
        let mut error = ChoiceError::NothingToChoose(choice.to_owned());
        for snapshot in self.snapshots() {
            let files = files_of(&snapshot);
            let offered: Vec<_> = files.iter().map(|file| (file.name.as_str(), file.bytes)).collect();
            match choose(&offered, Some(choice)) {
                Ok(chosen) => {
                    for &index in chosen.files() {
                        let path = snapshot.join(&files[index].name);
                        fs::remove_file(&path).with_context(|| format!("delete {}", path.display()))?;
                    }
                    found = true;
                }
                Err(why) => error = why,
            }
        }
        if found { Ok(()) } else { Err(error).with_context(|| format!("look in the cache of {}", self.repo)) }
    }

    /// Deletes the blobs that no snapshot links to.
    fn remove_unused(&self) -> Result<()> {
        let mut used = BTreeSet::new();
        for snapshot in self.snapshots() {
            let targets = files_of(&snapshot).into_iter().map(|file| fs::canonicalize(snapshot.join(file.name)));
            used.extend(targets.collect::<io::Result<Vec<_>>>().context("follow the links of a snapshot")?);
        }
        let blobs = fs::canonicalize(self.folder.join("blobs")).context("find the blobs")?;
        for blob in fs::read_dir(&blobs).with_context(|| format!("list {}", blobs.display()))? {
            let path = blob.with_context(|| format!("list {}", blobs.display()))?.path();
            if !used.contains(&path) {
                fs::remove_file(&path).with_context(|| format!("delete {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// Whether nothing of a model is here.
    pub fn is_empty(&self) -> bool {
        self.snapshots().is_empty() && self.bytes() == 0
    }

    fn bytes(&self) -> u64 {
        let blobs = fs::read_dir(self.folder.join("blobs")).into_iter().flatten();
        blobs.filter_map(|blob| Some(blob.ok()?.metadata().ok()?.len())).sum()
    }

    pub fn snapshot_folder(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The snapshot that `refs/main` names.
    fn snapshot(&self) -> Option<(PathBuf, Vec<CachedFile>)> {
        let mut commit = String::new();
        let file = File::open(self.folder.join("refs/main")).ok()?;
        file.take(REF_BYTES_MAX).read_to_string(&mut commit).ok()?;
        let commit = commit.trim();
        let plain = !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let snapshot = plain.then(|| self.snapshot_folder(commit)).filter(|folder| folder.is_dir())?;
        let files = files_of(&snapshot);
        Some((snapshot, files))
    }

    fn snapshots(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.folder.join("snapshots")).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.is_dir()).collect()
    }
}

/// A temporary file, to be renamed when it is complete. Other users may read it, as all files of a cache.
pub fn temporary_in(folder: &Path) -> io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

/// The files of a snapshot, ordered by name. Broken links are left out.
fn files_of(snapshot: &Path) -> Vec<CachedFile> {
    fn visit(folder: &Path, prefix: &str, depth: usize, found: &mut Vec<CachedFile>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let file_name = entry.file_name();
            let Some(own_name) = file_name.to_str() else { continue };
            let Ok(metadata) = fs::metadata(entry.path()) else { continue };
            let name = format!("{prefix}{own_name}");
            if metadata.is_file() && found.len() < SNAPSHOT_FILES_MAX {
                found.push(CachedFile { name, bytes: metadata.len() });
            } else if metadata.is_dir() && depth < SNAPSHOT_DEPTH_MAX {
                visit(&entry.path(), &format!("{name}/"), depth + 1, found);
            }
        }
    }
    let mut found = Vec::new();
    visit(snapshot, "", 0, &mut found);
    found.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

fn has_weights(snapshot: &Path) -> bool {
    files_of(snapshot).iter().any(|file| file.name.ends_with(".gguf") || file.name.ends_with(".safetensors"))
}

/// Whether a snapshot has a tokenizer and every shard that its index names.
fn is_complete_snapshot(snapshot: &Path) -> bool {
    #[derive(Deserialize)]
    struct SafetensorsIndex {
        weight_map: std::collections::HashMap<String, String>,
    }
    let index = snapshot.join(INDEX);
    let shards = || {
        let file = File::open(&index).ok()?;
        let index: SafetensorsIndex = serde_json::from_reader(io::BufReader::new(file.take(INDEX_BYTES_MAX))).ok()?;
        Some(index.weight_map.into_values().collect::<BTreeSet<_>>())
    };
    let weights = snapshot.join("model.safetensors").is_file()
        || !index.is_file()
        || shards().is_some_and(|shards| shards.iter().all(|shard| snapshot.join(shard).is_file()));
    weights && snapshot.join("tokenizer.json").is_file()
}

#[cfg(unix)]
fn replace_link(target: &Path, _blob: &Path, link: &Path) -> io::Result<()> {
    match fs::remove_file(link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => std::os::unix::fs::symlink(target, link),
    }
}

/// Symbolic links need a privilege on other systems, so the file is copied.
#[cfg(not(unix))]
fn replace_link(_target: &Path, blob: &Path, link: &Path) -> io::Result<()> {
    fs::copy(blob, link).map(|_| ())
}
