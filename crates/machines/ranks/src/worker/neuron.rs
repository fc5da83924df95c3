//! The ops of the neuron protocol for foreign leaders: ranks that find each other by an id (`init`), and models with one sequence
//! (`load_dense_shard`, `generate_step`). Consort's own supervisor uses none of them. Without the feature `neuron`,
//! `without_neuron.rs` stands here.

mod dense;
mod peers;
mod rank_zero;
mod rendezvous;

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use kernels::Backend as _;
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Collective as _, CollectiveError};
use tracing::info;
use types::WorldSize;

use super::process::{RankServer, not_loaded};
use super::request_error::{RequestError, group_kind};
use crate::protocol::{ErrorKind, LineMessage as _, RankReply, RankRequest};
use collectives::shared_memory::GroupLimits;
use collectives::{EXCHANGE_ELEMENTS_MAX, GroupCollective};
use dense::{DenseModel, DenseSource};
use peers::{PeerError, Peers, RequestDigest, StepGuard};
use rank_zero::has_rank_zero;
use rendezvous::{Rendezvous, RendezvousError};

/// The digest of a sanity check.
const SANITY_CHECK: RequestDigest = [0; 32];

/// What a foreign leader has asked for.
pub struct NeuronState {
    /// The models of `load_dense_shard`, by `model_id`.
    models: BTreeMap<String, DenseModel>,
    /// The other ranks of an `init`.
    peers: Option<Peers>,
    init_timeout: Duration,
    collective_timeout: Duration,
}

impl NeuronState {
    pub fn new(init_timeout: Duration, collective_timeout: Duration) -> Self {
        Self { models: BTreeMap::new(), peers: None, init_timeout, collective_timeout }
    }

    pub fn has_model(&self, model_id: &str) -> bool {
        self.models.contains_key(model_id)
    }

    /// Whether there was such a model.
    pub fn unload(&mut self, model_id: &str) -> bool {
        self.models.remove(model_id).is_some()
    }

    /// Drops the sequences and keeps the weights.
    pub fn regroup(&mut self, collective: &GroupCollective) {
        self.models.values_mut().for_each(|dense| dense.regroup(collective.clone()));
    }

    /// Leaves the ranks of an `init`.
    pub fn leave(&mut self) {
        self.peers = None;
    }

    /// Until the returned value is dropped, collectives without progress end the epoch of an `init`.
    pub fn stepping(&self) -> Option<StepGuard> {
        self.peers.as_ref().map(Peers::stepping)
    }

    /// Why the epoch of an `init` has ended.
    pub fn why_ended(&self) -> Option<RequestError> {
        self.peers.as_ref().map(|peers| peers.why_ended().into())
    }

    pub fn sessions(&self) -> u64 {
        self.models.values().map(DenseModel::sessions).sum()
    }

    pub fn weight_bytes(&self) -> u64 {
        self.models.values().map(DenseModel::weight_bytes).sum()
    }

    pub fn kv_bytes(&self) -> u64 {
        self.models.values().map(DenseModel::kv_bytes).sum()
    }

    fn model(&mut self, model_id: &str) -> Result<&mut DenseModel, RequestError> {
        self.models.get_mut(model_id).ok_or_else(|| not_loaded(model_id))
    }
}

impl RankServer {
    pub(super) fn handle_neuron(&mut self, request: &RankRequest) -> Result<RankReply, RequestError> {
        match *request {
            RankRequest::Init { ref comm_id } => self.init(comm_id),
            RankRequest::NcclSanityCheck => self.sanity_check(),
            RankRequest::LoadDenseShard { ref model_id, ref config_json, ref safetensors_paths, ref quant } => {
                let source = DenseSource { config: config_json, files: safetensors_paths, quant: quant.as_deref() };
                self.load_dense(model_id, &source)
            }
            RankRequest::GenerateStep { ref model_id, ref tokens, offset } => {
                let digest = step_digest(model_id, tokens, offset);
                let prepared = self.neuron.model(model_id).and_then(|dense| dense.prepare(tokens, offset));
                let tokens = self.agree(digest, prepared)?;
                self.step(|process| process.neuron.model(model_id)?.step(&tokens))?;
                Ok(RankReply::GenerateStepOk)
            }
            RankRequest::GenerateStepWithImages { ref model_id, ref tokens, offset, .. } => {
                let unsupported = || RequestError::new(ErrorKind::ForwardFailed, "images are not supported");
                let refused = self.neuron.model(model_id).and_then(|_| Err(unsupported()));
                self.agree(step_digest(model_id, tokens, offset), refused)
            }
            RankRequest::ClearKvCache { ref model_id } => {
                if let Some(peers) = &mut self.neuron.peers {
                    peers.leave_epoch();
                }
                let collective = self.collective.clone();
                self.neuron.model(model_id)?.clear(collective);
                Ok(RankReply::KvCacheCleared)
            }
            ref other => unreachable!("`{}` is not for foreign leaders alone", other.op()),
        }
    }

