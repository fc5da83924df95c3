//! Chains of peers for a model: the one with the least predicted time per token.
//!
//! A token goes from the client through the peers of the chain and back to the client. Its time is, for each peer, the
//! queue, the layers and what the peer's offences cost, and for each hop half of a round trip and the transfer of the
//! activations.

mod candidates;
mod hops;
mod search;

use std::collections::{HashMap, HashSet};

use types::{DType, LayerRange};

use crate::coordinate::Coordinate;
use crate::directory::Directory;
use crate::identity::{ModelDigest, PeerId, UnixTime};
use crate::record::{LAYERS_MAX, Reach};
use crate::reputation::Reputation;
use candidates::Candidates;
use hops::Endpoint;

/// A round trip of which nothing is known.
pub const DEFAULT_ROUND_TRIP_SECONDS: f64 = 0.15;
/// Added to a hop over a relay, which is a third machine that others use too.
pub const RELAY_SECONDS: f64 = 0.05;

/// See [`RouteLimits`].
pub const CANDIDATES_PER_LAYER: usize = 48;
pub const EXITS_PER_LAYER: usize = 48;

/// How much is searched. The search is exact if the limits are not reached: then every peer may enter and leave a chain
/// at every layer.
///
/// With many peers only the best few per layer take part. They are the ones with the least cost per layer, a round trip
/// to the client included: a chain starts and ends at the client, so with distances that obey the triangle inequality
/// one that contains a peer takes at least a round trip to it. A peer far down this order can be part of the best chain
/// only if it saves more on the hops to its neighbours in the chain than it loses against dozens of peers that are near
/// and fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteLimits {
    /// Peers that may enter a chain at a layer.
    pub candidates_per_layer: usize,
    /// Peers that may pass on the activations before a layer.
    pub exits_per_layer: usize,
}

impl Default for RouteLimits {
    fn default() -> Self {
        Self { candidates_per_layer: CANDIDATES_PER_LAYER, exits_per_layer: EXITS_PER_LAYER }
    }
}

/// What a chain is for.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    pub model: ModelDigest,
    /// All layers of the model.
    pub layers: usize,
    /// Only peers with weights in this format; `None`: any.
    pub dtype: Option<DType>,
    /// Tokens for which every peer must have room.
    pub kv_tokens: u32,
    /// Of one token between two layers.
    pub activation_bytes: u32,
    /// Peers that are not used, whatever they announce.
    pub excluded: &'a HashSet<PeerId>,
}

/// What the client measured. It goes before what records say.
#[derive(Clone, Debug, Default)]
pub struct ClientView {
    pub coordinate: Option<Coordinate>,
    pub bytes_per_s: Option<f32>,
    pub reach: Option<Reach>,
    /// Round trips, in seconds.
    pub round_trips: HashMap<PeerId, f32>,
    /// The time of one layer on a peer, in seconds.
    pub layer_seconds: HashMap<PeerId, f32>,
}

/// Layers that one peer runs for a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSpan {
    pub peer: PeerId,
    pub layers: LayerRange,
}

/// Peers that run all layers, one after the other. A peer can have two spans with others in between.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerChain {
    pub spans: Vec<ChainSpan>,
    /// The predicted time of a token.
    pub token_seconds: f64,
}

/// Why there is no chain.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RouteError {
    #[error("a route is for 1 to {LAYERS_MAX} layers, the model has {layers}")]
    LayerCount { layers: usize },
    #[error("no peer serves layers {layers}")]
    Uncovered { layers: LayerRange },
    #[error("no peer for layers {layers} that is allowed and has room for {kv_tokens} tokens")]
    NoRoom { layers: LayerRange, kv_tokens: u32 },
    /// Only peers that serve their whole block are left, and their blocks do not meet.
    #[error("the blocks that peers serve for layers {layers} form no chain")]
    NoChain { layers: LayerRange },
    #[error("layers {layers} are not spans of the chain")]
    NotSpans { layers: LayerRange },
}

/// The peers of which a chain may consist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// This process has reached them itself.
    Reached,
    NotDoubtful,
    Any,
}

