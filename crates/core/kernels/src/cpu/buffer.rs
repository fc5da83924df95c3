//! `Buffer`: activations of the CPU backend.

use std::cell::{RefCell, RefMut};

use super::activations::{Bf16SplitActivations, Bf16SplitWriter, Q8Activations, Q8KActivations};
use super::level::Level;
use super::linear::RequiredLayouts;
use super::matrix::SendPtr;
use super::memory::Aligned;
use super::pool::Pool;
use crate::BackendError;

/// Activations `[rows, cols]` in f32, and the layouts of them that linear kernels read, which are computed on demand.
pub struct Buffer {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Aligned<f32>,
    /// `None` if no linear layer reads this buffer.
    pub(super) layouts: Option<RefCell<ActivationLayouts>>,
}

pub(super) struct ActivationLayouts {
    pub(super) group: Q8Activations,
    pub(super) superblock: Q8KActivations,
    pub(super) split: Bf16SplitActivations<2>,
    pub(super) rounded: Bf16SplitActivations<1>,
    /// The rows for which each layout is up to date.
    pub(super) filled: FilledRows,
}

/// For each layout, the first row that it holds and the number of rows.
#[derive(Clone, Copy, Default)]
pub(super) struct FilledRows {
    pub(super) group: (usize, usize),
    pub(super) superblock: (usize, usize),
    pub(super) split: (usize, usize),
    pub(super) rounded: (usize, usize),
}

/// The layout in which an op writes its output rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActivationLayout {
    Plain,
    Rounded,
    Split,
}

/// Write access to a buffer's rows in one layout, from several threads.
pub(super) enum RowWriter {
    Plain(SendPtr<f32>),
    Rounded(Bf16SplitWriter<1>),
    Split(Bf16SplitWriter<2>),
}

impl ActivationLayouts {
    fn new(rows: usize, cols: usize, parts: usize) -> Result<Self, BackendError> {
        Ok(Self {
            group: Q8Activations::new(rows * parts, cols)?,
            superblock: Q8KActivations::new(rows * parts, cols)?,
            split: Bf16SplitActivations::new(rows, cols)?,
            rounded: Bf16SplitActivations::new(rows, cols)?,
            filled: FilledRows::default(),
        })
    }

    /// Bytes that `new` would allocate.
    fn bytes(rows: usize, cols: usize, parts: usize) -> usize {
        let split = Bf16SplitActivations::<2>::bytes(rows, cols) + Bf16SplitActivations::<1>::bytes(rows, cols);
        Q8Activations::bytes(rows * parts, cols) + Q8KActivations::bytes(rows * parts, cols) + split
    }

    /// Makes sure that the layouts in `required` hold `x`, which is a buffer's rows from `first` on.
    pub(super) fn fill(
        &mut self,
        pool: &Pool,
        level: Level,
        required: RequiredLayouts,
        first: usize,
        cols: usize,
        x: &[f32],
    ) {
        let rows = x.len() / cols;
        let is_missing = |filled: &mut (usize, usize), is_needed: bool| {
            let missing = is_needed && !(filled.0 == first && filled.1 >= rows);
            if missing {
                *filled = (first, rows);
            }
            missing
        };
        // Rows in other parts are other values.
        let parts = required.parts;
        if self.group.parts != parts {
            self.filled.group = (0, 0);
        }
        if self.superblock.parts != parts {
            self.filled.superblock = (0, 0);
        }
        if is_missing(&mut self.filled.group, required.group) {
            self.group.fill(pool, level, rows, parts, cols, x);
        }
        if is_missing(&mut self.filled.superblock, required.superblock) {
            self.superblock.fill(pool, level, rows, parts, cols, x);
        }
        if is_missing(&mut self.filled.split, required.split) {
            self.split.fill(pool, rows, cols, x);
        }
        if is_missing(&mut self.filled.rounded, required.rounded) {
            self.rounded.fill(pool, rows, cols, x);
        }
    }
}

impl Buffer {
    /// `parts`: the most int8 parts of a row.
    pub(super) fn new(rows: usize, cols: usize, parts: usize) -> Result<Self, BackendError> {
        // Memory becomes resident when it is touched, so an unused layout costs nothing.
        let layouts = Some(RefCell::new(ActivationLayouts::new(rows, cols, parts)?));
        Ok(Self { layouts, ..Self::output(rows, cols)? })
    }

    pub(super) fn output(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let what = "activations";
        let len = rows.checked_mul(cols).ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { rows, cols, data: Aligned::working(what, len)?, layouts: None })
    }

    /// Bytes that `new` would allocate.
    pub(super) fn bytes(rows: usize, cols: usize, parts: usize) -> usize {
        Self::output_bytes(rows, cols) + ActivationLayouts::bytes(rows, cols, parts)
    }

    /// Bytes that `output` would allocate.
    pub(super) fn output_bytes(rows: usize, cols: usize) -> usize {
        rows * cols * size_of::<f32>()
    }

    pub(super) fn layouts(&self) -> RefMut<'_, ActivationLayouts> {
        self.layouts.as_ref().expect("linear layers do not read `output` buffers").borrow_mut()
    }

    /// The first `rows` rows, to be overwritten. Invalidates all layouts.
    pub(super) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.rows, "{rows} rows in a buffer of {}", self.rows);
        if let Some(layouts) = &mut self.layouts {
            layouts.get_mut().filled = FilledRows::default();
        }
        &mut self.data[..rows * self.cols]
    }

    pub(super) fn rows(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.rows, "{rows} rows in a buffer of {}", self.rows);
        &self.data[..rows * self.cols]
    }

    /// Write access to the first `rows` rows in layout `kind`.
    pub(super) fn target(&mut self, rows: usize, kind: ActivationLayout) -> RowWriter {
        match kind {
            ActivationLayout::Plain => RowWriter::Plain(SendPtr(self.rows_mut(rows).as_mut_ptr())),
            ActivationLayout::Rounded => RowWriter::Rounded(self.rounded(rows).target()),
            ActivationLayout::Split => RowWriter::Split(self.split(rows).target()),
        }
    }

    /// The first `rows` rows in bf16. Invalidates the other layouts; the f32 rows are not written.
    pub(super) fn rounded(&mut self, rows: usize) -> &mut Bf16SplitActivations<1> {
        let layouts = self.layouts.as_mut().expect("this buffer has layouts").get_mut();
        layouts.filled = FilledRows { rounded: (0, rows), ..FilledRows::default() };
        layouts.rounded.begin(rows, self.cols);
        &mut layouts.rounded
    }

    /// The same in two bf16 parts.
    pub(super) fn split(&mut self, rows: usize) -> &mut Bf16SplitActivations<2> {
        let layouts = self.layouts.as_mut().expect("this buffer has layouts").get_mut();
        layouts.filled = FilledRows { split: (0, rows), ..FilledRows::default() };
        layouts.split.begin(rows, self.cols);
        &mut layouts.split
    }
}
