//! The locations of the model store, from the environment: the variables of Hugging Face's own tools.

use std::env;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};

const ENDPOINT: &str = "https://huggingface.co";
const TOKEN_BYTES_MAX: u64 = 4096;

#[derive(Debug)]
pub struct Settings {
    /// The folder that contains the `models--owner--name` folders.
    pub hub_cache: PathBuf,
    /// consort's own cache, for models that do not come from a hub.
    pub own_cache: PathBuf,
    /// The file of aliases.
    pub aliases: PathBuf,
    pub token_file: PathBuf,
    /// The hub, as the environment names it. Checked only when it is needed.
    pub hub: HubVariables,
}

/// What the environment says of the hub.
#[derive(Debug, Default)]
pub struct HubVariables {
    pub endpoint: Option<String>,
    pub token: Option<String>,
    pub offline: bool,
}

/// How to reach the hub. Read only when the hub is needed, so that wrong settings do not matter for a cached model.
#[derive(Debug)]
pub struct HubAccess {
    /// Scheme and host of the hub, without a slash at the end.
    pub endpoint: String,
    pub token: Option<String>,
    /// Never send requests to the hub.
    pub offline: bool,
}

impl Settings {
    pub fn from_environment() -> Result<Self> {
        let cache = match path("XDG_CACHE_HOME") {
            Some(path) => path,
            None => env::home_dir().context("no home folder: set HOME, or HF_HOME and XDG_CACHE_HOME")?.join(".cache"),
        };
        let hf_home = path("HF_HOME").unwrap_or_else(|| cache.join("huggingface"));
        let hub_cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        Ok(Self {
            hub_cache: hub_cache.unwrap_or_else(|| hf_home.join("hub")),
            own_cache: cache.join("consort"),
            aliases: Self::own_configuration().unwrap_or_else(|_| cache.join("consort")).join("aliases.json"),
            token_file: path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token")),
            hub: HubVariables {
                endpoint: variable("HF_ENDPOINT"),
                token: variable("HF_TOKEN"),
                offline: variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            },
        })
    }

    /// The folder of keys and identities.
    pub fn own_configuration() -> Result<PathBuf> {
        let configuration = match path("XDG_CONFIG_HOME").filter(|path| path.is_absolute()) {
            Some(configuration) => configuration,
            None => env::home_dir().context("no home folder: set HOME or XDG_CONFIG_HOME")?.join(".config"),
        };
        Ok(configuration.join("consort"))
    }

    /// The folder of what is kept between runs and can be lost.
    pub fn own_state() -> Result<PathBuf> {
        let state = match path("XDG_STATE_HOME").filter(|path| path.is_absolute()) {
            Some(state) => state,
            None => env::home_dir().context("no home folder: set HOME or XDG_STATE_HOME")?.join(".local/state"),
        };
        Ok(state.join("consort"))
    }

    pub fn access(&self) -> Result<HubAccess> {
        Ok(HubAccess {
            endpoint: endpoint(self.hub.endpoint.as_deref().unwrap_or(ENDPOINT))?,
            token: token(self.hub.token.clone(), &self.token_file)?,
            offline: self.hub.offline,
        })
    }
}

fn endpoint(text: &str) -> Result<String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    match host {
        Some(host) if !host.is_empty() && !host.contains(char::is_whitespace) => {
            Ok(text.trim_end_matches('/').to_owned())
        }
        _ => bail!("HF_ENDPOINT must begin with https:// or http://, not be `{text}`"),
    }
}

/// The token from the environment, else the one that `hf auth login` stored.
fn token(variable: Option<String>, file: &PathBuf) -> Result<Option<String>> {
    let text = match variable {
        Some(text) => text,
        None if fs::metadata(file).is_ok_and(|file| file.is_file() && file.len() <= TOKEN_BYTES_MAX) => {
            fs::read_to_string(file).with_context(|| format!("read the hub token in {}", file.display()))?
        }
        None => return Ok(None),
    };
    let text = text.trim();
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        bail!("the hub token has characters that no token has: check HF_TOKEN and {}", file.display());
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// Reads a path from a variable. It need not be UTF-8.
fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_needs_a_scheme_and_loses_its_slash() {
        assert_eq!(endpoint("http://127.0.0.1:80/").unwrap(), "http://127.0.0.1:80");
        for text in ["huggingface.co", "ftp://x", "https://", "https://a b"] {
            assert!(endpoint(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_token_file_counts_only_without_the_variable() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("token");
        assert_eq!(token(None, &file).unwrap(), None);
        fs::write(&file, "hf_file\n").unwrap();
        assert_eq!(token(None, &file).unwrap().as_deref(), Some("hf_file"));
        assert_eq!(token(Some("hf_env".into()), &file).unwrap().as_deref(), Some("hf_env"));
        assert!(token(Some("two words".into()), &file).is_err());
    }
}
