//! The peers that a search may use: those whose records allow it, with what they cost, and per layer the best few.

use std::collections::HashMap;

use types::LayerRange;

use super::hops::{Endpoint, Site, Sites};
use super::{ChainSpan, RouteError, RoutePlanner, RouteRequest, Trust};
use crate::identity::PeerId;
use crate::record::{BlockRecord, BlockUse, ServiceState};

/// Layers on a peer that has no record any more. Larger than what any record may announce for its queue.
const UNKNOWN_SECONDS: f64 = 1000.0;

/// A peer and what it costs, apart from hops.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    pub peer: PeerId,
    /// The layers of the block that lie in the range which is searched.
    pub start: usize,
    pub end: usize,
    pub block_use: BlockUse,
    /// Queue and penalty.
    pub fixed_seconds: f64,
    pub layer_seconds: f64,
}

impl Candidate {
    pub fn seconds(&self, layers: usize) -> f64 {
        self.fixed_seconds + layers as f64 * self.layer_seconds
    }

    pub fn leaves_at(&self, layer: usize) -> bool {
        self.block_use == BlockUse::AnyRange || layer == self.end
    }
}

/// A part of a chain, with the index of its candidate.
pub(super) type IndexedSpan = (usize, LayerRange);

pub(super) struct Candidates {
    pub range: LayerRange,
    pub all: Vec<Candidate>,
    pub sites: Sites,
    /// For each layer of the range, who may enter a chain there, the best first.
    pub entries: Vec<Vec<usize>>,
    index: HashMap<PeerId, usize>,
}

impl Candidates {
    /// The candidates for a range of layers. `kept` are peers of the chain whose sites are needed too; they can also be
    /// candidates.
    pub fn find(
        planner: &RoutePlanner,
        request: &RouteRequest,
        range: LayerRange,
        kept: &[PeerId],
        trust: Trust,
    ) -> Result<Self, RouteError> {
        let client = Site::client(planner.client, request.activation_bytes);
        let allowed: Vec<_> = planner
            .directory
            .records(&request.model)
            .filter(|record| is_allowed(planner, request, record) && overlaps(record, range))
            .filter(|record| is_trusted(planner, request, record, trust))
            .map(|record| (record, candidate(planner, record, range)))
            .map(|(record, candidate)| {
                (record, candidate, Site::peer(record, planner.client, &client, request.activation_bytes))
            })
            .collect();
        if let Some(gap) = first_gap(range, allowed.iter().map(|(_, candidate, _)| candidate)) {
            return Err(why_uncovered(planner, request, gap));
        }
        let costs = allowed.iter().map(|(_, candidate, site)| (candidate, site.client_round_trip));
        let picked = best_entries(range, costs, planner.limits.candidates_per_layer);
        let mut found = Self::of_peers(planner, request, kept);
        found.range = range;
        // Of all that are allowed only those that were picked get an index.
        let mut indices = vec![None; allowed.len()];
        for layer in picked {
            let mut entries = Vec::with_capacity(layer.len());
            for position in layer {
                let index = *indices[position].get_or_insert_with(|| {
                    let (record, candidate, site) = &allowed[position];
                    found.push(record.peer, candidate.clone(), site.clone())
                });
                entries.push(index);
            }
            found.entries.push(entries);
        }
        found.set_neighbours(planner, request);
        Ok(found)
    }

    /// Only these peers, without entries.
    pub fn of_peers(planner: &RoutePlanner, request: &RouteRequest, peers: &[PeerId]) -> Self {
        let client = Site::client(planner.client, request.activation_bytes);
        let whole = LayerRange::new(0, u32::MAX).expect("0 is less");
        let mut found = Self {
            range: whole,
            all: Vec::new(),
            sites: Sites { client: client.clone(), peers: Vec::new() },
            entries: Vec::new(),
            index: HashMap::new(),
        };
        for peer in peers {
            let record = planner.directory.get(&request.model, peer);
            if let Some(record) = record.filter(|record| !found.index.contains_key(&record.peer)) {
                let site = Site::peer(record, planner.client, &client, request.activation_bytes);
                found.push(*peer, candidate(planner, record, whole), site);
            }
        }
        found.set_neighbours(planner, request);
        found
    }

    pub fn index_of(&self, peer: &PeerId) -> Option<usize> {
        self.index.get(peer).copied()
    }

    pub fn chain_spans(&self, spans: &[IndexedSpan]) -> Vec<ChainSpan> {
        spans.iter().map(|&(index, layers)| ChainSpan { peer: self.all[index].peer, layers }).collect()
    }

    /// The predicted time of a token between two ends.
    pub fn chain_seconds(&self, spans: &[IndexedSpan], from: Endpoint, to: Endpoint) -> f64 {
        let mut at = from;
        let mut seconds = 0.0;
        for &(index, layers) in spans {
            seconds += self.sites.hop_seconds(at, Endpoint::Peer(index)) + self.all[index].seconds(layers.count());
            at = Endpoint::Peer(index);
        }
        seconds + self.sites.hop_seconds(at, to)
    }

