//! `Stage`: runs a range of layers in this process, or one rank's shard of them: sessions, KV pages and steps. Activations come
//! in and go out; the embedding and the head are elsewhere. The stages of a chain, like the ranks of a group, get the same
//! calls in the same order, so their session tables agree.
//!
//! It has one step in flight. `submit` hands the layers to the backend, `collect` waits for them. On a backend that works in
//! order, a page that is released between the two is written to only afterwards.

use std::ops::Range;

use kernels::{Backend, Rows, Span, StepInputs};
use model::{Block, Checkpoint, Collective, Embedding, Limits, LoadError, LoadOptions, SingleRank};
use types::{LayerRange, Rank, SessionId};

use crate::executor::{Capacity, Executor, ExecutorError, OpenedSession};
use crate::plan::{StepOutput, StepPlan};
use crate::prefix::Prefix;
use crate::session_table::SessionTable;

pub struct Stage<B: Backend> {
    backend: B,
    rank: Rank,
    collective: Box<dyn Collective<B>>,
    /// `None` in the first stage of a chain if the coordinator runs no layers itself.
    block: Option<Block<B>>,
    step: B::Step,
    /// The residual stream of the step's rows, `[rows, hidden]`.
    hidden: B::Buffer,
    width: usize,
    sessions: SessionTable,
    inputs: Inputs,
    /// The rows of the step in flight whose states were requested, in ranges that do not meet.
    requested: Vec<Range<usize>>,
    in_flight: bool,
}

/// The lists that `StepInputs` borrows, with memory for the largest step.
struct Inputs {
    tokens: Vec<u32>,
    spans: Vec<Span>,
    pages: Vec<u32>,
    /// Rows whose states the head needs.
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

impl<B: Backend> Stage<B> {
    /// Loads a range of layers. `progress` gets the number of layers loaded so far.
    pub fn load(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        layers: LayerRange,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        Self::load_shard(backend, from, options, layers, Rank::SINGLE, Box::new(SingleRank), progress)
    }

    /// Loads a rank's shard of a range of layers. `collective` connects it with the other ranks.
    pub fn load_shard(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        layers: LayerRange,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, LoadError> {
        let block = Block::load(&backend, from, layers, rank, options, progress)?;
        Self::new(backend, from, options, Some(block), rank, collective)
    }

    pub(crate) fn new(
        backend: B,
        from: &Checkpoint,
        options: &LoadOptions,
        block: Option<Block<B>>,
        rank: Rank,
        collective: Box<dyn Collective<B>>,
    ) -> Result<Self, LoadError> {
        let (limits, description) = (options.limits, from.description());
        Ok(Self {
            rank,
            collective,
            block,
            step: backend.step(limits.step)?,
            hidden: backend.output(limits.step.rows, description.hidden)?,
            width: description.hidden,
            sessions: SessionTable::new(&limits, description.vocab),
            inputs: Inputs::new(&limits),
            requested: Vec::with_capacity(limits.step.sequences),
            in_flight: false,
            backend,
        })
    }

    /// Continues in a newly formed group: all sessions are closed, the weights stay.
    pub fn regroup(&mut self, collective: Box<dyn Collective<B>>) {
        self.collective = collective;
        self.clear();
    }

    /// Closes all sessions, empties the prefix cache and drops the step in flight. The weights stay.
    pub fn clear(&mut self) {
        self.sessions.clear();
        self.in_flight = false;
    }

    pub fn backend(&self) -> &B {
        &self.backend
    }

    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Its layers, if it has any.
    pub fn layers(&self) -> Option<LayerRange> {
        self.block.as_ref().map(Block::layers)
    }

    /// Columns of its activations.
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn sessions(&self) -> &SessionTable {
        &self.sessions
    }

    /// Bytes of the layers' weights.
    pub fn weight_bytes(&self) -> usize {
        self.block.as_ref().map_or(0, Block::weight_bytes)
    }

    pub(crate) fn sessions_mut(&mut self) -> &mut SessionTable {
        &mut self.sessions
    }

    /// What the head needs to continue the step that was started last.
    pub(crate) fn step(&self) -> (&B, &dyn Collective<B>, &B::Step, &B::Buffer) {
        (&self.backend, &*self.collective, &self.step, &self.hidden)
    }

    /// Checks a plan, allocates its pages and hands the layers to the backend. The rows are the tokens of the plan if there is
    /// an embedding, else its activations; the caller has checked that it has them. An error means that no session changed.
    pub(crate) fn start(&mut self, plan: &StepPlan, embedding: Option<&Embedding<B>>) -> Result<(), ExecutorError> {
        self.sessions.check(plan)?;
        let result = self.prepare(plan).and_then(|()| self.forward(plan, embedding));
        if let Err(error) = result {
            self.sessions.release_reserved(plan);
            return Err(error);
        }
        self.sessions.advance(plan);
        Ok(())
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
            logit_rows.extend(entry.state_rows().map(|row| row as u32));
        }
        Ok(())
    }

