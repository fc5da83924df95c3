//! `SwarmView`: what this process knows of the swarm: records of peers, how they behaved, and measured times. Shared by
//! everything that reads or changes it.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use directory::{
    AddressBlock, BlockRecord, ChainSpan, ClientView, Coverage, Directory, DirectoryError, ModelDigest, Offence,
    PeerChain, PeerId, RECORDS_MAX, Reputation, RouteError, RouteLimits, RoutePlanner, RouteRequest, SignedRecord,
    UnixTime, VerifiedRecord,
};
use tokio::sync::Notify;
use tracing::debug;
use types::LayerRange;

/// The part of a new measurement in a running mean.
const WEIGHT: f32 = 0.2;
/// Peers whose times are remembered. With more, only those that have records are.
const MEASURED_PEERS_MAX: usize = RECORDS_MAX;

#[derive(Debug)]
pub struct SwarmView {
    known: Mutex<Known>,
    wanted: Notify,
}

#[derive(Debug)]
struct Known {
    directory: Directory,
    reputation: Reputation,
    client: ClientView,
}

/// A peer with a block of a model, and what this process thinks of it.
#[derive(Clone, Debug, PartialEq)]
pub struct KnownPeer {
    pub record: BlockRecord,
    /// 0 without an offence.
    pub score: f64,
    /// It misbehaved, so no chain has it.
    pub is_excluded: bool,
}

/// What a chain is for.
#[derive(Clone, Copy, Debug)]
pub struct ChainRequest {
    pub model: ModelDigest,
    /// All layers of the model.
    pub layers: usize,
    pub tokens_max: usize,
    /// Of one row.
    pub row_bytes: usize,
}

impl Default for SwarmView {
    fn default() -> Self {
        let directory = Directory::new(RECORDS_MAX);
        let known = Known { directory, reputation: Reputation::new(), client: ClientView::default() };
        Self { known: Mutex::new(known), wanted: Notify::new() }
    }
}

impl SwarmView {
    /// Takes a record, if it is newer than the known one of its peer and model.
    pub fn insert(&self, record: VerifiedRecord) -> Result<(), DirectoryError> {
        self.lock().directory.insert(record, now())
    }

    /// The same for a record that a neighbour told.
    pub fn insert_told(&self, record: VerifiedRecord, teller: AddressBlock) -> Result<(), DirectoryError> {
        let mut known = self.lock();
        let peer = record.record().peer;
        known.directory.insert_told(record, teller, now())?;
        if known.client.round_trips.contains_key(&peer) {
            known.directory.set_reached(&peer);
        }
        Ok(())
    }

    /// Whether a record that a neighbour told need not be verified, because the known one is as new.
    pub fn tell_again(&self, record: &SignedRecord, teller: AddressBlock) -> bool {
        self.lock().directory.tell_again(record, teller)
    }

    /// The records of a model, or of all, that have not expired, the most trusted first.
    pub fn records(&self, model: Option<&ModelDigest>) -> Vec<BlockRecord> {
        self.verified(model).into_iter().map(|record| record.record().clone()).collect()
    }

    /// Those of them that were signed, and issued since then.
    pub fn signed_records(&self, model: Option<&ModelDigest>, since: UnixTime) -> Vec<VerifiedRecord> {
        let mut records = self.verified(model);
        records.retain(|record| record.record().issued >= since && record.is_signed());
        records
    }

    /// What to tell a neighbour: those of them that are not doubtful.
    pub fn to_tell(&self, model: Option<&ModelDigest>, since: UnixTime) -> Vec<VerifiedRecord> {
        let mut known = self.lock();
        known.directory.expire(now());
        known.directory.to_tell(model, since)
    }

    fn verified(&self, model: Option<&ModelDigest>) -> Vec<VerifiedRecord> {
        let mut known = self.lock();
        known.directory.expire(now());
        known.directory.by_trust(model)
    }

    /// The peers that have a block of a model: those that are `first`, and others, as many as `peers_max` in all; and how many
    /// there are.
    pub fn peers(&self, model: &ModelDigest, first: &[PeerId], peers_max: usize) -> (Vec<KnownPeer>, usize) {
        let (known, now) = (self.lock(), now());
        let records = || known.directory.records(model).filter(|record| record.expires() > now);
        let firsts = records().filter(|record| first.contains(&record.peer));
        let others = records().filter(|record| !first.contains(&record.peer));
        let peers = firsts.chain(others).take(peers_max).map(|record| KnownPeer {
            record: record.clone(),
            score: known.reputation.score(&record.peer, now),
            is_excluded: known.reputation.is_excluded(&record.peer, now),
        });
        (peers.collect(), records().count())
    }

    pub fn record(&self, model: &ModelDigest, peer: &PeerId) -> Option<BlockRecord> {
        self.lock().directory.get(model, peer).cloned()
    }

    /// The peers that have some of these layers of a model, whatever they are like, and whether they are doubtful.
    pub fn serving(&self, model: &ModelDigest, layers: LayerRange) -> Vec<(PeerId, bool)> {
        let known = self.lock();
        let records = known.directory.records(model);
        let some = |record: &&BlockRecord| {
            record.layers.start() < layers.end() && layers.start() < record.layers.end() && record.expires() > now()
        };
        let told = |record: &BlockRecord| (record.peer, known.directory.is_doubtful(model, &record.peer));
        records.filter(some).map(told).collect()
    }

