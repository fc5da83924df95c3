//! `DenseModel`: a model that a foreign leader has loaded by `load_dense_shard`, with the one sequence of
//! `generate_step`. The leader samples elsewhere: a step only fills the KV cache and takes part in the collectives. A
//! step that fails leaves the cache in an unknown state, so no further step runs until it is cleared.

use std::path::PathBuf;

use engine::{Executor as _, ExecutorError, LocalExecutor, Phase, Prefix, RequestedOutput, StepOutput, StepPlan};
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use types::{DType, Rank, SessionId, TokenId, WorldSize};

use crate::memory::memory_available;
use crate::protocol::ErrorKind;
use crate::worker::process::count;
use crate::worker::request_error::RequestError;
use crate::worker::shard;
use collectives::GroupCollective;

/// Tokens of a prefill chunk.
const CHUNK_TOKENS: usize = 512;

pub struct DenseModel {
    local: LocalExecutor<CpuBackend>,
    kv_bytes: u64,
    /// The model's context length. Memory may allow less.
    context: usize,
    sequence: Option<DenseSequence>,
    /// A step has failed, and the cache has not been cleared since.
    has_failed: bool,
    plan: StepPlan,
    output: StepOutput,
}

#[derive(Clone, Copy)]
struct DenseSequence {
    session: SessionId,
    computed: usize,
}

/// The arguments of `load_dense_shard`.
pub struct DenseSource<'a> {
    pub config: &'a str,
    pub files: &'a [String],
    pub quant: Option<&'a str>,
}

/// A `generate_step` that has passed all checks.
pub struct CheckedStep {
    offset: usize,
    tokens: Vec<TokenId>,
}

impl DenseModel {
    pub fn load(
        parts: &DenseSource<'_>,
        rank: Rank,
        threads_max: usize,
        collective: GroupCollective,
    ) -> Result<Self, RequestError> {
        let keep = parts.quant.map(format_of).transpose()?;
        let files: Vec<PathBuf> = parts.files.iter().map(PathBuf::from).collect();
        if !files.iter().all(|path| path.is_absolute()) {
            return Err(RequestError::new(ErrorKind::BadRequest, "the paths of a model are absolute"));
        }
        let checkpoint = Checkpoint::from_parts(parts.config, &files)?.with_embedding_as_stored();
        let context = checkpoint.description().positions_max;
        let cpu = cpu_options(rank, threads_max);
        let backend = CpuBackend::new(cpu).map_err(|error| RequestError::of(ErrorKind::LoadFailed, &error))?;
        let whole = ModelPart::whole(checkpoint.description());
        let all = Footprint::new(&backend, &checkpoint, &load_options(keep, context), whole, rank)?;
        let options = load_options(keep, context_that_fits(context, all, rank.world(), memory_available()));
        let (local, footprint) = shard::load(&checkpoint, &options, backend, rank, collective, &mut |_| {})?;
        Ok(Self {
            local,
            kv_bytes: footprint.kv,
            context,
            sequence: None,
            has_failed: false,
            plan: StepPlan::new(),
            output: StepOutput::new(),
        })
    }

    /// Checks a step. If it fails, nothing has changed.
    pub fn prepare(&mut self, tokens: &[u32], offset: u64) -> Result<CheckedStep, RequestError> {
        let error = |message: String| RequestError::new(ErrorKind::ForwardFailed, message);
        let (capacity, offset) = (self.local.capacity(), count(offset)?);
        let computed = self.sequence.map_or(0, |sequence| sequence.computed);
        if self.has_failed {
            return Err(error("the step before has failed: `clear_kv_cache` comes first".to_owned()));
        }
        if tokens.is_empty() {
            return Err(error("a step without tokens".to_owned()));
        }
        if offset > computed {
            return Err(error(format!("the cache holds {computed} tokens, the step continues at {offset}")));
        }
        let end = offset.saturating_add(tokens.len());
        let limit = capacity.tokens_max().min(self.context);
        if end > limit {
            let less = if limit < self.context { ", which is what memory allows" } else { "" };
            return Err(error(format!("{end} tokens exceed the limit of {limit}{less} (context: {})", self.context)));
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= capacity.vocab) {
            return Err(ExecutorError::TokenOutOfRange { token, vocab: capacity.vocab }.into());
        }
        Ok(CheckedStep { offset, tokens: tokens.iter().copied().map(TokenId).collect() })
    }

    pub fn step(&mut self, tokens: &CheckedStep) -> Result<(), RequestError> {
        let result = self.run(tokens);
        self.has_failed = result.is_err();
        result
    }

    fn run(&mut self, CheckedStep { offset, tokens }: &CheckedStep) -> Result<(), RequestError> {
        let DenseSequence { session, .. } = self.at(*offset)?;
        for (index, chunk) in tokens.chunks(self.local.capacity().rows_max).enumerate() {
            let position = offset + index * self.local.capacity().rows_max;
            let phase = if tokens.len() == 1 { Phase::Decode } else { Phase::Prefill };
            self.plan.clear();
            self.plan.push(session, phase, position, chunk, RequestedOutput::Nothing);
            self.local.submit(&self.plan)?;
            self.local.collect(&mut self.output)?;
            self.sequence = Some(DenseSequence { session, computed: position + chunk.len() });
        }
        Ok(())
    }

