//! The records that a client or a server knows: the newest of each peer and model, until they expire.
//!
//! Anybody can sign records for as many keys as he likes, so a record counts for what it takes to have it here:
//! - own records, and those of peers that this process has reached itself, come first;
//! - then those that neighbours in several address blocks told of, then those known for longest;
//! - a record of another peer counts to the share of the block that told of it first, which is limited; in a full directory the
//!   block with the most records loses its latest one;
//! - of a block that alone tells of more than [`CROWD`] peers of a model, these are doubtful: they are not passed on, and used only
//!   where there is nobody else.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::coverage::Coverage;
use crate::identity::{ModelDigest, PeerId, UnixTime};
use crate::record::{BlockRecord, RecordError, SignedRecord, VerifiedRecord};
use crate::source::AddressBlock;

/// The most models of which one peer may announce a block.
pub const BLOCKS_PER_PEER_MAX: usize = 4;
/// The most records that a directory holds, unless it is told otherwise.
pub const RECORDS_MAX: usize = 64 << 10;
/// The part of a directory that one address block may fill with what it was the first to tell: one of so many.
const SHARE: usize = 16;
/// So many records of a model that one address block alone tells of are doubtful.
pub const CROWD: usize = 128;
/// How many address blocks that told of a peer are remembered.
const TELLERS_MAX: usize = 3;

/// Why a record was not taken.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DirectoryError {
    #[error("record {sequence} of peer {peer} is not newer than record {known}")]
    NotNewer { peer: PeerId, sequence: u64, known: u64 },
    #[error("peer {peer} announces more than {BLOCKS_PER_PEER_MAX} blocks")]
    TooManyBlocks { peer: PeerId },
    #[error("an address block that was the first to tell of {share} peers may tell of no more")]
    Share { share: usize },
    #[error("the directory is full: it holds {records_max} records")]
    Full { records_max: usize },
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Records by model and peer, and by when they expire.
#[derive(Clone, Debug)]
pub struct Directory {
    records_max: usize,
    models: HashMap<ModelDigest, BTreeMap<PeerId, Entry>>,
    /// The models of each peer.
    peers: HashMap<PeerId, Vec<ModelDigest>>,
    expiry: BTreeSet<(UnixTime, PeerId, ModelDigest)>,
    /// What each address block was the first to tell, by since when.
    shares: HashMap<AddressBlock, BTreeSet<(UnixTime, PeerId, ModelDigest)>>,
    /// How many peers of a model an address block alone tells of.
    crowds: HashMap<(AddressBlock, ModelDigest), usize>,
}

#[derive(Clone, Debug)]
struct Entry {
    verified: VerifiedRecord,
    since: UnixTime,
    /// It is of this process, of a peer that the user named, or of one that this process has reached.
    is_own: bool,
    /// The address blocks that told of it, the first one first.
    tellers: Vec<AddressBlock>,
}

impl Entry {
    /// The address block to whose share it counts.
    fn share_of(&self) -> Option<AddressBlock> {
        self.tellers.first().copied().filter(|_| !self.is_own)
    }

    /// The address block that alone tells of it.
    fn hearsay_of(&self) -> Option<AddressBlock> {
        match *self.tellers.as_slice() {
            [block] if !self.is_own => Some(block),
            _ => None,
        }
    }

    /// The most trusted first.
    fn order(&self) -> impl Ord + use<> {
        (Reverse((self.is_own, self.tellers.len())), self.since)
    }
}

impl Directory {
    pub fn new(records_max: usize) -> Self {
        Self {
            records_max,
            models: HashMap::new(),
            peers: HashMap::new(),
            expiry: BTreeSet::new(),
            shares: HashMap::new(),
            crowds: HashMap::new(),
        }
    }

    /// Takes a record of this process, or of a peer that its user named, in place of an older one of the same peer and model.
    pub fn insert(&mut self, verified: VerifiedRecord, now: UnixTime) -> Result<(), DirectoryError> {
        self.take(verified, None, now)
    }

