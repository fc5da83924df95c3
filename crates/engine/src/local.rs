//! `LocalExecutor`: runs all layers of a model in this process, with embedding, head and sampler: the whole model, or one rank's
//! shard of it. The ranks of a group get the same calls in the same order; the first of them samples, and its output is that
//! of the group.
//!
//! It has one step in flight. `submit` hands the layers to the backend, `collect` the head, then waits for the logits and
//! samples. On a backend that works in order, a page that is released between the two is written to only afterwards.

use kernels::{Backend, Rows, Span, StepInputs};
use model::{Block, Checkpoint, Collective, Embedding, Limits, LmHead, LoadError, LoadOptions, SingleRank};
use types::{LayerRange, Rank, SessionId, TokenId};

use crate::executor::{Capacity, Executor, ExecutorError, OpenedSession};
use crate::page_tables::slot_of;
use crate::plan::{
    Entry, PooledEmbedding, PromptLogprobs, RequestedOutput, Sample, StepOutput, StepPlan, SuppressedTokens,
};
use crate::prefix::Prefix;
use crate::request::Pooling;
use crate::sampler::{AllowedTokens, History, Sampler};
use crate::session_table::SessionTable;

pub struct LocalExecutor<B: Backend> {
    backend: B,
    rank: Rank,
    collective: Box<dyn Collective<B>>,
    embedding: Embedding<B>,
    lm_head: LmHead<B>,
    block: Block<B>,
    step: B::Step,
    hidden: B::Buffer,
    sessions: SessionTable,
    /// The computed tokens of each session, by slot: penalties look back at them.
    histories: Vec<Vec<TokenId>>,
    /// The sums of each embedded session's hidden states, by slot.
    pools: Vec<Vec<f64>>,
    inputs: Inputs,
    /// A copy of the plan whose step is in flight.
    flight: Option<StepPlan>,
    /// The plan of the previous step, kept for its memory.
    spare: StepPlan,
    logits: Vec<f32>,
    /// Hidden states of the rows to pool.
    states: Vec<f32>,
    state_width: usize,
    sampler: Sampler,
}

/// The lists that `StepInputs` borrows, with memory for the largest step.
struct Inputs {
    tokens: Vec<u32>,
    spans: Vec<Span>,
    pages: Vec<u32>,
    logit_rows: Vec<u32>,
}

impl Inputs {
    fn new(limits: &Limits) -> Self {
        Self {
            tokens: Vec::with_capacity(limits.step.rows),
            spans: Vec::with_capacity(limits.step.sequences),
            pages: Vec::with_capacity(limits.step.pages),
            logit_rows: Vec::with_capacity(limits.step.rows),
        }
    }
}

