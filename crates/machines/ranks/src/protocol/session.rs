//! Sessions and statistics in the line protocol: the prefix of a new session, a rank's counters and its capacity.

use engine::PageHash;
use kernels::PAGE_TOKENS;
use serde::{Deserialize, Serialize};
use types::TokenId;

use super::limits::{LimitError, PAGE_TOKENS_MAX, PAGES_MAX, POSITIONS_MAX, ROWS_MAX, VOCAB_MAX};
use super::limits::{at_most, count, in_vocab};
use super::packed::Packed;

/// The prefix of a new session: see [`engine::Prefix`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WirePrefix {
    pub tokens: Vec<u32>,
    /// Hashes of 32 bytes each.
    pub pages: Packed,
    pub reuse_max: u64,
}

impl From<engine::Prefix<'_>> for WirePrefix {
    fn from(prefix: engine::Prefix<'_>) -> Self {
        Self {
            tokens: prefix.tokens.iter().map(|token| token.0).collect(),
            pages: Packed::of_arrays(prefix.pages.iter().map(|page| page.0)),
            reuse_max: prefix.reuse_max as u64,
        }
    }
}

impl WirePrefix {
    /// Checks it for a model with this vocabulary.
    pub fn check(&self, vocab: usize) -> Result<CheckedPrefix, LimitError> {
        at_most("tokens of a prefix", self.tokens.len(), POSITIONS_MAX)?;
        in_vocab(self.tokens.iter().copied(), vocab)?;
        let pages = self.pages.arrays("page hashes")?;
        at_most("page hashes", pages.len(), self.tokens.len() / PAGE_TOKENS)?;
        Ok(CheckedPrefix {
            tokens: self.tokens.iter().copied().map(TokenId).collect(),
            pages: pages.iter().copied().map(PageHash).collect(),
            reuse_max: count("tokens to use again", self.reuse_max, self.tokens.len())?,
        })
    }

    /// Checks it for a stage in the middle of a chain, which gets the hashes of pages but never tokens.
    pub fn check_stage(&self) -> Result<CheckedPrefix, LimitError> {
        at_most("tokens of a prefix of a stage", self.tokens.len(), 0)?;
        let pages = self.pages.arrays("page hashes")?;
        at_most("page hashes", pages.len(), POSITIONS_MAX / PAGE_TOKENS)?;
        Ok(CheckedPrefix {
            tokens: Vec::new(),
            pages: pages.iter().copied().map(PageHash).collect(),
            reuse_max: count("tokens to use again", self.reuse_max, POSITIONS_MAX)?,
        })
    }
}

/// The owned data that an [`engine::Prefix`] borrows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedPrefix {
    tokens: Vec<TokenId>,
    pages: Vec<PageHash>,
    reuse_max: usize,
}

impl CheckedPrefix {
    pub fn as_prefix(&self) -> engine::Prefix<'_> {
        engine::Prefix { tokens: &self.tokens, pages: &self.pages, reuse_max: self.reuse_max }
    }
}

/// A rank's memory, and its counters since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankStats {
    /// The epoch of its group.
    pub epoch: u32,
    /// Open sessions.
    pub sessions: u64,
    /// Bytes of its shard of the weights, and of its shard of the KV cache.
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// Resident bytes of the process.
    pub resident_bytes: u64,
    pub steps: u64,
    pub collectives: u64,
    /// Time in steps, and the time in collectives.
    pub step_us: u64,
    pub collective_us: u64,
    /// `None` while no model is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<WireCapacity>,
}

/// See [`engine::Capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireCapacity {
    pub vocab: u64,
    pub positions_max: u64,
    pub rows_max: u64,
    pub sequences_max: u64,
    pub logit_rows_max: u64,
    pub step_pages_max: u64,
    pub page_tokens: u64,
    pub pages_total: u64,
    pub pages_free: u64,
    pub pages_cached: u64,
}

impl From<engine::Capacity> for WireCapacity {
    fn from(capacity: engine::Capacity) -> Self {
        Self {
            vocab: capacity.vocab as u64,
            positions_max: capacity.positions_max as u64,
            rows_max: capacity.rows_max as u64,
            sequences_max: capacity.sequences_max as u64,
            logit_rows_max: capacity.logit_rows_max as u64,
            step_pages_max: capacity.step_pages_max as u64,
            page_tokens: capacity.page_tokens as u64,
            pages_total: capacity.pages_total as u64,
            pages_free: capacity.pages_free as u64,
            pages_cached: capacity.pages_cached as u64,
        }
    }
}

impl TryFrom<WireCapacity> for engine::Capacity {
    type Error = LimitError;

    fn try_from(capacity: WireCapacity) -> Result<Self, LimitError> {
        let checked = Self {
            vocab: count("vocabulary", capacity.vocab, VOCAB_MAX)?,
            positions_max: count("positions", capacity.positions_max, POSITIONS_MAX)?,
            rows_max: count("rows", capacity.rows_max, ROWS_MAX)?,
            sequences_max: count("sequences", capacity.sequences_max, ROWS_MAX)?,
            logit_rows_max: count("rows with logits", capacity.logit_rows_max, ROWS_MAX)?,
            step_pages_max: count("pages of a step", capacity.step_pages_max, PAGES_MAX)?,
            page_tokens: count("tokens of a page", capacity.page_tokens, PAGE_TOKENS_MAX)?,
            pages_total: count("pages", capacity.pages_total, PAGES_MAX)?,
            pages_free: count("free pages", capacity.pages_free, PAGES_MAX)?,
            pages_cached: count("cached pages", capacity.pages_cached, PAGES_MAX)?,
        };
        for (what, value) in [
            ("vocabulary", checked.vocab),
            ("positions", checked.positions_max),
            ("rows", checked.rows_max),
            ("sequences", checked.sequences_max),
            ("tokens of a page", checked.page_tokens),
        ] {
            if value == 0 {
                return Err(LimitError::Zero { what });
            }
        }
        at_most("free pages", checked.pages_free, checked.pages_total)?;
        at_most("cached pages", checked.pages_cached, checked.pages_free)?;
        Ok(checked)
    }
}
