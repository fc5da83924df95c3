//! The inputs of a step, in one device buffer that is filled by one copy.
//!
//! `Step` in `kernels.cu` mirrors its layout: the number of rows and of logit rows; the token, the position and the start
//! of the page table of each row; the logit rows; the page tables. There are no gaps, so a decode step copies a few hundred
//! bytes, independently of the limits. The host side also stores the number of rows, for grid sizes.

use cudarc::driver::{CudaEvent, PinnedHostSlice, result};

use super::device::{Device, Memory, fault};
use crate::{BackendError, PAGE_TOKENS, StepInputs, StepLimits};

const HEADER_WORDS: usize = 2;

pub struct CudaStep {
    pub(super) memory: Memory,
    pub(super) rows: usize,
    pub(super) logit_rows: usize,
    staging: PinnedHostSlice<u32>,
    /// Recorded after the copy from `staging`, which must not be overwritten before that.
    copied: CudaEvent,
    limits: StepLimits,
}

impl CudaStep {
    pub(super) fn new(device: &Device, limits: StepLimits) -> Result<Self, BackendError> {
        let words = HEADER_WORDS + 4 * limits.rows + limits.pages;
        let memory = device.allocate("step inputs", 4 * words)?;
        let context = device.stream.context();
        // SAFETY: `fill` writes every word that it copies.
        let staging = unsafe { context.alloc_pinned(words) }.map_err(|error| fault("allocate pinned memory", error))?;
        let copied = context.new_event(None).map_err(|error| fault("make CUDA event", error))?;
        Ok(Self { memory, rows: 0, logit_rows: 0, staging, copied, limits })
    }

    pub(super) fn fill(&mut self, device: &Device, inputs: StepInputs<'_>) -> Result<(), BackendError> {
        let StepInputs { tokens, spans, pages, logit_rows } = inputs;
        let (rows, limits) = (inputs.rows(), self.limits);
        if rows > limits.rows || spans.len() > limits.sequences || pages.len() > limits.pages || logit_rows.len() > rows
        {
            let (sequences, pages) = (spans.len(), pages.len());
            return Err(BackendError::StepTooLarge { rows, sequences, pages, limits });
        }
        assert!(logit_rows.iter().all(|&row| (row as usize) < rows), "a logit row is a row of the step");
        // Waits only until the previous step's inputs have been copied, not until that step has run.
        self.copied.synchronize().map_err(|error| fault("wait for step inputs", error))?;
        let words = self.staging.as_mut_slice().map_err(|error| fault("write step inputs", error))?;
        let (header, rest) = words.split_at_mut(HEADER_WORDS);
        let (token_words, rest) = rest.split_at_mut(rows);
        let (positions, rest) = rest.split_at_mut(rows);
        let (tables, rest) = rest.split_at_mut(rows);
        let (logit_row_words, rest) = rest.split_at_mut(logit_rows.len());
        header.copy_from_slice(&[rows as u32, logit_rows.len() as u32]);
        match tokens.is_empty() {
            true => token_words.fill(0),
            false => token_words.copy_from_slice(tokens),
        }
        logit_row_words.copy_from_slice(logit_rows);
        rest[..pages.len()].copy_from_slice(pages);
        let mut row = 0;
        for span in spans {
            let (table, last) = (span.pages_start as usize + span.pages_len as usize, span.position + span.rows);
            assert_eq!(span.row as usize, row, "spans cover the rows in order");
            assert!(table <= pages.len() && last as usize <= span.pages_len as usize * PAGE_TOKENS);
            for position in span.position..last {
                positions[row] = position;
                tables[row] = span.pages_start;
                row += 1;
            }
        }

        device.bind()?;
        let used = HEADER_WORDS + 3 * rows + logit_rows.len() + pages.len();
        // SAFETY: the memory has space for all of `words`, which are not changed until `copied` has been reached.
        unsafe { result::memcpy_htod_async(self.memory.address(), &words[..used], device.stream.cu_stream()) }
            .and_then(|()| self.copied.record(&device.stream))
            .map_err(|error| fault("copy step inputs", error))?;
        (self.rows, self.logit_rows) = (rows, logit_rows.len());
        Ok(())
    }
}

impl Drop for CudaStep {
    fn drop(&mut self) {
        // The pinned memory is freed next. If waiting fails, the device is lost and no longer reads it.
        let _ = self.copied.synchronize();
    }
}
