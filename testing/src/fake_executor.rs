//! A fake executor: a toy language model whose logits are a function of the whole history and of the phase of each token
//! in it, with the real page tables and the real sampler. It reads the history of a session from its pages, so a page that
//! is shared wrongly, or allocated while it is used, changes answers. It refuses any plan that does not continue its session
//! exactly.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use engine::{
    AllowedTokens, Capacity, Entry, Executor, ExecutorError, History, OpenedSession, PageTables, Phase,
    PooledEmbedding, Pooling, Prefix, PromptLogprobs, RequestedOutput, Sample, Sampler, SamplingParams, StepOutput,
    StepPlan,
};
use kernels::{BackendError, PAGE_TOKENS};
use types::{SessionId, TokenId};

pub const VOCAB: usize = 53;
/// More steps than any test needs.
const STEPS_MAX: usize = 100_000;
/// After this token the toy model's logits are NaN.
pub const POISON: TokenId = TokenId(13);

pub struct Fake {
    pub depth: usize,
    pub rows_max: usize,
    pub logit_rows_max: usize,
    pub sequences_max: usize,
    pub page_tables: PageTables,
    /// Rows of each entry of each step that was submitted.
    pub steps: Vec<Vec<usize>>,
    /// Steps after which submitting fails.
    pub fail_after: usize,
    /// Makes the next step fail, once.
    pub breaks: Arc<AtomicBool>,
    /// A step begins when a permit is received, or when the sender is dropped.
    pub gate: Option<Receiver<()>>,
    /// The time that a step of these rows takes on the clock of [`Fake::clock`], by their positions.
    pub row_time: fn(usize) -> Duration,
    /// The time of each step that was collected.
    pub times: Vec<Duration>,
    clock: Arc<AtomicU64>,
    pages: usize,
    positions_max: usize,
    /// The contents of each page.
    kv: Vec<[(TokenId, Phase); PAGE_TOKENS]>,
    pools: HashMap<SessionId, Vec<f64>>,
    flights: VecDeque<(StepOutput, Duration)>,
    sampler: Sampler,
}

impl Fake {
    pub fn new(pages: usize, positions_max: usize) -> Self {
        Self {
            depth: 1,
            rows_max: 128,
            logit_rows_max: 128,
            sequences_max: 16,
            page_tables: PageTables::new(pages, positions_max),
            steps: Vec::new(),
            fail_after: usize::MAX,
            breaks: Arc::default(),
            gate: None,
            row_time: |_| Duration::ZERO,
            times: Vec::new(),
            clock: Arc::default(),
            pages,
            positions_max,
            kv: vec![[(POISON, Phase::Decode); PAGE_TOKENS]; pages],
            pools: HashMap::new(),
            flights: VecDeque::new(),
            sampler: Sampler::new(),
        }
    }

    pub fn with_depth(self, depth: usize) -> Self {
        Self { depth, ..self }
    }

    /// A clock that only steps advance.
    pub fn clock(&self) -> impl Fn() -> Instant + Send + 'static {
        let (start, elapsed) = (Instant::now(), self.clock.clone());
        move || start + Duration::from_nanos(elapsed.load(Ordering::Relaxed))
    }

    /// No page is used and every session is closed.
    pub fn is_clean(&self) -> bool {
        self.page_tables.count() == 0 && self.page_tables.pool().free() == self.pages && self.flights.is_empty()
    }

    /// The contents of a session's pages.
    fn history(&self, session: SessionId, tokens: usize) -> (Vec<TokenId>, Vec<Phase>) {
        let table = self.page_tables.pages(session).unwrap();
        let cells = table.iter().flat_map(|&page| self.kv[page as usize]);
        cells.take(tokens).unzip()
    }

    fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        assert!(plan.rows() <= self.rows_max && plan.entries().len() <= self.sequences_max && !plan.is_empty());
        assert!(plan.logit_rows() <= self.logit_rows_max);
        if self.flights.len() == self.depth {
            return Err(ExecutorError::PipelineFull { depth: self.depth });
        }
        if self.steps.len() >= self.fail_after || self.breaks.swap(false, Ordering::Relaxed) {
            return Err(BackendError::Device("the toy broke".into()).into());
        }
        let mut needed = 0;
        for entry in plan.entries() {
            assert_eq!(self.page_tables.computed(entry.session)?, entry.position);
            needed += self.page_tables.pages_missing(entry.session, entry.end())?;
        }
        let free = self.page_tables.pool().free();
        if needed > free { Err(ExecutorError::OutOfPages { needed, free }) } else { Ok(()) }
    }

    fn run(&mut self, plan: &StepPlan, entry: &Entry, output: &mut StepOutput) {
        let session = entry.session;
        self.page_tables.reserve(session, entry.end()).unwrap();
        for (position, &token) in (entry.position..).zip(plan.tokens(entry)) {
            let page = self.page_tables.pages(session).unwrap()[position / PAGE_TOKENS];
            let shared = self.page_tables.pool().references(page) > 1 || self.page_tables.pool().is_published(page);
            assert!(!shared, "a shared page is written");
            self.kv[page as usize][position % PAGE_TOKENS] = (token, entry.phase);
        }
        let (tokens, phases) = self.history(session, entry.end());
        self.page_tables.advance(session, entry.end(), entry.phase, plan.layers());
        let row = |end: usize| logits_of(&tokens[..end], &phases[..end]);
        let rows = entry.end() - entry.logit_rows() + 1..=entry.end();
        match &entry.requested {
            RequestedOutput::Nothing => {}
            RequestedOutput::States { .. } => panic!("the engine asks for no states"),
            RequestedOutput::Logits { .. } => rows.for_each(|end| output.push_logits(session, end - 1, 1, &row(end))),
            RequestedOutput::Sample { prompt_tokens, sampling, suppressed, .. } => {
                for position in rows {
                    let history = History { tokens: &tokens[..position], prompt_tokens: *prompt_tokens };
                    let suppressed = suppressed.as_ref().filter(|suppressed| position < suppressed.until);
                    let suppressed = suppressed.map_or(&[][..], |suppressed| &suppressed.tokens);
                    let allowed = AllowedTokens { mask: plan.mask(entry), suppressed };
                    let outcome = self.sampler.sample(&mut row(position), sampling, history, allowed);
                    output.samples.push(Sample { session, position, outcome });
                }
            }
            RequestedOutput::PromptLogprobs { top, next } => {
                let following = plan.tokens(entry)[1..].iter().chain([next]);
                let scored = rows.zip(following);
                let outcome = scored.map(|(end, &token)| self.sampler.logprobs_of(&row(end), token, *top)).collect();
                output.prompt_logprobs.push(PromptLogprobs { session, position: entry.position + 1, outcome });
            }
            RequestedOutput::Embed { pooling, last } => {
                let sums = self.pools.entry(session).or_insert_with(|| vec![0.0; VOCAB]);
                for end in entry.end() - entry.pooled_rows() + 1..=entry.end() {
                    sums.iter_mut().zip(row(end)).for_each(|(sum, value)| *sum += f64::from(value));
                }
                if *last {
                    let count = if *pooling == Pooling::Mean { entry.end() } else { 1 };
                    let values = sums.iter().map(|sum| (sum / count as f64) as f32).collect();
                    output.embeddings.push(PooledEmbedding { session, values });
                }
            }
        }
    }
}

