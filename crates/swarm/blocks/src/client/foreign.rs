//! Peers with another protocol: a span whose runs somebody else carries out. Rows are neither passed on to such a peer nor by it.

use std::collections::{HashMap, HashSet};
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};

use directory::PeerId;
use tokio::sync::mpsc;
use types::LayerRange;

use crate::wire::{Returned, Run};

/// Why a foreign span ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForeignLoss {
    /// Nobody is to blame: the rows have to be run again from the first one on, in another session.
    Replay,
    /// It is not ready, or has no room: others are tried first.
    Busy {
        why: Arc<str>,
        is_full: bool,
    },
    Lost {
        why: Arc<str>,
    },
    /// The peer did what no honest one does.
    Malformed {
        why: Arc<str>,
    },
}

pub type ForeignTask = Pin<Box<dyn Future<Output = ForeignLoss> + Send>>;

/// The peers with other protocols that a client may use, which may change. Clones are the same set.
#[derive(Clone, Default)]
pub struct ForeignPeers(Arc<RwLock<HashMap<PeerId, Arc<dyn ForeignPeer>>>>);

impl From<HashMap<PeerId, Arc<dyn ForeignPeer>>> for ForeignPeers {
    fn from(peers: HashMap<PeerId, Arc<dyn ForeignPeer>>) -> Self {
        Self(Arc::new(RwLock::new(peers)))
    }
}

impl ForeignPeers {
    pub fn insert(&self, peer: PeerId, foreign: Arc<dyn ForeignPeer>) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(peer, foreign);
    }

    /// Sessions that use it go on.
    pub fn remove(&self, peer: &PeerId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(peer);
    }

    pub fn contains(&self, peer: &PeerId) -> bool {
        self.0.read().unwrap_or_else(PoisonError::into_inner).contains_key(peer)
    }

    /// What people call a peer, if it has another name than its id.
    pub fn name(&self, peer: &PeerId) -> Option<String> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(peer)?.name()
    }

    /// The peer, if it runs these layers. If it runs others, it has become another one since the layers were planned.
    pub fn get(&self, peer: &PeerId, layers: LayerRange) -> Option<Arc<dyn ForeignPeer>> {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner).get(peer).cloned();
        found.filter(|foreign| foreign.layers() == layers)
    }

    /// Those that return logits.
    pub fn with_logits(&self) -> HashSet<PeerId> {
        let peers = self.0.read().unwrap_or_else(PoisonError::into_inner);
        peers.iter().filter(|(_, foreign)| foreign.returns_logits()).map(|(peer, _)| *peer).collect()
    }
}

/// A peer that runs one block, always all of it.
pub trait ForeignPeer: Send + Sync {
    /// Where it is, as the user said it.
    fn name(&self) -> Option<String> {
        None
    }

    fn layers(&self) -> LayerRange;

    /// Whether it has the model's last layer and returns the logits of a run's last row instead of states.
    fn returns_logits(&self) -> bool;

    /// One session: carries out runs in order, and returns what is due: nothing for silent ones, `state_rows` rows at the end of
    /// a chain, else all. It ends when `runs` does, or with a loss.
    fn session(
        &self,
        is_last: bool,
        runs: mpsc::UnboundedReceiver<Run>,
        returned: mpsc::UnboundedSender<Returned>,
    ) -> ForeignTask;
}
