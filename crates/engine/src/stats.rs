//! `Stats`: what the loop holds now, and what it has done since it began. A plain copy, taken after each step.

use crate::request::FinishReason;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that hold a session.
    pub running: usize,
    pub waiting: usize,
    pub pages_total: usize,
    /// Pages that a sequence could take: empty ones, and those that only the prefix cache holds.
    pub pages_free: usize,
    /// Of the free ones: those that hold a prefix that is found again until the page is taken.
    pub pages_cached: usize,
    /// Prompt tokens that were looked up in the prefix cache, and those that were found.
    pub prefix_lookup_tokens: u64,
    pub prefix_hit_tokens: u64,
    /// Prompt tokens that were run, and once more when a sequence had to begin again.
    pub prefilled_tokens: u64,
    /// Tokens that answers were given.
    pub decoded_tokens: u64,
    /// Tokens that were guessed, and those that proved right.
    pub guessed_tokens: u64,
    pub guesses_right: u64,
    pub finished: FinishCounts,
    pub steps: u64,
    /// Times that a sequence gave its pages up and began again.
    pub preemptions: u64,
    /// Times that one began again because the executor had lost a part of itself.
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
