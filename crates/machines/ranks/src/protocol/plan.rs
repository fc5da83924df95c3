//! A step's plan in the line protocol: see [`engine::StepPlan`].
//!
//! `WirePlan::fill` converts it back and checks every invariant that the engine relies on: counts within [`limits`],
//! tokens within the vocabulary, sampling parameters in their ranges, entries in order. The executor checks whether the
//! sessions are open and the pages suffice.
//!
//! [`limits`]: super::limits

use engine::{SamplingParams, StepPlan, SuppressedTokens, TOP_LOGPROBS_MAX};
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use types::{SessionId, TokenId};

use super::attached::Attached;
use super::bounded::BoundedVec;
use super::limits::{ENTRIES_MAX, LimitError, POSITIONS_MAX, ROWS_MAX, STATE_VALUES_MAX, VOCAB_MAX};
use super::limits::{at_most, count, in_vocab};
use super::number::Number;
use super::packed::Packed;

/// Tokens of an entry that are copied without an allocation: a generated token, and draft tokens after it.
const TOKENS_INLINE: usize = 16;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WirePlan {
    pub entries: BoundedVec<WireEntry, ENTRIES_MAX>,
    /// `[rows, hidden]`: of a plan without tokens, for ranks that share a stage of a chain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<Attached>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireEntry {
    pub session: u64,
    pub phase: WirePhase,
    pub position: u64,
    pub tokens: BoundedVec<u32, ROWS_MAX>,
    /// Rows of an entry without tokens.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rows: u64,
    pub requested: WireRequestedOutput,
    /// Bit mask of the tokens that may be sampled, in words of 32 bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<Packed>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WirePhase {
    Decode,
    Prefill,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireRequestedOutput {
    Nothing,
    Sample {
        rows: u64,
        prompt_tokens: u64,
        sampling: WireSampling,
        #[serde(skip_serializing_if = "Option::is_none")]
        suppressed: Option<WireSuppressedTokens>,
    },
    PromptLogprobs {
        top: u64,
        next: u32,
    },
    Embed {
        pooling: WirePooling,
        last: bool,
    },
    Logits {
        rows: u64,
    },
    States {
        rows: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WirePooling {
    Mean,
    Last,
}

/// See [`engine::SuppressedTokens`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireSuppressedTokens {
    pub until: u64,
    pub tokens: Vec<u32>,
}

/// See [`engine::SamplingParams`]. Defaults are left out, because every step of every sequence carries it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WireSampling {
    #[serde(skip_serializing_if = "Number::is_zero")]
    pub temperature: Number,
    #[serde(skip_serializing_if = "is_zero")]
    pub top_k: u64,
    #[serde(skip_serializing_if = "Number::is_one")]
    pub top_p: Number,
    #[serde(skip_serializing_if = "Number::is_zero")]
    pub min_p: Number,
    #[serde(skip_serializing_if = "is_zero")]
    pub seed: u64,
    #[serde(skip_serializing_if = "Number::is_one")]
    pub repetition_penalty: Number,
    #[serde(skip_serializing_if = "Number::is_zero")]
    pub presence_penalty: Number,
    #[serde(skip_serializing_if = "Number::is_zero")]
    pub frequency_penalty: Number,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logit_bias: Option<Vec<(u32, Number)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u64>,
}

impl Default for WireSampling {
    fn default() -> Self {
        Self::from(&SamplingParams::default())
    }
}

impl From<&StepPlan> for WirePlan {
    fn from(plan: &StepPlan) -> Self {
        let mut wire = Self::default();
        wire.assign(plan);
        wire
    }
}

impl WirePlan {
    /// Overwrites this with the wire form of `plan` and reuses its memory.
    pub fn assign(&mut self, plan: &StepPlan) {
        self.activations = (!plan.has_tokens()).then(|| Attached::of_f32(plan.activations()));
        self.entries.truncate(plan.entries().len());
        for (index, entry) in plan.entries().iter().enumerate() {
            let mut tokens =
                self.entries.get_mut(index).map(|entry| std::mem::take(&mut entry.tokens)).unwrap_or_default();
            tokens.clear();
            tokens.extend(plan.tokens(entry).iter().map(|token| token.0));
            let wire = WireEntry {
                session: entry.session.0,
                phase: entry.phase.into(),
                position: entry.position as u64,
                rows: if plan.has_tokens() { 0 } else { entry.rows() as u64 },
                tokens,
                requested: (&entry.requested).into(),
                mask: plan.mask(entry).map(Packed::of_u32),
            };
            match self.entries.get_mut(index) {
                Some(slot) => *slot = wire,
                None => self.entries.push(wire),
            }
        }
    }

    /// Replaces `plan` with this plan, for a model with this vocabulary. After an error `plan` is empty.
    pub fn fill(&self, vocab: usize, plan: &mut StepPlan) -> Result<(), LimitError> {
        plan.clear();
        let filled = self.push_entries(vocab, plan);
        if filled.is_err() {
            plan.clear();
        }
        filled
    }

    fn push_entries(&self, vocab: usize, plan: &mut StepPlan) -> Result<(), LimitError> {
        at_most("sequences of a step", self.entries.len(), ENTRIES_MAX)?;
        let mut before = None;
        for entry in &*self.entries {
            let (order, session) = (entry.order(), entry.session);
            if before.replace(order).is_some_and(|before| before > order) {
                return Err(LimitError::OutOfOrder { session });
            }
            entry.push(vocab, plan)?;
        }
        if let Some(activations) = &self.activations {
            // The executor checks their shape.
            let values = activations.f32s("activations")?;
            at_most("activations of a step", values.len(), STATE_VALUES_MAX)?;
            *plan.activations_mut() = values;
        }
        Ok(())
    }
}

impl WireEntry {
    /// The sort key of the order that the engine requires: see [`StepPlan`].
    fn order(&self) -> (bool, bool) {
        (self.phase == WirePhase::Prefill, matches!(self.requested, WireRequestedOutput::Embed { .. }))
    }

    fn push(&self, vocab: usize, plan: &mut StepPlan) -> Result<(), LimitError> {
        let (tokens, rows) = (self.tokens.len(), count("rows of an entry", self.rows, ROWS_MAX)?);
        if tokens == 0 && rows == 0 {
            return Err(LimitError::Zero { what: "tokens of an entry" });
        }
        if rows > 0 && tokens > 0 || !plan.is_empty() && plan.has_tokens() != (tokens > 0) {
            return Err(LimitError::MixedRows { session: self.session });
        }
        let rows = rows.max(tokens);
        at_most("rows of a step", plan.rows() + rows, ROWS_MAX)?;
        let position = count("position", self.position, POSITIONS_MAX - rows)?;
        in_vocab(self.tokens.iter().copied(), vocab)?;
        let requested = self.requested.checked(vocab)?;
        if let engine::RequestedOutput::Sample { rows: logit_rows, .. }
        | engine::RequestedOutput::Logits { rows: logit_rows }
        | engine::RequestedOutput::States { rows: logit_rows } = requested
            && logit_rows > rows
        {
            return Err(LimitError::RowsMissing { session: self.session, logit_rows, rows });
        }
        let mask = self.mask.as_ref().map(|mask| mask.u32s("mask")).transpose()?;
        at_most("words of a mask", mask.as_ref().map_or(0, Vec::len), VOCAB_MAX.div_ceil(32))?;
        if tokens > 0 {
            let tokens: SmallVec<[TokenId; TOKENS_INLINE]> = self.tokens.iter().copied().map(TokenId).collect();
            plan.push(SessionId(self.session), self.phase.into(), position, &tokens, requested);
        } else {
            plan.push_rows(SessionId(self.session), self.phase.into(), position, rows, requested);
        }
        if let Some(mask) = mask {
            plan.mask_last(&mask);
        }
        Ok(())
    }
}

impl WireRequestedOutput {
    fn checked(&self, vocab: usize) -> Result<engine::RequestedOutput, LimitError> {
        Ok(match self {
            Self::Nothing => engine::RequestedOutput::Nothing,
            Self::Sample { rows, prompt_tokens, sampling, suppressed } => engine::RequestedOutput::Sample {
                rows: count("rows to sample", *rows, ROWS_MAX)?,
                prompt_tokens: count("tokens of a prompt", *prompt_tokens, POSITIONS_MAX)?,
                sampling: sampling.checked(vocab)?,
                suppressed: suppressed.as_ref().map(WireSuppressedTokens::checked).transpose()?,
            },
            Self::PromptLogprobs { top, next } => {
                in_vocab([*next], vocab)?;
                let top = count("top log probabilities", *top, TOP_LOGPROBS_MAX)?;
                engine::RequestedOutput::PromptLogprobs { top, next: TokenId(*next) }
            }
            Self::Embed { pooling, last } => engine::RequestedOutput::Embed { pooling: (*pooling).into(), last: *last },
            Self::Logits { rows } => {
                engine::RequestedOutput::Logits { rows: count("rows of logits", *rows, ROWS_MAX)? }
            }
            Self::States { rows } => {
                engine::RequestedOutput::States { rows: count("rows of states", *rows, ROWS_MAX)? }
            }
        })
    }
}

impl WireSuppressedTokens {
    /// Tokens beyond the model's vocabulary are accepted: a tokenizer may have more tokens than the head has rows.
    fn checked(&self) -> Result<SuppressedTokens, LimitError> {
        at_most("tokens that are not chosen before a position", self.tokens.len(), VOCAB_MAX)?;
        let until = count("position", self.until, POSITIONS_MAX)?;
        Ok(SuppressedTokens { until, tokens: tokens(&self.tokens).into() })
    }
}

impl WireSampling {
    fn checked(&self, vocab: usize) -> Result<SamplingParams, LimitError> {
        let biases = self.logit_bias.as_ref();
        at_most("logit biases", biases.map_or(0, Vec::len), VOCAB_MAX)?;
        let sampling = SamplingParams {
            temperature: self.temperature.0,
            top_k: count("top_k", self.top_k, usize::MAX)?,
            top_p: self.top_p.0,
            min_p: self.min_p.0,
            seed: self.seed,
            repetition_penalty: self.repetition_penalty.0,
            presence_penalty: self.presence_penalty.0,
            frequency_penalty: self.frequency_penalty.0,
            logit_bias: biases.map(|list| list.iter().map(|&(token, bias)| (TokenId(token), bias.0)).collect()),
            logprobs: self.logprobs.map(|top| count("top log probabilities", top, TOP_LOGPROBS_MAX)).transpose()?,
        };
        sampling.check(vocab)?;
        Ok(sampling)
    }
}

impl From<&engine::RequestedOutput> for WireRequestedOutput {
    fn from(requested: &engine::RequestedOutput) -> Self {
        match requested {
            engine::RequestedOutput::Nothing => Self::Nothing,
            engine::RequestedOutput::Sample { rows, prompt_tokens, sampling, suppressed } => Self::Sample {
                rows: *rows as u64,
                prompt_tokens: *prompt_tokens as u64,
                sampling: sampling.into(),
                suppressed: suppressed.as_ref().map(|SuppressedTokens { until, tokens }| WireSuppressedTokens {
                    until: *until as u64,
                    tokens: ids(tokens),
                }),
            },
            engine::RequestedOutput::PromptLogprobs { top, next } => {
                Self::PromptLogprobs { top: *top as u64, next: next.0 }
            }
            engine::RequestedOutput::Embed { pooling, last } => Self::Embed { pooling: (*pooling).into(), last: *last },
            engine::RequestedOutput::Logits { rows } => Self::Logits { rows: *rows as u64 },
            engine::RequestedOutput::States { rows } => Self::States { rows: *rows as u64 },
        }
    }
}

impl From<&SamplingParams> for WireSampling {
    fn from(sampling: &SamplingParams) -> Self {
        let biases = sampling.logit_bias.as_ref();
        Self {
            temperature: Number(sampling.temperature),
            top_k: sampling.top_k as u64,
            top_p: Number(sampling.top_p),
            min_p: Number(sampling.min_p),
            seed: sampling.seed,
            repetition_penalty: Number(sampling.repetition_penalty),
            presence_penalty: Number(sampling.presence_penalty),
            frequency_penalty: Number(sampling.frequency_penalty),
            logit_bias: biases.map(|list| list.iter().map(|&(token, bias)| (token.0, Number(bias))).collect()),
            logprobs: sampling.logprobs.map(|top| top as u64),
        }
    }
}

impl From<engine::Phase> for WirePhase {
    fn from(phase: engine::Phase) -> Self {
        match phase {
            engine::Phase::Decode => Self::Decode,
            engine::Phase::Prefill => Self::Prefill,
        }
    }
}

impl From<WirePhase> for engine::Phase {
    fn from(phase: WirePhase) -> Self {
        match phase {
            WirePhase::Decode => Self::Decode,
            WirePhase::Prefill => Self::Prefill,
        }
    }
}

impl From<engine::Pooling> for WirePooling {
    fn from(pooling: engine::Pooling) -> Self {
        match pooling {
            engine::Pooling::Mean => Self::Mean,
            engine::Pooling::Last => Self::Last,
        }
    }
}

impl From<WirePooling> for engine::Pooling {
    fn from(pooling: WirePooling) -> Self {
        match pooling {
            WirePooling::Mean => Self::Mean,
            WirePooling::Last => Self::Last,
        }
    }
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}
