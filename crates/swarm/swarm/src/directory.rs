//! The records that a client or a server knows: the newest of each peer and model, until they expire.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::coverage::Coverage;
use crate::identity::{ModelDigest, PeerId, UnixTime};
use crate::record::{BlockRecord, RecordError, VerifiedRecord};

/// The most models of which one peer may announce a block.
pub const BLOCKS_PER_PEER_MAX: usize = 4;
/// The most records that a directory holds, unless it is told otherwise.
pub const RECORDS_MAX: usize = 64 << 10;

/// Why a record was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DirectoryError {
    #[error("record {sequence} of peer {peer} is not newer than record {known}")]
    NotNewer { peer: PeerId, sequence: u64, known: u64 },
    #[error("peer {peer} announces more than {BLOCKS_PER_PEER_MAX} blocks")]
    TooManyBlocks { peer: PeerId },
    /// Records that are known stay: a flood of new peers must not displace those that are in use.
    #[error("the directory is full: it holds {records_max} records")]
    Full { records_max: usize },
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Records by model and peer, and by when they expire.
#[derive(Clone, Debug)]
pub struct Directory {
    records_max: usize,
    models: HashMap<ModelDigest, BTreeMap<PeerId, VerifiedRecord>>,
    /// The models of each peer.
    peers: HashMap<PeerId, Vec<ModelDigest>>,
    expiry: BTreeSet<(UnixTime, PeerId, ModelDigest)>,
}

impl Directory {
    pub fn new(records_max: usize) -> Self {
        Self { records_max, models: HashMap::new(), peers: HashMap::new(), expiry: BTreeSet::new() }
    }

    /// Takes a record, in place of an older one of the same peer and model.
    pub fn insert(&mut self, verified: VerifiedRecord, now: UnixTime) -> Result<(), DirectoryError> {
        let record = verified.record();
        record.check_time(now)?;
        let (peer, model, expires) = (record.peer, record.model, record.expires());
        match self.get(&model, &peer) {
            Some(known) if known.sequence >= record.sequence => {
                return Err(DirectoryError::NotNewer { peer, sequence: record.sequence, known: known.sequence });
            }
            Some(known) => {
                let old = (known.expires(), peer, model);
                self.expiry.remove(&old);
            }
            None => self.make_room(&peer, now)?,
        }
        self.expiry.insert((expires, peer, model));
        let old = self.models.entry(model).or_default().insert(peer, verified);
        if old.is_none() {
            self.peers.entry(peer).or_default().push(model);
        }
        Ok(())
    }

    /// Drops what has expired. Returns how many records that were.
    pub fn expire(&mut self, now: UnixTime) -> usize {
        let mut expired = 0;
        while let Some((expires, peer, model)) = self.expiry.first().copied()
            && expires <= now
        {
            self.remove(&model, &peer);
            expired += 1;
        }
        expired
    }

    pub fn remove(&mut self, model: &ModelDigest, peer: &PeerId) {
        let Some(records) = self.models.get_mut(model) else { return };
        let Some(removed) = records.remove(peer) else { return };
        if records.is_empty() {
            self.models.remove(model);
        }
        self.expiry.remove(&(removed.record().expires(), *peer, *model));
        if let Some(models) = self.peers.get_mut(peer) {
            models.retain(|known| known != model);
            if models.is_empty() {
                self.peers.remove(peer);
            }
        }
    }

    /// Whether there is a record of the peer.
    pub fn knows(&self, peer: &PeerId) -> bool {
        self.peers.contains_key(peer)
    }

    /// The number of records.
    pub fn len(&self) -> usize {
        self.expiry.len()
    }

    pub fn is_empty(&self) -> bool {
        self.expiry.is_empty()
    }

    pub fn get(&self, model: &ModelDigest, peer: &PeerId) -> Option<&BlockRecord> {
        self.models.get(model)?.get(peer).map(VerifiedRecord::record)
    }

    /// All records of a model, in the order of peers. Some may have expired since the last [`Self::expire`].
    pub fn records(&self, model: &ModelDigest) -> impl Iterator<Item = &BlockRecord> + Clone {
        self.models.get(model).into_iter().flat_map(|records| records.values().map(VerifiedRecord::record))
    }

    /// The same, as they were verified, to be passed on.
    pub fn verified(&self, model: &ModelDigest) -> impl Iterator<Item = &VerifiedRecord> + Clone {
        self.models.get(model).into_iter().flat_map(BTreeMap::values)
    }

    /// The records of all models.
    pub fn all(&self) -> impl Iterator<Item = &VerifiedRecord> {
        self.models.values().flat_map(BTreeMap::values)
    }

    /// What the peers give each layer of a model at this time.
    pub fn coverage(&self, model: &ModelDigest, layers: usize, now: UnixTime) -> Coverage {
        Coverage::new(layers, self.records(model).filter(move |record| record.expires() > now))
    }

    fn make_room(&mut self, peer: &PeerId, now: UnixTime) -> Result<(), DirectoryError> {
        self.expire(now);
        if self.peers.get(peer).is_some_and(|models| models.len() >= BLOCKS_PER_PEER_MAX) {
            return Err(DirectoryError::TooManyBlocks { peer: *peer });
        }
        if self.len() >= self.records_max {
            return Err(DirectoryError::Full { records_max: self.records_max });
        }
        Ok(())
    }
}
