//! `Local`: the executor that runs a whole model in this process: embedding, all layers, head, and the sampler.
//!
//! It has one step in flight. `submit` hands the layers to the backend, `collect` the head, then waits for the logits and
//! samples. On a backend that works in order, a page that is let go between the two is written to only afterwards.

use kernels::{Backend, PAGE_TOKENS, Span, StepInputs};
use model::{Block, Checkpoint, Ends, Limits, LoadError, LoadOptions, Solo};
use types::{LayerRange, Rank, SessionId, TokenId};

use crate::executor::{Capacity, Executor, ExecutorError, Forked};
use crate::plan::{Sample, StepOutput, StepPlan, Want};
use crate::sampler::{History, Sampler};
use crate::sessions::{Sessions, slot_of};

pub struct Local<B: Backend> {
    backend: B,
    ends: Ends<B>,
    block: Block<B>,
    limits: Limits,
    step: B::Step,
    hidden: B::Buffer,
    sessions: Sessions,
    /// The computed tokens of each session, by slot: penalties look back at them.
    histories: Vec<Vec<TokenId>>,
    inputs: Inputs,
    /// A copy of the plan whose step is in flight.
    flight: Option<StepPlan>,
    /// The plan of the flight before, kept for its memory.
    spare: StepPlan,
    logits: Vec<f32>,
    sampler: Sampler,
}

/// The lists that `StepInputs` borrows, with room for the largest step.
struct Inputs {
    tokens: Vec<u32>,
    spans: Vec<Span>,
    pages: Vec<u32>,
    wanted: Vec<u32>,
}

impl Inputs {
    fn new(limits: &Limits) -> Self {
        Self {
            tokens: Vec::with_capacity(limits.step.rows),
            spans: Vec::with_capacity(limits.step.sequences),
            pages: Vec::with_capacity(limits.step.pages),
            wanted: Vec::with_capacity(limits.wanted),
        }
    }
}

impl<B: Backend> Local<B> {
    /// Loads all layers of a model. `progress` is told how many of them are there.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let layers = u32::try_from(from.description().layers.len()).ok().and_then(|count| LayerRange::new(0, count));
        let layers = layers.expect("a checked description has layers");
        let ends = Ends::load(&backend, from, options, Rank::SOLO)?;
        let block = Block::load(&backend, from, layers, Rank::SOLO, options, progress)?;
        let hidden = backend.buffer(options.limits.step.rows, from.description().hidden)?;
        let step = backend.step(options.limits.step)?;
        let limits = options.limits;
        Ok(Self {
            backend,
            ends,
            block,
            limits,
            step,
            hidden,
            sessions: Sessions::new(limits.kv_pages, limits.positions),
            histories: Vec::new(),
            inputs: Inputs::new(&limits),
            flight: None,
            spare: StepPlan::new(),
            logits: Vec::new(),
            sampler: Sampler::new(),
        })
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Bytes of the layers' weights.
    pub fn weight_bytes(&self) -> usize {
        self.block.weight_bytes()
    }

    /// Bytes of the head's weights.
    pub fn head_bytes(&self) -> usize {
        self.ends.head_bytes(&self.backend)
    }

