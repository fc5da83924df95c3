//! `Head`: from hidden states to what a plan requests: final norm, LM head, sampler, pooled sums. It keeps the tokens of each
//! session, because penalties look back at them.
//!
//! A head does not depend on a stage's step: several steps may be in flight between their rows' first layer and their
//! logits.

use kernels::Backend;
use model::{Checkpoint, Collective, Embedding, LmHead, LoadError, LoadOptions};
use types::{Rank, SessionId, TokenId};

use crate::executor::ExecutorError;
use crate::page_tables::slot_of;
use crate::plan::{
    Entry, PooledEmbedding, PromptLogprobs, RequestedOutput, Sample, StepOutput, StepPlan, SuppressedTokens,
};
use crate::request::Pooling;
use crate::sampler::{AllowedTokens, History, Sampler};
use crate::session_table::SessionTable;

pub(crate) struct Head<B: Backend> {
    rank: Rank,
    lm_head: LmHead<B>,
    width: usize,
    /// The computed tokens of each session, by slot: penalties look back at them.
    histories: Vec<Vec<TokenId>>,
    /// The sums of each embedded session's hidden states, by slot.
    pools: Vec<Vec<f64>>,
    logits: Vec<f32>,
    /// Hidden states of the rows to pool.
    pooled: Vec<f32>,
    sampler: Sampler,
}

/// The hidden states after the last layer.
pub(crate) enum HeadInput<'a, B: Backend> {
    /// Of all rows of a step. The step lists those that are needed.
    Step { step: &'a B::Step, hidden: &'a B::Buffer },
    /// Of the rows that are needed, `[rows, hidden]`: see [`Entry::state_rows`].
    States(&'a [f32]),
}

impl<B: Backend> Head<B> {
    pub fn load(
        backend: &B,
        from: &Checkpoint,
        options: &LoadOptions,
        rank: Rank,
        embedding: &Embedding<B>,
    ) -> Result<Self, LoadError> {
        Ok(Self {
            rank,
            lm_head: LmHead::load(backend, from, options, rank, embedding)?,
            width: from.description().hidden,
            histories: Vec::new(),
            pools: Vec::new(),
            logits: Vec::new(),
            pooled: Vec::new(),
            sampler: Sampler::new(),
        })
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self, backend: &B) -> usize {
        self.lm_head.head_bytes(backend)
    }

    /// A session was opened, with `found` as the tokens that are computed already.
    pub fn open(&mut self, session: SessionId, tokens_max: usize, found: &[TokenId]) {
        let slot = slot_of(session);
        if self.histories.len() <= slot {
            self.histories.resize_with(slot + 1, Vec::new);
            self.pools.resize_with(slot + 1, Vec::new);
        }
        self.pools[slot].clear();
        self.histories[slot].clear();
        self.histories[slot].reserve(tokens_max);
        self.histories[slot].extend_from_slice(found);
    }

    /// An open session was truncated to its first `kept` tokens.
    pub fn truncate(&mut self, session: SessionId, kept: usize) {
        self.histories[slot_of(session)].truncate(kept);
    }

    /// A step was started: its tokens are computed from now on.
    pub fn record(&mut self, plan: &StepPlan) {
        for entry in plan.entries() {
            self.histories[slot_of(entry.session)].extend_from_slice(plan.tokens(entry));
        }
    }

    /// Computes what a plan requests and appends it to `output`. Ranks after the first compute their shard of the logits for
    /// it.
    pub fn finish(
        &mut self,
        backend: &B,
        collective: &dyn Collective<B>,
        sessions: &SessionTable,
        plan: &StepPlan,
        input: HeadInput<'_, B>,
        output: &mut StepOutput,
    ) -> Result<(), ExecutorError> {
        let (logit_rows, pooled) = (plan.logit_rows(), plan.pooled_rows());
        let (rows, width, is_first) = (logit_rows + pooled, self.width, self.rank.index() == 0);
        if let HeadInput::States(states) = input
            && states.len() != rows * width
        {
            return Err(ExecutorError::ActivationShape { rows, width, found: states.len() });
        }
        if logit_rows == 0 && (pooled == 0 || !is_first) {
            return Ok(());
        }
        let normed = match input {
            HeadInput::Step { step, hidden } => self.lm_head.normed(backend, step, rows, hidden),
            HeadInput::States(states) => self.lm_head.normed_of(backend, rows, states)?,
        };
        if pooled > 0 && is_first {
            self.pooled.resize(pooled * width, 0.0);
            backend.read(normed, logit_rows..rows, &mut self.pooled)?;
            self.pool(sessions, plan, output);
        }
        if logit_rows == 0 {
            return Ok(());
        }
        let len = logit_rows * self.lm_head.vocab();
        if let Some(logits) = self.lm_head.logits_of_normed(backend, logit_rows, collective)? {
            if self.logits.len() < len {
                self.logits.resize(len, 0.0);
            }
            backend.read(logits, 0..logit_rows, &mut self.logits[..len])?;
            self.choose(sessions, plan, output);
        }
        Ok(())
    }

