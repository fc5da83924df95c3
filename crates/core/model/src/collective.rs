//! `Collective`: the reduce and gather operations of a tensor-parallel group. The trait is declared here, where the forward
//! pass needs it, and implemented in `ranks`. Sums are taken in a fixed order, so runs are reproducible bit for bit.

use std::ops::Range;

use kernels::{Backend, BackendError};
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

/// Computes a range of rows of the second buffer from the same rows of the first.
pub type MapRows<'a, B> = dyn FnMut(&<B as Backend>::Buffer, &mut <B as Backend>::Buffer, Range<usize>) + 'a;

/// All ranks call the same ops in the same order, on the first `rows` rows of buffers of the same shape.
pub trait Collective<B: Backend>: Send {
    /// Replaces every rank's `buffer` with the sum over all ranks.
    fn all_reduce(&self, backend: &B, rows: usize, buffer: &mut B::Buffer) -> Result<(), CollectiveError>;
    /// Sums `from` over all ranks and fills `to` with the result of `map` on the sums. Afterwards every rank has all rows of
    /// `to`; a row of `from` may be summed on one rank only. An implementation may let each rank sum and map some of the
    /// rows and exchange the results, so with several ranks `map` must write plain rows of `to` ([`Backend::host_rows`]).
    fn reduce_into(
        &self,
        backend: &B,
        rows: usize,
        from: &mut B::Buffer,
        to: &mut B::Buffer,
        map: &mut MapRows<'_, B>,
    ) -> Result<(), CollectiveError> {
        self.all_reduce(backend, rows, from)?;
        map(from, to, 0..rows);
        Ok(())
    }
    /// `part` is a rank's shard ([`Rank::shard`]) of `cols` columns. Rank 0 passes `whole` and receives all columns in it.
    fn gather_columns(
        &self,
        backend: &B,
        rows: usize,
        cols: usize,
        part: &B::Buffer,
        whole: Option<&mut B::Buffer>,
    ) -> Result<(), CollectiveError>;
}

/// The collective of world size 1, which exchanges nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleRank;

impl<B: Backend> Collective<B> for SingleRank {
    fn all_reduce(&self, _: &B, _: usize, _: &mut B::Buffer) -> Result<(), CollectiveError> {
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
        unreachable!("with one rank all columns are in one buffer")
    }
}
