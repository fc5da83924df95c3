//! The output of a step in the line protocol: see [`engine::StepOutput`].
//!
//! `WireOutput::fill` checks it against the plan of the step: output that was not requested, or in another order, is
//! detected here and not in the decode loop.

use engine::{Entry, RequestedOutput, SampleError, StepOutput, StepPlan, TOP_LOGPROBS_MAX};
use serde::{Deserialize, Serialize};
use types::{SessionId, TokenId};

use super::attached::Attached;
use super::bounded::BoundedVec;
use super::limits::{EMBEDDING_VALUES_MAX, ENTRIES_MAX, LOGIT_VALUES_MAX, LimitError, ROWS_MAX};
use super::limits::{at_most, in_vocab};
use super::number::Number;
use super::packed::Packed;

/// Empty on all ranks but rank 0, which samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WireOutput {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub samples: BoundedVec<WireSample, ROWS_MAX>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompt_logprobs: BoundedVec<WirePromptLogprobs, ENTRIES_MAX>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub embeddings: BoundedVec<WireEmbedding, ENTRIES_MAX>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logits: BoundedVec<WireLogitRows, ENTRIES_MAX>,
    /// `[rows, hidden]`.
    #[serde(skip_serializing_if = "Attached::is_empty")]
    pub states: Attached,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireSample {
    pub session: u64,
    pub position: u64,
    pub outcome: WireOutcome<WireSampled>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WirePromptLogprobs {
    pub session: u64,
    pub position: u64,
    pub outcome: WireOutcome<Vec<WireLogprobs>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireEmbedding {
    pub session: u64,
    /// `f32`.
    pub values: Packed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireLogitRows {
    pub session: u64,
    pub position: u64,
    pub rows: u64,
    /// `f32`, `[rows, vocab]`.
    pub values: Packed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireSampled {
    pub token: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<WireLogprobs>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WireLogprobs {
    pub chosen: Number,
    pub top: BoundedVec<(u32, Number), TOP_LOGPROBS_MAX>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireOutcome<T> {
    Ok(T),
    NotFinite,
    NothingAllowed,
}

impl From<&StepOutput> for WireOutput {
    fn from(output: &StepOutput) -> Self {
        let mut wire = Self::default();
        wire.assign(output);
        wire
    }
}

impl WireOutput {
    /// Overwrites this with the wire form of `output` and reuses its memory.
    pub fn assign(&mut self, output: &StepOutput) {
        let sample = |sample: &engine::Sample| WireSample {
            session: sample.session.0,
            position: sample.position as u64,
            outcome: WireOutcome::new(sample.outcome.as_ref(), |sampled| WireSampled {
                token: sampled.token.0,
                logprobs: sampled.logprobs.as_ref().map(WireLogprobs::from),
            }),
        };
        let prompt_logprobs = |logprobs: &engine::PromptLogprobs| WirePromptLogprobs {
            session: logprobs.session.0,
            position: logprobs.position as u64,
            outcome: WireOutcome::new(logprobs.outcome.as_ref(), |logprobs| {
                logprobs.iter().map(WireLogprobs::from).collect()
            }),
        };
        let embedding = |embedding: &engine::PooledEmbedding| WireEmbedding {
            session: embedding.session.0,
            values: Packed::of_f32(&embedding.values),
        };
        let logits = |rows: &engine::LogitRows| WireLogitRows {
            session: rows.session.0,
            position: rows.position as u64,
            rows: rows.rows as u64,
            values: Packed::of_f32(output.values(rows)),
        };
        self.samples.clear();
        self.samples.extend(output.samples.iter().map(sample));
        self.prompt_logprobs = output.prompt_logprobs.iter().map(prompt_logprobs).collect();
        self.embeddings = output.embeddings.iter().map(embedding).collect();
        self.logits = output.logits.iter().map(logits).collect();
        self.states = Attached::of_f32(&output.states);
    }

    /// Replaces `output` with this output of the step `plan`, for a model with this vocabulary. Missing output is no
    /// error: sessions may have been closed since. After an error `output` is empty.
    pub fn fill(&self, plan: &StepPlan, vocab: usize, output: &mut StepOutput) -> Result<(), LimitError> {
        output.clear();
        let filled = self
            .push_samples(plan, vocab, output)
            .and_then(|()| self.push_prompt_logprobs(plan, vocab, output))
            .and_then(|()| self.push_embeddings(plan, output))
            .and_then(|()| self.push_logits(plan, vocab, output))
            .and_then(|()| self.push_states(plan, output));
        if filled.is_err() {
            output.clear();
        }
        filled
    }

    fn push_samples(&self, plan: &StepPlan, vocab: usize, output: &mut StepOutput) -> Result<(), LimitError> {
        let mut asked = plan.entries().iter().filter(|entry| entry.is_sampled()).flat_map(|entry| {
            let positions = entry.end() - entry.logit_rows() + 1..entry.end() + 1;
            positions.map(|position| (entry.session, position))
        });
        for sample in &*self.samples {
            let (session, position) = asked
                .find(|&(session, position)| is_at(sample.session, sample.position, session, position))
                .ok_or(LimitError::NotRequested { what: "a sample", session: sample.session })?;
            let outcome = sample.outcome.checked(|sampled| {
                in_vocab([sampled.token], vocab)?;
                let logprobs = sampled.logprobs.as_ref().map(|logprobs| logprobs.checked(vocab)).transpose()?;
                Ok(engine::Sampled { token: TokenId(sampled.token), logprobs })
            })?;
            output.samples.push(engine::Sample { session, position, outcome });
        }
        Ok(())
    }

    fn push_prompt_logprobs(&self, plan: &StepPlan, vocab: usize, output: &mut StepOutput) -> Result<(), LimitError> {
        let mut asked =
            plan.entries().iter().filter(|entry| matches!(entry.requested, RequestedOutput::PromptLogprobs { .. }));
        for logprobs in &*self.prompt_logprobs {
            let entry = asked
                .find(|entry| is_at(logprobs.session, logprobs.position, entry.session, entry.position + 1))
                .ok_or(LimitError::NotRequested { what: "log probabilities", session: logprobs.session })?;
            let outcome = logprobs.outcome.checked(|logprobs| {
                expect("log probabilities", logprobs.len(), entry.rows())?;
                logprobs.iter().map(|logprobs| logprobs.checked(vocab)).collect()
            })?;
            output.prompt_logprobs.push(engine::PromptLogprobs {
                session: entry.session,
                position: entry.position + 1,
                outcome,
            });
        }
        Ok(())
    }

    fn push_embeddings(&self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), LimitError> {
        let mut asked =
            plan.entries().iter().filter(|entry| matches!(entry.requested, RequestedOutput::Embed { last: true, .. }));
        for embedding in &*self.embeddings {
            let entry = asked
                .find(|entry| entry.session.0 == embedding.session)
                .ok_or(LimitError::NotRequested { what: "an embedding", session: embedding.session })?;
            let values = embedding.values.f32s("embedding")?;
            at_most("values of an embedding", values.len(), EMBEDDING_VALUES_MAX)?;
            output.embeddings.push(engine::PooledEmbedding { session: entry.session, values });
        }
        Ok(())
    }

    fn push_logits(&self, plan: &StepPlan, vocab: usize, output: &mut StepOutput) -> Result<(), LimitError> {
        let mut asked = plan.entries().iter().filter(|entry| matches!(entry.requested, RequestedOutput::Logits { .. }));
        let mut total = 0;
        for logits in &*self.logits {
            let start = |entry: &Entry| entry.end() - entry.logit_rows();
            let entry = asked
                .find(|entry| is_at(logits.session, logits.position, entry.session, start(entry)))
                .filter(|entry| logits.rows == entry.logit_rows() as u64)
                .ok_or(LimitError::NotRequested { what: "a row of logits", session: logits.session })?;
            let values = logits.values.f32s("logits")?;
            total += values.len();
            at_most("logits of a step", total, LOGIT_VALUES_MAX)?;
            expect("a row of logits", values.len(), entry.logit_rows() * vocab)?;
            output.push_logits(entry.session, start(entry), entry.logit_rows(), &values);
        }
        Ok(())
    }

    /// States have the width of the plan's activations.
    fn push_states(&self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), LimitError> {
        let rows = if plan.has_tokens() { 0 } else { plan.state_rows() };
        let width = plan.activations().len().checked_div(plan.rows()).unwrap_or(0);
        let values = self.states.f32s("states")?;
        expect("the states of a step", values.len(), rows * width)?;
        output.states = values;
        Ok(())
    }
}

impl<T> WireOutcome<T> {
    fn new<U>(outcome: Result<&U, &SampleError>, make: impl FnOnce(&U) -> T) -> Self {
        match outcome {
            Ok(value) => Self::Ok(make(value)),
            Err(SampleError::NotFinite) => Self::NotFinite,
            Err(SampleError::NothingAllowed) => Self::NothingAllowed,
        }
    }

    fn checked<U>(&self, make: impl FnOnce(&T) -> Result<U, LimitError>) -> Result<Result<U, SampleError>, LimitError> {
        Ok(match self {
            Self::Ok(value) => Ok(make(value)?),
            Self::NotFinite => Err(SampleError::NotFinite),
            Self::NothingAllowed => Err(SampleError::NothingAllowed),
        })
    }
}

impl From<&engine::Logprobs> for WireLogprobs {
    fn from(logprobs: &engine::Logprobs) -> Self {
        let top = logprobs.top.iter().map(|&(token, logprob)| (token.0, Number(logprob)));
        Self { chosen: Number(logprobs.chosen), top: top.collect() }
    }
}

impl WireLogprobs {
    fn checked(&self, vocab: usize) -> Result<engine::Logprobs, LimitError> {
        at_most("top log probabilities", self.top.len(), TOP_LOGPROBS_MAX)?;
        in_vocab(self.top.iter().map(|&(token, _)| token), vocab)?;
        let top = self.top.iter().map(|&(token, logprob)| (TokenId(token), logprob.0));
        Ok(engine::Logprobs { chosen: self.chosen.0, top: top.collect() })
    }
}

fn is_at(session: u64, position: u64, asked_session: SessionId, asked_position: usize) -> bool {
    session == asked_session.0 && position == asked_position as u64
}

fn expect(what: &'static str, found: usize, expected: usize) -> Result<(), LimitError> {
    if found == expected { Ok(()) } else { Err(LimitError::Shape { what, found, expected }) }
}
