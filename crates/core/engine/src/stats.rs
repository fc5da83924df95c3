//! `EngineStats`: the current state of the engine, and counters since its start. A plain copy, taken after each step.

use crate::request::FinishReason;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Requests that hold a session.
    pub running: usize,
    pub waiting: usize,
    pub pages_total: usize,
    /// Pages that can be allocated: empty ones, and those that only the prefix cache holds.
    pub pages_free: usize,
    /// Of the free ones: those that the prefix cache holds.
    pub pages_cached: usize,
    /// Prompt tokens that were looked up in the prefix cache, and those that were found.
    pub prefix_lookup_tokens: u64,
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were computed, including those of requeued sequences.
    pub prefilled_tokens: u64,
    /// Tokens of answers.
    pub decoded_tokens: u64,
    /// Draft tokens that were run, and those that were accepted.
    pub draft_tokens: u64,
    pub draft_tokens_accepted: u64,
    pub finished: FinishCounts,
    pub steps: u64,
    /// How often a sequence was preempted: it was requeued because the KV cache was full.
    pub preemptions: u64,
    /// How often a sequence was requeued because the executor had lost a process.
    pub replays: u64,
}

/// Requests that have ended, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FinishCounts {
    pub eos: u64,
    pub length: u64,
    pub context: u64,
    pub complete: u64,
    pub cancelled: u64,
    pub failed: u64,
}

impl FinishCounts {
    pub fn total(&self) -> u64 {
        let Self { eos, length, context, complete, cancelled, failed } = self;
        eos + length + context + complete + cancelled + failed
    }

    pub(crate) fn count(&mut self, reason: &FinishReason) {
        *match reason {
            FinishReason::Eos(_) => &mut self.eos,
            FinishReason::Length => &mut self.length,
            FinishReason::Context => &mut self.context,
            FinishReason::Complete => &mut self.complete,
            FinishReason::Cancelled => &mut self.cancelled,
            FinishReason::Failed(_) => &mut self.failed,
        } += 1;
    }
}
