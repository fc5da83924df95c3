//! `Collective`: how the ranks of a tensor-parallel group combine what each computed. Declared here, where the
//! forward pass needs it; implemented where the sockets are. Sums are taken in a fixed order, so a run repeats bit
//! for bit.

use std::ops::Range;

use kernels::{Backend, BackendError, Rows, SharedMemory};
use types::Rank;

#[derive(Debug, thiserror::Error)]
pub enum CollectiveError {
    #[error("rank {0} left the group")]
    Lost(Rank),
    #[error("the group was stopped")]
    Aborted,
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("exchange between ranks failed")]
    Transport(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Makes rows of the second buffer from the same rows of the first.
pub type EachRows<'a, B> = dyn FnMut(&<B as Backend>::Buffer, &mut <B as Backend>::Buffer, Range<usize>) + 'a;

/// Memory for rows that ranks exchange.
pub struct Rooms {
    /// For those that this rank brings to be summed.
    pub brought: SharedMemory,
    /// For those that it makes of the sums.
    pub made: SharedMemory,
}

/// All ranks call the same ops in the same order, on the first `rows` rows of buffers of the same shape.
pub trait Collective<B: Backend>: Send {
    /// Every rank's `buffer` becomes the sum of all.
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError>;
    /// `each` makes rows of `to` from the same rows of `from`, which are the sum of all ranks' by then: as [`Backend::norm_for`] does for
    /// the `reader`, if there is one. Afterwards every rank has all rows of `to`, for that reader. Who makes which rows is decided here:
    /// many of them are worth sharing.
    fn reduce_into(
        &self,
        backend: &B,
        rows: Rows,
        from: &mut B::Buffer,
        to: &mut B::Buffer,
        reader: Option<&B::Matrix>,
        each: &mut EachRows<'_, B>,
    ) -> Result<(), CollectiveError> {
        let _ = reader;
        self.all_reduce(backend, rows.all(), from)?;
        each(from, to, 0..rows.all());
        Ok(())
    }
    /// Memory for the rows of [`Collective::reduce_into`], which the others then read where they lie. It is given once.
    fn rooms(&self) -> Option<Rooms> {
        None
    }
    /// Each rank has filled its share ([`Rank::share`]) of the columns of `buffer`; afterwards every rank has all of them.
    fn all_gather(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError>;
    /// `part` is a rank's share ([`Rank::share`]) of `cols` columns. `whole`, which only the first rank has, gets all of them.
    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError>;
    /// Every rank has as many values, in this process's memory. `all`, which only the first rank has, gets them in the order of ranks.
    fn gather_values(&self, own: &[f32], all: Option<&mut [f32]>) -> Result<(), CollectiveError>;
    /// Every rank's `buffer` becomes that of `root`.
    fn broadcast(&self, backend: &B, root: Rank, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError>;
}

/// World size 1: there is nobody to exchange anything with, and no part that is not the whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl<B: Backend> Collective<B> for Solo {
    fn all_reduce(&self, _: &B, _: usize, _: &mut B::Buffer) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn all_gather(&self, _: &B, _: usize, _: &mut B::Buffer) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn gather_columns(
        &self,
        _: &B,
        _: usize,
        _: usize,
        _: &B::Buffer,
        _: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError> {
        unreachable!("a world of one has its columns in one buffer")
    }

    fn gather_values(&self, own: &[f32], all: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        if let Some(all) = all {
            all.copy_from_slice(own);
        }
        Ok(())
    }

    fn broadcast(&self, _: &B, _: Rank, _: usize, _: &mut B::Buffer) -> Result<(), CollectiveError> {
        Ok(())
    }
}
