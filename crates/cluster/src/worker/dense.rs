//! `Dense`: a model that a foreign leader has loaded by `load_dense_shard`, with the one sequence of `generate_step`.
//! What the leader samples from is not ours to know: a step only computes keys and values, and takes part in the
//! collectives.

use std::path::PathBuf;

use engine::{Executor as _, ExecutorError, LocalExecutor, Phase, Prefix, RequestedOutput, StepOutput, StepPlan};
use kernels::cpu::{CpuBackend, CpuOptions};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Limits, LoadOptions};
use types::{DType, Rank, SessionId, TokenId};

use super::process::count;
use super::refusal::Refusal;
use super::share;
use crate::collective::GroupCollective;
use crate::protocol::ErrorKind;

/// The longest sequence, where the model allows it.
const POSITIONS_MAX: usize = 8192;
/// Tokens that run at once.
const CHUNK_TOKENS: usize = 512;

pub struct Dense {
    local: LocalExecutor<CpuBackend>,
    kv_bytes: u64,
    sequence: Option<Sequence>,
    plan: StepPlan,
    output: StepOutput,
}

#[derive(Clone, Copy)]
struct Sequence {
    session: SessionId,
    computed: usize,
}

/// What `load_dense_shard` gives.
pub struct Parts<'a> {
    pub config: &'a str,
    pub files: &'a [String],
    pub quant: Option<&'a str>,
}

/// A `generate_step` that can run.
pub struct Tokens {
    offset: usize,
    tokens: Vec<TokenId>,
}

impl Dense {
    pub fn load(parts: &Parts<'_>, rank: Rank, link: GroupCollective) -> Result<Self, Refusal> {
        let keep = parts.quant.map(format_of).transpose()?;
        let files: Vec<PathBuf> = parts.files.iter().map(PathBuf::from).collect();
        if !files.iter().all(|path| path.is_absolute()) {
            return Err(Refusal::new(ErrorKind::BadRequest, "the paths of a model are absolute"));
        }
        let checkpoint = Checkpoint::from_parts(parts.config, &files)?;
        let positions = checkpoint.description().positions_max.min(POSITIONS_MAX);
        let pages = positions.div_ceil(PAGE_TOKENS);
        let step = StepLimits { rows: CHUNK_TOKENS.min(positions), sequences: 1, pages };
        let options = LoadOptions { keep, limits: Limits { step, wanted: 1, kv_pages: pages, positions } };
        let cpu = own_part_of_the_cpu(rank);
        let (local, footprint) = share::load(&checkpoint, &options, cpu, rank, link, &mut |_| {})?;
        Ok(Self { local, kv_bytes: footprint.kv, sequence: None, plan: StepPlan::new(), output: StepOutput::new() })
    }

    /// Checks a step and makes room for it. All ranks refuse alike what is refused here.
    pub fn prepare(&mut self, tokens: &[u32], offset: u64) -> Result<Tokens, Refusal> {
        let refusal = |message: String| Refusal::new(ErrorKind::ForwardFailed, message);
        let (capacity, offset) = (self.local.capacity(), count(offset)?);
        let computed = self.sequence.map_or(0, |sequence| sequence.computed);
        if tokens.is_empty() {
            return Err(refusal("a step without tokens".to_owned()));
        }
        if offset > computed {
            return Err(refusal(format!("the cache holds {computed} tokens, the step continues at {offset}")));
        }
        let end = offset.saturating_add(tokens.len());
        if end > capacity.tokens_max() {
            return Err(refusal(format!("{end} tokens are too many, the limit is {}", capacity.tokens_max())));
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= capacity.vocab) {
            return Err(ExecutorError::TokenOutOfRange { token, vocab: capacity.vocab }.into());
        }
        Ok(Tokens { offset, tokens: tokens.iter().copied().map(TokenId).collect() })
    }

    pub fn step(&mut self, Tokens { offset, tokens }: &Tokens) -> Result<(), Refusal> {
        let Sequence { session, .. } = self.at(*offset)?;
        for (index, chunk) in tokens.chunks(self.local.capacity().rows_max).enumerate() {
            let position = offset + index * self.local.capacity().rows_max;
            let phase = if tokens.len() == 1 { Phase::Decode } else { Phase::Prefill };
            self.plan.clear();
            self.plan.push(session, phase, position, chunk, RequestedOutput::Nothing);
            self.local.submit(&self.plan)?;
            self.local.collect(&mut self.output)?;
            self.sequence = Some(Sequence { session, computed: position + chunk.len() });
        }
        Ok(())
    }

    /// The next step begins at zero.
    pub fn clear(&mut self) {
        if let Some(Sequence { session, .. }) = self.sequence.take() {
            self.local.close(session);
        }
    }

    /// The sequence is gone, the weights stay.
    pub fn regroup(&mut self, link: GroupCollective) {
        self.sequence = None;
        self.local.regroup(Box::new(link));
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

    /// The sequence, cut back to its first `offset` tokens.
    fn at(&mut self, offset: usize) -> Result<Sequence, Refusal> {
        let Some(Sequence { session, computed }) = self.sequence else {
            let opened = self.local.open(self.local.capacity().tokens_max(), Prefix::NONE)?;
            let sequence = Sequence { session: opened.session, computed: opened.computed };
            self.sequence = Some(sequence);
            return Ok(sequence);
        };
        let computed = if offset < computed { self.local.truncate(session, offset)? } else { computed };
        let sequence = Sequence { session, computed };
        self.sequence = Some(sequence);
        Ok(sequence)
    }
}

/// The ranks of a host share its cores.
fn own_part_of_the_cpu(rank: Rank) -> CpuOptions {
    let all = CpuOptions::default();
    CpuOptions { threads: (all.threads / rank.world().get()).max(1), ..all }
}

/// A format by one of the names that leaders use.
fn format_of(name: &str) -> Result<DType, Refusal> {
    let plain = |name: &str| name.to_ascii_lowercase().replace('_', "");
    let asked = plain(name);
    let asked = asked.strip_suffix('m').unwrap_or(&asked);
    let format = DType::ALL.into_iter().find(|format| plain(format.name()) == asked);
    format.ok_or_else(|| Refusal::new(ErrorKind::LoadFailed, format!("weights can not be kept as {name}")))
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
        for unknown in ["q8_1", "q8k", "int4", "", "m"] {
            assert_eq!(format_of(unknown).unwrap_err().kind, ErrorKind::LoadFailed, "{unknown}");
        }
    }
}