    pub fn remove(&self, model: &ModelDigest, peer: &PeerId) {
        self.lock().directory.remove(model, peer);
    }

    /// What the peers give each layer, without one of them.
    pub fn coverage(&self, model: &ModelDigest, layers: usize, without: Option<&PeerId>) -> Coverage {
        let (known, now) = (self.lock(), now());
        let others = |record: &&BlockRecord| record.expires() > now && Some(&record.peer) != without;
        Coverage::new(layers, known.directory.records(model).filter(others))
    }

    /// The fastest chain.
    pub fn plan(&self, request: ChainRequest, excluded: &HashSet<PeerId>) -> Result<PeerChain, RouteError> {
        let known = self.lock();
        known.planner().plan(&route_request(request, excluded))
    }

    /// The fastest chain with other spans for `lost`.
    pub fn replace(
        &self,
        request: ChainRequest,
        excluded: &HashSet<PeerId>,
        chain: &PeerChain,
        lost: LayerRange,
    ) -> Result<PeerChain, RouteError> {
        let known = self.lock();
        known.planner().replace(&route_request(request, excluded), chain, lost)
    }

    /// The predicted time of a token in a chain, in seconds.
    pub fn predict(&self, request: ChainRequest, spans: &[ChainSpan]) -> f64 {
        self.lock().planner().predict(&route_request(request, &HashSet::new()), spans)
    }

    /// What is known is not enough for a chain: whoever asks others for records does so soon.
    pub fn want(&self) {
        self.wanted.notify_one();
    }

    /// Returns after [`Self::want`].
    pub async fn wanted(&self) {
        self.wanted.notified().await;
    }

    pub fn report(&self, peer: PeerId, offence: Offence) {
        debug!(%peer, %offence, "a peer did not do its part");
        let (mut known, now) = (self.lock(), now());
        if offence == Offence::Lost && !known.client.round_trips.contains_key(&peer) {
            known.reputation.report_claim(now);
        }
        known.reputation.report(peer, offence, now);
    }

    /// 0 for a peer without an offence.
    pub fn score(&self, peer: &PeerId) -> f64 {
        self.lock().reputation.score(peer, now())
    }

    pub fn set_round_trip(&self, peer: PeerId, time: Duration) {
        let mut known = self.lock();
        let Known { directory, client, .. } = &mut *known;
        make_room(&mut client.round_trips, &peer, directory);
        client.round_trips.insert(peer, time.as_secs_f32());
        directory.set_reached(&peer);
    }

    pub fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        let seconds = self.lock().client.round_trips.get(peer).copied()?;
        Duration::try_from_secs_f32(seconds).ok()
    }

    /// A run of one row took so long in each layer.
    pub fn add_layer_time(&self, peer: PeerId, time: Duration) {
        let seconds = time.as_secs_f32();
        let mut known = self.lock();
        let Known { directory, client, .. } = &mut *known;
        make_room(&mut client.layer_seconds, &peer, directory);
        let mean = client.layer_seconds.entry(peer).or_insert(seconds);
        *mean += WEIGHT * (seconds - *mean);
    }

    /// As it was measured, for one row.
    pub fn layer_time(&self, peer: &PeerId) -> Option<Duration> {
        let seconds = self.lock().client.layer_seconds.get(peer).copied()?;
        Duration::try_from_secs_f32(seconds).ok()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn planner(&self) -> RoutePlanner<'_> {
        let Self { directory, reputation, client } = self;
        RoutePlanner { directory, reputation, client, now: now(), limits: RouteLimits::default() }
    }
}

/// Makes room for one more peer, if there is too little: peers without records make it, or any one.
fn make_room(times: &mut HashMap<PeerId, f32>, peer: &PeerId, directory: &Directory) {
    if times.len() < MEASURED_PEERS_MAX || times.contains_key(peer) {
        return;
    }
    times.retain(|peer, _| directory.knows(peer));
    if times.len() >= MEASURED_PEERS_MAX
        && let Some(any) = times.keys().next().copied()
    {
        times.remove(&any);
    }
}

fn route_request(request: ChainRequest, excluded: &HashSet<PeerId>) -> RouteRequest<'_> {
    RouteRequest {
        model: request.model,
        layers: request.layers,
        dtype: None,
        kv_tokens: u32::try_from(request.tokens_max).unwrap_or(u32::MAX),
        activation_bytes: u32::try_from(request.row_bytes).unwrap_or(u32::MAX),
        excluded,
    }
}

pub fn now() -> UnixTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UnixTime(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_peers_without_records_are_forgotten_when_there_are_too_many() {
        let view = SwarmView::default();
        for number in 0..2 * MEASURED_PEERS_MAX as u64 {
            let peer = PeerId::new(&number.to_le_bytes()).unwrap();
            view.set_round_trip(peer, Duration::from_millis(1));
            view.add_layer_time(peer, Duration::from_millis(1));
            assert!(view.round_trip(&peer).is_some());
        }
        let known = view.lock();
        assert!(known.client.round_trips.len() <= MEASURED_PEERS_MAX);
        assert!(known.client.layer_seconds.len() <= MEASURED_PEERS_MAX);
    }
}