    fn forward(&mut self, plan: &StepPlan, embedding: Option<&Embedding<B>>) -> Result<(), ExecutorError> {
        let Self { backend, collective, step, hidden, .. } = self;
        let decode = plan.decode_rows();
        let rows = Rows { decode, prefill: plan.rows() - decode };
        let Inputs { tokens, spans, pages, logit_rows } = &self.inputs;
        backend.begin(step, StepInputs { tokens, spans, pages, logit_rows })?;
        match embedding {
            Some(embedding) => embedding.embed(backend, step, rows.all(), hidden, &**collective)?,
            None => backend.write(hidden, plan.activations())?,
        }
        if let Some(block) = &mut self.block {
            let layers = plan.layers().unwrap_or(block.layers());
            block.forward(backend, step, rows, layers, hidden, &**collective)?;
        }
        Ok(())
    }

    /// Checks that it has the layers that a plan asks for.
    fn check_layers(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        let has = |layers| self.layers().is_some_and(|own| own.contains(layers));
        match plan.layers() {
            Some(layers) if !has(layers) => Err(ExecutorError::UnknownLayers { layers }),
            _ => Ok(()),
        }
    }

    /// Appends the residual stream of `rows` of the step that was started last to `states`, and waits for it.
    pub(crate) fn read(&self, rows: Range<usize>, states: &mut Vec<f32>) -> Result<(), ExecutorError> {
        if let Some(values) = self.backend.host_rows(&self.hidden, rows.end) {
            states.extend_from_slice(&values[rows.start * self.width..]);
            return Ok(());
        }
        let start = states.len();
        states.resize(start + rows.len() * self.width, 0.0);
        Ok(self.backend.read(&self.hidden, rows, &mut states[start..])?)
    }

    /// Notes the rows whose states were requested, and joins ranges that meet: each is read at once.
    fn request(&mut self, plan: &StepPlan) {
        self.requested.clear();
        for rows in plan.entries().iter().map(|entry| entry.state_rows()).filter(|rows| !rows.is_empty()) {
            match self.requested.last_mut() {
                Some(last) if last.end == rows.start => last.end = rows.end,
                _ => self.requested.push(rows),
            }
        }
    }
}

impl<B: Backend> Executor for Stage<B> {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.sessions.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.sessions.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.sessions.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.sessions.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        if self.in_flight {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        plan.check_stage(self.width)?;
        self.check_layers(plan)?;
        self.start(plan, None)?;
        self.request(plan);
        self.in_flight = true;
        Ok(())
    }

    /// With several ranks, all have the states and the first of them returns them.
    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        if !std::mem::take(&mut self.in_flight) {
            return Err(ExecutorError::NoStepInFlight);
        }
        let is_first = self.rank.index() == 0;
        let mut ranges = self.requested.iter().filter(|_| is_first);
        let result = ranges.try_for_each(|rows| self.read(rows.clone(), &mut output.states));
        if result.is_err() {
            self.sessions.clear_prefix_cache();
        }
        result
    }
}
