//! `Buffer`: the CPU's activations.

use std::cell::{RefCell, RefMut};

use super::activations::{GroupActivations, SplitActivations, SplitPlaces, SuperActivations};
use super::level::Level;
use super::linear::Needs;
use super::matrix::SendPtr;
use super::memory::Aligned;
use super::pool::Pool;
use crate::BackendError;

/// Activations `[rows, cols]`, and the forms of them that linear layers multiply with, made when one is asked for.
pub struct Buffer {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: Aligned<f32>,
    /// `None`: no linear layer reads this.
    pub(super) forms: Option<RefCell<Forms>>,
}

pub(super) struct Forms {
    pub(super) group: GroupActivations,
    pub(super) superblock: SuperActivations,
    pub(super) split: SplitActivations<2>,
    pub(super) rounded: SplitActivations<1>,
    /// The rows whose present contents each form holds.
    pub(super) held: Held,
}

/// For each form the first row that it holds, and how many.
#[derive(Clone, Copy, Default)]
pub(super) struct Held {
    pub(super) group: (usize, usize),
    pub(super) superblock: (usize, usize),
    pub(super) split: (usize, usize),
    pub(super) rounded: (usize, usize),
}

/// A form in which rows can be left for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FormKind {
    Plain,
    Rounded,
    Split,
}

/// Where rows go that are made in such a form.
pub(super) enum Places {
    Plain(SendPtr<f32>),
    Rounded(SplitPlaces<1>),
    Split(SplitPlaces<2>),
}

impl Forms {
    fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        Ok(Self {
            group: GroupActivations::new(rows, cols)?,
            superblock: SuperActivations::new(rows, cols)?,
            split: SplitActivations::new(rows, cols)?,
            rounded: SplitActivations::new(rows, cols)?,
            held: Held::default(),
        })
    }

    /// Bytes that `new` would allocate.
    fn bytes(rows: usize, cols: usize) -> usize {
        let split = SplitActivations::<2>::bytes(rows, cols) + SplitActivations::<1>::bytes(rows, cols);
        GroupActivations::bytes(rows, cols) + SuperActivations::bytes(rows, cols) + split
    }

    /// Makes sure that the forms in `needs` hold `x`, which is a buffer's rows from `first` on.
    pub(super) fn fill(&mut self, pool: &Pool, level: Level, needs: Needs, first: usize, cols: usize, x: &[f32]) {
        let rows = x.len() / cols;
        let is_missing = |held: &mut (usize, usize), is_needed: bool| {
            let missing = is_needed && !(held.0 == first && held.1 >= rows);
            if missing {
                *held = (first, rows);
            }
            missing
        };
        if is_missing(&mut self.held.group, needs.group) {
            self.group.fill(pool, level, rows, cols, x);
        }
        if is_missing(&mut self.held.superblock, needs.superblock) {
            self.superblock.fill(pool, level, rows, cols, x);
        }
        if is_missing(&mut self.held.split, needs.split) {
            self.split.fill(pool, rows, cols, x);
        }
        if is_missing(&mut self.held.rounded, needs.rounded) {
            self.rounded.fill(pool, rows, cols, x);
        }
    }
}

impl Buffer {
    pub(super) fn new(rows: usize, cols: usize) -> Result<Self, BackendError> {
        // Memory becomes resident when it is touched: a form that no layer asks for costs nothing.
        let forms = Some(RefCell::new(Forms::new(rows, cols)?));
        Ok(Self { forms, ..Self::output(rows, cols)? })
    }

    pub(super) fn output(rows: usize, cols: usize) -> Result<Self, BackendError> {
        let what = "activations";
        let len = rows.checked_mul(cols).ok_or(BackendError::OutOfMemory { what, bytes: usize::MAX })?;
        Ok(Self { rows, cols, data: Aligned::working(what, len)?, forms: None })
    }

    /// Bytes that `new` would allocate.
    pub(super) fn bytes(rows: usize, cols: usize) -> usize {
        Self::output_bytes(rows, cols) + Forms::bytes(rows, cols)
    }

    /// Bytes that `output` would allocate.
    pub(super) fn output_bytes(rows: usize, cols: usize) -> usize {
        rows * cols * size_of::<f32>()
    }

    pub(super) fn forms(&self) -> RefMut<'_, Forms> {
        self.forms.as_ref().expect("linear layers read no outputs").borrow_mut()
    }

    /// The first `rows` rows, to be overwritten: what was derived from the old contents is void.
    pub(super) fn rows_mut(&mut self, rows: usize) -> &mut [f32] {
        assert!(rows <= self.rows, "{rows} rows in a buffer of {}", self.rows);
        if let Some(forms) = &mut self.forms {
            forms.get_mut().held = Held::default();
        }
        &mut self.data[..rows * self.cols]
    }

    pub(super) fn rows(&self, rows: usize) -> &[f32] {
        assert!(rows <= self.rows, "{rows} rows in a buffer of {}", self.rows);
        &self.data[..rows * self.cols]
    }

    /// Where the first `rows` rows go, all in this form.
    pub(super) fn places(&mut self, rows: usize, kind: FormKind) -> Places {
        match kind {
            FormKind::Plain => Places::Plain(SendPtr(self.rows_mut(rows).as_mut_ptr())),
            FormKind::Rounded => Places::Rounded(self.rounded(rows).places()),
            FormKind::Split => Places::Split(self.split(rows).places()),
        }
    }

    /// The first `rows` rows, rounded: all that there will be of them.
    pub(super) fn rounded(&mut self, rows: usize) -> &mut SplitActivations<1> {
        let forms = self.forms.as_mut().expect("a linear layer reads this").get_mut();
        forms.held = Held { rounded: (0, rows), ..Held::default() };
        forms.rounded.begin(rows, self.cols);
        &mut forms.rounded
    }

    /// The same in two parts.
    pub(super) fn split(&mut self, rows: usize) -> &mut SplitActivations<2> {
        let forms = self.forms.as_mut().expect("a linear layer reads this").get_mut();
        forms.held = Held { split: (0, rows), ..Held::default() };
        forms.split.begin(rows, self.cols);
        &mut forms.split
    }
}
