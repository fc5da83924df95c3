//! `Step`: the inputs of a step on the CPU backend.

use super::attention::SequenceRows;
use crate::{BackendError, PAGE_TOKENS, Span, StepInputs, StepLimits};

/// The inputs of one step, copied into preallocated memory.
pub struct Step {
    limits: StepLimits,
    pub(super) tokens: Vec<u32>,
    pub(super) spans: Vec<Span>,
    pub(super) pages: Vec<u32>,
    pub(super) logit_rows: Vec<u32>,
    /// The position of every row.
    pub(super) positions: Vec<u32>,
}

impl Step {
    pub(super) fn new(limits: StepLimits) -> Self {
        Self {
            limits,
            tokens: Vec::with_capacity(limits.rows),
            spans: Vec::with_capacity(limits.sequences),
            pages: Vec::with_capacity(limits.pages),
            logit_rows: Vec::with_capacity(limits.rows),
            positions: Vec::with_capacity(limits.rows),
        }
    }

    pub(super) fn fill(&mut self, inputs: StepInputs<'_>) -> Result<(), BackendError> {
        let StepInputs { tokens, spans, pages, logit_rows } = inputs;
        let (rows, limits) = (inputs.rows(), self.limits);
        if rows > limits.rows || spans.len() > limits.sequences || pages.len() > limits.pages {
            let (sequences, pages) = (spans.len(), pages.len());
            return Err(BackendError::StepTooLarge { rows, sequences, pages, limits });
        }
        self.positions.clear();
        for span in spans {
            assert_eq!(span.row as usize, self.positions.len(), "spans cover the rows in order");
            let end = span.position as usize + span.rows as usize;
            assert!(end.div_ceil(PAGE_TOKENS) <= span.pages_len as usize, "a page table covers its sequence");
            self.positions.extend(span.position..span.position + span.rows);
        }
        assert!(logit_rows.len() <= rows && logit_rows.iter().all(|&row| (row as usize) < rows));
        let copy = |to: &mut Vec<u32>, from: &[u32]| {
            to.clear();
            to.extend_from_slice(from);
        };
        copy(&mut self.tokens, tokens);
        copy(&mut self.pages, pages);
        copy(&mut self.logit_rows, logit_rows);
        self.spans.clear();
        self.spans.extend_from_slice(spans);
        Ok(())
    }

    pub(super) fn rows(&self) -> usize {
        self.positions.len()
    }

    /// One more than the largest position.
    pub(super) fn end(&self) -> usize {
        self.positions.iter().max().map_or(0, |&last| last as usize + 1)
    }

    pub(super) fn sequence(&self, index: usize) -> SequenceRows<'_> {
        let span = self.spans[index];
        SequenceRows { span, pages: &self.pages[span.pages_start as usize..][..span.pages_len as usize] }
    }
}
