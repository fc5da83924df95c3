//! `Exchange`: a seat as the `Collective` of a backend. Activations are exchanged where they lie if that is this process's memory, else they
//! pass through it. They go through the segment in pieces of whole rows, so that a segment of any size serves steps of any size, and a piece is
//! still in the cache when another rank reads it. All ranks cut alike.

use std::cell::RefCell;

use kernels::{Backend, BackendError};
use model::{Collective, CollectiveError};
use types::Rank;

use super::barrier::GroupError;
use super::seat::Seat;

/// What the segments of groups are made for: a row of 2^20 elements, the logits of the largest vocabularies, or many
/// rows of hidden states at once.
pub const EXCHANGE_ELEMENTS_MAX: usize = 1 << 20;

/// The columns that an `all_gather` gets from a rank are its [`Rank::share`] of them.
#[derive(Debug)]
pub struct Exchange {
    inner: RefCell<Inner>,
}

#[derive(Debug)]
struct Inner {
    seat: Seat,
    /// The rows of the buffer in hand.
    values: Vec<f32>,
    /// This rank's columns of them, where these are in a buffer of their own.
    part: Vec<f32>,
}

impl Exchange {
    pub fn new(seat: Seat) -> Self {
        Self { inner: RefCell::new(Inner { seat, values: Vec::new(), part: Vec::new() }) }
    }

    pub fn rank(&self) -> Rank {
        self.inner.borrow().seat.rank()
    }

    /// Runs `exchange` on the first `rows` rows of `buffer`, as many of them at a time as fit in the segment. A failure
    /// of the backend ends the generation: the other ranks shall not wait for this one.
    fn run<B: Backend>(
        &self,
        backend: &B,
        rows: usize,
        buffer: &mut B::Buffer,
        exchange: impl Fn(&mut Seat, &mut [f32]) -> Result<(), GroupError>,
    ) -> Result<(), CollectiveError> {
        let Inner { seat, values, .. } = &mut *self.inner.borrow_mut();
        let cols = backend.columns(buffer);
        let piece = piece_elements(seat, cols)?;
        if let Some(values) = backend.host_rows(buffer, rows) {
            return Ok(values.chunks_mut(piece).try_for_each(|piece| exchange(seat, piece))?);
        }
        let values = room(values, rows.saturating_mul(cols)).map_err(|error| leave(seat, error))?;
        backend.read(buffer, 0..rows, values).map_err(|error| leave(seat, error))?;
        values.chunks_mut(piece).try_for_each(|piece| exchange(seat, piece))?;
        backend.write(buffer, values).map_err(|error| leave(seat, error))
    }
}

impl<B: Backend> Collective<B> for Exchange {
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |seat, values| seat.all_reduce(values))
    }

    fn all_gather(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        let cols = backend.columns(buffer);
        self.run(backend, rows, buffer, |seat, values| seat.all_gather(cols, |rank| rank.share(cols), values))
    }

    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError> {
        let Inner { seat, values, part: own } = &mut *self.inner.borrow_mut();
        let at_once = piece_elements(seat, cols)? / cols;
        let width = seat.rank().share(cols).len();
        let own = room(own, rows.saturating_mul(width)).map_err(|error| leave(seat, error))?;
        backend.read(part, 0..rows, own).map_err(|error| leave(seat, error))?;
        let elements = if whole.is_some() { rows.saturating_mul(cols) } else { 0 };
        let values = room(values, elements).map_err(|error| leave(seat, error))?;
        for first in (0..rows).step_by(at_once) {
            let piece = first..rows.min(first + at_once);
            let own = &own[piece.start * width..piece.end * width];
            let all = whole.is_some().then(|| &mut values[piece.start * cols..piece.end * cols]);
            seat.gather_columns([piece.len(), cols], |rank| rank.share(cols), own, all)?;
        }
        match whole {
            Some(whole) => backend.write(whole, values).map_err(|error| leave(seat, error)),
            None => Ok(()),
        }
    }

    fn broadcast(&self, backend: &B, root: Rank, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError> {
        self.run(backend, rows, buffer, |seat, values| seat.broadcast(root, values))
    }
}

/// The other ranks shall not wait for one whose backend failed.
fn leave(seat: &Seat, error: BackendError) -> CollectiveError {
    seat.abort().lost(seat.rank());
    CollectiveError::Backend(error)
}

/// Elements of a piece, if rows are not longer: both slots of a few ranks fit in a core's own cache.
const PIECE_ELEMENTS: usize = 1 << 16;

/// Elements of the most whole rows of `cols` columns that one exchange takes.
fn piece_elements(seat: &Seat, cols: usize) -> Result<usize, GroupError> {
    let elements_max = seat.elements_max();
    if cols > elements_max {
        return Err(GroupError::TooLarge { elements: cols, elements_max });
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