    /// Samples tokens, computes log probabilities, or copies logits, as the entries request.
    fn choose(&mut self, sessions: &SessionTable, plan: &StepPlan, output: &mut StepOutput) {
        let vocab = self.lm_head.vocab();
        let mut rest = self.logits.as_mut_slice();
        for entry in plan.entries() {
            let (rows, session) = (entry.logit_rows(), entry.session);
            let (values, after) = rest.split_at_mut(rows * vocab);
            rest = after;
            if !sessions.is_open(session) {
                continue;
            }
            match &entry.requested {
                RequestedOutput::Nothing | RequestedOutput::Embed { .. } | RequestedOutput::States { .. } => {}
                RequestedOutput::Logits { .. } => output.push_logits(session, entry.end() - rows, rows, values),
                RequestedOutput::PromptLogprobs { top, next } => {
                    let following = plan.tokens(entry)[1..].iter().chain([next]);
                    let rows = values.chunks_exact(vocab).zip(following);
                    let outcome = rows.map(|(row, &token)| self.sampler.logprobs_of(row, token, *top)).collect();
                    output.prompt_logprobs.push(PromptLogprobs { session, position: entry.position + 1, outcome });
                }
                RequestedOutput::Sample { prompt_tokens, sampling, suppressed, .. } => {
                    let history = &self.histories[slot_of(session)];
                    for (index, row) in values.chunks_exact_mut(vocab).enumerate() {
                        let position = entry.end() - rows + index + 1;
                        // A session that was truncated since has no such position any more.
                        let Some(tokens) = history.get(..position) else { break };
                        let history = History { tokens, prompt_tokens: *prompt_tokens };
                        let allowed = allowed(plan, entry, suppressed.as_ref(), position);
                        let outcome = self.sampler.sample(row, sampling, history, allowed);
                        output.samples.push(Sample { session, position, outcome });
                    }
                }
            }
        }
    }

    /// Adds the step's hidden states to their sessions' sums, row by row, so that chunks do not change a bit.
    fn pool(&mut self, sessions: &SessionTable, plan: &StepPlan, output: &mut StepOutput) {
        let width = self.width;
        let mut rest = self.pooled.as_slice();
        for entry in plan.entries() {
            let (rows, after) = rest.split_at(entry.pooled_rows() * width);
            rest = after;
            let RequestedOutput::Embed { pooling, last } = entry.requested else { continue };
            if !sessions.is_open(entry.session) {
                continue;
            }
            let sums = &mut self.pools[slot_of(entry.session)];
            sums.resize(width, 0.0);
            for row in rows.chunks_exact(width) {
                sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += f64::from(value));
            }
            if last {
                let count = if pooling == Pooling::Mean { entry.end() } else { 1 };
                let values = sums.iter().map(|sum| (sum / count as f64) as f32).collect();
                output.embeddings.push(PooledEmbedding { session: entry.session, values });
            }
        }
    }
}

/// Which tokens may be sampled for `position` of an entry.
fn allowed<'a>(
    plan: &'a StepPlan,
    entry: &Entry,
    suppressed: Option<&'a SuppressedTokens>,
    position: usize,
) -> AllowedTokens<'a> {
    let suppressed = suppressed.filter(|tokens| position < tokens.until).map_or(&[][..], |tokens| &tokens.tokens);
    AllowedTokens { mask: plan.mask(entry), suppressed }
}
