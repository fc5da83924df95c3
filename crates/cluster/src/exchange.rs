//! `Exchange`: a rank's place among others as the `Collective` of a backend, whatever connects them.
//!
//! Activations are exchanged where they lie if that is this process's memory, else they pass through it. They go in pieces of
//! whole rows, so that a place for any number of elements serves steps of any size. All ranks cut alike.

use std::cell::RefCell;
use std::ops::Range;

use kernels::{Backend, BackendError, Form, HostWork, Rows};
use model::{Collective, CollectiveError, EachRows, Rooms};
use types::Rank;

/// What groups are made for: a row of 2^20 elements, the logits of the largest vocabularies, or many rows of hidden states at once.
pub const EXCHANGE_ELEMENTS_MAX: usize = 1 << 20;

/// Elements of a piece that is read again when it is there, if rows are not longer: both slots of a few ranks fit in a core's own
/// cache.
const PIECE_ELEMENTS: usize = 1 << 17;

/// Elements of the rows that a thread sums and works on at a time: they and what is made of them stay in a core's own cache.
const PART_ELEMENTS: usize = 1 << 16;

/// Rows that one rank makes are a multiple of this, but for the last: forms have as many in a bundle, or one.
pub(crate) const BUNDLE: usize = 16;

/// Rows that go to one thread at a time, as in the ops of the CPU's backend: then a thread works on what it has summed.
const RUN_ROWS: usize = 4;

/// [`Backend::host_runs`] of some backend.
pub type Runs<'a> = dyn Fn(&mut [f32], usize, &HostWork<'_>) + 'a;

/// A rank's place in a group: the collectives on slices. What a rank has of `cols` columns is its [`Rank::share`] of them.
pub trait Joint {
    type Error: Into<CollectiveError>;

    fn rank(&self) -> Rank;
    /// The most elements of one call.
    fn elements_max(&self) -> usize;
    fn too_large(elements: usize, elements_max: usize) -> Self::Error;
    /// The others shall not wait for this rank any more.
    fn leave(&self);

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), Self::Error>;
    /// Memory for what this rank brings and makes, where the others can read it. It is given once.
    fn rooms(&mut self) -> Option<Rooms>;
    /// Shows the others these rows of `cols` columns, which begin `at` elements after the first of a buffer. Returns the rows that
    /// this rank is to sum and work on, or nothing if all are summed already.
    fn bring_rows(&mut self, at: usize, cols: usize, values: &mut [f32]) -> Result<Option<Range<usize>>, Self::Error>;
    /// Adds to some of the values that it has brought, from the `start`th on, what the others have.
    fn sum_brought(&self, start: usize, values: &mut [f32]);
    /// Each rank has made what `bring_rows` gave it of these `rows` of `cols` columns; afterwards it has all of them. `runs` copies.
    fn gather_rows(
        &mut self,
        rows: Range<usize>,
        cols: usize,
        made: Form<'_>,
        runs: &Runs<'_>,
    ) -> Result<(), Self::Error>;
    fn all_gather(&mut self, cols: usize, values: &mut [f32]) -> Result<(), Self::Error>;
    /// `whole`, which only the first rank has, gets what all have in `part`.
    fn gather_columns(&mut self, shape: [usize; 2], part: &[f32], whole: Option<&mut [f32]>)
    -> Result<(), Self::Error>;
    fn broadcast(&mut self, root: Rank, values: &mut [f32]) -> Result<(), Self::Error>;
}

/// Makes a place in a group a [`Joint`]: it has these methods, with shares of its caller's choice.
macro_rules! joint {
    ($Place:ty, $Error:ident) => {
        impl $crate::exchange::Joint for $Place {
            type Error = $Error;

            fn rank(&self) -> Rank {
                self.rank()
            }

            fn elements_max(&self) -> usize {
                self.elements_max()
            }

            fn too_large(elements: usize, elements_max: usize) -> $Error {
                $Error::TooLarge { elements, elements_max }
            }

            fn leave(&self) {
                self.abort().lost(self.rank());
            }

            fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), $Error> {
                self.all_reduce(values)
            }

            fn rooms(&mut self) -> Option<Rooms> {
                self.rooms()
            }

            fn bring_rows(
                &mut self,
                at: usize,
                cols: usize,
                values: &mut [f32],
            ) -> Result<Option<Range<usize>>, $Error> {
                self.bring_rows(at, cols, values)
            }

            fn sum_brought(&self, start: usize, values: &mut [f32]) {
                self.sum_brought(start, values)
            }

            fn gather_rows(
                &mut self,
                rows: Range<usize>,
                cols: usize,
                made: Form<'_>,
                runs: &$crate::exchange::Runs<'_>,
            ) -> Result<(), $Error> {
                self.gather_rows(rows, cols, made, runs)
            }

            fn all_gather(&mut self, cols: usize, values: &mut [f32]) -> Result<(), $Error> {
                self.all_gather(cols, |rank| rank.share(cols), values)
            }

            fn gather_columns(
                &mut self,
                [rows, cols]: [usize; 2],
                part: &[f32],
                whole: Option<&mut [f32]>,
            ) -> Result<(), $Error> {
                self.gather_columns([rows, cols], |rank| rank.share(cols), part, whole)
            }

            fn broadcast(&mut self, root: Rank, values: &mut [f32]) -> Result<(), $Error> {
                self.broadcast(root, values)
            }
        }
    };
}
pub(crate) use joint;