    fn load_dense(&mut self, model_id: &str, source: &DenseSource<'_>) -> Result<RankReply, RequestError> {
        self.check_unused(model_id)?;
        let dense = DenseModel::load(source, self.rank, self.threads_max, self.collective.clone())?;
        info!(rank = self.rank.index(), model = model_id, "loaded");
        self.neuron.models.insert(model_id.to_owned(), dense);
        Ok(RankReply::LoadDenseShardOk)
    }

    fn init(&mut self, comm_id: &str) -> Result<RankReply, RequestError> {
        let limits = GroupLimits { world: self.rank.world(), elements_max: EXCHANGE_ELEMENTS_MAX };
        let rendezvous = Rendezvous::new(comm_id, limits, Instant::now() + self.neuron.init_timeout)?;
        // Whether this succeeds or not, the previous group is over.
        self.leave();
        let (abort, world) = (self.collective.abort_handle(), self.rank.world());
        let met = rendezvous.meet(self.rank, &|| abort.has_ended(), &|| has_rank_zero(world))?;
        self.collective.join(met.comm)?;
        if world != WorldSize::ONE {
            let (collective, timeout) = (self.collective.clone(), self.neuron.collective_timeout);
            let peers = Peers::new(self.rank, met.segment, met.connections, timeout, move || collective.spent().0);
            let failed =
                |error: io::Error| RequestError::new(ErrorKind::NcclInitFailed, format!("watch the ranks: {error}"));
            self.neuron.peers = Some(peers.map_err(failed)?);
        }
        Ok(RankReply::InitOk)
    }

    /// Agrees with the other ranks of an `init` on the request of `digest`: if one of them cannot run it, none does.
    /// Returns what this rank has `prepared` for it.
    fn agree<T>(&mut self, digest: RequestDigest, prepared: Result<T, RequestError>) -> Result<T, RequestError> {
        let agreed = self.agreed(digest, prepared.is_ok());
        // This rank's own error says more than that the group has rejected the request.
        let prepared = prepared?;
        agreed?;
        Ok(prepared)
    }

    fn agreed(&mut self, digest: RequestDigest, is_ready: bool) -> Result<(), RequestError> {
        let Some(peers) = &mut self.neuron.peers else { return Ok(()) };
        let abort = self.collective.abort_handle();
        if let Some(comm) = peers.renew(&|| abort.has_ended())? {
            info!(rank = self.rank.index(), epoch = %comm.epoch(), "joined the next epoch");
            self.collective.join(comm)?;
        }
        Ok(peers.agree(digest, is_ready)?)
    }

    /// Leaves the group.
    fn leave(&mut self) {
        self.neuron.peers = None;
        self.collective.leave();
        self.forget_sessions();
    }

    fn sanity_check(&mut self) -> Result<RankReply, RequestError> {
        if self.collective.epoch().is_none() {
            return Err(RequestError::new(ErrorKind::NcclNotInitialised, "the rank is in no group"));
        }
        self.agree(SANITY_CHECK, Ok(()))?;
        let _stepping = self.neuron.peers.as_ref().map(Peers::stepping);
        let failed = |message: String| {
            self.collective.abandon();
            RequestError::new(ErrorKind::NcclSanityFailed, message)
        };
        match self.sum_of_ones() {
            Ok(sum) if sum == self.rank.world().get() as f32 => {
                Ok(RankReply::NcclSanityResult { observed_sum: sum as u64 })
            }
            Ok(sum) => Err(failed(format!("the ranks add up to {sum}"))),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    /// All-reduces a 1 from each rank.
    fn sum_of_ones(&self) -> Result<f32, CollectiveError> {
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() })?;
        let (mut buffer, mut sum) = (backend.buffer(1, 1)?, [1.0]);
        backend.write(&mut buffer, &sum)?;
        self.collective.all_reduce(&backend, 1, &mut buffer)?;
        backend.read(&buffer, 0..1, &mut sum)?;
        Ok(sum[0])
    }
}

/// A hash of a step's arguments.
fn step_digest(model_id: &str, tokens: &[u32], offset: u64) -> RequestDigest {
    let mut hash = blake3::Hasher::new_derive_key("consort 2026 a step of one sequence");
    hash.update(&(model_id.len() as u64).to_le_bytes()).update(model_id.as_bytes()).update(&offset.to_le_bytes());
    for token in tokens {
        hash.update(&token.to_le_bytes());
    }
    hash.finalize().into()
}

impl From<RendezvousError> for RequestError {
    fn from(error: RendezvousError) -> Self {
        Self::of(ErrorKind::NcclInitFailed, &error)
    }
}

impl From<PeerError> for RequestError {
    fn from(error: PeerError) -> Self {
        let kind = match &error {
            PeerError::Refused(_) => ErrorKind::ForwardFailed,
            PeerError::Group(source) => group_kind(source).unwrap_or(ErrorKind::NcclInitFailed),
            _ => ErrorKind::Aborted,
        };
        Self::of(kind, &error)
    }
}
