//! `ServerClient`: requests to a running server, for the commands that ask it or change it.

use std::io::{self, Read};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use ureq::Agent;
use ureq::http::{Response, Uri};

/// The address of `consort serve` without options.
pub const DEFAULT_URL: &str = "http://127.0.0.1:8000";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const REPLY_BYTES_MAX: u64 = 4 << 20;

pub struct ServerClient<'a> {
    /// Scheme, host and perhaps a port and a path, without a slash at the end.
    pub url: &'a str,
    pub api_key: Option<&'a str>,
}

impl ServerClient<'_> {
    /// A path that every consort server has.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.find(path)?.ok_or_else(|| self.not_ours(path, "it answered with HTTP 404"))
    }

    /// `None`: the server has no such path.
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        let mut request = agent().get(self.address(path));
        if let Some(key) = self.bearer() {
            request = request.header("Authorization", key);
        }
        self.reply(path, request.call())
    }

    /// `None`: the server has no such path, or not what the request is about.
    pub fn post(&self, path: &str, body: &Value) -> Result<Option<Value>> {
        let mut request = agent().post(self.address(path)).header("Content-Type", "application/json");
        if let Some(key) = self.bearer() {
            request = request.header("Authorization", key);
        }
        self.reply(path, request.send(body.to_string()))
    }

    fn address(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    fn bearer(&self) -> Option<String> {
        self.api_key.map(|key| format!("Bearer {key}"))
    }

    fn reply(&self, path: &str, response: Result<Response<ureq::Body>, ureq::Error>) -> Result<Option<Value>> {
        let response = response.map_err(|error| self.unreachable(error))?;
        let status = response.status().as_u16();
        match status {
            401 | 403 if self.api_key.is_none() => {
                bail!("the server at {} wants a key: give it by --api-key or CONSORT_API_KEY", self.url)
            }
            401 | 403 => bail!("the server at {} does not know this key", self.url),
            404 | 405 => return Ok(None),
            _ => {}
        }
        let mut body = Vec::new();
        let mut reader = response.into_body().into_reader().take(REPLY_BYTES_MAX + 1);
        reader.read_to_end(&mut body).map_err(|error| self.unreachable(error))?;
        ensure!(body.len() as u64 <= REPLY_BYTES_MAX, self.not_ours(path, "its reply has no end"));
        let reply: Result<Value, _> = serde_json::from_slice(&body);
        match (status, reply) {
            (200..=299, Ok(reply)) => Ok(Some(reply)),
            (200..=299, Err(_)) => Err(self.not_ours(path, "its reply is something else")),
            (_, Ok(reply)) if error_message(&reply).is_some() => {
                let message = error_message(&reply).unwrap_or_default();
                bail!("the server at {} refuses: {message}", self.url)
            }
            _ => Err(self.not_ours(path, &format!("it answered with HTTP {status}"))),
        }
    }

    fn not_ours(&self, path: &str, why: &str) -> anyhow::Error {
        anyhow!("{} is no consort server: asked for {path}, {why}", self.url)
    }

    fn unreachable(&self, error: impl Into<ureq::Error>) -> anyhow::Error {
        let reason = match error.into() {
            ureq::Error::HostNotFound => "there is no such host".to_owned(),
            ureq::Error::Timeout(_) => "no answer in time".to_owned(),
            ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                "connection refused; `consort serve` starts one".to_owned()
            }
            ureq::Error::Io(error) => error.to_string(),
            error => error.to_string(),
        };
        anyhow!("no server answers at {}: {reason}", self.url)
    }
}

/// The message of an error body in OpenAI's or Ollama's format.
fn error_message(body: &Value) -> Option<&str> {
    body["error"]["message"].as_str().or(body["error"].as_str())
}

fn agent() -> Agent {
    Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        // A server on this machine or in this network is not behind a proxy.
        .proxy(None)
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(REPLY_TIMEOUT))
        .timeout_recv_body(Some(REPLY_TIMEOUT))
        .user_agent(concat!("consort/", env!("CARGO_PKG_VERSION")))
        .build()
        .new_agent()
}

/// Parses the address of a server: scheme and host, perhaps a port and a path.
pub fn server_url(text: &str) -> Result<String, String> {
    let wrong = || "write it as http://HOST:PORT or https://HOST:PORT".to_owned();
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    let plain = known && uri.host().is_some_and(|host| !host.is_empty()) && uri.query().is_none();
    if plain { Ok(text.trim_end_matches('/').to_owned()) } else { Err(wrong()) }
}

/// The port of an address that [`server_url`] accepts.
pub fn port(url: &str) -> Result<u16> {
    let uri: Uri = url.parse().context("the address of a server")?;
    Ok(uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_a_scheme_and_loses_its_slash() {
        assert_eq!(server_url("http://127.0.0.1:8000/"), Ok("http://127.0.0.1:8000".to_owned()));
        assert_eq!(server_url("https://a.example/llm"), Ok("https://a.example/llm".to_owned()));
        for text in ["", "localhost:8000", "127.0.0.1", "ftp://x", "http://", "http://a b", "http://a/?x=1"] {
            assert!(server_url(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_without_a_port_has_that_of_its_scheme() {
        for (url, expected) in [("http://a:8000", 8000), ("http://[::1]:9", 9), ("http://a", 80), ("https://a/b", 443)]
        {
            assert_eq!(port(url).unwrap(), expected, "{url}");
        }
    }
}
