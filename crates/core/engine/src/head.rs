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
    Entry, EntryWithoutStates, PooledEmbedding, PromptLogprobs, RequestedOutput, Sample, StepOutput, StepPlan,
    SuppressedTokens,
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
    /// Of the rows that are needed, `[rows, hidden]`: see [`Entry::state_rows`]. The entries without states are listed in the
    /// order of the plan.
    States { states: &'a [f32], without: &'a [EntryWithoutStates] },
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
        let without = match input {
            HeadInput::States { without, .. } => without,
            HeadInput::Step { .. } => &[],
        };
        self.check_given(plan, without)?;
        let unserved = without.iter().filter(|given| given.logits.is_none());
        output.unserved.extend(unserved.map(|given| plan.entries()[given.entry].session));
        let has_logits = match needs_head(plan, without) {
            true => self.compute(backend, collective, plan, input)?,
            false => self.rank.index() == 0,
        };
        if plan.pooled_rows() > 0 && self.rank.index() == 0 {
            self.pool(sessions, plan, without, output);
        }
        if plan.logit_rows() > 0 && has_logits {
            self.place_given(plan, without);
            self.choose(sessions, plan, without, output);
        }
        Ok(())
    }

    /// Checks that entries without states take the logits that were given for them.
    fn check_given(&self, plan: &StepPlan, without: &[EntryWithoutStates]) -> Result<(), ExecutorError> {
        let vocab = self.lm_head.vocab();
        for EntryWithoutStates { entry, logits } in without {
            let Some(entry) = plan.entries().get(*entry) else {
                return Err(ExecutorError::Input { expected: "entries without states" });
            };
            let Some(logits) = logits else { continue };
            if !entry.takes_logits() || logits.len() != vocab {
                let (rows, found) = (entry.logit_rows(), logits.len());
                return Err(ExecutorError::ActivationShape { rows, width: vocab, found });
            }
        }
        Ok(())
    }

    /// Computes logits and pooled rows from states. Returns whether this rank has the logits.
    fn compute(
        &mut self,
        backend: &B,
        collective: &dyn Collective<B>,
        plan: &StepPlan,
        input: HeadInput<'_, B>,
    ) -> Result<bool, ExecutorError> {
        let (logit_rows, pooled) = (plan.logit_rows(), plan.pooled_rows());
        let (rows, width, is_first) = (logit_rows + pooled, self.width, self.rank.index() == 0);
        if let HeadInput::States { states, .. } = input
            && states.len() != rows * width
        {
            return Err(ExecutorError::ActivationShape { rows, width, found: states.len() });
        }
        if logit_rows == 0 && (pooled == 0 || !is_first) {
            return Ok(false);
        }
        let normed = match input {
            HeadInput::Step { step, hidden } => self.lm_head.normed(backend, step, rows, hidden),
            HeadInput::States { states, .. } => self.lm_head.normed_of(backend, rows, states)?,
        };
        if pooled > 0 && is_first {
            self.pooled.resize(pooled * width, 0.0);
            backend.read(normed, logit_rows..rows, &mut self.pooled)?;
        }
        if logit_rows == 0 {
            return Ok(false);
        }
        let len = logit_rows * self.lm_head.vocab();
        let Some(logits) = self.lm_head.logits_of_normed(backend, logit_rows, collective)? else { return Ok(false) };
        make_room(&mut self.logits, len);
        backend.read(logits, 0..logit_rows, &mut self.logits[..len])?;
        Ok(true)
    }

    /// Puts logits that were given into the places of those that were not computed.
    fn place_given(&mut self, plan: &StepPlan, without: &[EntryWithoutStates]) {
        let vocab = self.lm_head.vocab();
        make_room(&mut self.logits, plan.logit_rows() * vocab);
        let mut rest = self.logits.as_mut_slice();
        for (index, entry) in plan.entries().iter().enumerate() {
            let (values, after) = rest.split_at_mut(entry.logit_rows() * vocab);
            rest = after;
            if let Some(EntryWithoutStates { logits: Some(logits), .. }) = given_for(without, index) {
                values.copy_from_slice(logits);
            }
        }
    }

    /// Samples tokens, computes log probabilities, or copies logits, as the entries request.
    fn choose(
        &mut self,
        sessions: &SessionTable,
        plan: &StepPlan,
        without: &[EntryWithoutStates],
        output: &mut StepOutput,
    ) {
        let vocab = self.lm_head.vocab();
        let mut rest = self.logits.as_mut_slice();
        for (index, entry) in plan.entries().iter().enumerate() {
            let (rows, session) = (entry.logit_rows(), entry.session);
            let (values, after) = rest.split_at_mut(rows * vocab);
            rest = after;
            if !sessions.is_open(session) || is_unserved(without, index) {
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
    fn pool(
        &mut self,
        sessions: &SessionTable,
        plan: &StepPlan,
        without: &[EntryWithoutStates],
        output: &mut StepOutput,
    ) {
        let width = self.width;
        // There are fewer only if no row of the step has states.
        self.pooled.resize(plan.pooled_rows() * width, 0.0);
        let mut rest = self.pooled.as_slice();
        for (index, entry) in plan.entries().iter().enumerate() {
            let (rows, after) = rest.split_at(entry.pooled_rows() * width);
            rest = after;
            let RequestedOutput::Embed { pooling, last } = entry.requested else { continue };
            if !sessions.is_open(entry.session) || is_unserved(without, index) {
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

fn make_room(values: &mut Vec<f32>, len: usize) {
    if values.len() < len {
        values.resize(len, 0.0);
    }
}

fn given_for(without: &[EntryWithoutStates], entry: usize) -> Option<&EntryWithoutStates> {
    without.binary_search_by_key(&entry, |given| given.entry).ok().map(|index| &without[index])
}

fn is_unserved(without: &[EntryWithoutStates], entry: usize) -> bool {
    given_for(without, entry).is_some_and(|given| given.logits.is_none())
}

/// Whether any entry that needs states has them. A head for zeros would be computed in vain.
fn needs_head(plan: &StepPlan, without: &[EntryWithoutStates]) -> bool {
    let mut entries = plan.entries().iter().enumerate();
    without.is_empty()
        || entries.any(|(index, entry)| !entry.state_rows().is_empty() && given_for(without, index).is_none())
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