    /// The same for a record that a neighbour in this address block told.
    pub fn insert_told(
        &mut self,
        verified: VerifiedRecord,
        teller: AddressBlock,
        now: UnixTime,
    ) -> Result<(), DirectoryError> {
        self.take(verified, Some(teller), now)
    }

    /// A neighbour told a record that need not be verified: the known one is as new. If it is the same, there is one more who
    /// knows it. Returns whether the known one is as new.
    pub fn tell_again(&mut self, record: &SignedRecord, teller: AddressBlock) -> bool {
        let BlockRecord { peer, model, sequence, .. } = *record.record();
        let Some(entry) = self.models.get(&model).and_then(|peers| peers.get(&peer)) else { return false };
        if is_new_teller(entry, teller) && entry.verified.signed() == record {
            self.change(&model, &peer, |entry| add_teller(entry, Some(teller)));
            return true;
        }
        entry.verified.record().sequence >= sequence
    }

    /// This process has reached a peer itself.
    pub fn set_reached(&mut self, peer: &PeerId) {
        for model in self.peers.get(peer).cloned().unwrap_or_default() {
            self.change(&model, peer, |entry| entry.is_own = true);
        }
    }

    fn take(
        &mut self,
        verified: VerifiedRecord,
        teller: Option<AddressBlock>,
        now: UnixTime,
    ) -> Result<(), DirectoryError> {
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
                self.change(&model, &peer, |entry| {
                    entry.verified = verified;
                    add_teller(entry, teller);
                });
            }
            None => {
                let is_known = self.peers.get(&peer).is_some_and(|models| {
                    let entries = models.iter().filter_map(|model| self.models.get(model)?.get(&peer));
                    entries.into_iter().any(|entry| entry.is_own)
                });
                let mut entry = Entry { verified, since: now, is_own: is_known, tellers: Vec::new() };
                add_teller(&mut entry, teller);
                self.make_room(&peer, entry.share_of(), now)?;
                self.count(&entry, true);
                self.models.entry(model).or_default().insert(peer, entry);
                self.peers.entry(peer).or_default().push(model);
            }
        }
        self.expiry.insert((expires, peer, model));
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
        self.count(&removed, false);
        self.expiry.remove(&(removed.verified.record().expires(), *peer, *model));
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
        self.models.get(model)?.get(peer).map(|entry| entry.verified.record())
    }

    /// Whether one address block alone tells of this peer, and of many others.
    pub fn is_doubtful(&self, model: &ModelDigest, peer: &PeerId) -> bool {
        self.models.get(model).and_then(|peers| peers.get(peer)).is_some_and(|entry| self.doubts(entry))
    }

    /// Whether the peer is of this process, or its user named it, or this process has reached it.
    pub fn is_own(&self, model: &ModelDigest, peer: &PeerId) -> bool {
        self.models.get(model).and_then(|peers| peers.get(peer)).is_some_and(|entry| entry.is_own)
    }

    /// Whether there are doubtful peers of a model.
    pub fn has_doubtful(&self, model: &ModelDigest) -> bool {
        self.crowds.iter().any(|((_, known), count)| known == model && *count > CROWD)
    }

    fn doubts(&self, entry: &Entry) -> bool {
        let model = entry.verified.record().model;
        let crowd = entry.hearsay_of().and_then(|block| self.crowds.get(&(block, model)));
        crowd.is_some_and(|count| *count > CROWD)
    }

    /// All records of a model, in the order of peers. Some may have expired since the last [`Self::expire`].
    pub fn records(&self, model: &ModelDigest) -> impl Iterator<Item = &BlockRecord> + Clone {
        self.models.get(model).into_iter().flat_map(|records| records.values().map(|entry| entry.verified.record()))
    }

    /// The same, as they were verified; `None`: of all models. The most trusted first.
    pub fn by_trust(&self, model: Option<&ModelDigest>) -> Vec<VerifiedRecord> {
        let mut entries: Vec<&Entry> = self.entries(model).collect();
        entries.sort_by_key(|entry| entry.order());
        entries.into_iter().map(|entry| entry.verified.clone()).collect()
    }

    /// What to tell a neighbour: signed records that were issued since then, without doubtful ones. The most trusted first.
    pub fn to_tell(&self, model: Option<&ModelDigest>, since: UnixTime) -> Vec<VerifiedRecord> {
        let is_told = |entry: &&Entry| {
            entry.verified.is_signed() && entry.verified.record().issued >= since && !self.doubts(entry)
        };
        let mut entries: Vec<&Entry> = self.entries(model).filter(is_told).collect();
        entries.sort_by_key(|entry| entry.order());
        entries.into_iter().map(|entry| entry.verified.clone()).collect()
    }

    fn entries(&self, model: Option<&ModelDigest>) -> impl Iterator<Item = &Entry> {
        let models = self.models.iter().filter(move |(known, _)| model.is_none_or(|model| model == *known));
        models.flat_map(|(_, entries)| entries.values())
    }

    /// What the peers give each layer of a model at this time.
    pub fn coverage(&self, model: &ModelDigest, layers: usize, now: UnixTime) -> Coverage {
        Coverage::new(layers, self.records(model).filter(move |record| record.expires() > now))
    }

    /// Room for one more record, which counts to the share of this address block, if to one.
    fn make_room(&mut self, peer: &PeerId, teller: Option<AddressBlock>, now: UnixTime) -> Result<(), DirectoryError> {
        self.expire(now);
        if self.peers.get(peer).is_some_and(|models| models.len() >= BLOCKS_PER_PEER_MAX) {
            return Err(DirectoryError::TooManyBlocks { peer: *peer });
        }
        let told = |block: &AddressBlock| self.shares.get(block).map_or(0, BTreeSet::len);
        let share = (self.records_max / SHARE).max(1);
        if teller.is_some_and(|block| told(&block) >= share) {
            return Err(DirectoryError::Share { share });
        }
        if self.len() < self.records_max {
            return Ok(());
        }
        let largest = self.shares.iter().max_by_key(|(block, records)| (records.len(), **block));
        let last = largest.and_then(|(_, records)| Some((records.len(), *records.last()?)));
        match last {
            Some((len, (_, peer, model))) if teller.is_none_or(|block| told(&block) + 1 < len) => {
                self.remove(&model, &peer);
                Ok(())
            }
            _ => Err(DirectoryError::Full { records_max: self.records_max }),
        }
    }

    /// Changes an entry, and what is counted by what it says.
    fn change(&mut self, model: &ModelDigest, peer: &PeerId, change: impl FnOnce(&mut Entry)) {
        let Some(mut entry) = self.models.get(model).and_then(|peers| peers.get(peer)).cloned() else { return };
        self.count(&entry, false);
        change(&mut entry);
        self.count(&entry, true);
        if let Some(peers) = self.models.get_mut(model) {
            peers.insert(*peer, entry);
        }
    }

    fn count(&mut self, entry: &Entry, is_added: bool) {
        let record = entry.verified.record();
        if let Some(block) = entry.share_of() {
            let (key, records) = ((entry.since, record.peer, record.model), self.shares.entry(block).or_default());
            let _ = if is_added { records.insert(key) } else { records.remove(&key) };
            if records.is_empty() {
                self.shares.remove(&block);
            }
        }
        if let Some(block) = entry.hearsay_of() {
            let crowd = (block, record.model);
            let count = self.crowds.entry(crowd).or_default();
            *count = if is_added { *count + 1 } else { count.saturating_sub(1) };
            if *count == 0 {
                self.crowds.remove(&crowd);
            }
        }
    }
}

fn add_teller(entry: &mut Entry, teller: Option<AddressBlock>) {
    match teller {
        None => entry.is_own = true,
        Some(block) if is_new_teller(entry, block) => entry.tellers.push(block),
        Some(_) => {}
    }
}

fn is_new_teller(entry: &Entry, teller: AddressBlock) -> bool {
    entry.tellers.len() < TELLERS_MAX && !entry.tellers.contains(&teller)
}
