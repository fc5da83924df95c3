//! `LoadedShard`: a rank's shard of a model, or of a stage of it, loaded by consort's own `load`, with the sessions and steps of
//! a supervisor that keeps the same session table.

use std::path::Path;

use engine::{Capacity, Executor, LocalExecutor, OpenedSession, Stage, StepOutput, StepPlan};
use kernels::cpu::CpuBackend;
use model::{Checkpoint, CheckpointDigest, Footprint, LoadOptions, Manifest, ModelPart};
use types::{Rank, SessionId};

use super::process::count;
use super::request_error::RequestError;
use crate::memory::check_memory;
use crate::protocol::output::WireOutput;
use crate::protocol::plan::WirePlan;
use crate::protocol::session::WirePrefix;
use crate::protocol::shard::ShardSpec;
use crate::protocol::{ErrorKind, RankReply};
use collectives::GroupCollective;

pub struct LoadedShard {
    model_id: String,
    part: LoadedPart,
    kv_bytes: u64,
    digest: CheckpointDigest,
    plan: StepPlan,
    output: StepOutput,
}

/// The rank's shard of a whole model, or of a range of layers.
enum LoadedPart {
    Whole(Box<LocalExecutor<CpuBackend>>),
    Stage(Box<Stage<CpuBackend>>),
}

impl LoadedShard {
    pub fn load(
        model_id: String,
        spec: &ShardSpec,
        rank: Rank,
        collective: GroupCollective,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, RequestError> {
        let (options, cpu, layers) = (spec.options()?, spec.cpu.options()?, spec.layers()?);
        let checkpoint = open(spec)?;
        let backend = CpuBackend::new(cpu).map_err(|error| RequestError::of(ErrorKind::LoadFailed, &error))?;
        let (part, Footprint { kv, .. }) = match layers {
            None => {
                let (whole, footprint) = load(&checkpoint, &options, backend, rank, collective, progress)?;
                (LoadedPart::Whole(Box::new(whole)), footprint)
            }
            Some(layers) => {
                let footprint = checked_footprint(&checkpoint, &options, &backend, ModelPart::stage(layers), rank)?;
                let collective = Box::new(collective);
                let stage = Stage::load_shard(backend, &checkpoint, &options, layers, rank, collective, progress)?;
                checkpoint.release();
                (LoadedPart::Stage(Box::new(stage)), footprint)
            }
        };
        // After the weights, so that a file which was changed while it was read has another digest.
        let digest = checkpoint.digest();
        Ok(Self { model_id, part, kv_bytes: kv, digest, plan: StepPlan::new(), output: StepOutput::new() })
    }

    pub fn load_ok(&self, id: u64) -> RankReply {
        RankReply::LoadOk {
            id,
            capacity: self.capacity().into(),
            weight_bytes: self.part.layer_bytes(),
            head_bytes: self.part.head_bytes(),
            kv_bytes: self.kv_bytes,
            digest: self.digest.to_string(),
        }
    }

    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    pub fn capacity(&self) -> Capacity {
        match &self.part {
            LoadedPart::Whole(local) => local.capacity(),
            LoadedPart::Stage(stage) => stage.capacity(),
        }
    }

    pub fn sessions(&self) -> u64 {
        match &self.part {
            LoadedPart::Whole(local) => local.sessions() as u64,
            LoadedPart::Stage(stage) => stage.sessions().count() as u64,
        }
    }

    /// Bytes of the layers' and the head's weights.
    pub fn weight_bytes(&self) -> u64 {
        self.part.layer_bytes() + self.part.head_bytes()
    }

    pub fn kv_bytes(&self) -> u64 {
        self.kv_bytes
    }

    /// Drops the sessions and keeps the weights.
    pub fn regroup(&mut self, collective: GroupCollective) {
        match &mut self.part {
            LoadedPart::Whole(local) => local.regroup(Box::new(collective)),
            LoadedPart::Stage(stage) => stage.regroup(Box::new(collective)),
        }
    }

    /// Drops the sessions and the prefix cache, and stays in its group.
    pub fn clear(&mut self) {
        match &mut self.part {
            LoadedPart::Whole(local) => local.clear(),
            LoadedPart::Stage(stage) => stage.clear(),
        }
    }

    pub fn open(&mut self, tokens_max: u64, prefix: &WirePrefix) -> Result<OpenedSession, RequestError> {
        let prefix = match &self.part {
            LoadedPart::Whole(local) => prefix.check(local.capacity().vocab)?,
            LoadedPart::Stage(_) => prefix.check_stage()?,
        };
        Ok(self.part.executor().open(count(tokens_max)?, prefix.as_prefix())?)
    }

    pub fn truncate(&mut self, session: u64, tokens: u64) -> Result<usize, RequestError> {
        Ok(self.part.executor().truncate(SessionId(session), count(tokens)?)?)
    }

    pub fn close(&mut self, session: u64) {
        self.part.executor().close(SessionId(session));
    }

    /// Checks what depends on the plan alone, so that all ranks reject it alike.
    pub fn prepare(&mut self, plan: &WirePlan) -> Result<(), RequestError> {
        Ok(plan.fill(self.capacity().vocab, &mut self.plan)?)
    }

    /// Runs the plan that was prepared.
    pub fn step(&mut self, output: &mut WireOutput) -> Result<(), RequestError> {
        let Self { part, plan, output: own, .. } = self;
        let executor = part.executor();
        executor.submit(plan)?;
        executor.collect(own)?;
        output.assign(own);
        Ok(())
    }
}

impl LoadedPart {
    fn executor(&mut self) -> &mut dyn Executor {
        match self {
            Self::Whole(local) => &mut **local,
            Self::Stage(stage) => &mut **stage,
        }
    }

    fn layer_bytes(&self) -> u64 {
        match self {
            Self::Whole(local) => local.weight_bytes() as u64,
            Self::Stage(stage) => stage.weight_bytes() as u64,
        }
    }

    fn head_bytes(&self) -> u64 {
        match self {
            Self::Whole(local) => local.head_bytes() as u64,
            Self::Stage(_) => 0,
        }
    }
}

/// Opens the files of a shard: a model, or the part of one that its manifest and its layers name.
fn open(spec: &ShardSpec) -> Result<Checkpoint, RequestError> {
    let path = spec.path();
    let folder = spec.tensors.as_ref().map(Path::new);
    if !path.is_absolute() || folder.is_some_and(|folder| !folder.is_absolute()) {
        return Err(RequestError::new(ErrorKind::BadRequest, "the path of a model is absolute"));
    }
    let Some(folder) = folder else { return Ok(Checkpoint::open(&path)?) };
    let manifest = Manifest::read(&path)?;
    let part = spec.layers()?.map_or_else(|| ModelPart::whole(manifest.description()), ModelPart::stage);
    Ok(Checkpoint::from_tensor_folder(&manifest, part, folder)?)
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
    let whole = ModelPart::whole(checkpoint.description());
    let footprint = checked_footprint(checkpoint, options, &backend, whole, rank)?;
    let local = LocalExecutor::load_shard(backend, checkpoint, options, rank, Box::new(collective), progress)?;
    checkpoint.release();
    Ok((local, footprint))
}

fn checked_footprint(
    checkpoint: &Checkpoint,
    options: &LoadOptions,
    backend: &CpuBackend,
    part: ModelPart,
    rank: Rank,
) -> Result<Footprint, RequestError> {
    let footprint = Footprint::new(backend, checkpoint, options, part, rank)?;
    check_memory(&[footprint]).map_err(|error| RequestError::of(ErrorKind::InsufficientMemory, &error))?;
    Ok(footprint)
}