/// Finds chains, from what is known at one time.
#[derive(Clone, Copy, Debug)]
pub struct RoutePlanner<'a> {
    pub directory: &'a Directory,
    pub reputation: &'a Reputation,
    pub client: &'a ClientView,
    pub now: UnixTime,
    pub limits: RouteLimits,
}

impl RoutePlanner<'_> {
    /// The chain for all layers with the least predicted time per token. The same facts give the same chain.
    pub fn plan(&self, request: &RouteRequest) -> Result<PeerChain, RouteError> {
        let layers = u32::try_from(request.layers).ok().filter(|_| request.layers <= LAYERS_MAX);
        let range = layers.and_then(|layers| LayerRange::new(0, layers));
        let range = range.ok_or(RouteError::LayerCount { layers: request.layers })?;
        self.by_trust(request, |trust| self.plan_with(request, range, trust))
    }

    fn plan_with(&self, request: &RouteRequest, range: LayerRange, trust: Trust) -> Result<PeerChain, RouteError> {
        let candidates = Candidates::find(self, request, range, &[], trust)?;
        let found = search::least(&candidates, self.limits, Endpoint::Client, Endpoint::Client);
        let spans = found.ok_or(RouteError::NoChain { layers: range })?;
        let token_seconds = candidates.chain_seconds(&spans, Endpoint::Client, Endpoint::Client);
        Ok(PeerChain { spans: candidates.chain_spans(&spans), token_seconds })
    }

    /// Finds a chain of the peers that deserve most trust: after some that others told of were not there, of those that this
    /// process has reached; else of those that are not doubtful; or if there is none, of all.
    fn by_trust(
        &self,
        request: &RouteRequest,
        find: impl Fn(Trust) -> Result<PeerChain, RouteError>,
    ) -> Result<PeerChain, RouteError> {
        if self.reputation.doubts_claims(self.now)
            && let Ok(chain) = find(Trust::Reached)
        {
            return Ok(chain);
        }
        if self.directory.has_doubtful(&request.model)
            && let Ok(chain) = find(Trust::NotDoubtful)
        {
            return Ok(chain);
        }
        find(Trust::Any)
    }

    /// The best chain with other spans for `lost`, which is one span or several next to each other; the others stay. A
    /// lost peer should be excluded by the request, or it may be used again; one with two spans takes a call for each.
    pub fn replace(
        &self,
        request: &RouteRequest,
        chain: &PeerChain,
        lost: LayerRange,
    ) -> Result<PeerChain, RouteError> {
        self.by_trust(request, |trust| self.replace_with(request, chain, lost, trust))
    }

    fn replace_with(
        &self,
        request: &RouteRequest,
        chain: &PeerChain,
        lost: LayerRange,
        trust: Trust,
    ) -> Result<PeerChain, RouteError> {
        let not_spans = RouteError::NotSpans { layers: lost };
        let first = chain.spans.iter().position(|span| span.layers.start() == lost.start());
        let last = chain.spans.iter().position(|span| span.layers.end() == lost.end());
        let (Some(first), Some(last)) = (first, last) else { return Err(not_spans) };
        if first > last {
            return Err(not_spans);
        }
        let (before, after) = (&chain.spans[..first], &chain.spans[last + 1..]);
        let kept: Vec<PeerId> = before.iter().chain(after).map(|span| span.peer).collect();
        let candidates = Candidates::find(self, request, lost, &kept, trust)?;
        let endpoint = |span: Option<&ChainSpan>| {
            span.and_then(|span| candidates.index_of(&span.peer)).map_or(Endpoint::Client, Endpoint::Peer)
        };
        let (from, to) = (endpoint(before.last()), endpoint(after.first()));
        let found = search::least(&candidates, self.limits, from, to).ok_or(RouteError::NoChain { layers: lost })?;
        let spans = [before, &candidates.chain_spans(&found), after].concat();
        let token_seconds = candidates.spans_seconds(&spans);
        Ok(PeerChain { spans, token_seconds })
    }

    /// The predicted time of a token in a given chain. A peer without a record counts as if it were slow.
    pub fn predict(&self, request: &RouteRequest, spans: &[ChainSpan]) -> f64 {
        let kept: Vec<PeerId> = spans.iter().map(|span| span.peer).collect();
        Candidates::of_peers(self, request, &kept).spans_seconds(spans)
    }
}
