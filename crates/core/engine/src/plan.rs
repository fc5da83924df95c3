//! `StepPlan`: what one step runs, and `StepOutput`: its results.
//!
//! A plan has one entry per sequence: which tokens to run, from the first position that is not computed yet, and which
//! output to return. Chunked prefill, decode, and verification of draft tokens are all this one case. A stage without the
//! embedding gets the same plan with the activations of the rows instead of their tokens. Both types keep their memory from
//! step to step.
//!
//! Decode entries come first, then prefill entries, and last the prefill entries whose hidden states are pooled: rows with
//! the same arithmetic are contiguous, and so are rows with logits.

use std::ops::Range;
use std::sync::Arc;

use types::{LayerRange, SessionId, TokenId};

use crate::request::Pooling;
use crate::sampler::{Logprobs, SampleError, Sampled, SamplingParams};

/// How tokens are computed: as part of a prompt, or as part of an answer. A token's arithmetic may depend on its phase, never
/// on the other rows of the step or on how its sequence was split into steps. So a sequence that is computed again computes
/// each token in the phase that it had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Generated tokens and draft tokens.
    Decode,
    /// Tokens of the prompt.
    Prefill,
}

/// What a step returns for an entry.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestedOutput {
    Nothing,
    /// A sampled token for each of the last `rows` rows. The first `prompt_tokens` tokens of the session are its prompt;
    /// presence and frequency penalties count only those after them.
    Sample {
        rows: usize,
        prompt_tokens: usize,
        sampling: SamplingParams,
        suppressed: Option<SuppressedTokens>,
    },
    /// The log probability of the token that follows each row: the entry's next one, and `next` after its last.
    PromptLogprobs {
        top: usize,
        next: TokenId,
    },
    /// The session's hidden states after the final norm, pooled. They are returned by the entry with `last`.
    Embed {
        pooling: Pooling,
        last: bool,
    },
    /// The logits of the last `rows` rows. They are large: for inspection, not for serving.
    Logits {
        rows: usize,
    },
    /// The hidden states of the last `rows` rows after the last layer of a stage: the activations of the next one.
    States {
        rows: usize,
    },
}

impl RequestedOutput {
    /// One token, with all tokens allowed.
    pub fn sample(prompt_tokens: usize, sampling: SamplingParams) -> Self {
        Self::Sample { rows: 1, prompt_tokens, sampling, suppressed: None }
    }
}

/// Tokens that are not sampled before a position.
#[derive(Clone, Debug, PartialEq)]
pub struct SuppressedTokens {
    /// The first position for which they may be sampled.
    pub until: usize,
    pub tokens: Arc<[TokenId]>,
}

/// One sequence's part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub session: SessionId,
    pub phase: Phase,
    /// The position of the first token. It equals the number of tokens that the session has computed.
    pub position: usize,
    /// Its rows of the step.
    rows: Range<usize>,
    pub requested: RequestedOutput,
    mask: Option<Range<usize>>,
}

impl Entry {
    /// How many tokens it runs.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The session's length after the step.
    pub fn end(&self) -> usize {
        self.position + self.rows()
    }

    /// How many of its last rows need logits.
    pub fn logit_rows(&self) -> usize {
        match self.requested {
            RequestedOutput::Nothing | RequestedOutput::Embed { .. } | RequestedOutput::States { .. } => 0,
            RequestedOutput::Sample { rows, .. } | RequestedOutput::Logits { rows } => rows,
            RequestedOutput::PromptLogprobs { .. } => self.rows(),
        }
    }

    /// Whether tokens are sampled for it.
    pub fn is_sampled(&self) -> bool {
        matches!(self.requested, RequestedOutput::Sample { .. })
    }

    /// How many of its last rows are pooled.
    pub fn pooled_rows(&self) -> usize {
        match self.requested {
            RequestedOutput::Embed { pooling: Pooling::Mean, .. } => self.rows(),
            RequestedOutput::Embed { pooling: Pooling::Last, last } => usize::from(last),
            _ => 0,
        }
    }

    /// Its last rows, of the step's rows, whose hidden states after the last layer are needed: for logits, to be pooled, or to
    /// be returned.
    pub fn state_rows(&self) -> Range<usize> {
        let count = match self.requested {
            RequestedOutput::States { rows } => rows,
            _ => self.logit_rows() + self.pooled_rows(),
        };
        self.rows.end - count..self.rows.end
    }