#[derive(Debug)]
pub struct Exchange<J> {
    inner: RefCell<Inner<J>>,
}

#[derive(Debug)]
struct Inner<J> {
    joint: J,
    /// The rows of the buffer in hand.
    values: Vec<f32>,
    /// This rank's columns of them, where these are in a buffer of their own.
    part: Vec<f32>,
}

impl<J: Joint> Exchange<J> {
    pub fn new(joint: J) -> Self {
        Self { inner: RefCell::new(Inner { joint, values: Vec::new(), part: Vec::new() }) }
    }

    pub fn rank(&self) -> Rank {
        self.inner.borrow().joint.rank()
    }

    /// Nobody may be within an exchange.
    pub(crate) fn joint_mut(&mut self) -> &mut J {
        &mut self.inner.get_mut().joint
    }

    /// Runs `exchange` on the first `rows` rows of `buffer`, a piece at a time. A failure of the backend ends the group: the
    /// other ranks shall not wait for this one.
    fn run<B: Backend>(
        &self,
        backend: &B,
        rows: usize,
        buffer: &mut B::Buffer,
        exchange: impl Fn(&mut J, &mut [f32]) -> Result<(), J::Error>,
    ) -> Result<(), CollectiveError> {
        let Inner { joint, values, .. } = &mut *self.inner.borrow_mut();
        let cols = backend.columns(buffer);
        let piece = piece_elements::<J>(joint, cols)?;
        if let Some(values) = backend.host_rows_mut(buffer, rows) {
            return values.chunks_mut(piece).try_for_each(|piece| exchange(joint, piece)).map_err(Into::into);
        }
        let values = room(values, rows.saturating_mul(cols)).map_err(|error| leave(joint, error))?;
        backend.read(buffer, 0..rows, values).map_err(|error| leave(joint, error))?;
        values.chunks_mut(piece).try_for_each(|piece| exchange(joint, piece)).map_err(Into::into)?;
        backend.write(buffer, values).map_err(|error| leave(joint, error))
    }
}

