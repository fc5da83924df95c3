//! `consort ps`: what running servers serve, what they are doing, and on which machines.

mod machines;
mod status;

use std::io::{Write, stdout};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::{Value, json};

use crate::running_servers::{self, RunningServer};
use crate::server_client::{DEFAULT_URL, ServerClient, server_url};
use crate::terminal;
use machines::MachinesReply;
use status::StatusReply;

/// Show what servers serve, and the machines, ranks and peers that run it
///
/// For each model: state, memory, requests. Without --url: the servers that you started on this machine, else the one at http://127.0.0.1:8000.
#[derive(Args, Debug)]
pub struct PsArgs {
    /// Address of a server
    #[arg(long, value_name = "URL", value_parser = server_url)]
    url: Option<String>,
    /// API key, if the server has keys
    #[arg(long, value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print a line of JSON for each model: its /status, and its /v1/cluster as `cluster`
    #[arg(long)]
    json: bool,
}

impl PsArgs {
    pub fn run(self) -> Result<()> {
        let servers = match self.url {
            // Where there are no such files, the usual address may still have a server.
            None => running_servers::list().unwrap_or_default(),
            Some(_) => Vec::new(),
        };
        let servers: Vec<(&str, Option<&RunningServer>)> = match &self.url {
            Some(url) => vec![(url, None)],
            None if servers.is_empty() => vec![(DEFAULT_URL, None)],
            None => servers.iter().map(|server| (server.url.as_str(), Some(server))).collect(),
        };
        let mut failed = 0;
        for (index, (url, server)) in servers.iter().enumerate() {
            match self.show(url, *server, index) {
                Err(error) if servers.len() > 1 => {
                    failed += 1;
                    terminal::note(&format!("{error:#}"));
                }
                shown => shown?,
            }
        }
        ensure!(failed < servers.len(), "no server of yours told what it serves");
        Ok(())
    }

    /// The server that is `index` in the list.
    fn show(&self, url: &str, server: Option<&RunningServer>, index: usize) -> Result<()> {
        let client = ServerClient { url, api_key: self.api_key.as_deref() };
        // Before anything is printed: the server may want a key.
        let queries = queries(&client)?;
        let mut out = stdout();
        if let Some(server) = server.filter(|_| !self.json) {
            let space = if index > 0 { "\n" } else { "" };
            writeln!(out, "{space}{url}, process {}", server.pid)?;
        }
        for query in queries {
            let status = client.get(&format!("/status{query}"))?;
            let cluster = client.find(&format!("/v1/cluster{query}"))?;
            if self.json {
                let mut line = status;
                if let Value::Object(fields) = &mut line {
                    fields.insert("url".to_owned(), json!(url));
                    fields.insert("process".to_owned(), json!(server.map(|server| server.pid)));
                    fields.insert("cluster".to_owned(), cluster.unwrap_or_default());
                }
                terminal::print_line(line)?;
                continue;
            }
            let not_ours = || format!("{url} is no consort server: its /status is something else");
            let status: StatusReply = serde_json::from_value(status).with_context(not_ours)?;
            // A server of another version may have another form of it.
            let machines = cluster.and_then(|cluster| serde_json::from_value::<MachinesReply>(cluster).ok());
            write!(out, "{status}{}", machines.unwrap_or_default())?;
        }
        Ok(())
    }
}

/// What to add to paths for each model that is loaded. A server of one model is asked without a name.
fn queries(client: &ServerClient<'_>) -> Result<Vec<String>> {
    let loaded = client.find("/api/ps")?.unwrap_or_default();
    let names = loaded["models"].as_array().into_iter().flatten().filter_map(|model| model["name"].as_str());
    let names: Vec<_> = names.collect();
    Ok(match &names[..] {
        [] | [_] => vec![String::new()],
        names => names.iter().map(|name| format!("?model={}", in_query(name))).collect(),
    })
}

/// A text as the value of a query.
fn in_query(text: &str) -> String {
    let encoded = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encoded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_a_model_is_one_value_of_a_query() {
        assert_eq!(in_query("owner/name:Q4_K_M"), "owner%2Fname%3AQ4_K_M");
        assert_eq!(in_query("a b&c=ü"), "a%20b%26c%3D%C3%BC");
    }
}