    /// Whether the logits of its last row are all that it needs.
    pub fn takes_logits(&self) -> bool {
        matches!(self.requested, RequestedOutput::Sample { rows: 1, .. } | RequestedOutput::Logits { rows: 1 })
    }

    /// Sorts the entries of a plan.
    fn order(&self) -> (Phase, bool) {
        (self.phase, matches!(self.requested, RequestedOutput::Embed { .. }))
    }
}

/// What one step runs: at most one entry for a session, each with at least one row. Either all rows have tokens, or none has,
/// and the plan carries activations.
#[derive(Debug, Default)]
pub struct StepPlan {
    entries: Vec<Entry>,
    rows: usize,
    /// One for each row, or none.
    tokens: Vec<TokenId>,
    /// `[rows, hidden]`, or none.
    activations: Vec<f32>,
    /// The masks of all entries that have one: see [`TokenMask`](crate::TokenMask::words).
    masks: Vec<u32>,
    layers: Option<LayerRange>,
}

impl Clone for StepPlan {
    fn clone(&self) -> Self {
        let mut plan = Self::new();
        plan.clone_from(self);
        plan
    }

    /// Reuses memory: executors keep a copy of a plan while its step is in flight.
    fn clone_from(&mut self, source: &Self) {
        self.entries.clone_from(&source.entries);
        self.rows = source.rows;
        self.tokens.clone_from(&source.tokens);
        self.activations.clone_from(&source.activations);
        self.masks.clone_from(&source.masks);
        self.layers = source.layers;
    }
}

