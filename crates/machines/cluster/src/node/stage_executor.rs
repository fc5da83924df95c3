//! `StageExecutor`: what runs the layers of a stage: this process, or a group of rank processes that share each layer.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;

use engine::{Executor, Stage};
use kernels::cpu::{CpuBackend, CpuOptions};
use model::{Checkpoint, Footprint, LoadOptions, Manifest, ModelPart};
use ranks::group::{Deadlines, Group, GroupConfig};
use ranks::protocol::shard::ShardSpec;
use rustix::fs::{MemfdFlags, memfd_create};
use types::{LayerRange, Rank, WorldSize};
use weights::TensorStore;

/// The rank processes of a node.
#[derive(Clone, Debug)]
pub struct NodeRanks {
    pub world: WorldSize,
    /// What ranks run: see [`ranks::worker::command`].
    pub program: PathBuf,
    pub deadlines: Deadlines,
}

/// A stage that is to be loaded. All of its tensors are in the store.
pub(super) struct StageSource<'a> {
    pub manifest: &'a Manifest,
    pub checkpoint: &'a Checkpoint,
    pub store: &'a TensorStore,
    pub layers: LayerRange,
    pub options: &'a LoadOptions,
    /// The threads of each rank.
    pub cpu: CpuOptions,
}

pub(super) enum StageExecutor {
    Process(Box<Stage<CpuBackend>>),
    Ranks {
        group: Box<Group>,
        /// Ranks inherit it, also those that start later.
        _manifest: File,
    },
}

impl StageExecutor {
    /// Loads a stage, on these ranks or in this process. `progress` gets the number of layers loaded so far. Fails before anything
    /// is allocated if memory does not suffice for these footprints, of each rank.
    pub fn load(
        source: &StageSource<'_>,
        footprints: &[Footprint],
        ranks: Option<&NodeRanks>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, String> {
        ranks::check_memory(footprints).map_err(|error| error.to_string())?;
        let loaded = match ranks {
            None => source.load_here(progress)?,
            Some(ranks) => source.start_ranks(ranks, progress)?,
        };
        source.checkpoint.release();
        Ok(loaded)
    }

    pub fn executor(&mut self) -> &mut dyn Executor {
        match self {
            Self::Process(stage) => &mut **stage,
            Self::Ranks { group, .. } => &mut **group,
        }
    }

    /// Closes all sessions.
    pub fn clear(&mut self) {
        match self {
            Self::Process(stage) => stage.clear(),
            Self::Ranks { group, .. } => group.clear(),
        }
    }

    /// Replaces ranks that were lost.
    pub fn restore(&mut self, progress: &mut dyn FnMut(usize)) -> Result<(), String> {
        match self {
            Self::Process(_) => Ok(()),
            Self::Ranks { group, .. } => group.restore(progress).map_err(|error| error.to_string()),
        }
    }
}

impl StageSource<'_> {
    /// The memory of each rank.
    pub fn footprints(&self, world: WorldSize) -> Result<Vec<Footprint>, String> {
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..self.cpu }).map_err(|error| error.to_string())?;
        let part = ModelPart::stage(self.layers);
        let footprint = |rank: Rank| Footprint::new(&backend, self.checkpoint, self.options, part, rank);
        world.ranks().map(footprint).collect::<Result<_, _>>().map_err(|error| error.to_string())
    }

    fn load_here(&self, progress: &mut dyn FnMut(usize)) -> Result<StageExecutor, String> {
        let backend = CpuBackend::new(self.cpu).map_err(|error| error.to_string())?;
        let stage = Stage::load(backend, self.checkpoint, self.options, self.layers, progress);
        Ok(StageExecutor::Process(Box::new(stage.map_err(|error| error.to_string())?)))
    }

    fn start_ranks(&self, ranks: &NodeRanks, progress: &mut dyn FnMut(usize)) -> Result<StageExecutor, String> {
        let (manifest, path) = inherited(self.manifest).map_err(|error| format!("keep the manifest: {error}"))?;
        let folder = fs::canonicalize(self.store.folder()).map_err(|error| format!("find the store: {error}"))?;
        let folder = folder.into_os_string().into_string().map_err(|_| "the path of the store is not valid UTF-8")?;
        let (count, description) = (self.layers.count(), self.checkpoint.description());
        let config = GroupConfig {
            world: ranks.world,
            program: ranks.program.clone(),
            model_id: "stage".to_owned(),
            shard: ShardSpec::new(path, self.options, self.cpu).with_layers(self.layers).with_tensors(folder),
            limits: self.options.limits,
            vocab: description.vocab,
            hidden: description.hidden,
            digest: self.checkpoint.digest(),
            deadlines: ranks.deadlines,
            environment: Vec::new(),
            hosts: None,
        };
        let group = Group::start(config, &mut |layers| progress(layers.min(count)));
        let group = group.map_err(|error| format!("start the ranks: {error}"))?;
        Ok(StageExecutor::Ranks { group: Box::new(group), _manifest: manifest })
    }
}

/// Writes a manifest into memory that rank processes inherit, and returns it with the path under which they find it.
fn inherited(manifest: &Manifest) -> io::Result<(File, String)> {
    // Without `CLOEXEC`, so that ranks have it under the same number.
    let mut file = File::from(memfd_create("consort-manifest", MemfdFlags::empty())?);
    file.write_all(&manifest.to_json())?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok((file, path))
}
