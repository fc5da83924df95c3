//! `StepPlan`: what one step runs, and `StepOutput`: what it gave.
//!
//! A plan lists sequences. For each it says which tokens to run, from the first position that is not computed yet, and
//! what is wanted of the last rows. Chunked prefill, decode, and checking of guessed tokens are all this one case:
//! *computed* advances towards *known*. Both types keep their memory from step to step.

use std::ops::Range;

use types::{SessionId, TokenId};

use crate::sampler::{SampleError, Sampled, SamplingParams};

/// What is wanted of an entry. `rows` counts from its end: 1 is the last row, the number of its tokens is all of them.
#[derive(Clone, Debug, PartialEq)]
pub enum Want {
    Nothing,
    /// A token for each of the last `rows` rows. Tokens before position `prompt` were given, those after it generated:
    /// presence and frequency penalties count only the latter.
    Sample {
        rows: usize,
        prompt: usize,
        sampling: SamplingParams,
    },
    /// The logits themselves. They are large: for inspection, not for serving.
    Logits {
        rows: usize,
    },
}

impl Want {
    /// How many of the last rows need logits.
    pub fn rows(&self) -> usize {
        match *self {
            Self::Nothing => 0,
            Self::Sample { rows, .. } | Self::Logits { rows } => rows,
        }
    }
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub session: SessionId,
    /// Of the first token; equals the tokens that the session has computed so far.
    pub position: usize,
    tokens: Range<usize>,
    pub want: Want,
}

impl Entry {
    /// How many tokens it runs.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// The session's length after the step.
    pub fn end(&self) -> usize {
        self.position + self.rows()
    }
}

/// What one step runs: at most one entry for a session, each with at least one token.
#[derive(Debug, Default)]
pub struct StepPlan {
    entries: Vec<Entry>,
    tokens: Vec<TokenId>,
}

impl Clone for StepPlan {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), tokens: self.tokens.clone() }
    }

    /// Uses the memory that is there: executors keep a copy of a plan while its step is in flight.
    fn clone_from(&mut self, source: &Self) {
        self.entries.clone_from(&source.entries);
        self.tokens.clone_from(&source.tokens);
    }
}

impl StepPlan {
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.tokens.clear();
    }

    pub fn push(&mut self, session: SessionId, position: usize, tokens: &[TokenId], want: Want) {
        assert!(!tokens.is_empty(), "an entry runs at least one token");
        assert!(want.rows() <= tokens.len(), "rows are wanted that the entry does not run");
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.entries.push(Entry { session, position, tokens: start..self.tokens.len(), want });
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub fn tokens(&self, entry: &Entry) -> &[TokenId] {
        &self.tokens[entry.tokens.clone()]
    }

    /// The tokens of all entries, in order: one row each.
    pub fn all_tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Rows whose logits are needed.
    pub fn wanted_rows(&self) -> usize {
        self.entries.iter().map(|entry| entry.want.rows()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// A token for the row before `position`, or why there is none: one sequence's bad logits do not spoil the others.
#[derive(Clone, Debug)]
pub struct Sample {
    pub session: SessionId,
    /// Where the token belongs in its sequence.
    pub position: usize,
    pub outcome: Result<Sampled, SampleError>,
}

/// Logits of consecutive positions of one sequence.
#[derive(Clone, Debug)]
pub struct LogitRows {
    pub session: SessionId,
    /// Of the first row.
    pub position: usize,
    pub rows: usize,
    values: Range<usize>,
}

/// What one step gave, in the order of the plan's entries and rows.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub samples: Vec<Sample>,
    pub logits: Vec<LogitRows>,
    values: Vec<f32>,
}

impl StepOutput {
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the output and keeps its memory.
    pub fn clear(&mut self) {
        self.samples.clear();
        self.logits.clear();
        self.values.clear();
    }

    /// `values` is `[rows, vocab]`.
    pub fn push_logits(&mut self, session: SessionId, position: usize, rows: usize, values: &[f32]) {
        let start = self.values.len();
        self.values.extend_from_slice(values);
        self.logits.push(LogitRows { session, position, rows, values: start..self.values.len() });
    }

    /// `[rows, vocab]`.
    pub fn values(&self, of: &LogitRows) -> &[f32] {
        &self.values[of.values.clone()]
    }
}