impl StepPlan {
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.rows = 0;
        self.tokens.clear();
        self.activations.clear();
        self.masks.clear();
        self.layers = None;
    }

    pub fn push(
        &mut self,
        session: SessionId,
        phase: Phase,
        position: usize,
        tokens: &[TokenId],
        requested: RequestedOutput,
    ) {
        self.push_with_draft(session, phase, position, tokens, &[], requested);
    }

    /// Adds an entry that runs `tokens` and then `draft` tokens, which may be rejected.
    pub fn push_with_draft(
        &mut self,
        session: SessionId,
        phase: Phase,
        position: usize,
        tokens: &[TokenId],
        draft: &[TokenId],
        requested: RequestedOutput,
    ) {
        assert!(self.has_tokens(), "the rows before have no tokens");
        self.tokens.extend_from_slice(tokens);
        self.tokens.extend_from_slice(draft);
        self.push_entry(session, phase, position, tokens.len() + draft.len(), requested);
    }

    /// Adds an entry of rows without tokens. The plan needs activations: see [`StepPlan::activations_mut`].
    pub fn push_rows(
        &mut self,
        session: SessionId,
        phase: Phase,
        position: usize,
        rows: usize,
        requested: RequestedOutput,
    ) {
        assert!(self.tokens.is_empty(), "the rows before have tokens");
        self.push_entry(session, phase, position, rows, requested);
    }

    fn push_entry(
        &mut self,
        session: SessionId,
        phase: Phase,
        position: usize,
        rows: usize,
        requested: RequestedOutput,
    ) {
        let entry = Entry { session, phase, position, rows: self.rows..self.rows + rows, requested, mask: None };
        assert!(rows > 0, "an entry runs at least one token");
        let requested = match entry.requested {
            RequestedOutput::States { rows } => rows,
            _ => entry.logit_rows(),
        };
        assert!(requested <= rows, "an entry has the rows whose output it requests");
        assert!(self.entries.last().is_none_or(|last| last.order() <= entry.order()), "an entry is out of order");
        self.rows += rows;
        self.entries.push(entry);
    }

    /// Allows only tokens with a bit in `words` to be sampled for the last entry.
    pub fn mask_last(&mut self, words: &[u32]) {
        let start = self.masks.len();
        self.masks.extend_from_slice(words);
        let last = self.entries.last_mut().expect("there is an entry to mask");
        last.mask = Some(start..self.masks.len());
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The tokens of an entry; none if the plan carries activations.
    pub fn tokens(&self, entry: &Entry) -> &[TokenId] {
        if self.has_tokens() { &self.tokens[entry.rows.clone()] } else { &[] }
    }

    /// The tokens of all entries, in order: one row each; none if the plan carries activations.
    pub fn all_tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Whether each row has a token. Otherwise the rows are activations.
    pub fn has_tokens(&self) -> bool {
        self.tokens.len() == self.rows
    }

    /// The activations `[rows, hidden]` of a plan without tokens.
    pub fn activations(&self) -> &[f32] {
        &self.activations
    }

    /// The same, to be filled. An executor refuses a plan whose activations do not have the shape of its rows.
    pub fn activations_mut(&mut self) -> &mut Vec<f32> {
        &mut self.activations
    }

    /// The layers to run, as the model numbers them; `None`: all that the executor has.
    pub fn layers(&self) -> Option<LayerRange> {
        self.layers
    }

    /// Has only some of the executor's layers run. A session always runs the same ones, or fewer: the others have no keys and
    /// values of its tokens. An executor that cannot run a part of its layers refuses the plan.
    pub fn set_layers(&mut self, layers: Option<LayerRange>) {
        self.layers = layers;
    }

    /// Which tokens may be sampled for an entry; `None`: any.
    pub fn mask(&self, entry: &Entry) -> Option<&[u32]> {
        entry.mask.clone().map(|range| &self.masks[range])
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows of decode entries: the first rows of the plan.
    pub fn decode_rows(&self) -> usize {
        let decode = self.entries.iter().filter(|entry| entry.phase == Phase::Decode);
        decode.map(Entry::rows).sum()
    }

    /// Rows whose logits are needed.
    pub fn logit_rows(&self) -> usize {
        self.entries.iter().map(Entry::logit_rows).sum()
    }

    /// Rows whose hidden states are pooled.
    pub fn pooled_rows(&self) -> usize {
        self.entries.iter().map(Entry::pooled_rows).sum()
    }

    /// Rows whose hidden states after the last layer are needed: see [`Entry::state_rows`].
    pub fn state_rows(&self) -> usize {
        self.entries.iter().map(|entry| entry.state_rows().len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// A sampled token, or why there is none: unusable logits of one sequence do not affect the others.
#[derive(Clone, Debug)]
pub struct Sample {
    pub session: SessionId,
    /// The position of the token in its sequence.
    pub position: usize,
    pub outcome: Result<Sampled, SampleError>,
}

/// The log probabilities of consecutive tokens of a prompt.
#[derive(Clone, Debug)]
pub struct PromptLogprobs {
    pub session: SessionId,
    /// The position of the first token.
    pub position: usize,
    pub outcome: Result<Vec<Logprobs>, SampleError>,
}

/// The pooled hidden states of a prompt.
#[derive(Clone, Debug)]
pub struct PooledEmbedding {
    pub session: SessionId,
    pub values: Vec<f32>,
}

/// Logits of consecutive positions of one sequence.
#[derive(Clone, Debug)]
pub struct LogitRows {
    pub session: SessionId,
    /// The position of the first row.
    pub position: usize,
    pub rows: usize,
    values: Range<usize>,
}

/// An entry of whose rows the end of a chain returned no states, because it has a head of its own. Zeros stand in their places.
#[derive(Clone, Debug)]
pub struct EntryWithoutStates {
    /// The entry's index in the plan.
    pub entry: usize,
    /// Of its last row, if it [takes them](Entry::takes_logits). `None`: the entry needs states, so its request fails.
    pub logits: Option<Vec<f32>>,
}

/// The results of one step, in the order of the plan's entries and rows.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    pub samples: Vec<Sample>,
    pub prompt_logprobs: Vec<PromptLogprobs>,
    pub embeddings: Vec<PooledEmbedding>,
    pub logits: Vec<LogitRows>,
    /// Hidden states `[rows, hidden]` of all rows for which [`RequestedOutput::States`] asked, also of sessions that were
    /// closed since: the rows keep their places.
    pub states: Vec<f32>,
    /// Sessions whose entries needed states that the end of a chain did not return: see [`EntryWithoutStates`].
    pub unserved: Vec<SessionId>,
    /// Sessions that the executor has closed, because there is no room for them any more. Nothing else of them is returned.
    pub preempted: Vec<SessionId>,
    /// Steps that were submitted earlier and are still in flight: see [`Executor::collect`](crate::Executor::collect).
    pub overtaken: usize,
    values: Vec<f32>,
}

impl StepOutput {
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties the output and keeps its memory.
    pub fn clear(&mut self) {
        self.samples.clear();
        self.prompt_logprobs.clear();
        self.embeddings.clear();
        self.logits.clear();
        self.states.clear();
        self.unserved.clear();
        self.preempted.clear();
        self.overtaken = 0;
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