impl Executor for Fake {
    fn depth(&self) -> usize {
        self.depth
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            vocab: VOCAB,
            positions_max: self.positions_max,
            rows_max: self.rows_max,
            sequences_max: self.sequences_max,
            logit_rows_max: self.logit_rows_max,
            step_pages_max: 4 * self.pages,
            page_tokens: PAGE_TOKENS,
            pages_total: self.pages,
            pages_free: self.page_tables.pool().free(),
            pages_cached: self.page_tables.pool().cached(),
        }
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.page_tables.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.page_tables.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.page_tables.close(session);
        self.pools.remove(&session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.check(plan)?;
        if let Some(gate) = &self.gate {
            let _ = gate.recv();
        }
        assert!(self.steps.len() < STEPS_MAX, "the engine runs steps without end");
        self.steps.push(plan.entries().iter().map(|entry| entry.rows()).collect());
        let mut output = StepOutput::new();
        for entry in plan.entries() {
            self.run(plan, entry, &mut output);
        }
        let positions = plan.entries().iter().flat_map(|entry| entry.position..entry.end());
        let time = positions.map(self.row_time).sum();
        self.flights.push_back((output, time));
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        let (collected, time) = self.flights.pop_front().ok_or(ExecutorError::NoStepInFlight)?;
        *output = collected;
        self.clock.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        self.times.push(time);
        output.samples.retain(|sample| self.page_tables.computed(sample.session).is_ok());
        Ok(())
    }
}

/// The toy model on a prompt: logits in -4..4 that depend on every token and on the order.
pub fn logits(history: &[TokenId]) -> Vec<f32> {
    logits_of(history, &vec![Phase::Prefill; history.len()])
}

fn logits_of(history: &[TokenId], phases: &[Phase]) -> Vec<f32> {
    let mix = |state: u64, value: u64| {
        let mixed = (state ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    };
    let cell = |(token, phase): (&TokenId, &Phase)| 2 * u64::from(token.0) + 1 + u64::from(*phase == Phase::Prefill);
    let state = history.iter().zip(phases).map(cell).fold(1, mix);
    let logit = |id| (mix(mix(state, id), 7) >> 40) as f32 / (1 << 24) as f32 * 8.0 - 4.0;
    if history.last() == Some(&POISON) {
        return vec![f32::NAN; VOCAB];
    }
    (0..VOCAB as u64).map(logit).collect()
}

/// The toy model's answer, computed one token at a time without an engine. Stops at [`POISON`].
pub fn answer(prompt: &[TokenId], sampling: &SamplingParams, tokens: usize) -> Vec<TokenId> {
    let (mut history, mut phases) = (prompt.to_vec(), vec![Phase::Prefill; prompt.len()]);
    let mut sampler = Sampler::new();
    while history.len() < prompt.len() + tokens {
        let before = History { tokens: &history, prompt_tokens: prompt.len() };
        match sampler.sample(&mut logits_of(&history, &phases), sampling, before, AllowedTokens::default()) {
            Ok(sampled) => history.push(sampled.token),
            Err(_) => break,
        }
        phases.push(Phase::Decode);
    }
    history.split_off(prompt.len())
}

/// A prompt without [`POISON`].
pub fn prompt(length: usize, seed: u32) -> Vec<TokenId> {
    let token = |index: usize| (index as u32 * 31 + seed * 17 + (index as u32 * seed) % 5) % VOCAB as u32;
    (0..length).map(|index| TokenId(token(index))).map(|id| if id == POISON { TokenId(0) } else { id }).collect()
}

/// Sampling that never chooses [`POISON`].
pub fn safe(sampling: SamplingParams) -> SamplingParams {
    SamplingParams { logit_bias: Some([(POISON, f32::NEG_INFINITY)].into()), ..sampling }
}
