//! A client for a Hugging Face hub, with three requests: list a repository, download a file, and search.
//!
//! Responses of a hub are not trusted: listings are bounded and their names checked, redirects are limited and never leave
//! HTTPS, and the token is sent to the hub only, not to redirect targets.

use std::io::{self, Read};
use std::time::Duration;

use serde::Deserialize;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

use super::name::{FileName, RepoId, percent_encoded};
use super::settings::HubAccess;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time until the first byte of a body, and between two reads.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum time for the whole of a listing that is not worth a longer wait, because there is another way.
const QUICK_TIMEOUT: Duration = Duration::from_secs(5);
const REDIRECTS_MAX: u32 = 5;
const LISTING_BYTES_MAX: u64 = 16 << 20;
const LISTING_FILES_MAX: usize = 20_000;
const SEARCH_BYTES_MAX: u64 = 4 << 20;
/// No file of any model is this large; a listing with such a size is wrong.
const FILE_BYTES_MAX: u64 = 1 << 40;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("HF_HUB_OFFLINE is set, so {0} is not asked")]
    Offline(String),
    #[error("cannot reach {endpoint}: {reason}")]
    Unreachable { endpoint: String, reason: String },
    #[error("{endpoint} has no public {repo}: check the spelling, or set HF_TOKEN if it is private or gated")]
    Hidden { endpoint: String, repo: RepoId },
    #[error("{endpoint} does not show {repo} to the owner of this token: check the spelling and HF_TOKEN")]
    TokenRefused { endpoint: String, repo: RepoId },
    #[error("{repo} is gated: accept its terms at {endpoint}/{repo}, then set HF_TOKEN to a token of that account")]
    Gated { endpoint: String, repo: RepoId },
    #[error("{endpoint} has no {what}: check the spelling")]
    NotFound { endpoint: String, what: String },
    #[error("{endpoint} asks to slow down (HTTP 429): try again later, or set HF_TOKEN")]
    TooManyRequests { endpoint: String },
    #[error("{endpoint} answered with HTTP {status}")]
    Status { endpoint: String, status: u16 },
    #[error("{endpoint} sent a listing of {repo} that makes no sense: {reason}")]
    BadListing { endpoint: String, repo: RepoId, reason: String },
    #[error("{endpoint} sent search results that make no sense: {reason}")]
    BadResults { endpoint: String, reason: String },
}

impl HubError {
    /// Whether the same request may succeed soon.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }

    /// Whether the hub has answered, and has no such repository for this user.
    pub fn is_about_repository(&self) -> bool {
        use HubError::{Gated, Hidden, NotFound, TokenRefused};
        matches!(self, Hidden { .. } | TokenRefused { .. } | Gated { .. } | NotFound { .. })
    }
}

/// A model that a search found.
#[derive(Debug, PartialEq, Eq)]
pub struct FoundModel {
    pub repo: RepoId,
    pub downloads: u64,
    pub likes: u64,
    /// Of its GGUF, if the hub says it.
    pub architecture: Option<String>,
}

/// The files of a repository at one commit.
#[derive(Debug)]
pub struct Listing {
    /// 40 hexadecimal digits.
    pub commit: String,
    pub files: Vec<RemoteFile>,
}

#[derive(Clone, Debug)]
pub struct RemoteFile {
    pub name: FileName,
    pub bytes: u64,
    pub digest: Digest,
}

/// The expected hash of a file. In hexadecimal it is also the name of the blob in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Digest {
    /// SHA-256 of the bytes, for large files.
    Sha256(String),
    /// The Git object id, for small files.
    GitBlob(String),
}

impl Digest {
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }
}

pub struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
    offline: bool,
}

