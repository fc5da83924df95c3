//! `StepPlan`: what one step runs, and `StepOutput`: what it gave.
//!
//! A plan lists sequences. For each it says which tokens to run, from the first position that is not computed yet, and
//! what is wanted of them. Chunked prefill, decode, and checking of guessed tokens are all this one case: *computed*
//! advances towards *known*. Both types keep their memory from step to step.
//!
//! Entries with generated tokens come first, then those of prompts, and last those of prompts that are to be pooled: rows
//! with the same arithmetic lie side by side, and so do rows with logits.

use std::ops::Range;
use std::sync::Arc;

use types::{SessionId, TokenId};

use crate::request::Pooling;
use crate::sampler::{Logprobs, SampleError, Sampled, SamplingParams};

/// Whether tokens were given or generated. A token's arithmetic may depend on its role, never on its company or on how
/// its sequence was cut into steps; so a sequence that begins again computes each token in the role that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Also tokens that are only guessed to be generated.
    Generated,
    Prompt,
}

/// What is wanted of an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum Want {
    Nothing,
    /// A token for each of the last `rows` rows. Tokens before position `prompt` were given, those after it generated:
    /// presence and frequency penalties count only the latter.
    Sample {
        rows: usize,
        prompt: usize,
        sampling: SamplingParams,
        not_before: Option<NotBefore>,
    },
    /// The log probability of the token that follows each row: the entry's next one, and `next` after its last.
    Score {
        top: usize,
        next: TokenId,
    },
    /// The session's hidden states after the final norm, pooled: given when `last` says that no more are to come.
    Embed {
        pooling: Pooling,
        last: bool,
    },
    /// The logits of the last `rows` rows. They are large: for inspection, not for serving.
    Logits {
        rows: usize,
    },
}

impl Want {
    /// One token, chosen freely.
    pub fn sample(prompt: usize, sampling: SamplingParams) -> Self {
        Self::Sample { rows: 1, prompt, sampling, not_before: None }
    }
}

/// Tokens that are not chosen for positions before `position`.
#[derive(Clone, Debug, PartialEq)]
pub struct NotBefore {
    pub position: usize,
    pub tokens: Arc<[TokenId]>,
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub session: SessionId,
    pub role: Role,
    /// Of the first token; equals the tokens that the session has computed so far.
    pub position: usize,
    tokens: Range<usize>,
    pub want: Want,
    mask: Option<Range<usize>>,
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

    /// How many of its last rows need logits.
    pub fn logit_rows(&self) -> usize {
        match self.want {
            Want::Nothing | Want::Embed { .. } => 0,
            Want::Sample { rows, .. } | Want::Logits { rows } => rows,
            Want::Score { .. } => self.rows(),
        }
    }

    /// Whether tokens are chosen for it.
    pub fn is_sampled(&self) -> bool {
        matches!(self.want, Want::Sample { .. })
    }

    /// How many of its last rows are pooled.
    pub fn pooled_rows(&self) -> usize {
        match self.want {
            Want::Embed { pooling: Pooling::Mean, .. } => self.rows(),
            Want::Embed { pooling: Pooling::Last, last } => usize::from(last),
            _ => 0,
        }
    }

    /// Where it comes in a plan.
    fn order(&self) -> (Role, bool) {
        (self.role, matches!(self.want, Want::Embed { .. }))
    }
}

/// What one step runs: at most one entry for a session, each with at least one token.
#[derive(Debug, Default)]
pub struct StepPlan {
    entries: Vec<Entry>,
    tokens: Vec<TokenId>,
    /// Of all entries that have one: see [`TokenMask`](crate::TokenMask::words).
    masks: Vec<u32>,
}

impl Clone for StepPlan {
    fn clone(&self) -> Self {
        Self { entries: self.entries.clone(), tokens: self.tokens.clone(), masks: self.masks.clone() }
    }

    /// Uses the memory that is there: executors keep a copy of a plan while its step is in flight.
    fn clone_from(&mut self, source: &Self) {
        self.entries.clone_from(&source.entries);
        self.tokens.clone_from(&source.tokens);
        self.masks.clone_from(&source.masks);
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
        self.masks.clear();
    }

    pub fn push(&mut self, session: SessionId, role: Role, position: usize, tokens: &[TokenId], want: Want) {
        self.push_guessed(session, role, position, tokens, &[], want);
    }

    /// `tokens`, then `guesses`, which may prove wrong.
    pub fn push_guessed(
        &mut self,
        session: SessionId,
        role: Role,
        position: usize,
        tokens: &[TokenId],
        guesses: &[TokenId],
        want: Want,
    ) {
        let start = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        self.tokens.extend_from_slice(guesses);
        let entry = Entry { session, role, position, tokens: start..self.tokens.len(), want, mask: None };
        assert!(entry.rows() > 0, "an entry runs at least one token");
        assert!(entry.logit_rows() <= entry.rows(), "rows are wanted that the entry does not run");
        assert!(self.entries.last().is_none_or(|last| last.order() <= entry.order()), "an entry is out of order");
        self.entries.push(entry);
    }

    /// Only tokens with a bit in `words` may be sampled for the last entry.
    pub fn mask_last(&mut self, words: &[u32]) {
        let start = self.masks.len();
        self.masks.extend_from_slice(words);
        let last = self.entries.last_mut().expect("there is an entry to mask");
        last.mask = Some(start..self.masks.len());
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

    /// Which tokens may be sampled for an entry; `None`: any.
    pub fn mask(&self, entry: &Entry) -> Option<&[u32]> {
        entry.mask.clone().map(|range| &self.masks[range])
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Rows of generated tokens: the first ones.
    pub fn generated_rows(&self) -> usize {
        let generated = self.entries.iter().filter(|entry| entry.role == Role::Generated);
        generated.map(Entry::rows).sum()
    }

    /// Rows whose logits are needed.
    pub fn logit_rows(&self) -> usize {
        self.entries.iter().map(Entry::logit_rows).sum()
    }

    /// Rows whose hidden states are pooled.
    pub fn pooled_rows(&self) -> usize {
        self.entries.iter().map(Entry::pooled_rows).sum()
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

/// The log probabilities of given tokens.
#[derive(Clone, Debug)]
pub struct Scores {
    pub session: SessionId,
    /// Of the first token.
    pub position: usize,
    pub outcome: Result<Vec<Logprobs>, SampleError>,
}

/// A whole prompt as one vector.
#[derive(Clone, Debug)]
pub struct Embedding {
    pub session: SessionId,
    pub values: Vec<f32>,
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
    pub scores: Vec<Scores>,
    pub embeddings: Vec<Embedding>,
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
        self.scores.clear();
        self.embeddings.clear();
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
