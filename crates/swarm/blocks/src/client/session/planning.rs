//! Which peers a session plans with.

use std::collections::HashSet;
use std::time::Instant;

use directory::{ChainSpan, PeerChain, PeerId, RouteError};
use types::LayerRange;

use super::super::forming::OpenSpan;
use super::super::session_state::SpanId;
use super::Session;

impl Session {
    /// Whether there is a chain without a peer.
    pub(in super::super) fn has_other(
        &mut self,
        peer: PeerId,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> bool {
        let [mut avoided, _] = self.avoided.at(Instant::now());
        avoided.insert(peer);
        self.plan_without(&avoided, layers, around).is_ok()
    }

    /// The spans for some layers of the fastest chain that has these spans around them. True if one of them is at a peer that was busy
    /// a moment ago: there are no others.
    pub(in super::super) fn plan(
        &mut self,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<(Vec<ChainSpan>, bool), RouteError> {
        let [avoided, always] = self.avoided.at(Instant::now());
        match self.plan_without(&avoided, layers, around) {
            Err(_) if avoided != always => Ok((self.plan_without(&always, layers, around)?, true)),
            planned => Ok((planned?, false)),
        }
    }

    fn plan_without(
        &self,
        excluded: &HashSet<PeerId>,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<Vec<ChainSpan>, RouteError> {
        self.context.prefer_states(excluded, |excluded| self.plan_excluding(excluded, layers, around))
    }

    fn plan_excluding(
        &self,
        excluded: &HashSet<PeerId>,
        layers: LayerRange,
        around: [&[(SpanId, OpenSpan)]; 2],
    ) -> Result<Vec<ChainSpan>, RouteError> {
        let (view, request) = (&self.context.view, self.context.request(self.tokens_max));
        let own = |spans: &[(SpanId, OpenSpan)]| -> Vec<ChainSpan> {
            spans.iter().map(|(_, span)| ChainSpan { peer: span.peer, layers: span.layers }).collect()
        };
        if layers.count() == self.context.layers && self.outer.iter().all(Vec::is_empty) {
            return Ok(view.plan(request, excluded)?.spans);
        }
        // Who had the layers does not matter: its span is replaced.
        let lost = ChainSpan { peer: PeerId::new(&[0]).expect("a byte is an id"), layers };
        let [before, after] = around.map(own);
        let spans = [&self.outer[0][..], &before, &[lost], &after, &self.outer[1]].concat();
        let chain = view.replace(request, excluded, &PeerChain { spans, token_seconds: 0.0 }, layers)?;
        let is_new = |span: &ChainSpan| span.layers.start() >= layers.start() && span.layers.end() <= layers.end();
        Ok(chain.spans.into_iter().filter(is_new).collect())
    }
}
