//! `consort swarm status`: the peers of a swarm, how they are reached, and what they serve.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use anyhow::{Context, Result};
use blocks::node::SwarmNode;
use clap::Args;
use directory::{BlockRecord, ModelDigest, PeerId, Reach, ServiceState};
use libp2p_node::{ConnectedPeer, Identity};
use serde_json::json;

use super::super::chain::network_runtime;
use super::super::options::SwarmNetworkOptions;
use crate::terminal;

/// What is listed of a swarm for a person: connected peers, models, and blocks of a model, of each the most trusted.
const PEERS_MAX: usize = 64;
const MODELS_MAX: usize = 16;
const BLOCKS_MAX: usize = 64;

/// Show the peers of a swarm, how they are reached, and the layers that they serve
#[derive(Args, Debug)]
pub struct SwarmStatusArgs {
    #[command(flatten)]
    network: SwarmNetworkOptions,
    /// Seconds to look for peers
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    wait: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl SwarmStatusArgs {
    pub fn run(self) -> Result<()> {
        let runtime = network_runtime()?;
        let _entered = runtime.enter();
        let options = self.network.node_options(Identity::ephemeral())?;
        let node = SwarmNode::start(options, Vec::new()).context("join the swarm")?;
        let _following = node.follow(None);
        std::thread::sleep(Duration::from_secs(self.wait));
        let connected: BTreeMap<PeerId, ConnectedPeer> =
            node.handle().peers().into_iter().map(|peer| (peer.peer, peer)).collect();
        let records = node.view().records(None);
        if self.json {
            let peers: Vec<_> = connected.values().map(peer_json).collect();
            let blocks: Vec<_> = records.iter().map(block_json).collect();
            terminal::print_line(json!({ "peers": peers, "blocks": blocks }).to_string())?;
            return Ok(());
        }
        if connected.is_empty() && records.is_empty() {
            let why = node.handle().bootstrap_failure();
            let why = why.unwrap_or_else(|| "name one with --bootstrap".to_owned());
            terminal::print_line(format!("no peers were found: {why}"))?;
            return Ok(());
        }
        for peer in connected.values().take(PEERS_MAX) {
            let way = if peer.is_relayed { "over a relay" } else { "directly" };
            let time = peer.round_trip.map_or_else(String::new, |time| format!(", {:.1} ms", time.as_secs_f64() * 1e3));
            terminal::print_line(format!("{}  {way}{time}  {}", libp2p_node::peer_text(&peer.peer), peer.address))?;
        }
        print_more(connected.len(), PEERS_MAX, "peers")?;
        // Models and blocks in the order of the records: the most trusted first.
        let mut models: Vec<(ModelDigest, Vec<&BlockRecord>)> = Vec::new();
        let mut places: HashMap<ModelDigest, usize> = HashMap::new();
        for record in &records {
            let place = *places.entry(record.model).or_insert(models.len());
            if place == models.len() {
                models.push((record.model, Vec::new()));
            }
            models[place].1.push(record);
        }
        let count = models.len();
        for (model, mut blocks) in models.into_iter().take(MODELS_MAX) {
            let id: String = model.0[..4].iter().map(|byte| format!("{byte:02x}")).collect();
            terminal::print_line(format!("model {id}…"))?;
            let count = blocks.len();
            blocks.truncate(BLOCKS_MAX);
            blocks.sort_by_key(|block| (block.layers.start(), block.layers.end()));
            for block in blocks {
                let (speed, free) = (block.speed.layer_seconds * 1e3, block.kv_tokens_free);
                let peer = libp2p_node::peer_text(&block.peer);
                terminal::print_line(format!(
                    "  layers {}  {}  {speed:.2} ms a layer, {free} tokens free  {peer}",
                    block.layers,
                    state_text(block.state),
                ))?;
            }
            print_more(count, BLOCKS_MAX, "blocks")?;
        }
        print_more(count, MODELS_MAX, "models")
    }
}

/// How many there are beyond those that were listed.
fn print_more(count: usize, listed_max: usize, what: &str) -> Result<()> {
    if count > listed_max {
        terminal::print_line(format!("  and {} more {what}; --json lists all", count - listed_max))?;
    }
    Ok(())
}

fn state_text(state: ServiceState) -> &'static str {
    match state {
        ServiceState::Joining => "loading",
        ServiceState::Serving => "serving",
        ServiceState::Draining { .. } => "leaving",
    }
}

fn peer_json(peer: &ConnectedPeer) -> serde_json::Value {
    json!({
        "peer": libp2p_node::peer_text(&peer.peer),
        "address": peer.address.to_string(),
        "relayed": peer.is_relayed,
        "round_trip_ms": peer.round_trip.map(|time| time.as_secs_f64() * 1e3),
        "agent": peer.agent,
    })
}

fn block_json(record: &BlockRecord) -> serde_json::Value {
    let model: String = record.model.0.iter().map(|byte| format!("{byte:02x}")).collect();
    json!({
        "peer": libp2p_node::peer_text(&record.peer),
        "model": model,
        "layers": [record.layers.start(), record.layers.end()],
        "state": state_text(record.state),
        "format": record.dtype.to_string(),
        "reach": match record.reach { Reach::Direct => "direct", Reach::Relayed => "relayed" },
        "layer_ms": record.speed.layer_seconds * 1e3,
        "layer_tokens_per_s": record.speed.layer_tokens_per_s,
        "queue_ms": record.speed.queue_seconds * 1e3,
        "kv_tokens_free": record.kv_tokens_free,
    })
}
