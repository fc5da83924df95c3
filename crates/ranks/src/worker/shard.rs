//! `LoadedShard`: a rank's shard of a model, loaded by consort's own `load`, with the sessions and steps of a
//! supervisor that keeps the same session table.

use engine::{Capacity, Executor as _, LocalExecutor, OpenedSession, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use model::{Checkpoint, CheckpointDigest, Footprint, LoadOptions, ModelPart};
use types::{Rank, SessionId};

use super::process::count;
use super::request_error::RequestError;
use crate::collective::GroupCollective;
use crate::memory::check_memory;
use crate::protocol::output::WireOutput;
use crate::protocol::plan::WirePlan;
use crate::protocol::session::WirePrefix;
use crate::protocol::shard::ShardSpec;
use crate::protocol::{ErrorKind, RankReply};

pub struct LoadedShard {
    model_id: String,
    local: LocalExecutor<CpuBackend>,
    kv_bytes: u64,
    digest: CheckpointDigest,
    plan: StepPlan,
    output: StepOutput,
}

impl LoadedShard {
    pub fn load(
        model_id: String,
        spec: &ShardSpec,
        rank: Rank,
        collective: GroupCollective,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, RequestError> {
        let (path, options, cpu) = (spec.path(), spec.options()?, spec.cpu.options()?);
        if !path.is_absolute() {
            return Err(RequestError::new(ErrorKind::BadRequest, "the path of a model is absolute"));
        }
        let checkpoint = Checkpoint::open(&path)?;
        let backend = CpuBackend::new(cpu).map_err(|error| RequestError::of(ErrorKind::LoadFailed, &error))?;
        let (local, Footprint { kv, .. }) = load(&checkpoint, &options, backend, rank, collective, progress)?;
        // After the weights, so that a file which was changed while it was read has another digest.
        let digest = checkpoint.digest();
        Ok(Self { model_id, local, kv_bytes: kv, digest, plan: StepPlan::new(), output: StepOutput::new() })
    }

    pub fn load_ok(&self, id: u64) -> RankReply {
        RankReply::LoadOk {
            id,
            capacity: self.local.capacity().into(),
            weight_bytes: self.local.weight_bytes() as u64,
            head_bytes: self.local.head_bytes() as u64,
            kv_bytes: self.kv_bytes,
            digest: self.digest.to_string(),
        }
    }

    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    pub fn capacity(&self) -> Capacity {
        self.local.capacity()
    }

    pub fn sessions(&self) -> u64 {
        self.local.sessions() as u64
    }

    /// Bytes of the layers' and the head's weights.
    pub fn weight_bytes(&self) -> u64 {
        (self.local.weight_bytes() + self.local.head_bytes()) as u64
    }

    pub fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    /// Drops the sessions and keeps the weights.
    pub fn regroup(&mut self, collective: GroupCollective) {
        self.local.regroup(Box::new(collective));
    }

    pub fn open(&mut self, tokens_max: u64, prefix: &WirePrefix) -> Result<OpenedSession, RequestError> {
        let prefix = prefix.check(self.capacity().vocab)?;
        Ok(self.local.open(count(tokens_max)?, prefix.as_prefix())?)
    }

    pub fn truncate(&mut self, session: u64, tokens: u64) -> Result<usize, RequestError> {
        Ok(self.local.truncate(SessionId(session), count(tokens)?)?)
    }

    pub fn close(&mut self, session: u64) {
        self.local.close(SessionId(session));
    }

    /// Checks what depends on the plan alone, so that all ranks reject it alike.
    pub fn prepare(&mut self, plan: &WirePlan) -> Result<(), RequestError> {
        Ok(plan.fill(self.capacity().vocab, &mut self.plan)?)
    }

    /// Runs the plan that was prepared.
    pub fn step(&mut self, output: &mut WireOutput) -> Result<(), RequestError> {
        self.local.submit(&self.plan)?;
        self.local.collect(&mut self.output)?;
        output.assign(&self.output);
        Ok(())
    }
}

/// Loads a rank's shard of a model on the CPU. Fails before anything is allocated if memory does not suffice.
pub fn load(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    backend: CpuBackend,
    rank: Rank,
    collective: GroupCollective,
    progress: &mut dyn FnMut(usize),
) -> Result<(LocalExecutor<CpuBackend>, Footprint), RequestError> {
    let footprint = Footprint::new(&backend, checkpoint, options, ModelPart::whole(checkpoint.description()), rank)?;
    check_memory(&[footprint]).map_err(|error| RequestError::of(ErrorKind::InsufficientMemory, &error))?;
    let local = LocalExecutor::load_shard(backend, checkpoint, options, rank, Box::new(collective), progress)?;
    checkpoint.release();
    Ok((local, footprint))
}
