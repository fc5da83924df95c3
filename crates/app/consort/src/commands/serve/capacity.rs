//! How much a server can run at once: the size of its KV cache, and its longest context.

use std::num::NonZeroUsize;

use anyhow::Result;
use clap::Args;
use kernels::PAGE_TOKENS;
use model::{Checkpoint, Footprint};
use ranks::memory_available;

use crate::model_config::{ModelConfig, RequestedCapacity};
use crate::options::{bytes, heading};
use crate::placement::Placement;
use crate::usage::UsageError;

/// The default context, if the model supports that many tokens.
const CONTEXT_DEFAULT: usize = 32 << 10;
/// The default context of a model that shares the memory with others.
const SHARED_CONTEXT_DEFAULT: usize = 8 << 10;
/// By default the KV cache holds no more than this many full contexts.
const CONTEXTS_MAX: usize = 16;
/// The default size of the KV cache of a cluster, in full contexts.
const CLUSTER_CONTEXTS: usize = 2;
/// By default the KV cache gets one part in this many of the memory that the weights leave free.
const KV_MEMORY_DIVISOR: u64 = 3;
/// Assumed where the system does not report its free memory.
const MEMORY_DEFAULT: u64 = 8 << 30;

/// How much of the memory a model is given by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Share {
    /// It is the only one: a part of what the weights leave.
    Most,
    /// There are others: one context.
    Least,
}

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::MACHINE)]
pub struct CapacityOptions {
    /// Size of the KV cache in tokens, all requests together [default: a third of the memory that the weights leave]
    #[arg(long, value_name = "TOKENS")]
    kv_tokens: Option<NonZeroUsize>,
    /// Size of the KV cache in memory, such as 2G or 512M
    #[arg(long, value_name = "BYTES", value_parser = bytes, conflicts_with = "kv_tokens")]
    kv_memory: Option<u64>,
    /// Maximum requests that run at once; further requests are queued
    #[arg(long, value_name = "COUNT", default_value = "64")]
    max_running: NonZeroUsize,
}

impl CapacityOptions {
    /// The capacity to load the model with, and the bytes of the KV cache. By default the context is as long as the memory
    /// beside the weights allows.
    pub fn capacity(
        &self,
        model: &ModelConfig,
        checkpoint: &Checkpoint,
        draft_tokens: usize,
        share: Share,
    ) -> Result<(RequestedCapacity, u64)> {
        if self.kv_memory.is_some() && matches!(model.placement, Placement::Swarm(_)) {
            return Err(UsageError::new("--kv-memory does not go with --swarm: peers keep the KV cache").into());
        }
        let sequences = self.max_running.get();
        let logit_rows = sequences * (1 + draft_tokens);
        let capacity = |positions: usize, tokens: usize| RequestedCapacity {
            sequences,
            positions,
            tokens,
            rows: positions,
            logit_rows,
        };
        let least = model.footprint(checkpoint, capacity(PAGE_TOKENS, PAGE_TOKENS))?;
        let sum = |part: fn(&Footprint) -> u64| least.iter().map(part).sum::<u64>();
        // With a swarm, peers have the pages.
        let (fixed, page_bytes) =
            (sum(|footprint| footprint.weights + footprint.working), sum(|footprint| footprint.kv));
        let fits =
            |memory: u64| usize::try_from(memory / page_bytes.max(1)).unwrap_or(usize::MAX).saturating_mul(PAGE_TOKENS);
        let rest = memory_available().unwrap_or(MEMORY_DEFAULT).saturating_sub(fixed);
        let trained = checkpoint.description().positions_max;
        let spare = match model.placement {
            _ if share == Share::Least => {
                let positions = model.execution.context(checkpoint, SHARED_CONTEXT_DEFAULT)?;
                positions.div_ceil(PAGE_TOKENS) * PAGE_TOKENS
            }
            Placement::Here | Placement::Ranks(_) => fits(rest / KV_MEMORY_DIVISOR),
            // Every machine has keys and values of its own layers; the plan counts them.
            Placement::Cluster(_) | Placement::Cake(_) | Placement::Swarm(_) => {
                CONTEXT_DEFAULT.min(trained).saturating_mul(CLUSTER_CONTEXTS)
            }
        };
        let asked = self.kv_tokens.map(NonZeroUsize::get).or(self.kv_memory.map(fits));
        let longest = if share == Share::Least { SHARED_CONTEXT_DEFAULT } else { CONTEXT_DEFAULT };
        let default_context = longest.min(asked.unwrap_or(spare)).max(PAGE_TOKENS);
        let positions = model.execution.context(checkpoint, default_context)?;
        let most = if share == Share::Least { spare } else { positions.saturating_mul(CONTEXTS_MAX) };
        let tokens = asked.unwrap_or_else(|| spare.clamp(positions, most.max(positions)));
        if tokens < positions {
            return Err(UsageError::new(format!(
                "the KV cache holds {tokens} tokens, which is less than the context of {positions}: \
                 use a smaller --context or a larger --kv-tokens"
            ))
            .into());
        }
        Ok((capacity(positions, tokens), tokens.div_ceil(PAGE_TOKENS) as u64 * page_bytes))
    }
}