    /// The same for a whole chain.
    pub fn spans_seconds(&self, spans: &[ChainSpan]) -> f64 {
        let known: Vec<_> =
            spans.iter().filter_map(|span| self.index_of(&span.peer).map(|index| (index, span.layers))).collect();
        let unknown = spans.len() - known.len();
        self.chain_seconds(&known, Endpoint::Client, Endpoint::Client) + unknown as f64 * UNKNOWN_SECONDS
    }

    /// A peer that is there already keeps its index, and gets the layers of this candidate.
    fn push(&mut self, peer: PeerId, candidate: Candidate, site: Site) -> usize {
        match self.index.get(&peer) {
            Some(&index) => {
                self.all[index] = candidate;
                index
            }
            None => {
                let index = self.all.len();
                self.all.push(candidate);
                self.sites.peers.push(site);
                self.index.insert(peer, index);
                index
            }
        }
    }

    fn set_neighbours(&mut self, planner: &RoutePlanner, request: &RouteRequest) {
        for (candidate, site) in self.all.iter().zip(&mut self.sites.peers) {
            if let Some(record) = planner.directory.get(&request.model, &candidate.peer) {
                site.set_neighbours(record, &self.index);
            }
        }
    }
}

fn is_allowed(planner: &RoutePlanner, request: &RouteRequest, record: &BlockRecord) -> bool {
    record.state == ServiceState::Serving
        && record.expires() > planner.now
        && record.kv_tokens_free >= request.kv_tokens
        && request.dtype.is_none_or(|dtype| dtype == record.dtype)
        && !request.excluded.contains(&record.peer)
        && !planner.reputation.is_excluded(&record.peer, planner.now)
}

fn is_trusted(planner: &RoutePlanner, request: &RouteRequest, record: &BlockRecord, trust: Trust) -> bool {
    match trust {
        Trust::Reached => planner.directory.is_own(&request.model, &record.peer),
        Trust::NotDoubtful => !planner.directory.is_doubtful(&request.model, &record.peer),
        Trust::Any => true,
    }
}

/// Some of the block can be used for the range; if only the whole block can be used, all of it.
fn overlaps(record: &BlockRecord, range: LayerRange) -> bool {
    let (start, end) = (record.layers.start(), record.layers.end());
    match record.block_use {
        BlockUse::AnyRange => start < range.end() && end > range.start(),
        BlockUse::Whole => start >= range.start() && end <= range.end(),
    }
}

fn candidate(planner: &RoutePlanner, record: &BlockRecord, range: LayerRange) -> Candidate {
    let measured = planner.client.layer_seconds.get(&record.peer).copied().filter(|seconds| *seconds > 0.0);
    let queue = f64::from(record.speed.queue_seconds);
    Candidate {
        peer: record.peer,
        start: record.layers.start().max(range.start()),
        end: record.layers.end().min(range.end()),
        block_use: record.block_use,
        fixed_seconds: queue + planner.reputation.penalty_seconds(&record.peer, planner.now),
        layer_seconds: measured.unwrap_or(record.speed.layer_seconds).into(),
    }
}

/// For each layer of the range the positions of those who can enter there and cost least per layer up to their end, the
/// way to the client included.
fn best_entries<'a>(
    range: LayerRange,
    candidates: impl Iterator<Item = (&'a Candidate, f64)>,
    count_max: usize,
) -> Vec<Vec<usize>> {
    let mut scored: Vec<Vec<(f64, usize)>> = vec![Vec::new(); range.count()];
    for (position, (candidate, client_round_trip)) in candidates.enumerate() {
        let last = if candidate.block_use == BlockUse::Whole { candidate.start + 1 } else { candidate.end };
        for layer in candidate.start..last {
            let layers = candidate.end - layer;
            let score = (candidate.seconds(layers) + client_round_trip) / layers as f64;
            scored[layer - range.start()].push((score, position));
        }
    }
    let order = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
    let best = |mut layer: Vec<(f64, usize)>| {
        if layer.len() > count_max {
            layer.select_nth_unstable_by(count_max, order);
            layer.truncate(count_max);
        }
        layer.sort_unstable_by(order);
        layer.into_iter().map(|(_, position)| position).collect()
    };
    scored.into_iter().map(best).collect()
}

/// The first layers of the range that no candidate has.
fn first_gap<'a>(range: LayerRange, candidates: impl Iterator<Item = &'a Candidate>) -> Option<LayerRange> {
    let mut covered = vec![false; range.count()];
    candidates.for_each(|candidate| covered[candidate.start - range.start()..candidate.end - range.start()].fill(true));
    let start = covered.iter().position(|covered| !covered)?;
    let count = covered[start..].iter().take_while(|covered| !**covered).count();
    let start = (range.start() + start) as u32;
    LayerRange::new(start, start + count as u32)
}

fn why_uncovered(planner: &RoutePlanner, request: &RouteRequest, gap: LayerRange) -> RouteError {
    let served = |layer: usize| {
        planner.directory.records(&request.model).any(|record| {
            record.state == ServiceState::Serving
                && record.expires() > planner.now
                && (record.layers.start()..record.layers.end()).contains(&layer)
        })
    };
    match gap.iter().all(served) {
        true => RouteError::NoRoom { layers: gap, kv_tokens: request.kv_tokens },
        false => RouteError::Uncovered { layers: gap },
    }
}
