//! Peers with another protocol: a span whose runs somebody else carries out. Rows are neither passed on to such a peer nor by it.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::mpsc;
use types::LayerRange;

use crate::wire::{Returned, Run};

/// Why a foreign span ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignLoss {
    /// Nobody is to blame: the rows have to be run again from the first one on, in another session.
    Replay,
    Lost {
        why: Arc<str>,
    },
    /// The peer did what no honest one does.
    Malformed {
        why: Arc<str>,
    },
}

pub type ForeignTask = Pin<Box<dyn Future<Output = ForeignLoss> + Send>>;

/// A peer that runs one block, always all of it.
pub trait ForeignPeer: Send + Sync {
    fn layers(&self) -> LayerRange;

    /// One session: carries out runs in order, and returns their states, all of a run's rows but for silent ones. It ends when
    /// `runs` does, or with a loss.
    fn session(&self, runs: mpsc::UnboundedReceiver<Run>, returned: mpsc::UnboundedSender<Returned>) -> ForeignTask;
}
