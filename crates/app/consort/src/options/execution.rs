//! `ExecutionOptions`: how a model computes, wherever it runs.

use std::num::NonZeroUsize;

use anyhow::{Context, Result};
use clap::Args;
use engine::CHUNK_DEFAULT;
use kernels::cpu::{CpuOptions, KvType, Level};
use model::Checkpoint;
use types::DType;

use super::values::{
    ComputeOption, CpuLevelOption, DecodeMathOption, KvOption, PromptMathOption, positive, quantisation,
};
use super::{ModelMath, heading};
use crate::usage::UsageError;

/// The context of `run`, `chat` and `show`, if the model supports that many tokens.
pub const CONTEXT_DEFAULT: usize = 8192;
/// The upper limit of `--chunk`: more rows in one step only cost memory.
const CHUNK_MAX: usize = 1 << 16;

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = heading::MODEL)]
pub struct ExecutionOptions {
    /// Context size: the tokens of prompt and output together
    #[arg(short, long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = positive)]
    #[arg(visible_alias = "ctx-size", alias = "max-model-len")]
    context: Option<NonZeroUsize>,
    /// Quantise the weights of a safetensors model at load: q8_0, q6_k, q5_k, q4_k or q4_0
    #[arg(long, value_name = "FORMAT", value_parser = quantisation)]
    quant: Option<DType>,
    /// Use no better CPU instructions than these
    #[arg(long, value_enum, default_value_t, env = "CONSORT_CPU", help_heading = heading::MACHINE)]
    cpu_level: CpuLevelOption,
    /// Prompt tokens that are computed in one step
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = positive)]
    #[arg(help_heading = heading::MACHINE)]
    chunk: Option<NonZeroUsize>,
    /// Data type to compute in; f32 converts all weights to f32 at load, for exact checks
    #[arg(long, value_enum, default_value_t)]
    compute: ComputeOption,
    /// Data type of the KV cache; auto is f16 for quantised weights, else f32 (for bf16 weights on amx: two bf16 parts)
    #[arg(long, value_enum, default_value_t)]
    kv: KvOption,
    /// Arithmetic of generated tokens with quantised weights: exact rounds activations to 16 bits, int8 to 8, which is faster for
    /// many sequences at once; auto is exact where that is as fast for one
    #[arg(long, value_enum, default_value_t, env = "CONSORT_DECODE_MATH")]
    decode_math: DecodeMathOption,
    /// Arithmetic of prompts with quantised weights: exact and int8 as for generated tokens; bf16 on amx is fast and nearly exact;
    /// auto is bf16 on amx, elsewhere exact for formats that stay fast with it
    #[arg(long, value_enum, default_value_t, env = "CONSORT_PROMPT_MATH")]
    prompt_math: PromptMathOption,
}

impl ExecutionOptions {
    /// Prompt tokens in one step.
    pub fn chunk(&self) -> usize {
        self.chunk.map_or(CHUNK_DEFAULT, NonZeroUsize::get).min(CHUNK_MAX)
    }

    /// The value of `--context`, which must not exceed the maximum of the model, else `default_context`, reduced to that maximum.
    pub fn context(&self, checkpoint: &Checkpoint, default_context: usize) -> Result<usize, UsageError> {
        let max = checkpoint.description().positions_max;
        match self.context {
            Some(asked) if asked.get() > max => Err(UsageError::new(format!(
                "--context {asked} is more than the {max} tokens that this model was made for"
            ))),
            Some(asked) => Ok(asked.get()),
            None => Ok(default_context.min(max)),
        }
    }

    /// The instruction level to use: the CPU's best, or a lower one from `--cpu-level`.
    pub fn level(&self) -> Result<Level> {
        self.cpu_level.level()
    }

    /// The format that weights are converted to at load, if they are.
    pub fn keep(&self) -> Result<Option<DType>, UsageError> {
        match (self.compute, self.quant) {
            (ComputeOption::F32, Some(_)) => Err(UsageError::new("--compute f32 and --quant exclude each other")),
            (ComputeOption::F32, None) => Ok(Some(DType::F32)),
            (ComputeOption::Auto, quant) => Ok(quant),
        }
    }

    /// The data type of the KV cache on this level, which may differ from [`Self::kv`]: see [`KvType::on`].
    pub fn effective_kv_type(&self, checkpoint: &Checkpoint) -> Result<KvType> {
        let level = self.level()?;
        let kv = self.kv(checkpoint, level);
        kv.on(level).with_context(|| format!("keys and values cannot be kept as {kv:?} on {level}"))
    }

    /// The data type of the KV cache: about as exact as the weights.
    pub fn kv(&self, checkpoint: &Checkpoint, level: Level) -> KvType {
        match self.kv {
            KvOption::F32 => KvType::F32,
            KvOption::F16 => KvType::F16,
            KvOption::Auto if self.compute == ComputeOption::F32 => KvType::F32,
            KvOption::Auto => match if self.quant.is_some() { KvType::F16 } else { kv_default(checkpoint, level) } {
                // bf16, which f16 becomes on this level, would be the least exact part of exact arithmetic.
                KvType::F16 if level == Level::Amx && self.prompt_math == PromptMathOption::Exact => KvType::Split,
                kind => kind,
            },
        }
    }

    /// How the CPU computes.
    pub fn cpu(&self, checkpoint: &Checkpoint, threads: usize) -> Result<CpuOptions> {
        let level = self.level()?;
        let default = ModelMath::of(checkpoint, self.keep()?, level);
        let decode = self.decode_math.named().unwrap_or(default.decode);
        let prompt = self.prompt_math.named().unwrap_or(default.prompt);
        Ok(CpuOptions { threads, level, kv: self.kv(checkpoint, level), decode, prompt })
    }
}

/// The data type of the KV cache of a model as it is stored.
pub fn kv_default(checkpoint: &Checkpoint, level: Level) -> KvType {
    match level {
        _ if checkpoint.has(DType::is_quantised) => KvType::F16,
        Level::Amx if checkpoint.has(|dtype| dtype == DType::BF16) => KvType::Split,
        _ => KvType::F32,
    }
}
