//! The exchange of records: two peers give each other what they know of a model, or of all. So a client that reaches any peer
//! of the swarm learns of all. Only records that their peers signed are taken, and only until they expire.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use directory::{AddressBlock, ModelDigest, PeerId, RECORD_BYTES_MAX, RecordError, SignedRecord, UnixTime};
use futures_util::future::join_all;
use libp2p_node::{InlinedKeys, NodeHandle};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tracing::debug;

use super::EXCHANGE_TIME_MAX;
use crate::protocols::RECORDS_PROTOCOL;
use crate::view::{SwarmView, now};
use crate::wire::{FrameError, WireError, read_frame, write_frame};

/// Records of one direction of an exchange.
const RECORDS_MAX: usize = 4096;
/// Peers that are asked in one round.
const PEERS_PER_ROUND: usize = 4;
/// Records may be so old when they reach a peer, after the last exchange with it.
const LATE_MS: u64 = 30_000;

mod kind {
    /// Model (32 bytes, or none for all) and the time since which records are wanted (u64).
    pub const ASK: u8 = 1;
    pub const RECORD: u8 = 2;
    pub const END: u8 = 3;
}

pub(super) struct Gossip {
    handle: NodeHandle,
    view: Arc<SwarmView>,
    model: Option<ModelDigest>,
    /// When each peer was asked.
    asked: HashMap<PeerId, UnixTime>,
    providers: Vec<PeerId>,
    /// Connected peers that do not speak this protocol, such as those of other networks.
    deaf: HashSet<PeerId>,
}

impl Gossip {
    pub fn new(handle: NodeHandle, view: Arc<SwarmView>, model: Option<ModelDigest>) -> Self {
        Self { handle, view, model, asked: HashMap::new(), providers: Vec::new(), deaf: HashSet::new() }
    }

    /// Returns when somebody looks for a chain in vain.
    pub async fn wanted(&self) {
        self.view.wanted().await;
    }

    /// Asks some peers. Returns whether records are known.
    pub async fn round(&mut self, looks_up: bool) -> bool {
        if looks_up && let Some(model) = self.model {
            match self.handle.providers(&model.0).await {
                Ok(providers) => self.providers = providers,
                Err(error) => debug!(%error, "no peer was found by a look-up"),
            }
        }
        let connected = self.handle.peers().into_iter().map(|connected| connected.peer);
        let mut peers: Vec<PeerId> = connected.chain(self.providers.iter().copied()).collect();
        peers.sort_unstable();
        peers.dedup();
        // One that is not connected any more may be another program when it comes back.
        self.deaf.retain(|peer| peers.binary_search(peer).is_ok());
        peers.retain(|peer| *peer != self.handle.peer() && !self.deaf.contains(peer));
        self.asked.retain(|peer, _| peers.contains(peer));
        // Those that were asked longest ago.
        peers.sort_by_key(|peer| self.asked.get(peer).copied().unwrap_or_default());
        peers.truncate(PEERS_PER_ROUND);
        let last = |peer: &PeerId| self.asked.get(peer).copied().unwrap_or_default();
        let (asked, started): (Vec<_>, _) = (peers.iter().map(|peer| (*peer, last(peer))).collect(), now());
        self.asked.extend(peers.iter().map(|peer| (*peer, started)));
        // At once: one that has died keeps nobody else waiting.
        let answers = join_all(asked.into_iter().map(|(peer, since)| self.ask(peer, since))).await;
        self.deaf.extend(answers.into_iter().flatten());
        !self.view.signed_records(self.model.as_ref(), UnixTime(0)).is_empty()
    }

    /// Returns the peer if it does not speak this protocol.
    async fn ask(&self, peer: PeerId, since: UnixTime) -> Option<PeerId> {
        match timeout(EXCHANGE_TIME_MAX, self.exchange(peer, since)).await {
            Ok(Ok(())) => {}
            Ok(Err(ExchangeError::Open(libp2p_node::OpenError::Protocol { .. }))) => return Some(peer),
            Ok(Err(error)) => debug!(%peer, %error, "an exchange of records failed"),
            Err(_) => debug!(%peer, "an exchange of records took too long"),
        }
        if let Some(time) = self.handle.round_trip(&peer) {
            self.view.set_round_trip(peer, time);
        }
        None
    }

