//! The options of the HTTP server: addresses, API keys, TLS, origins.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use server::{ApiKeys, HeaderValue, Tls};

use super::logs::LogFormat;
use crate::bounded_file;
use crate::options::heading;

/// The maximum size of a file of API keys, certificates or a private key.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Args, Debug)]
#[command(next_help_heading = heading::SERVER)]
pub struct HttpOptions {
    /// Address to listen on; 0.0.0.0 is every address of this machine
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 is any free port
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// A second address for /health, /ready, /metrics and /status, which requests to the first cannot starve; on a loopback
    /// address it needs no API key
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub admin: Option<HostAndPort>,
    #[command(flatten)]
    pub keys: ApiKeyOptions,
    /// Name by which clients may call a server without API keys, beside localhost and addresses; may be repeated
    #[arg(long = "allowed-host", value_name = "NAME")]
    allowed_hosts: Vec<String>,
    /// TLS certificate chain (PEM): serve HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Origin that CORS allows, such as https://example.org, or *; may be repeated
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub cors: Vec<HeaderValue>,
    /// Model name in the API [default: the model's own name]; may be repeated for aliases
    #[arg(long = "served-model-name", value_name = "NAME")]
    pub names: Vec<String>,
    /// Maximum size of a request body, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = server::BODY_BYTES_MAX)]
    pub max_body: usize,
    /// Store no responses of /v1/responses: each request must contain its whole conversation
    #[arg(long)]
    pub no_store: bool,
    /// Seconds that running requests get to finish at shutdown
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// Show every request in a terminal, with times, as the log has them elsewhere
    #[arg(short, long)]
    pub verbose: bool,
    /// Log format, on standard error
    #[arg(long, value_enum, default_value_t)]
    pub log: LogFormat,
}

#[derive(Args, Clone, Debug)]
pub struct ApiKeyOptions {
    /// API key that clients must send; may be repeated, each key is a tenant of its own
    #[arg(long = "api-key", value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_keys: Vec<String>,
    /// File of API keys, one per line; it is read again on SIGHUP
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

/// A host, which may be a name, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAndPort {
    pub host: String,
    pub port: u16,
}

impl std::str::FromStr for HostAndPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (host, port) = text.rsplit_once(':')?;
            let host = match host.strip_prefix('[') {
                Some(address) => address.strip_suffix(']')?,
                None if host.contains(':') => return None,
                None => host,
            };
            (!host.is_empty()).then_some(Self { host: host.to_owned(), port: port.parse().ok()? })
        };
        parse().ok_or_else(|| "write it as 127.0.0.1:9000 or [::1]:9000".to_owned())
    }
}

impl HttpOptions {
    /// The names by which clients may call the server: those that the user gave.
    pub fn allowed_hosts(&self) -> Vec<String> {
        let bound = [Some(&self.host), self.admin.as_ref().map(|admin| &admin.host)];
        self.allowed_hosts.iter().chain(bound.into_iter().flatten()).cloned().collect()
    }

    pub fn tls(&self) -> Result<Option<Tls>> {
        let (Some(certificates), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        Ok(Some(Tls::from_pem(&read(certificates)?, &read(key)?)?))
    }
}

impl ApiKeyOptions {
    pub fn has_file(&self) -> bool {
        self.api_key_file.is_some()
    }

    /// The keys of the command line and of the file.
    pub fn keys(&self) -> Result<ApiKeys> {
        let file = self.api_key_file.as_deref().map(read).transpose()?.unwrap_or_default();
        let file = String::from_utf8(file).context("read the API keys: the file is not text")?;
        let keys = self.api_keys.iter().map(String::as_str).chain(ApiKeys::lines(&file));
        let keys = ApiKeys::new(keys)?;
        anyhow::ensure!(
            self.api_key_file.is_none() || !keys.is_empty(),
            "the file of API keys has no key in it: every client would have access"
        );
        Ok(keys)
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    bounded_file::read(path, FILE_BYTES_MAX).with_context(|| format!("read {}", path.display()))
}

/// Parses an origin: a scheme, a host and perhaps a port. The result is what browsers send, so without the scheme's own port.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let refused = || "an origin is written as https://example.org, http://localhost:3000 or *".to_owned();
    if text == "*" {
        return Ok(HeaderValue::from_static("*"));
    }
    let (scheme, authority) = text.split_once("://").ok_or_else(refused)?;
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let (host, port) = match authority.rsplit_once(':') {
        // The colons of an IPv6 address are within its brackets.
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let is_host =
        !host.is_empty() && host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._[]:".contains(&byte));
    let port = port.map(str::parse::<u16>).transpose().map_err(|_| refused())?;
    if !is_scheme || !is_host {
        return Err(refused());
    }
    let (scheme, host) = (scheme.to_ascii_lowercase(), host.to_ascii_lowercase());
    let own_port = match &*scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    };
    let port = port.filter(|port| Some(*port) != own_port).map(|port| format!(":{port}")).unwrap_or_default();
    HeaderValue::from_str(&format!("{scheme}://{host}{port}")).map_err(|_| refused())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_a_scheme_and_a_host() {
        for (text, expected) in [
            ("*", "*"),
            ("https://Example.org", "https://example.org"),
            ("http://localhost:3000", "http://localhost:3000"),
            ("http://[::1]:3000", "http://[::1]:3000"),
            ("http://[::1]", "http://[::1]"),
            ("https://example.org:443", "https://example.org"),
            ("HTTP://example.org:80", "http://example.org"),
            ("http://example.org:443", "http://example.org:443"),
            ("chrome-extension://abc", "chrome-extension://abc"),
        ] {
            assert_eq!(origin(text).unwrap(), expected, "{text}");
        }
        for text in
            ["nonsense", "", "https://", "example.org", "https://a.b/", "https://a.b/c", "http://a:x", "a b://c"]
        {
            assert!(origin(text).unwrap_err().starts_with("an origin is written as"), "{text}");
        }
    }

    #[test]
    fn an_admin_address_has_a_host_and_a_port() {
        for (text, host, port) in [("127.0.0.1:9000", "127.0.0.1", 9000), ("[::1]:0", "::1", 0), ("box:1", "box", 1)] {
            assert_eq!(text.parse(), Ok(HostAndPort { host: host.to_owned(), port }), "{text}");
        }
        for text in ["9000", ":9000", "127.0.0.1", "::1:9000", "[::1]9000", "a:b", "a:70000"] {
            assert!(text.parse::<HostAndPort>().is_err(), "{text}");
        }
    }
}
