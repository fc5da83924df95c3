//! `Buffer`: the CPU's activations.

use std::cell::{RefCell, RefMut};

use super::activations::{GroupActivations, SplitActivations, SplitTarget, SuperActivations};
use super::level::Level;
use super::linear::RequiredLayouts;
use super::matrix::SendPtr;
use super::memory::Aligned;
use super::pool::Pool;
use crate::BackendError;

/// Activations `[rows, cols]`, and the layouts of them that linear layers multiply with, made when one is asked for.
pub struct Buffer {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Aligned<f32>,
    /// `None`: no linear layer reads this.
    pub(super) layouts: Option<RefCell<ActivationLayouts>>,
}

pub(super) struct ActivationLayouts {
    pub(super) group: GroupActivations,
    pub(super) superblock: SuperActivations,
    pub(super) split: SplitActivations<2>,
    pub(super) rounded: SplitActivations<1>,
    /// The rows whose present contents each form holds.
    pub(super) filled: FilledRows,
}

/// For each form the first row that it holds, and how many.
#[derive(Clone, Copy, Default)]
pub(super) struct FilledRows {
    pub(super) group: (usize, usize),
    pub(super) superblock: (usize, usize),
    pub(super) split: (usize, usize),
    pub(super) rounded: (usize, usize),
}

/// A form in which rows can be left for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ActivationLayout {
    Plain,
    Rounded,
    Split,
}

/// Where rows go that are made in such a form.
pub(super) enum RowTarget {
    Plain(SendPtr<f32>),
    Rounded(SplitTarget<1>),
    Split(SplitTarget<2>),
}

impl ActivationLayouts {
    fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        Ok(Self {
            group: GroupActivations::new(rows, cols)?,
            superblock: SuperActivations::new(rows, cols)?,
            split: SplitActivations::new(rows, cols)?,
            rounded: SplitActivations::new(rows, cols)?,
            filled: FilledRows::default(),
        })
    }

    /// Bytes that `new` would allocate.
    fn bytes(rows: usize, cols: usize) -> usize {
        let split = SplitActivations::<2>::bytes(rows, cols) + SplitActivations::<1>::bytes(rows, cols);
        GroupActivations::bytes(rows, cols) + SuperActivations::bytes(rows, cols) + split
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
        if is_missing(&mut self.filled.group, required.group) {
            self.group.fill(pool, level, rows, cols, x);
        }
        if is_missing(&mut self.filled.superblock, required.superblock) {
            self.superblock.fill(pool, level, rows, cols, x);
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
    pub(super) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        // Memory becomes resident when it is touched: a form that no layer asks for costs nothing.
        let layouts = Some(RefCell::new(ActivationLayouts::new(rows, cols)?));
        Ok(Self { layouts, ..Self::output(rows, cols)? })
    }

    pub(super) fn output(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let what = "activations";
        let len = rows.checked_mul(cols).ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { rows, cols, data: Aligned::working(what, len)?, layouts: None })
    }

    /// Bytes that `new` would allocate.
    pub(super) fn bytes(rows: usize, cols: usize) -> usize {
        Self::output_bytes(rows, cols) + ActivationLayouts::bytes(rows, cols)
    }

    /// Bytes that `output` would allocate.
    pub(super) fn output_bytes(rows: usize, cols: usize) -> usize {
        rows * cols * size_of::<f32>()
    }

    pub(super) fn layouts(&self) -> RefMut<'_, ActivationLayouts> {
        self.layouts.as_ref().expect("linear layers read no outputs").borrow_mut()
    }

    /// The first `rows` rows, to be overwritten: what was derived from the old contents is void.
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

    /// Where the first `rows` rows go, all in this form.
    pub(super) fn target(&mut self, rows: usize, kind: ActivationLayout) -> RowTarget {
        match kind {
            ActivationLayout::Plain => RowTarget::Plain(SendPtr(self.rows_mut(rows).as_mut_ptr())),
            ActivationLayout::Rounded => RowTarget::Rounded(self.rounded(rows).target()),
            ActivationLayout::Split => RowTarget::Split(self.split(rows).target()),
        }
    }

    /// The first `rows` rows, rounded: all that there will be of them.
    pub(super) fn rounded(&mut self, rows: usize) -> &mut SplitActivations<1> {
        let layouts = self.layouts.as_mut().expect("a linear layer reads this").get_mut();
        layouts.filled = FilledRows { rounded: (0, rows), ..FilledRows::default() };
        layouts.rounded.begin(rows, self.cols);
        &mut layouts.rounded
    }

    /// The same in two parts.
    pub(super) fn split(&mut self, rows: usize) -> &mut SplitActivations<2> {
        let layouts = self.layouts.as_mut().expect("a linear layer reads this").get_mut();
        layouts.filled = FilledRows { split: (0, rows), ..FilledRows::default() };
        layouts.split.begin(rows, self.cols);
        &mut layouts.split
    }
}
