//! `Communicator`: collectives between the ranks of a group, on slices of host memory. `ShmComm` and `TcpComm`
//! implement it; `GroupCollective` runs it on the buffers of a backend.
//!
//! All ranks call the same operations in the same order, with the same number of elements. After an error, the contents
//! of the slices are undefined. Dropping a communicator ends its group, so that the other ranks do not wait for a rank
//! that is gone.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use model::CollectiveError;
use types::Rank;

/// The most elements of one collective: one row of logits of the largest vocabularies, or many rows of hidden states at
/// once.
pub const EXCHANGE_ELEMENTS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    #[error("rank {0} left the group")]
    Lost(Rank),
    #[error("the group was stopped")]
    Aborted,
    #[error("epoch {own} of the group is over, the present one is {present}")]
    Stale { own: u32, present: u32 },
    #[error("rank {0} has joined this epoch already")]
    Taken(Rank),
    #[error("rank {0} is of another group size")]
    World(Rank),
    #[error("rank {0} arrived out of turn")]
    OutOfTurn(Rank),
    #[error("rank {0} runs another operation")]
    Mismatch(Rank),
    #[error("{elements} elements exceed the group's limit of {elements_max}")]
    TooLarge { elements: usize, elements_max: usize },
    #[error("the group was formed too often")]
    EpochsExhausted,
    #[error("nothing came from rank {rank} in {waited:?}")]
    Stalled { rank: Rank, waited: Duration },
    #[error("a message of rank {0} is not authentic")]
    Forged(Rank),
    #[error("a message of rank {0} is malformed")]
    Malformed(Rank),
}

impl From<CommError> for CollectiveError {
    fn from(error: CommError) -> Self {
        match error {
            CommError::Lost(rank) | CommError::Stalled { rank, .. } => Self::Lost(rank),
            CommError::Aborted => Self::Aborted,
            other => Self::Transport(Box::new(other)),
        }
    }
}

pub trait Communicator: fmt::Debug + Send {
    fn rank(&self) -> Rank;
    /// The most elements of one call.
    fn elements_max(&self) -> usize;
    /// Tells the other ranks that this one is lost: their waits end with [`CommError::Lost`].
    fn leave(&self);
    /// Every rank's `values` become the sum over all ranks, added in the order of ranks.
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CommError>;
    /// `values` are rows of `cols` columns. Returns the rows that this rank owns. Those become the sums over all ranks;
    /// the others are undefined. Every row is owned by at least one rank, and the ownership depends on the shape alone.
    fn reduce_scatter_rows(&mut self, cols: usize, values: &mut [f32]) -> Result<Range<usize>, CommError>;
    /// `values` are rows of `cols` columns. Each rank has filled the rows that [`Communicator::reduce_scatter_rows`]
    /// returned for this shape. Afterwards every rank has all rows.
    fn all_gather_rows(&mut self, cols: usize, values: &mut [f32]) -> Result<(), CommError>;
    /// Each rank passes `rows` rows of its shard ([`Rank::shard`]) of `cols` columns in `part`. Rank 0 alone passes
    /// `whole`, which gets all columns.
    fn gather_columns(&mut self, shape: [usize; 2], part: &[f32], whole: Option<&mut [f32]>) -> Result<(), CommError>;
}