    async fn exchange(&self, peer: PeerId, since: UnixTime) -> Result<(), ExchangeError> {
        let mut stream = self.handle.open(&peer, &[], RECORDS_PROTOCOL).await.map_err(ExchangeError::Open)?;
        let since = UnixTime(since.0.saturating_sub(LATE_MS));
        let model = self.model.map(|model| model.0);
        let body = [model.as_ref().map_or(&[][..], |model| &model[..]), &since.0.to_le_bytes()].concat();
        write_frame(&mut stream, kind::ASK, &body).await?;
        send(&mut stream, &self.view, self.model.as_ref(), since).await?;
        let teller = address_block(stream.ip());
        receive(&mut stream, &self.view, teller).await
    }
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ExchangeError {
    #[error(transparent)]
    Open(libp2p_node::OpenError),
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Record(#[from] directory::RecordError),
    #[error("more than {RECORDS_MAX} records")]
    TooMany,
}

/// Whom a neighbour at this address counts as.
pub(super) fn address_block(ip: Option<IpAddr>) -> AddressBlock {
    ip.map_or(AddressBlock::UNKNOWN, AddressBlock::of)
}

/// Answers a peer that asks.
pub(super) async fn answer(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    view: &SwarmView,
    teller: AddressBlock,
) -> Result<(), ExchangeError> {
    let mut body = Vec::new();
    let kind = read_frame(&mut stream, 32 + 8, &mut body).await?;
    let (model, since) = body.split_at(body.len().saturating_sub(8));
    let since = since.try_into().map(u64::from_le_bytes).ok().filter(|_| kind == kind::ASK);
    let Some(since) = since else { return Err(unknown(kind)) };
    let model = match model {
        [] => None,
        model => Some(ModelDigest(model.try_into().map_err(|_| unknown(kind))?)),
    };
    receive(&mut stream, view, teller).await?;
    send(&mut stream, view, model.as_ref(), UnixTime(since)).await
}

/// Sends what is known and issued since then, the most trusted if there is too much.
async fn send(
    to: &mut (impl AsyncWrite + Unpin),
    view: &SwarmView,
    model: Option<&ModelDigest>,
    since: UnixTime,
) -> Result<(), ExchangeError> {
    let records = view.to_tell(model, since);
    for record in records.iter().take(RECORDS_MAX) {
        write_frame(to, kind::RECORD, &record.signed().encode()).await?;
    }
    Ok(write_frame(to, kind::END, &[]).await?)
}

async fn receive(
    from: &mut (impl AsyncRead + Unpin),
    view: &SwarmView,
    teller: AddressBlock,
) -> Result<(), ExchangeError> {
    let mut body = Vec::new();
    for _ in 0..=RECORDS_MAX {
        match read_frame(from, RECORD_BYTES_MAX, &mut body).await? {
            kind::RECORD => {
                let record = SignedRecord::decode(&body)?;
                // That costs less than to verify it.
                if view.tell_again(&record, teller) {
                    continue;
                }
                match record.verify(&InlinedKeys, now()) {
                    Ok(record) => {
                        if let Err(error) = view.insert_told(record, teller) {
                            tracing::trace!(%error, "a record is not taken");
                        }
                    }
                    // Whoever passes it on has verified it, unless that is who made it.
                    Err(error @ RecordError::Signature { .. }) => return Err(error.into()),
                    // It has expired on the way, or clocks differ.
                    Err(error) => tracing::trace!(%error, "a record is not taken"),
                }
            }
            kind::END => return Ok(()),
            other => return Err(unknown(other)),
        }
    }
    Err(ExchangeError::TooMany)
}

fn unknown(kind: u8) -> ExchangeError {
    FrameError::from(WireError::Unknown { what: "the kind of a message", found: kind.into() }).into()
}