    /// That the plan can run as a whole: only then is anything changed.
    fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let capacity = self.capacity();
        if self.flight.is_some() {
            return Err(ExecutorError::Full { depth: self.depth() });
        }
        let (mut needed, mut pages) = (0, 0);
        for (index, entry) in plan.entries().iter().enumerate() {
            let (session, position) = (entry.session, entry.position);
            let computed = self.sessions.computed(session)?;
            if computed != position {
                return Err(ExecutorError::OutOfPlace { session, computed, position });
            }
            if plan.entries()[..index].iter().any(|earlier| earlier.session == session) {
                return Err(ExecutorError::Duplicate(session));
            }
            needed += self.sessions.missing(session, entry.end())?;
            pages += capacity.pages(entry.end());
        }
        for (what, found, max) in [
            ("sequences", plan.entries().len(), capacity.sequences_max),
            ("rows", plan.rows(), capacity.rows_max),
            ("rows with logits", plan.wanted_rows(), capacity.wanted_max),
            ("pages", pages, capacity.step_pages_max),
        ] {
            if found > max {
                return Err(ExecutorError::StepTooLarge { what, found, max });
            }
        }
        let vocab = capacity.vocab;
        if let Some(&TokenId(token)) = plan.all_tokens().iter().find(|token| token.0 as usize >= vocab) {
            return Err(ExecutorError::TokenOutOfRange { token, vocab });
        }
        if needed > capacity.pages_free {
            return Err(ExecutorError::OutOfPages { needed, free: capacity.pages_free });
        }
        Ok(())
    }

    /// Takes the pages that the plan needs, and lists what the backend reads during the step.
    fn prepare(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let Inputs { tokens, spans, pages, wanted } = &mut self.inputs;
        tokens.clear();
        tokens.extend(plan.all_tokens().iter().map(|token| token.0));
        spans.clear();
        pages.clear();
        wanted.clear();
        let mut row = 0;
        for entry in plan.entries() {
            self.sessions.reserve(entry.session, entry.end())?;
            let table = &self.sessions.table(entry.session)?[..entry.end().div_ceil(PAGE_TOKENS)];
            spans.push(Span {
                row,
                rows: entry.rows() as u32,
                position: entry.position as u32,
                pages_start: pages.len() as u32,
                pages_len: table.len() as u32,
            });
            pages.extend_from_slice(table);
            row += entry.rows() as u32;
            wanted.extend(row - entry.want.rows() as u32..row);
        }
        Ok(())
    }

    fn forward(&mut self, rows: usize) -> Result<(), ExecutorError> {
        let Inputs { tokens, spans, pages, wanted } = &self.inputs;
        self.backend.begin(&mut self.step, StepInputs { tokens, spans, pages, wanted })?;
        self.ends.embed(&self.backend, &self.step, &mut self.hidden);
        self.block.forward(&self.backend, &self.step, rows, &mut self.hidden, &Solo)?;
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
        }
        self.histories[slot].clear();
        self.histories[slot].reserve(tokens_max);
        &mut self.histories[slot]
    }

    /// Reads the logits of the step in flight and turns them into what its plan wants.
    fn finish(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let (wanted, vocab) = (plan.wanted_rows(), self.ends.vocab());
        if wanted == 0 {
            return Ok(());
        }
        if self.logits.len() < wanted * vocab {
            self.logits.resize(wanted * vocab, 0.0);
        }
        let mut rest = &mut self.logits[..wanted * vocab];
        let logits = self.ends.logits(&self.backend, &self.step, wanted, &self.hidden);
        self.backend.read(logits, 0..wanted, rest)?;
        for entry in plan.entries() {
            let (rows, session) = (entry.want.rows(), entry.session);
            let (values, after) = rest.split_at_mut(rows * vocab);
            rest = after;
            if self.sessions.computed(session).is_err() {
                continue;
            }
            match &entry.want {
                Want::Nothing => {}
                Want::Logits { .. } => output.push_logits(session, entry.end() - rows, rows, values),
                Want::Sample { prompt, sampling, .. } => {
                    let history = &self.histories[slot_of(session)];
                    for (index, row) in values.chunks_exact_mut(vocab).enumerate() {
                        let position = entry.end() - rows + index + 1;
                        // A session that was cut back since has no such position any more.
                        let Some(tokens) = history.get(..position) else { break };
                        let outcome = self.sampler.sample(row, sampling, History { tokens, prompt: *prompt });
                        output.samples.push(Sample { session, position, outcome });
                    }
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend> Executor for Local<B> {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        let limits = self.limits.step;
        Capacity {
            vocab: self.ends.vocab(),
            positions_max: self.limits.positions,
            rows_max: limits.rows,
            // Each sequence may need a row, and its logits.
            sequences_max: limits.sequences.min(limits.rows).min(self.limits.wanted),
            wanted_max: self.limits.wanted.min(limits.rows),
            step_pages_max: limits.pages,
            page_tokens: PAGE_TOKENS,
            pages_total: self.sessions.pages().total(),
            pages_free: self.sessions.pages().free(),
        }
    }

    fn open(&mut self, tokens_max: usize) -> Result<SessionId, ExecutorError> {
        let session = self.sessions.open(tokens_max)?;
        self.begin_history(session, tokens_max);
        Ok(session)
    }

    fn fork(&mut self, from: SessionId, tokens: usize, tokens_max: usize) -> Result<Forked, ExecutorError> {
        let forked = self.sessions.fork(from, tokens, tokens_max)?;
        self.begin_history(forked.session, tokens_max);
        let [source, target] = self
            .histories
            .get_disjoint_mut([slot_of(from), slot_of(forked.session)])
            .expect("both sessions are open, in slots of their own");
        target.extend_from_slice(&source[..forked.computed]);
        Ok(forked)
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
        self.check(plan)?;
        let result = self.prepare(plan).and_then(|()| self.forward(plan.rows()));
        if let Err(error) = result {
            for entry in plan.entries() {
                self.sessions.trim(entry.session);
            }
            return Err(error);
        }
        for entry in plan.entries() {
            self.sessions.advance(entry.session, entry.end());
            self.record(entry.session, plan.tokens(entry));
        }
        let mut flight = std::mem::take(&mut self.spare);
        flight.clone_from(plan);
        self.flight = Some(flight);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        let plan = self.flight.take().ok_or(ExecutorError::Idle)?;
        let result = self.finish(&plan, output);
        self.spare = plan;
        result
    }
}
