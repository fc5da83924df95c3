//! Starts a group of rank processes.

use std::env;
use std::path::{self, PathBuf};

use anyhow::{Context, Result};
use ranks::group::{Group, GroupConfig, Hosts};
use ranks::protocol::shard::ShardSpec;
use types::LayerRange;

use super::OpenedModel;
use crate::placement::{RankHosts, RankPlacement};

/// Splits the layers of a block, or those of the whole model. `progress` is told how many layers are loaded.
pub fn start(
    ranks: &RankPlacement,
    model: &OpenedModel<'_>,
    block: Option<LayerRange>,
    progress: &mut dyn FnMut(usize),
) -> Result<Group> {
    let OpenedModel { path, checkpoint, options, cpu } = *model;
    // Other hosts have the model under the given path, so symbolic links are not resolved here.
    let path = if ranks.hosts.is_some() { path::absolute(path) } else { path.canonicalize() }
        .with_context(|| format!("find {}", path.display()))?;
    let path = path.to_str().context("the path of the model is not valid UTF-8")?.to_owned();
    let layers = checkpoint.description().layers.len();
    let config = GroupConfig {
        world: ranks.world,
        program: current_executable(),
        model_id: "model".to_owned(),
        shard: match block {
            Some(layers) => ShardSpec::new(path, &options, cpu).with_layers(layers),
            None => ShardSpec::new(path, &options, cpu),
        },
        limits: options.limits,
        vocab: checkpoint.description().vocab,
        hidden: checkpoint.description().hidden,
        digest: checkpoint.digest(),
        deadlines: ranks.deadlines,
        environment: Vec::new(),
        hosts: ranks.hosts.as_ref().map(hosts).transpose()?,
    };
    // This process holds no weights, only what the digest has read of them.
    checkpoint.release();
    Group::start(config, &mut |done| progress(done.min(layers))).context("start the ranks")
}

fn hosts(hosts: &RankHosts) -> Result<Hosts> {
    Ok(Hosts { addresses: hosts.addresses.clone(), key: hosts.key.key()?, activations: hosts.activations })
}

/// The path of the running executable. On Linux it is valid even if the file was replaced.
pub fn current_executable() -> PathBuf {
    if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { env::current_exe().unwrap_or_default() }
}
