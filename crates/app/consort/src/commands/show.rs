//! `consort show`: what a model on this machine is, and what it would need here.

mod report;

use std::io::{Write, stdout};

use anyhow::{Context, Result};
use clap::Args;
use model::{Checkpoint, Description, FeedForward};
use ranks::memory_available;
use text::{SpecialTokens, Tokenizer};
use types::TokenId;

use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{CONTEXT_DEFAULT, ModelOption, ModelOptions};
use crate::store::{ModelFiles, Store};
use crate::terminal;
use crate::text_assets::{TextAssets, template_source};
use report::{MemoryNeed, ModelReport, NamedToken, WeightFormat};

/// Numbers of ranks up to this one are tried.
const RANKS_SHOWN_MAX: u16 = 16;
/// The keys of a GGUF's metadata that are shown.
const METADATA: [&str; 6] = [
    "general.name",
    "general.organization",
    "general.author",
    "general.license",
    "general.quantized_by",
    "general.url",
];

/// Show what a model is, and what it would need on this machine
///
/// The options of how a model runs, such as --context, --quant and --tensor-parallel, change what it would need.
#[derive(Args, Debug)]
pub struct ShowArgs {
    /// Model on this machine: a name as `consort list` prints it, a folder or a .gguf file
    #[arg(required_unless_present = "model_option", conflicts_with = "model_option")]
    model: Option<String>,
    #[command(flatten)]
    option: ModelOption,
    /// Print the chat template and nothing else
    #[arg(long, conflicts_with = "json")]
    template: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: ModelOptions,
}

impl ShowArgs {
    pub fn run(self) -> Result<()> {
        let config = ModelConfig::without_key(&self.options)?;
        let model = self.model.or(self.option.model_option).context("name a model")?;
        let files = Store::from_environment()?.find(&model)?;
        let checkpoint = Checkpoint::open(&files.path).context("open the model")?;
        if self.template {
            let template = template_source(&files.path, &checkpoint)?;
            let template = template.context("the model has no chat template")?;
            return Ok(terminal::print_line(template)?);
        }
        let report = report(&config, files, &checkpoint)?;
        match self.json {
            true => terminal::print_line(serde_json::to_string(&report)?)?,
            false => write!(stdout(), "{report}")?,
        }
        Ok(())
    }
}

fn report(config: &ModelConfig, files: ModelFiles, checkpoint: &Checkpoint) -> Result<ModelReport> {
    let description = checkpoint.description();
    let stored = checkpoint.stored_formats();
    let parameters = stored.iter().map(|format| format.elements).sum();
    let (feed_forward, experts, experts_used) = match description.layers[0].feed_forward {
        FeedForward::Dense { inner } => (inner, None, None),
        FeedForward::Experts { inner, routing } => (inner, Some(routing.experts), Some(routing.chosen)),
    };
    let text = TextAssets::of(&files, checkpoint);
    let tokens = |ids: fn(&Tokenizer) -> &[TokenId]| {
        text.as_ref().map_or_else(|_| Vec::new(), |text| named(&text.tokenizer, ids(&text.tokenizer)))
    };
    let capacity = RequestedCapacity::full(1, config.execution.context(checkpoint, CONTEXT_DEFAULT)?, 1);
    let need = memory_need(config, checkpoint, capacity);
    Ok(ModelReport {
        architecture: description.architecture.name,
        parameters,
        active_parameters: experts.map(|_| parameters.saturating_sub(idle_parameters(description))),
        layers: description.layers.len(),
        hidden: description.hidden,
        heads: description.heads,
        kv_heads: description.kv_heads,
        head_dim: description.head_dim,
        feed_forward,
        experts,
        experts_used,
        vocabulary: description.vocab,
        context: description.positions_max,
        sliding_window: description.layers.iter().find_map(|layer| layer.window),
        tied_embeddings: description.tied,
        weights: stored.into_iter().map(WeightFormat::from).collect(),
        chat_template: text.as_ref().is_ok_and(|text| text.template.is_some()),
        bos_tokens: tokens(Tokenizer::prefix_ids),
        eos_tokens: tokens(Tokenizer::eos_ids),
        generation_defaults: text.as_ref().map(|text| text.defaults.clone()).unwrap_or_default(),
        metadata: metadata(checkpoint),
        text_problem: text.as_ref().err().map(|error| format!("{error:#}")),
        load_problem: need.as_ref().err().map(|error| format!("{error:#}")),
        need: need.ok(),
        ranks: config.possible_ranks(checkpoint, capacity, RANKS_SHOWN_MAX)?,
        name: files.name,
        path: files.path,
    })
}

fn memory_need(config: &ModelConfig, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Result<MemoryNeed> {
    let shares = config.footprint(checkpoint, capacity)?;
    Ok(MemoryNeed::new(&shares, capacity.positions, config.placement.ranks(), memory_available()))
}

/// The weights of the experts that a token does not use.
fn idle_parameters(description: &Description) -> u64 {
    let idle = description.layers.iter().map(|layer| match layer.feed_forward {
        FeedForward::Dense { .. } => 0,
        FeedForward::Experts { inner, routing } => {
            3 * inner as u64 * description.hidden as u64 * routing.experts.saturating_sub(routing.chosen) as u64
        }
    });
    idle.sum()
}

fn named(tokenizer: &Tokenizer, ids: &[TokenId]) -> Vec<NamedToken> {
    let named = |&id: &TokenId| NamedToken { id: id.0, text: tokenizer.decode(&[id], SpecialTokens::Show) };
    ids.iter().map(named).collect()
}

fn metadata(checkpoint: &Checkpoint) -> Vec<(&'static str, String)> {
    let Some(file) = checkpoint.gguf() else { return Vec::new() };
    let found = METADATA.iter().filter_map(|&key| Some((key, file.get(key)?.as_str()?.to_owned())));
    found.collect()
}