impl<B: Backend> LocalExecutor<B> {
    /// Loads all layers of a model. `progress` gets the number of layers loaded so far.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        Self::load_shard(backend, from, options, Rank::SINGLE, Box::new(SingleRank), progress)
    }

    /// Loads a rank's shard of all layers. `collective` connects it with the other ranks.
    pub fn load_shard(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let layers = u32::try_from(from.description().layers.len()).ok().and_then(|count| LayerRange::new(0, count));
        let layers = layers.expect("a checked description has layers");
        let embedding = Embedding::load(&backend, from, options, rank)?;
        let lm_head = LmHead::load(&backend, from, options, rank, &embedding)?;
        let block = Block::load(&backend, from, layers, rank, options, progress)?;
        let hidden = backend.output(options.limits.step.rows, from.description().hidden)?;
        let step = backend.step(options.limits.step)?;
        let limits = options.limits;
        Ok(Self {
            backend,
            rank,
            collective,
            embedding,
            lm_head,
            block,
            step,
            hidden,
            sessions: SessionTable::new(&limits, from.description().vocab),
            histories: Vec::new(),
            pools: Vec::new(),
            inputs: Inputs::new(&limits),
            flight: None,
            spare: StepPlan::new(),
            logits: Vec::new(),
            states: Vec::new(),
            state_width: from.description().hidden,
            sampler: Sampler::new(),
        })
    }

    /// Continues in a newly formed group: all sessions are closed, the weights stay.
    pub fn regroup(&mut self, collective: Box<dyn Collective<B>>) {
        self.collective = collective;
        self.sessions.clear();
        self.flight = None;
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Sessions that are open.
    pub fn sessions(&self) -> usize {
        self.sessions.count()
    }

    /// Bytes of the layers' weights.
    pub fn weight_bytes(&self) -> usize {
        self.block.weight_bytes()
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.lm_head.head_bytes(&self.backend)
    }

    /// Allocates the pages that the plan needs, and collects the inputs that the backend reads during the step.
    fn prepare(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let Inputs { tokens, spans, pages, logit_rows } = &mut self.inputs;
        tokens.clear();
        tokens.extend(plan.all_tokens().iter().map(|token| token.0));
        spans.clear();
        pages.clear();
        logit_rows.clear();
        let mut row = 0;
        self.sessions.reserve(plan)?;
        for entry in plan.entries() {
            let table = self.sessions.pages(entry)?;
            spans.push(Span {
                row,
                rows: entry.rows() as u32,
                position: entry.position as u32,
                pages_start: pages.len() as u32,
                pages_len: table.len() as u32,
            });
            pages.extend_from_slice(table);
            row += entry.rows() as u32;
            logit_rows.extend(row - (entry.logit_rows() + entry.pooled_rows()) as u32..row);
        }
        Ok(())
    }

    fn forward(&mut self, rows: Rows) -> Result<(), ExecutorError> {
        let Inputs { tokens, spans, pages, logit_rows } = &self.inputs;
        self.backend.begin(&mut self.step, StepInputs { tokens, spans, pages, logit_rows })?;
        self.embedding.embed(&self.backend, &self.step, rows.all(), &mut self.hidden, &*self.collective)?;
        self.block.forward(&self.backend, &self.step, rows, &mut self.hidden, &*self.collective)?;
        Ok(())
    }

    fn record(&mut self, session: SessionId, tokens: &[TokenId]) {
        self.histories[slot_of(session)].extend_from_slice(tokens);
    }

    /// The empty history of a session that was just opened.
    fn begin_history(&mut self, session: SessionId, tokens_max: usize) -> &mut Vec<TokenId> {
        let slot = slot_of(session);
        if self.histories.len() <= slot {
            self.histories.resize_with(slot + 1, Vec::new);
            self.pools.resize_with(slot + 1, Vec::new);
        }
        self.pools[slot].clear();
        self.histories[slot].clear();
        self.histories[slot].reserve(tokens_max);
        &mut self.histories[slot]
    }

    /// Reads the results of the step in flight and computes what its plan requests. Ranks after the first compute their shard
    /// of the logits for it.
    fn finish(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let (logit_rows, pooled) = (plan.logit_rows(), plan.pooled_rows());
        let is_first = self.rank.index() == 0;
        if logit_rows == 0 && (pooled == 0 || !is_first) {
            return Ok(());
        }
        let normed = self.lm_head.normed(&self.backend, &self.step, logit_rows + pooled, &self.hidden);
        if pooled > 0 && is_first {
            self.states.resize(pooled * self.state_width, 0.0);
            self.backend.read(normed, logit_rows..logit_rows + pooled, &mut self.states)?;
            self.pool(plan, output);
        }
        if logit_rows == 0 {
            return Ok(());
        }
        let len = logit_rows * self.lm_head.vocab();
        if let Some(logits) = self.lm_head.logits_of_normed(&self.backend, logit_rows, &*self.collective)? {
            if self.logits.len() < len {
                self.logits.resize(len, 0.0);
            }
            self.backend.read(logits, 0..logit_rows, &mut self.logits[..len])?;
            self.choose(plan, output);
        }
        Ok(())
    }

    /// Samples tokens, computes log probabilities, or copies logits, as the entries request.
    fn choose(&mut self, plan: &StepPlan, output: &mut StepOutput) {
        let vocab = self.lm_head.vocab();
        let mut rest = self.logits.as_mut_slice();
        for entry in plan.entries() {
            let (rows, session) = (entry.logit_rows(), entry.session);
            let (values, after) = rest.split_at_mut(rows * vocab);
            rest = after;
            if !self.sessions.is_open(session) {
                continue;
            }
            match &entry.requested {
                RequestedOutput::Nothing | RequestedOutput::Embed { .. } => {}
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
    fn pool(&mut self, plan: &StepPlan, output: &mut StepOutput) {
        let width = self.state_width;
        let mut rest = self.states.as_slice();
        for entry in plan.entries() {
            let (rows, after) = rest.split_at(entry.pooled_rows() * width);
            rest = after;
            let RequestedOutput::Embed { pooling, last } = entry.requested else { continue };
            if !self.sessions.is_open(entry.session) {
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

impl<B: Backend> Executor for LocalExecutor<B> {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.sessions.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        let opened = self.sessions.open(tokens_max, prefix)?;
        let found = &prefix.tokens[..opened.computed];
        self.begin_history(opened.session, tokens_max).extend_from_slice(found);
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.sessions.truncate(session, tokens)?;
        self.histories[slot_of(session)].truncate(kept);
        Ok(kept)
    }

    fn close(&mut self, session: SessionId) {
        self.sessions.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.flight.is_some() {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        self.sessions.check(plan)?;
        let decode = plan.decode_rows();
        let rows = Rows { decode, prefill: plan.rows() - decode };
        let result = self.prepare(plan).and_then(|()| self.forward(rows));
        if let Err(error) = result {
            self.sessions.release_reserved(plan);
            return Err(error);
        }
        self.sessions.advance(plan);
        for entry in plan.entries() {
            self.record(entry.session, plan.tokens(entry));
        }
        let mut flight = std::mem::take(&mut self.spare);
        flight.clone_from(plan);
        self.flight = Some(flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        let plan = self.flight.take().ok_or(ExecutorError::NoStepInFlight)?;
        let result = self.finish(&plan, output);
        self.spare = plan;
        if result.is_err() {
            self.sessions.clear_prefix_cache();
        }
        result
    }
}
