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

/// Show what servers serve: model, state, memory, requests, and the machines, ranks and peers that run it
///
/// Without --url: the servers that you started on this machine, else the one at http://127.0.0.1:8000.
#[derive(Args, Debug)]
pub struct PsArgs {
    /// Address of a server
    #[arg(long, value_name = "URL", value_parser = server_url)]
    url: Option<String>,
    /// API key, if the server has keys
    #[arg(long, value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// Print a line of JSON for each server: its /status, and its /v1/cluster as `cluster`
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
        let (status, cluster) = (client.get("/status")?, client.find("/v1/cluster")?);
        if self.json {
            let mut line = status;
            if let Value::Object(fields) = &mut line {
                fields.insert("url".to_owned(), json!(url));
                fields.insert("process".to_owned(), json!(server.map(|server| server.pid)));
                fields.insert("cluster".to_owned(), cluster.unwrap_or_default());
            }
            return Ok(terminal::print_line(line)?);
        }
        let not_ours = || format!("{url} is no consort server: its /status is something else");
        let status: StatusReply = serde_json::from_value(status).with_context(not_ours)?;
        // A server of another version may have another form of it.
        let machines: MachinesReply = cluster.and_then(|cluster| serde_json::from_value(cluster).ok()).unwrap_or_default();
        let mut out = stdout();
        if let Some(server) = server {
            let space = if index > 0 { "\n" } else { "" };
            writeln!(out, "{space}{url}, process {}", server.pid)?;
        }
        write!(out, "{status}{machines}")?;
        Ok(())
    }
}
