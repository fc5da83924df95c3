//! `EmbeddingAndHead`: what a model has outside its layers, without sampling: tokens become activations for the first layer, and
//! states after the last layer become logits. For whoever serves layers to clients that send tokens or expect logits.

use kernels::{Backend, PAGE_TOKENS, Span, StepInputs, StepLimits};
use model::{Checkpoint, Embedding, LmHead, LoadError, LoadOptions, SingleRank};
use types::{Rank, TokenId};

use crate::executor::ExecutorError;

pub struct EmbeddingAndHead<B: Backend> {
    backend: B,
    embedding: Embedding<B>,
    lm_head: LmHead<B>,
    step: B::Step,
    hidden: B::Buffer, // [rows, hidden]
    width: usize,
    rows_max: usize,
    logit_rows_max: usize,
    tokens: Vec<u32>,
    /// Steps have page tables; nothing here reads or writes a page.
    pages: Vec<u32>,
}

impl<B: Backend> EmbeddingAndHead<B> {
    /// Loads both, with buffers for the rows of a step and for its logit rows. No KV cache is allocated.
    pub fn load(backend: B, from: &Checkpoint, options: &LoadOptions) -> Result<Self, LoadError> {
        let rows_max = options.limits.step.rows;
        let pages = rows_max.div_ceil(PAGE_TOKENS);
        let embedding = Embedding::load(&backend, from, options, Rank::SINGLE)?;
        let width = from.description().hidden;
        Ok(Self {
            lm_head: LmHead::load(&backend, from, options, Rank::SINGLE, &embedding)?,
            embedding,
            step: backend.step(StepLimits { rows: rows_max, sequences: 1, pages })?,
            hidden: backend.output(rows_max, width)?,
            width,
            rows_max,
            logit_rows_max: options.limits.logit_rows,
            tokens: Vec::with_capacity(rows_max),
            pages: vec![0; pages],
            backend,
        })
    }

    /// Columns of activations and of states.
    pub fn width(&self) -> usize {
        self.width
    }

    pub fn vocab(&self) -> usize {
        self.lm_head.vocab()
    }

    /// The activations `[tokens, hidden]` before the first layer.
    pub fn embed(&mut self, tokens: &[TokenId]) -> Result<Vec<f32>, ExecutorError> {
        let vocab = self.vocab();
        if let Some(&TokenId(token)) = tokens.iter().find(|token| token.0 as usize >= vocab) {
            return Err(ExecutorError::TokenOutOfRange { token, vocab });
        }
        let mut activations = Vec::with_capacity(tokens.len() * self.width);
        for tokens in tokens.chunks(self.rows_max) {
            self.tokens.clear();
            self.tokens.extend(tokens.iter().map(|token| token.0));
            let pages = &self.pages[..tokens.len().div_ceil(PAGE_TOKENS)];
            let (rows, pages_len) = (tokens.len() as u32, pages.len() as u32);
            let span = Span { row: 0, rows, position: 0, pages_start: 0, pages_len };
            let inputs = StepInputs { tokens: &self.tokens, spans: &[span], pages, logit_rows: &[] };
            self.backend.begin(&mut self.step, inputs)?;
            self.embedding.embed(&self.backend, &self.step, tokens.len(), &mut self.hidden, &SingleRank)?;
            let start = activations.len();
            activations.resize(start + tokens.len() * self.width, 0.0);
            self.backend.read(&self.hidden, 0..tokens.len(), &mut activations[start..])?;
        }
        Ok(activations)
    }

    /// The logits `[rows, vocab]` of states `[rows, hidden]` after the last layer.
    pub fn logits(&mut self, states: &[f32]) -> Result<Vec<f32>, ExecutorError> {
        let rows = states.len() / self.width;
        if rows * self.width != states.len() {
            return Err(ExecutorError::ActivationShape { rows, width: self.width, found: states.len() });
        }
        if rows > self.logit_rows_max {
            return Err(ExecutorError::StepTooLarge { what: "logit rows", found: rows, max: self.logit_rows_max });
        }
        let mut logits = vec![0.0; rows * self.vocab()];
        if rows > 0 {
            self.lm_head.normed_of(&self.backend, rows, states)?;
            // A single rank always has the logits.
            if let Some(values) = self.lm_head.logits_of_normed(&self.backend, rows, &SingleRank)? {
                self.backend.read(values, 0..rows, &mut logits)?;
            }
        }
        Ok(logits)
    }
}