impl<B: Backend, J: Joint + Send + Sync> Collective<B> for Exchange<J> {
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |joint, values| joint.all_reduce(values))
    }

    /// Part by part: what is summed is still in the cache when `each` reads it, and what that makes when it is brought into form.
    fn reduce_into(
        &self,
        backend: &B,
        rows: Rows,
        from: &mut B::Buffer,
        to: &mut B::Buffer,
        reader: Option<&B::Matrix>,
        each: &mut EachRows<'_, B>,
    ) -> Result<(), CollectiveError> {
        let (cols, all) = (backend.columns(from), rows.all());
        let form = backend.host_form(rows, to, reader).map(|form| (form.strips, form.values.len()));
        // Of a row, the sum or its form is larger.
        let width =
            form.map(|(strips, elements)| cols.max(elements.div_ceil(all.next_multiple_of(strips.bundle).max(1))));
        let mut inner = self.inner.borrow_mut();
        let (elements_max, bundles) = (inner.joint.elements_max(), BUNDLE * inner.joint.rank().world().get());
        let fits = |width: &usize| *width > 0 && bundles.saturating_mul(*width) <= elements_max;
        let is_here = backend.host_rows_mut(from, all).is_some();
        let Some(width) = width.filter(fits).filter(|_| is_here) else {
            drop(inner);
            Collective::all_reduce(self, backend, all, from)?;
            each(from, to, 0..all);
            return Ok(());
        };
        let joint = &mut inner.joint;
        let at_once = elements_max / width / bundles * bundles;
        let at_a_time = (PART_ELEMENTS * backend.host_threads() / width / BUNDLE * BUNDLE).max(BUNDLE);
        let runs = |values: &mut [f32], length: usize, work: &HostWork<'_>| backend.host_runs(values, length, work);
        let here = "it was here before";
        for first in (0..all).step_by(at_once) {
            let piece = first..all.min(first + at_once);
            let elements = piece.start * cols..piece.end * cols;
            let values = &mut backend.host_rows_mut(from, all).expect(here)[elements.clone()];
            let Some(own) = joint.bring_rows(elements.start, cols, values).map_err(Into::into)? else {
                each(from, to, piece);
                continue;
            };
            for start in own.clone().step_by(at_a_time) {
                let part = start..own.end.min(start + at_a_time);
                let values = &mut backend.host_rows_mut(from, all).expect(here)[elements.clone()];
                let (length, start) = (RUN_ROWS * cols, part.start * cols);
                let joint = &*joint;
                backend.host_runs(&mut values[start..part.end * cols], length, &|run, values| {
                    joint.sum_brought(start + run * length, values);
                });
                each(from, to, first + part.start..first + part.end);
            }
            let made = backend.host_form(rows, to, reader).expect(here);
            joint.gather_rows(piece, cols, made, &runs).map_err(Into::into)?;
        }
        Ok(())
    }

    fn rooms(&self) -> Option<Rooms> {
        self.inner.borrow_mut().joint.rooms()
    }

    fn all_gather(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        let cols = backend.columns(buffer);
        self.run(backend, rows, buffer, |joint, values| joint.all_gather(cols, values))
    }

    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError> {
        let Inner { joint, values, part: own } = &mut *self.inner.borrow_mut();
        let at_once = piece_elements::<J>(joint, cols)? / cols;
        let width = joint.rank().share(cols).len();
        let own = match backend.host_rows(part, rows) {
            Some(own) => own,
            None => {
                let own = room(own, rows.saturating_mul(width)).map_err(|error| leave(joint, error))?;
                backend.read(part, 0..rows, own).map_err(|error| leave(joint, error))?;
                own
            }
        };
        let gather = |joint: &mut J, mut whole: Option<&mut [f32]>| {
            (0..rows).step_by(at_once).try_for_each(|first| {
                let piece = first..rows.min(first + at_once);
                let all = whole.as_mut().map(|whole| &mut whole[piece.start * cols..piece.end * cols]);
                let own = &own[piece.start * width..piece.end * width];
                joint.gather_columns([piece.len(), cols], own, all).map_err(Into::into)
            })
        };
        let Some(whole) = whole else { return gather(joint, None) };
        if let Some(whole) = backend.host_rows_mut(whole, rows) {
            return gather(joint, Some(whole));
        }
        let values = room(values, rows.saturating_mul(cols)).map_err(|error| leave(joint, error))?;
        gather(joint, Some(&mut *values))?;
        backend.write(whole, values).map_err(|error| leave(joint, error))
    }

    fn gather_values(&self, own: &[f32], all: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        let joint = &mut self.inner.borrow_mut().joint;
        let elements = own.len().saturating_mul(joint.rank().world().get());
        if elements > joint.elements_max() {
            return Err(J::too_large(elements, joint.elements_max()).into());
        }
        joint.gather_columns([1, elements], own, all).map_err(Into::into)
    }

    fn broadcast(&self, backend: &B, root: Rank, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |joint, values| joint.broadcast(root, values))
    }
}

fn leave(joint: &impl Joint, error: BackendError) -> CollectiveError {
    joint.leave();
    CollectiveError::Backend(error)
}

/// Elements of the most whole rows of `cols` columns that one exchange takes.
fn piece_elements<J: Joint>(joint: &J, cols: usize) -> Result<usize, CollectiveError> {
    let elements_max = joint.elements_max();
    if cols > elements_max {
        return Err(J::too_large(cols, elements_max).into());
    }
    let rows = elements_max.min(PIECE_ELEMENTS.max(cols)).checked_div(cols).unwrap_or(0);
    Ok((rows * cols).max(1)) // without columns there is nothing to cut
}

/// The first `elements` of `values`, which grow as needed.
fn room(values: &mut Vec<f32>, elements: usize) -> Result<&mut [f32], BackendError> {
    if values.len() < elements {
        let bytes = elements.saturating_mul(size_of::<f32>());
        values
            .try_reserve_exact(elements - values.len())
            .map_err(|_| BackendError::OutOfMemory { what: "an exchange between ranks", bytes })?;
        values.resize(elements, 0.0);
    }
    Ok(&mut values[..elements])
}