    /// Clears the cache, also after a failed step. The next step begins at position 0.
    pub fn clear(&mut self, collective: GroupCollective) {
        if self.has_failed {
            self.regroup(collective);
        } else if let Some(DenseSequence { session, .. }) = self.sequence.take() {
            self.local.close(session);
        }
    }

    /// Drops the sequence and keeps the weights.
    pub fn regroup(&mut self, collective: GroupCollective) {
        self.sequence = None;
        self.has_failed = false;
        self.local.regroup(Box::new(collective));
    }

    pub fn weight_bytes(&self) -> u64 {
        (self.local.weight_bytes() + self.local.head_bytes()) as u64
    }

    pub fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    pub fn sessions(&self) -> u64 {
        self.local.sessions() as u64
    }

    /// The sequence, truncated to its first `offset` tokens.
    fn at(&mut self, offset: usize) -> Result<DenseSequence, RequestError> {
        let Some(DenseSequence { session, computed }) = self.sequence else {
            let opened = self.local.open(self.local.capacity().tokens_max(), Prefix::NONE)?;
            let sequence = DenseSequence { session: opened.session, computed: opened.computed };
            self.sequence = Some(sequence);
            return Ok(sequence);
        };
        let computed = if offset < computed { self.local.truncate(session, offset)? } else { computed };
        let sequence = DenseSequence { session, computed };
        self.sequence = Some(sequence);
        Ok(sequence)
    }
}

/// Options for one sequence of up to `positions` tokens.
fn load_options(keep: Option<DType>, positions: usize) -> LoadOptions {
    let pages = positions.div_ceil(PAGE_TOKENS);
    let step = StepLimits { rows: CHUNK_TOKENS.min(positions), sequences: 1, pages };
    LoadOptions { keep, limits: Limits { step, logit_rows: 1, kv_pages: pages, positions } }
}

/// How much of `context` fits in memory, if a rank needs `all` for the whole context and every rank of this host as
/// much. An eighth of the memory stays free. The minimum is one page: if not even that fits, loading fails later.
fn context_that_fits(context: usize, all: Footprint, world: WorldSize, available: Option<u64>) -> usize {
    let Some(available) = available else { return context };
    let own = (available - available / 8) / world.get() as u64;
    if all.total() <= own {
        return context;
    }
    let pages = context.div_ceil(PAGE_TOKENS) as u64;
    let page_bytes = all.kv.div_ceil(pages.max(1)).max(1);
    let fitting = own.saturating_sub(all.total() - all.kv) / page_bytes;
    context.min(fitting.clamp(1, pages) as usize * PAGE_TOKENS)
}

/// This rank's part of the host's cores.
fn cpu_options(rank: Rank, threads_max: usize) -> CpuOptions {
    let all = CpuOptions::default();
    CpuOptions { threads: (all.threads / rank.world().get()).min(threads_max).max(1), ..all }
}

/// A format by one of the names that leaders use: candle's, in either case, with or without underscores.
fn format_of(name: &str) -> Result<DType, RequestError> {
    let plain = |name: &str| name.to_ascii_lowercase().replace('_', "");
    let asked = match plain(name).as_str() {
        "q4km" => "q4k".to_owned(),
        "q5km" => "q5k".to_owned(),
        other => other.to_owned(),
    };
    let format = DType::ALL.into_iter().find(|format| plain(format.name()) == asked);
    let known = || DType::ALL.map(DType::name).join(", ");
    let error = || format!("weights can not be kept as {name:?}, but as one of {}", known());
    format.ok_or_else(|| RequestError::new(ErrorKind::LoadFailed, error()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_the_names_of_foreign_leaders() {
        let check = |name: &str, format: DType| assert_eq!(format_of(name).unwrap(), format, "{name}");
        check("q4_0", DType::Q4_0);
        check("Q4K", DType::Q4_K);
        check("q4_k_m", DType::Q4_K);
        check("q5km", DType::Q5_K);
        check("Q6_K", DType::Q6_K);
        check("q80", DType::Q8_0);
        check("BF16", DType::BF16);
        for format in DType::ALL {
            check(format.name(), format);
            check(&format.name().replace('_', "").to_uppercase(), format);
        }
        for unknown in ["q8_1", "q8k", "q6_k_m", "q8_0m", "int4", "", "m"] {
            let error = format_of(unknown).unwrap_err();
            assert_eq!(error.kind, ErrorKind::LoadFailed, "{unknown}");
            assert!(error.message.contains(&format!("{unknown:?}")), "{}", error.message);
        }
    }

    #[test]
    fn the_context_is_what_memory_allows() {
        let world = |size| WorldSize::new(size).unwrap();
        let context = 100 * PAGE_TOKENS;
        // A page is 1000 bytes.
        let all = Footprint { weights: 50_000, kv: 100_000, working: 10_000 };
        let check = |size, available, pages: usize| {
            assert_eq!(
                context_that_fits(context, all, world(size), Some(available)),
                pages * PAGE_TOKENS,
                "{available}"
            );
        };
        assert_eq!(context_that_fits(context, all, world(2), None), context);
        check(1, 160_000 * 8 / 7 + 8, 100);
        check(1, 80_000 * 8 / 7 + 8, 20);
        check(2, 160_000 * 8 / 7 + 8, 20);
        check(1, 0, 1);
        let odd = Footprint { kv: 3000, ..all };
        assert_eq!(context_that_fits(2 * PAGE_TOKENS + 1, odd, world(1), Some(u64::MAX)), 2 * PAGE_TOKENS + 1);
    }
}