impl Hub {
    pub fn new(access: HubAccess) -> Self {
        let HubAccess { endpoint, token, offline } = access;
        let https = endpoint.starts_with("https://");
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(https)
            .max_redirects(REDIRECTS_MAX)
            // A renamed repository redirects within the hub. Without TLS, the host's identity is not proven, so the token is
            // never forwarded.
            .redirect_auth_headers(if https { RedirectAuthHeaders::SameHost } else { RedirectAuthHeaders::Never })
            .timeout_resolve(Some(CONNECT_TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_recv_response(Some(STALL_TIMEOUT))
            .timeout_per_read(Some(STALL_TIMEOUT))
            .user_agent(concat!("consort/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Self { agent, endpoint, token, offline }
    }

    pub fn is_offline(&self) -> bool {
        self.offline
    }

    pub fn listing(&self, repo: &RepoId) -> Result<Listing, HubError> {
        self.listing_within(repo, None)
    }

    /// The same, or an error after a few seconds.
    pub fn quick_listing(&self, repo: &RepoId) -> Result<Listing, HubError> {
        self.listing_within(repo, Some(QUICK_TIMEOUT))
    }

    fn listing_within(&self, repo: &RepoId, limit: Option<Duration>) -> Result<Listing, HubError> {
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let response = self.get(&url, None, limit)?;
        self.check(response.status().as_u16(), &response, repo, || format!("repository {repo}"))?;
        let bad = |reason: String| HubError::BadListing { endpoint: self.endpoint.clone(), repo: repo.clone(), reason };
        parse_listing(&self.body(response, LISTING_BYTES_MAX)?.map_err(bad)?).map_err(bad)
    }

    /// Models with GGUF files that have the word in their names, those with the most downloads first.
    pub fn search(&self, word: &str, count_max: usize) -> Result<Vec<FoundModel>, HubError> {
        let word = percent_encoded(word);
        let what = "filter=gguf&sort=downloads&direction=-1&expand[]=downloads&expand[]=likes&expand[]=gguf";
        let url = format!("{}/api/models?search={word}&{what}&limit={count_max}", self.endpoint);
        let response = self.get(&url, None, Some(STALL_TIMEOUT))?;
        let (endpoint, status) = (self.endpoint.clone(), response.status().as_u16());
        match status {
            200..=299 => {}
            429 => return Err(HubError::TooManyRequests { endpoint }),
            status => return Err(HubError::Status { endpoint, status }),
        }
        let bad = |reason| HubError::BadResults { endpoint: self.endpoint.clone(), reason };
        parse_results(&self.body(response, SEARCH_BYTES_MAX)?.map_err(bad)?, count_max).map_err(bad)
    }

    /// The body of a response; the inner error is that it is too long.
    fn body(&self, response: Response<Body>, bytes_max: u64) -> Result<Result<Vec<u8>, String>, HubError> {
        let mut text = Vec::new();
        let mut body = response.into_body().into_reader().take(bytes_max + 1);
        body.read_to_end(&mut text).map_err(|error| self.unreachable(error))?;
        let is_long = text.len() as u64 > bytes_max;
        Ok(if is_long { Err(format!("it is longer than {} MiB", bytes_max >> 20)) } else { Ok(text) })
    }

    /// Requests a file's bytes from `start` on. Returns any status that is not an error.
    pub fn file(&self, repo: &RepoId, commit: &str, name: &FileName, start: u64) -> Result<Response<Body>, HubError> {
        let url = format!("{}/{repo}/resolve/{commit}/{}", self.endpoint, name.url_path());
        let response = self.get(&url, (start > 0).then(|| format!("bytes={start}-")), None)?;
        self.check(response.status().as_u16(), &response, repo, || format!("file {name} in {repo}"))?;
        Ok(response)
    }

    fn get(&self, url: &str, range: Option<String>, limit: Option<Duration>) -> Result<Response<Body>, HubError> {
        if self.offline {
            return Err(HubError::Offline(self.endpoint.clone()));
        }
        // Digests are of the uncompressed files, so compression is refused.
        let mut request = self.agent.get(url).header("Accept-Encoding", "identity");
        if let Some(range) = range {
            request = request.header("Range", range);
        }
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let request = request.config().timeout_global(limit).build();
        request.call().map_err(|error| self.unreachable(error))
    }

    fn unreachable(&self, error: impl Into<ureq::Error>) -> HubError {
        let reason = match error.into() {
            ureq::Error::HostNotFound => "no such host, or no network".to_owned(),
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                "connection refused".to_owned()
            }
            ureq::Error::Timeout(_) => "no answer in time".to_owned(),
            ureq::Error::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        HubError::Unreachable { endpoint: self.endpoint.clone(), reason }
    }

    fn check(
        &self,
        status: u16,
        response: &Response<Body>,
        repo: &RepoId,
        what: impl Fn() -> String,
    ) -> Result<(), HubError> {
        let (endpoint, repo) = (self.endpoint.clone(), repo.clone());
        let code = response.headers().get("x-error-code").and_then(|value| value.to_str().ok());
        Err(match (status, code) {
            (200..=299 | 416, _) => return Ok(()),
            (_, Some("GatedRepo")) | (403, _) => HubError::Gated { endpoint, repo },
            // The hub does not tell whether a repository is missing or private.
            (401, _) if self.token.is_none() => HubError::Hidden { endpoint, repo },
            (401, _) => HubError::TokenRefused { endpoint, repo },
            (404, _) => HubError::NotFound { endpoint, what: what() },
            (429, _) => HubError::TooManyRequests { endpoint },
            (status, _) => HubError::Status { endpoint, status },
        })
    }
}

/// The listing in the hub's format.
#[derive(Deserialize)]
struct WireListing {
    sha: String,
    siblings: Vec<WireFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireFile {
    rfilename: String,
    size: Option<u64>,
    blob_id: Option<String>,
    lfs: Option<WireLfs>,
}

#[derive(Deserialize)]
struct WireLfs {
    sha256: String,
    size: Option<u64>,
}

fn parse_listing(text: &[u8]) -> Result<Listing, String> {
    let wire: WireListing = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    if !is_hex(&wire.sha, 40) {
        return Err("its commit is not 40 hexadecimal digits".to_owned());
    }
    if wire.siblings.len() > LISTING_FILES_MAX {
        return Err(format!("it has more than {LISTING_FILES_MAX} files"));
    }
    let files = wire.siblings.into_iter().map(file).collect::<Result<_, _>>()?;
    Ok(Listing { commit: wire.sha, files })
}

fn file(wire: WireFile) -> Result<RemoteFile, String> {
    let name: FileName = wire.rfilename.parse().map_err(|error: super::name::NameError| error.to_string())?;
    let lfs_bytes = wire.lfs.as_ref().and_then(|lfs| lfs.size);
    let bytes = lfs_bytes.or(wire.size).ok_or_else(|| format!("it does not tell the size of {name}"))?;
    if bytes > FILE_BYTES_MAX {
        return Err(format!("it says that {name} has {bytes} bytes"));
    }
    let digest = match (wire.lfs, wire.blob_id) {
        (Some(lfs), _) if is_hex(&lfs.sha256, 64) => Digest::Sha256(lfs.sha256),
        (None, Some(id)) if is_hex(&id, 40) => Digest::GitBlob(id),
        _ => return Err(format!("it gives no checksum of {name}")),
    };
    Ok(RemoteFile { name, bytes, digest })
}

/// A model in the hub's format. What else there is does not matter.
#[derive(Deserialize)]
struct WireModel {
    id: String,
    #[serde(default)]
    downloads: Option<u64>,
    #[serde(default)]
    likes: Option<u64>,
    #[serde(default)]
    gguf: Option<WireGguf>,
}

#[derive(Deserialize)]
struct WireGguf {
    #[serde(default)]
    architecture: Option<String>,
}

/// The models whose names can be fetched, at most `count_max`.
fn parse_results(text: &[u8], count_max: usize) -> Result<Vec<FoundModel>, String> {
    const ARCHITECTURE_CHARS_MAX: usize = 40;
    let wire: Vec<WireModel> = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let is_word = |text: &String| {
        text.len() <= ARCHITECTURE_CHARS_MAX && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let found = wire.into_iter().filter_map(|model| {
        let architecture = model.gguf.and_then(|gguf| gguf.architecture).filter(is_word);
        let (downloads, likes) = (model.downloads.unwrap_or(0), model.likes.unwrap_or(0));
        Some(FoundModel { repo: model.id.parse().ok()?, downloads, likes, architecture })
    });
    Ok(found.take(count_max).collect())
}

fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    fn check(files: &str) -> Result<Listing, String> {
        parse_listing(format!(r#"{{"sha":"{COMMIT}","siblings":[{files}],"author":"x"}}"#).as_bytes())
    }

    #[test]
    fn a_listing_gives_names_sizes_and_checksums() {
        let sha256 = "a".repeat(64);
        let listing = check(&format!(
            r#"{{"rfilename":"config.json","size":3,"blobId":"{COMMIT}"}},
               {{"rfilename":"m.gguf","size":9,"blobId":"{COMMIT}","lfs":{{"sha256":"{sha256}","size":9,"pointerSize":1}}}}"#
        ))
        .unwrap();
        assert_eq!(listing.files[0].digest, Digest::GitBlob(COMMIT.into()));
        assert_eq!((listing.files[1].bytes, listing.files[1].digest.hex()), (9, sha256.as_str()));
    }

    #[test]
    fn search_results_are_bounded_and_have_names_that_can_be_fetched() {
        let text = r#"[{"id":"a/b","downloads":7,"likes":1,"gguf":{"architecture":"llama","total":9},"x":[]},
                       {"id":"../x"},{"id":"c/d","gguf":{"architecture":"ev\u001bil"}},{"id":"e/f"}]"#;
        let found = parse_results(text.as_bytes(), 2).unwrap();
        let repos: Vec<_> = found.iter().map(|model| model.repo.to_string()).collect();
        assert_eq!(repos, ["a/b", "c/d"]);
        assert_eq!((found[0].downloads, found[0].likes, found[0].architecture.as_deref()), (7, 1, Some("llama")));
        assert_eq!((found[1].downloads, found[1].architecture.as_deref()), (0, None));
        assert!(parse_results(b"{}", 2).is_err());
    }

    #[test]
    fn a_listing_that_makes_no_sense_is_refused() {
        for files in [
            format!(r#"{{"rfilename":"../x","size":3,"blobId":"{COMMIT}"}}"#),
            format!(r#"{{"rfilename":"x","blobId":"{COMMIT}"}}"#),
            format!(r#"{{"rfilename":"x","size":-1,"blobId":"{COMMIT}"}}"#),
            format!(r#"{{"rfilename":"x","size":18446744073709551615,"blobId":"{COMMIT}"}}"#),
            r#"{"rfilename":"x","size":3}"#.to_owned(),
            r#"{"rfilename":"x","size":3,"blobId":"../../etc"}"#.to_owned(),
            format!(r#"{{"rfilename":"x","size":3,"blobId":"{COMMIT}","lfs":{{"sha256":"../x"}}}}"#),
        ] {
            assert!(check(&files).is_err(), "{files}");
        }
        assert!(parse_listing(b"<html>").is_err());
        assert!(parse_listing(br#"{"sha":"../..","siblings":[]}"#).is_err());
    }
}
