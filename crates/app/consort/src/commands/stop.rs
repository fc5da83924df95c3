//! `consort stop`: ends a server of this user, unloads a model of one, or ends an answer.

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;

use crate::running_servers::{self, RunningServer};
use crate::server_client::{DEFAULT_URL, ServerClient, port, server_url};
use crate::terminal;
use crate::usage::UsageError;

/// How an id of /v1/responses begins.
const RESPONSE_PREFIX: &str = "resp_";
/// The tag of names that have none, in Ollama's API.
const LATEST: &str = ":latest";
/// After this time, what it waits for is told.
const PATIENCE_S: i64 = 1;

/// End a server, unload a model, or end an answer
///
/// A port or a URL names a server that you started on this machine; it finishes its answers and ends. A model's name unloads
/// that model at your servers, which load it again when it is asked for. An id such as resp_… ends that answer. Without a
/// name, your only server ends; if there are several, they are listed.
#[derive(Args, Debug)]
pub struct StopArgs {
    /// Port or URL of a server, name of a model, or id of an answer
    #[arg(value_name = "PORT|URL|MODEL|ID")]
    target: Option<String>,
    /// End all servers that you started on this machine
    #[arg(long, conflicts_with = "target")]
    all: bool,
    /// Do not wait for answers that are running
    #[arg(long)]
    now: bool,
    /// For a model or an answer: ask this server, which may be on another machine
    #[arg(long, value_name = "URL", value_parser = server_url, requires = "target")]
    url: Option<String>,
    /// API key, if the server has keys
    #[arg(long, value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

impl StopArgs {
    pub fn run(self) -> Result<()> {
        let servers = running_servers::list()?;
        let Some(target) = &self.target else { return self.end_servers(&servers) };
        if self.url.is_none()
            && let Some(named) = named_by(target)
        {
            let found = servers.iter().find(|server| named.is(&server.url));
            let server =
                found.with_context(|| format!("no server of yours on this machine is {target}{}", listed(&servers)))?;
            return self.end(server);
        }
        let urls: Vec<&str> = match &self.url {
            Some(url) => vec![url],
            None if servers.is_empty() => vec![DEFAULT_URL],
            None => servers.iter().map(|server| server.url.as_str()).collect(),
        };
        let mut failure = None;
        for url in urls {
            match end_within(&ServerClient { url, api_key: self.api_key.as_deref() }, target) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) => Err(error),
            None if target.starts_with(RESPONSE_PREFIX) => bail!("no server has the answer {target}"),
            None => {
                bail!("{target} is neither a model that is loaded nor a running answer: `consort ps` shows the models")
            }
        }
    }

    /// The only server, or all.
    fn end_servers(&self, servers: &[RunningServer]) -> Result<()> {
        match servers {
            [] => bail!("no server of yours runs on this machine"),
            [server] => self.end(server),
            servers if self.all => servers.iter().try_for_each(|server| self.end(server)),
            servers => {
                let names: Vec<_> = servers.iter().map(name).collect();
                let why = format!("several servers run: name one by its port, or use --all: {}", names.join(", "));
                Err(UsageError::new(why).into())
            }
        }
    }

    fn end(&self, server: &RunningServer) -> Result<()> {
        let context = || format!("end {}", name(server));
        let Some(process) = server.process().with_context(context)? else {
            return Ok(terminal::print_line(format!("{} has ended already", name(server)))?);
        };
        process.ask_to_end(self.now).with_context(context)?;
        if !process.wait(Some(PATIENCE_S)).with_context(context)? {
            terminal::note(&format!("{} finishes its answers; --now does not wait for them", name(server)));
            process.wait(None).with_context(context)?;
        }
        Ok(terminal::print_line(format!("{} has ended", name(server)))?)
    }
}

/// Whether the server had the model loaded, or had the answer. It has neither any more.
fn end_within(server: &ServerClient<'_>, target: &str) -> Result<bool> {
    if target.starts_with(RESPONSE_PREFIX) {
        return cancel(server, "/v1/responses", target);
    }
    Ok(unload(server, target)? || cancel(server, "/v1/answers", target)?)
}

/// Whether the server had the model loaded, and has unloaded it.
fn unload(server: &ServerClient<'_>, model: &str) -> Result<bool> {
    let Some(name) = loaded(server, model)? else { return Ok(false) };
    let asked = server.post("/api/generate", &json!({ "model": name, "keep_alive": 0 }))?;
    if asked.is_none() || loaded(server, model)?.is_some() {
        let url = server.url;
        bail!("the server at {url} keeps {model}: `consort stop {}` ends the server", port(url)?);
    }
    terminal::print_line(format!("{model} is unloaded at {}", server.url))?;
    Ok(true)
}

/// Whether the server had the answer, and has ended it.
fn cancel(server: &ServerClient<'_>, answers: &str, id: &str) -> Result<bool> {
    if !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-') {
        return Ok(false);
    }
    let ended = server.post(&format!("{answers}/{id}/cancel"), &json!({}))?.is_some();
    if ended {
        terminal::print_line(format!("{id} is ended at {}", server.url))?;
    }
    Ok(ended)
}

/// The name by which the server has the model loaded.
fn loaded(server: &ServerClient<'_>, model: &str) -> Result<Option<String>> {
    let reply = server.get("/api/ps")?;
    let untagged = |name: &str| name.strip_suffix(LATEST).unwrap_or(name).to_owned();
    let names = reply["models"].as_array().into_iter().flatten().filter_map(|model| model["name"].as_str());
    Ok(names.map(str::to_owned).find(|name| untagged(name) == untagged(model)))
}

/// A server, as users name it.
#[derive(Debug, PartialEq, Eq)]
enum ServerName {
    Port(u16),
    Url(String),
}

fn named_by(target: &str) -> Option<ServerName> {
    match target.parse() {
        Ok(port) => Some(ServerName::Port(port)),
        Err(_) if target.contains("://") => server_url(target).ok().map(ServerName::Url),
        Err(_) => None,
    }
}

impl ServerName {
    fn is(&self, url: &str) -> bool {
        match self {
            Self::Port(own) => port(url).is_ok_and(|port| port == *own),
            Self::Url(own) => own.replace("://localhost", "://127.0.0.1") == url,
        }
    }
}

fn name(server: &RunningServer) -> String {
    format!("the server at {} (process {})", server.url, server.pid)
}

fn listed(servers: &[RunningServer]) -> String {
    let urls: Vec<_> = servers.iter().map(|server| server.url.as_str()).collect();
    if urls.is_empty() { String::new() } else { format!(": there are {}", urls.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_a_port_and_a_word_is_a_model() {
        assert_eq!(named_by("8000"), Some(ServerName::Port(8000)));
        assert_eq!(named_by("http://localhost:8000/"), Some(ServerName::Url("http://localhost:8000".to_owned())));
        for word in ["qwen3:4b", "owner/name", "70000", "resp_1"] {
            assert_eq!(named_by(word), None, "{word}");
        }
        assert!(
            ServerName::Port(8000).is("http://127.0.0.1:8000") && !ServerName::Port(800).is("http://127.0.0.1:8000")
        );
        assert!(ServerName::Url("http://localhost:8000".to_owned()).is("http://127.0.0.1:8000"));
    }
}
