//! A fake executor: a toy language model whose logits are a function of the whole history, behind the real page tables
//! and the real sampler. It refuses any plan that does not continue its session exactly.
#![allow(dead_code)] // each test binary uses its own part

use std::collections::{HashMap, VecDeque};

use engine::{
    Capacity, Executor, ExecutorError, Forked, History, Sample, Sampler, SamplingParams, Sessions, StepOutput,
    StepPlan, Want,
};
use kernels::{BackendError, PAGE_TOKENS};
use types::{SessionId, TokenId};

pub const VOCAB: usize = 53;
/// After this token the toy model's logits are not numbers.
pub const POISON: TokenId = TokenId(13);

pub struct Fake {
    pub depth: usize,
    pub rows_max: usize,
    pub sequences_max: usize,
    pub sessions: Sessions,
    /// Rows of each entry of each step that was submitted.
    pub steps: Vec<Vec<usize>>,
    /// Steps after which submitting fails.
    pub fail_after: usize,
    pages: usize,
    positions_max: usize,
    histories: HashMap<SessionId, Vec<TokenId>>,
    flights: VecDeque<StepOutput>,
    sampler: Sampler,
}

impl Fake {
    pub fn new(pages: usize, positions_max: usize) -> Self {
        Self {
            depth: 1,
            rows_max: 128,
            sequences_max: 16,
            sessions: Sessions::new(pages, positions_max),
            steps: Vec::new(),
            fail_after: usize::MAX,
            pages,
            positions_max,
            histories: HashMap::new(),
            flights: VecDeque::new(),
            sampler: Sampler::new(),
        }
    }

    pub fn with_depth(self, depth: usize) -> Self {
        Self { depth, ..self }
    }

    /// Every page is free and every session closed.
    pub fn is_clean(&self) -> bool {
        self.sessions.count() == 0 && self.sessions.pages().free() == self.pages && self.flights.is_empty()
    }

    fn check(&self, plan: &StepPlan) -> Result<(), ExecutorError> {
        assert!(plan.rows() <= self.rows_max && plan.entries().len() <= self.sequences_max && !plan.is_empty());
        if self.flights.len() == self.depth {
            return Err(ExecutorError::Full { depth: self.depth });
        }
        if self.steps.len() >= self.fail_after {
            return Err(BackendError::Device("the toy broke".into()).into());
        }
        let mut needed = 0;
        for entry in plan.entries() {
            assert_eq!(self.sessions.computed(entry.session)?, entry.position);
            needed += self.sessions.missing(entry.session, entry.end())?;
        }
        let free = self.sessions.pages().free();
        if needed > free { Err(ExecutorError::OutOfPages { needed, free }) } else { Ok(()) }
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
            wanted_max: self.rows_max,
            step_pages_max: 4 * self.pages,
            page_tokens: PAGE_TOKENS,
            pages_total: self.pages,
            pages_free: self.sessions.pages().free(),
        }
    }

    fn open(&mut self, tokens_max: usize) -> Result<SessionId, ExecutorError> {
        let session = self.sessions.open(tokens_max)?;
        self.histories.insert(session, Vec::new());
        Ok(session)
    }

    fn fork(&mut self, from: SessionId, tokens: usize, tokens_max: usize) -> Result<Forked, ExecutorError> {
        let forked = self.sessions.fork(from, tokens, tokens_max)?;
        let shared = self.histories[&from][..forked.computed].to_vec();
        self.histories.insert(forked.session, shared);
        Ok(forked)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        let kept = self.sessions.truncate(session, tokens)?;
        self.histories.get_mut(&session).unwrap().truncate(kept);
        Ok(kept)
    }

    fn close(&mut self, session: SessionId) {
        self.sessions.close(session);
        self.histories.remove(&session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.check(plan)?;
        self.steps.push(plan.entries().iter().map(|entry| entry.rows()).collect());
        let mut output = StepOutput::new();
        for entry in plan.entries() {
            self.sessions.reserve(entry.session, entry.end())?;
            self.sessions.advance(entry.session, entry.end());
            let history = self.histories.get_mut(&entry.session).unwrap();
            history.extend_from_slice(plan.tokens(entry));
            for position in entry.end() - entry.want.rows() + 1..=entry.end() {
                let tokens = &history[..position];
                match &entry.want {
                    Want::Nothing => {}
                    Want::Logits { .. } => output.push_logits(entry.session, position - 1, 1, &logits(tokens)),
                    Want::Sample { prompt, sampling, .. } => {
                        let history = History { tokens, prompt: *prompt };
                        let outcome = self.sampler.sample(&mut logits(tokens), sampling, history);
                        output.samples.push(Sample { session: entry.session, position, outcome });
                    }
                }
            }
        }
        self.flights.push_back(output);
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        *output = self.flights.pop_front().ok_or(ExecutorError::Idle)?;
        output.samples.retain(|sample| self.histories.contains_key(&sample.session));
        Ok(())
    }
}

/// The toy model: logits in -4..4 that depend on every token and on the order.
pub fn logits(history: &[TokenId]) -> Vec<f32> {
    let mix = |state: u64, value: u64| {
        let mixed = (state ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        mixed ^ mixed >> 29
    };
    let state = history.iter().fold(1, |state, token| mix(state, u64::from(token.0) + 1));
    let logit = |id| (mix(mix(state, id), 7) >> 40) as f32 / (1 << 24) as f32 * 8.0 - 4.0;
    if history.last() == Some(&POISON) {
        return vec![f32::NAN; VOCAB];
    }
    (0..VOCAB as u64).map(logit).collect()
}

/// What the toy model answers, computed one token at a time without an engine. Stops at poison.
pub fn answer(prompt: &[TokenId], sampling: &SamplingParams, tokens: usize) -> Vec<TokenId> {
    let mut history = prompt.to_vec();
    let mut sampler = Sampler::new();
    while history.len() < prompt.len() + tokens {
        let before = History { tokens: &history, prompt: prompt.len() };
        match sampler.sample(&mut logits(&history), sampling, before) {
            Ok(sampled) => history.push(sampled.token),
            Err(_) => break,
        }
    }
    history.split_off(prompt.len())
}

/// A prompt without poison.
pub fn prompt(length: usize, seed: u32) -> Vec<TokenId> {
    let token = |index: usize| (index as u32 * 31 + seed * 17 + (index as u32 * seed) % 5) % VOCAB as u32;
    (0..length).map(|index| TokenId(token(index))).map(|id| if id == POISON { TokenId(0) } else { id }).collect()
}

/// Sampling that never chooses the poison.
pub fn safe(sampling: SamplingParams) -> SamplingParams {
    SamplingParams { logit_bias: Some([(POISON, f32::NEG_INFINITY)].into()), ..sampling }
}
