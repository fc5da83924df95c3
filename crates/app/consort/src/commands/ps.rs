//! `consort ps`: the model that a running server serves, and what it is doing.

mod status;

use std::io::{self, Read, Write, stdout};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use ureq::Agent;
use ureq::http::Uri;

use crate::terminal;
use status::StatusReply;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const REPLY_BYTES_MAX: u64 = 4 << 20;

/// Show what a running server serves: model, state, memory, requests
#[derive(Args, Debug)]
pub struct PsArgs {
    /// Address of the server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000", value_parser = server_url)]
    url: String,
    /// API key, if the server has keys
    #[arg(long, value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print the server's /status as JSON
    #[arg(long)]
    json: bool,
}

impl PsArgs {
    pub fn run(self) -> Result<()> {
        let reply = self.request()?;
        let not_ours = || format!("{} is no consort server: its /status is something else", self.url);
        if self.json {
            let json: serde_json::Value = serde_json::from_slice(&reply).with_context(not_ours)?;
            terminal::print_line(json)?;
        } else {
            let status: StatusReply = serde_json::from_slice(&reply).with_context(not_ours)?;
            write!(stdout(), "{status}")?;
        }
        Ok(())
    }

    /// The body of `/status`.
    fn request(&self) -> Result<Vec<u8>> {
        let agent = Agent::config_builder()
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
            .new_agent();
        let mut request = agent.get(format!("{}/status", self.url));
        if let Some(key) = &self.api_key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let response = request.call().map_err(|error| self.unreachable(error))?;
        match response.status().as_u16() {
            200 => {}
            401 | 403 if self.api_key.is_none() => {
                bail!("the server at {} wants a key: give it by --api-key or CONSORT_API_KEY", self.url)
            }
            401 | 403 => bail!("the server at {} does not know this key", self.url),
            status => bail!("{} is no consort server: it answered /status with HTTP {status}", self.url),
        }
        let mut body = Vec::new();
        let mut reader = response.into_body().into_reader().take(REPLY_BYTES_MAX + 1);
        reader.read_to_end(&mut body).map_err(|error| self.unreachable(error))?;
        ensure!(body.len() as u64 <= REPLY_BYTES_MAX, "{} is no consort server: its /status has no end", self.url);
        Ok(body)
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
        anyhow::anyhow!("no server answers at {}: {reason}", self.url)
    }
}

/// Parses the address of a server: scheme and host, perhaps a port and a path before `/status`.
fn server_url(text: &str) -> Result<String, String> {
    let wrong = || "write it as http://HOST:PORT or https://HOST:PORT".to_owned();
    let uri: Uri = text.parse().map_err(|_| wrong())?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    let plain = known && uri.host().is_some_and(|host| !host.is_empty()) && uri.query().is_none();
    if plain { Ok(text.trim_end_matches('/').to_owned()) } else { Err(wrong()) }
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
}
