//! The options that all commands with a model share, and how they become a loaded model.

mod model_math;
mod values;

use std::env;
use std::num::{NonZeroU16, NonZeroUsize};
use std::path::{self, Path, PathBuf};
use std::thread;

use anyhow::{Context, Result};
use clap::Args;
use cluster::coordinator::Survey;
use engine::{CHUNK_DEFAULT, Executor, LocalExecutor};
use kernels::cpu::{CpuBackend, CpuOptions, KvType, Level};
use kernels::{PAGE_TOKENS, StepLimits};
use model::{Checkpoint, Footprint, Limits, LoadOptions, ModelPart};
use plan::UnusableNode;
use ranks::check_memory;
use ranks::group::{Deadlines, Group, GroupConfig, Hosts};
use ranks::protocol::limits::{LOGIT_VALUES_MAX, RANKS_MAX};
use ranks::protocol::shard::ShardSpec;
use types::{DType, LayerRange, Rank, WorldSize};

use crate::cake_options::{CakeModel, CakeOptions};
use crate::cluster_key::KeyOptions;
use crate::cluster_options::ClusterOptions;
use crate::kwaai_options::KwaaiOptions;
use crate::load_observer::{LoadBars, LoadObserver};
use crate::loaded_model::LoadedModel;
use crate::store::{ModelFiles, Store};
use crate::swarm_options::{SWARM_CLIENT_PART, SwarmNetworkOptions, SwarmOptions};
use crate::usage::UsageError;
use values::{ActivationsOption, ComputeOption, DecodeMathOption, KvOption, PromptMathOption, positive, quantisation};

pub use model_math::ModelMath;
pub use values::{CpuLevelOption, bytes, rank_count, thread_count};

/// The context of `run`, `chat` and `show`, if the model supports that many tokens.
pub const CONTEXT_DEFAULT: usize = 8192;
/// The upper limit of `--chunk`: more rows in one step only cost memory.
const CHUNK_MAX: usize = 1 << 16;
/// Page table entries in one step. If the sequences have more pages, they take turns.
const STEP_PAGES_MAX: usize = 1 << 20;

/// See [`ModelOptions::draft_tokens_default`].
const SWARM_DRAFT_TOKENS: usize = 4;

/// Where and how a model runs.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Where and how the model runs")]
pub struct ModelOptions {
    /// Quantise the weights of a safetensors model at load: q8_0, q6_k, q5_k, q4_k or q4_0
    #[arg(long, value_name = "FORMAT", value_parser = quantisation)]
    quant: Option<DType>,
    /// Use no better CPU instructions than these
    #[arg(long, value_enum, default_value_t, env = "CONSORT_CPU")]
    cpu_level: CpuLevelOption,
    /// Prompt tokens that are computed in one step
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = positive)]
    chunk: Option<NonZeroUsize>,
    /// Context size: the tokens of prompt and output together
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = positive)]
    context: Option<NonZeroUsize>,
    /// Data type to compute in; f32 converts all weights to f32 at load, for exact checks
    #[arg(long, value_enum, default_value_t)]
    compute: ComputeOption,
    /// Data type of the KV cache; auto is f16 for quantised weights, else f32 (for bf16 weights on amx: two bf16 parts)
    #[arg(long, value_enum, default_value_t)]
    kv: KvOption,
    /// Arithmetic of generated tokens with quantised weights: exact rounds activations to 16 bits, int8 to 8, which is faster for
    /// many sequences at once; auto is exact where that is as fast for one
    #[arg(long, value_enum, default_value_t, env = "CONSORT_DECODE_MATH")]
    decode_math: DecodeMathOption,
    /// Arithmetic of prompts with quantised weights: exact and int8 as for generated tokens; bf16 on amx is fast and nearly exact;
    /// auto is bf16 on amx, elsewhere exact for formats that stay fast with it
    #[arg(long, value_enum, default_value_t, env = "CONSORT_PROMPT_MATH")]
    prompt_math: PromptMathOption,
    /// Number of ranks (processes) that each layer is split over [default: 1, or one here and one on each host]
    #[arg(long, value_name = "RANKS", env = "CONSORT_TENSOR_PARALLEL", allow_negative_numbers = true)]
    #[arg(value_parser = rank_count)]
    tensor_parallel: Option<NonZeroU16>,
    /// Hosts that run `consort ranks`. Each runs one rank, and this machine runs one more. They need the same build of
    /// consort, and the model under the same path
    #[arg(long, value_name = "HOST:PORT", value_delimiter = ',')]
    tp_hosts: Vec<String>,
    /// Format of activations between hosts; q8 sends little more than a quarter of the bytes, and is less exact
    #[arg(long, value_enum, default_value_t)]
    tp_activations: ActivationsOption,
    /// Time limits after which a rank counts as lost; limits that are not named keep their default
    #[arg(long, value_name = "NAME=SECONDS,…", default_value_t)]
    rank_deadlines: Deadlines,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    cake: CakeOptions,
    #[command(flatten)]
    swarm: SwarmOptions,
    /// This machine serves layers to a swarm, rather than using those of others.
    #[arg(skip)]
    serves_swarm: bool,
    #[command(flatten)]
    key: KeyOptions,
}

/// The number of compute threads.
#[derive(Args, Clone, Debug, Default)]
pub struct ThreadOption {
    /// Compute threads of each rank [default: one per CPU, divided among the ranks]
    #[arg(short, long, value_name = "COUNT", env = "CONSORT_THREADS", value_parser = thread_count)]
    #[arg(allow_negative_numbers = true)]
    threads: Option<NonZeroUsize>,
}

/// The load that a model is sized for: determines the size of the KV cache and of the working memory.
#[derive(Clone, Copy, Debug)]
pub struct RequestedCapacity {
    /// Sequences that run at once.
    pub sequences: usize,
    /// Maximum tokens of one sequence.
    pub positions: usize,
    /// Tokens of all sequences together.
    pub tokens: usize,
    /// Maximum tokens of one step; the chunk size is another limit.
    pub rows: usize,
    /// Maximum rows of one step whose logits are computed.
    pub logit_rows: usize,
}

impl RequestedCapacity {
    /// Capacity for `sequences` sequences of `positions` tokens each.
    pub fn full(sequences: usize, positions: usize, logit_rows: usize) -> Self {
        // Sequences do not share pages, so each one is rounded up to whole pages.
        let tokens = sequences.saturating_mul(positions.div_ceil(PAGE_TOKENS)).saturating_mul(PAGE_TOKENS);
        Self { sequences, positions, tokens, rows: positions, logit_rows }
    }
}

impl ModelOptions {
    /// Checks what can be checked without the model, before it is downloaded to be loaded.
    pub fn check(&self) -> Result<()> {
        self.check_values()?;
        if self.cake.is_used() {
            return self.key.check_given();
        }
        if self.tp_hosts.is_empty() { Ok(()) } else { self.key.check() }
    }

    /// The files of a model, downloaded if they are missing: with `--swarm` only those that this machine needs.
    pub fn resolve(&self, model: Option<&str>) -> Result<ModelFiles> {
        let store = Store::from_environment()?;
        if self.swarm.swarm { store.resolve_part(model, SWARM_CLIENT_PART) } else { store.resolve(model) }
    }

    /// Checks that the options do not contradict each other.
    pub fn check_values(&self) -> Result<(), UsageError> {
        self.check_hosts()?;
        self.check_cake()?;
        self.check_swarm()?;
        if self.cluster.is_used() && self.ranks() > 1 {
            return Err(UsageError::new(
                "--tensor-parallel and --tp-hosts do not go with --cluster, --peer and --plan: in a cluster this machine runs its layers \
                 in one process; on the others, `consort join --tensor-parallel` splits them",
            ));
        }
        self.keep().map(|_| ())
    }

    fn check_cake(&self) -> Result<(), UsageError> {
        if !self.cake.is_used() {
            self.cluster.check()?;
            return self.cake.check(&[]);
        }
        let refuse = |with: &str| {
            Err(UsageError::new(format!("--cake-worker and --cake-discover do not work together with {with}")))
        };
        match () {
            () if self.cluster.is_used() => {
                refuse("--cluster, --peer and --plan: all machines of a chain speak one protocol")
            }
            () if self.ranks() > 1 => refuse("--tensor-parallel and --tp-hosts"),
            () => self.cake.check(&self.cluster.split),
        }
    }

    fn check_swarm(&self) -> Result<(), UsageError> {
        if self.serves_swarm {
            let is_client = self.swarm.swarm || !self.swarm.kwaai.kwaai_peer.is_empty();
            return match is_client || self.cake.is_used() || !self.tp_hosts.is_empty() {
                true => Err(UsageError::new(
                    "--swarm, --kwaai-peer, --cake-worker and --tp-hosts are not for serving a swarm",
                )),
                false => Ok(()),
            };
        }
        self.swarm.check()?;
        match self.swarm.swarm && (self.cluster.is_used() || self.cake.is_used() || self.ranks() > 1) {
            true => Err(UsageError::new(
                "--swarm does not go with --cluster, --peer, --plan, --cake-worker and --tensor-parallel: peers run the layers; a \
                 peer may have them on a cluster or on ranks of its own",
            )),
            false => Ok(()),
        }
    }

    /// Loads the model that was opened at `path`, and shows a progress bar. `threads` is per rank.
    pub fn load(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: &ThreadOption,
        capacity: RequestedCapacity,
    ) -> Result<LoadedModel> {
        let mut bars = LoadBars::new(checkpoint.description().layers.len());
        self.load_with(path, checkpoint, self.threads(threads), capacity, &mut bars)
    }

    /// Finds the machines that could run layers of the model that was opened at `path`, and loads nothing. Also returns those
    /// that cannot.
    pub fn survey(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: &ThreadOption,
        capacity: RequestedCapacity,
    ) -> Result<(Survey, Vec<UnusableNode>)> {
        let options = LoadOptions { keep: self.keep()?, limits: self.limits(checkpoint, capacity) };
        self.cluster.survey(path, &self.key, options, self.cpu(checkpoint, self.threads(threads))?)
    }

    /// Loads the model that was opened at `path`.
    pub fn load_with(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        threads: usize,
        capacity: RequestedCapacity,
        observer: &mut dyn LoadObserver,
    ) -> Result<LoadedModel> {
        let cpu = self.cpu(checkpoint, threads)?;
        let options = LoadOptions { keep: self.keep()?, limits: self.limits(checkpoint, capacity) };
        if self.cake.is_used() {
            let model = CakeModel { path, checkpoint, options, cpu };
            return Ok(LoadedModel::Cake(Box::new(self.cake.form(&self.key, &self.cluster.split, &model)?)));
        }
        if self.cluster.is_used() {
            let chain = self.cluster.form(path, &self.key, options, cpu, None, observer)?;
            return Ok(LoadedModel::Chain(Box::new(chain)));
        }
        if self.swarm.swarm {
            return Ok(LoadedModel::Swarm(Box::new(self.swarm.connect(path, checkpoint, &options, cpu, observer)?)));
        }
        let progress = &mut |done| observer.layers(done);
        check_memory(&self.footprints(checkpoint, &options, self.own_part(checkpoint))?)?;
        if self.ranks() > 1 {
            return Ok(LoadedModel::Group(Box::new(
                self.start_group(path, checkpoint, &options, cpu, None, progress)?,
            )));
        }
        let backend = CpuBackend::new(cpu)?;
        let local = LocalExecutor::load(backend, checkpoint, &options, progress).context("load the model")?;
        checkpoint.release();
        Ok(LoadedModel::Local(Box::new(local)))
    }

    /// Loads the model with its weights as f32, to compare with: in this process, on this machine.
    pub fn load_reference(
        &self,
        checkpoint: &Checkpoint,
        threads: usize,
        capacity: RequestedCapacity,
    ) -> Result<LocalExecutor<CpuBackend>> {
        let options = LoadOptions { keep: Some(DType::F32), limits: self.limits(checkpoint, capacity) };
        let backend = CpuBackend::new(CpuOptions { threads, level: self.level()?, ..CpuOptions::default() })?;
        let whole = ModelPart::whole(checkpoint.description());
        check_memory(&[Footprint::new(&backend, checkpoint, &options, whole, Rank::SINGLE)?])?;
        LocalExecutor::load(backend, checkpoint, &options, &mut |_| {}).context("load the model in f32")
    }

    /// The memory that each rank on this machine would need for this capacity.
    pub fn footprint(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Result<Vec<Footprint>> {
        let options = LoadOptions { keep: self.keep()?, limits: self.limits(checkpoint, capacity) };
        self.footprints(checkpoint, &options, self.own_part(checkpoint))
    }

    /// The numbers of ranks up to `max` that the model can be split over.
    pub fn possible_ranks(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity, max: u16) -> Result<Vec<u16>> {
        let options = LoadOptions { keep: self.keep()?, limits: self.limits(checkpoint, capacity) };
        let backend = CpuBackend::new(self.cpu(checkpoint, 1)?)?;
        let whole = ModelPart::whole(checkpoint.description());
        let can_load = |rank| Footprint::new(&backend, checkpoint, &options, whole, rank).is_ok();
        let can_split = |&size: &u16| WorldSize::new(size).is_some_and(|world| world.ranks().all(can_load));
        Ok((1..=max).filter(can_split).collect())
    }

    fn footprints(&self, checkpoint: &Checkpoint, options: &LoadOptions, part: ModelPart) -> Result<Vec<Footprint>> {
        let backend = CpuBackend::new(self.cpu(checkpoint, 1)?)?;
        let shares = self.world().ranks().take(self.local_ranks());
        let shares = shares.map(|rank| Footprint::new(&backend, checkpoint, options, part, rank));
        Ok(shares.collect::<Result<_, _>>()?)
    }

    /// The part of the model that ranks of this machine hold together.
    fn own_part(&self, checkpoint: &Checkpoint) -> ModelPart {
        if self.swarm.swarm { SWARM_CLIENT_PART } else { ModelPart::whole(checkpoint.description()) }
    }

    fn cpu(&self, checkpoint: &Checkpoint, threads: usize) -> Result<CpuOptions> {
        let level = self.level()?;
        let default = ModelMath::of(checkpoint, self.keep()?, level);
        let decode = self.decode_math.named().unwrap_or(default.decode);
        let prompt = self.prompt_math.named().unwrap_or(default.prompt);
        Ok(CpuOptions { threads, level, kv: self.kv(checkpoint, level), decode, prompt })
    }

    fn world(&self) -> WorldSize {
        WorldSize::new(self.size()).expect("a number of ranks is not zero")
    }

    fn size(&self) -> u16 {
        match self.tp_hosts.len() {
            0 => self.tensor_parallel.map_or(1, NonZeroU16::get),
            hosts => u16::try_from(hosts).unwrap_or(u16::MAX).saturating_add(1),
        }
    }

    /// The other hosts, if `--tp-hosts` names any.
    fn hosts(&self) -> Result<Option<Hosts>> {
        if self.tp_hosts.is_empty() {
            return Ok(None);
        }
        self.check_hosts()?;
        let addresses = self.tp_hosts.clone();
        Ok(Some(Hosts { addresses, key: self.key.key()?, activations: self.tp_activations.into() }))
    }

    fn check_hosts(&self) -> Result<(), UsageError> {
        if self.tp_hosts.len() >= RANKS_MAX {
            let message = format!("--tp-hosts names too many hosts: {RANKS_MAX} ranks are the limit");
            return Err(UsageError::new(message));
        }
        let (ranks, hosts) = (self.ranks(), !self.tp_hosts.is_empty());
        match self.tensor_parallel.filter(|asked| hosts && usize::from(asked.get()) != ranks) {
            Some(asked) => Err(UsageError::new(format!(
                "--tensor-parallel {asked} does not fit --tp-hosts: one rank here and one on each host are {ranks}"
            ))),
            None => Ok(()),
        }
    }

    fn limits(&self, checkpoint: &Checkpoint, capacity: RequestedCapacity) -> Limits {
        let pages_each = capacity.positions.div_ceil(PAGE_TOKENS);
        // A page that two sequences share is in both page tables.
        let step_pages = capacity.sequences.saturating_mul(pages_each).min(STEP_PAGES_MAX).max(pages_each);
        // At least the pages of one full sequence.
        let kv_pages = capacity.tokens.div_ceil(PAGE_TOKENS).max(pages_each);
        let logit_rows = match self.size() {
            1 => capacity.logit_rows,
            // All logits of a step must fit into one line of the protocol.
            _ => capacity.logit_rows.min(LOGIT_VALUES_MAX / checkpoint.description().vocab).max(capacity.sequences),
        };
        let rows = self.chunk().min(capacity.rows).max(logit_rows);
        let step = StepLimits { rows, sequences: capacity.sequences, pages: step_pages };
        Limits { step, logit_rows, kv_pages, positions: capacity.positions }
    }

    fn start_group(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        cpu: CpuOptions,
        block: Option<LayerRange>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Group> {
        let hosts = self.hosts()?;
        // Other hosts have the model under the given path, so symbolic links are not resolved here.
        let path = if hosts.is_some() { path::absolute(path) } else { path.canonicalize() }
            .with_context(|| format!("find {}", path.display()))?;
        let path = path.to_str().context("the path of the model is not valid UTF-8")?.to_owned();
        let layers = checkpoint.description().layers.len();
        let config = GroupConfig {
            world: self.world(),
            program: current_executable(),
            model_id: "model".to_owned(),
            shard: match block {
                Some(layers) => ShardSpec::new(path, options, cpu).with_layers(layers),
                None => ShardSpec::new(path, options, cpu),
            },
            limits: options.limits,
            vocab: checkpoint.description().vocab,
            hidden: checkpoint.description().hidden,
            digest: checkpoint.digest(),
            deadlines: self.rank_deadlines,
            environment: Vec::new(),
            hosts,
        };
        // This process holds no weights, only what the digest has read of them.
        checkpoint.release();
        Group::start(config, &mut |done| progress(done.min(layers))).context("start the ranks")
    }

    /// How a block of the model is loaded that is served to a swarm.
    pub fn block_options(
        &self,
        checkpoint: &Checkpoint,
        limits: Limits,
        threads: &ThreadOption,
    ) -> Result<(LoadOptions, CpuOptions)> {
        Ok((LoadOptions { keep: self.keep()?, limits }, self.cpu(checkpoint, self.threads(threads))?))
    }

    /// The memory that each rank on this machine needs for a block.
    pub fn block_footprints(
        &self,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        layers: LayerRange,
    ) -> Result<Vec<Footprint>> {
        self.footprints(checkpoint, options, ModelPart::stage(layers))
    }

    /// Loads a block on ranks, or on machines of the LAN; `None` if the options name neither.
    pub fn load_block(
        &self,
        path: &Path,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
        cpu: CpuOptions,
        layers: LayerRange,
    ) -> Result<Option<Box<dyn Executor>>> {
        if self.cluster.is_used() {
            let chain = self.cluster.form(path, &self.key, *options, cpu, Some(layers), &mut |_: usize| {})?;
            return Ok(Some(Box::new(chain)));
        }
        if self.ranks() > 1 {
            check_memory(&self.block_footprints(checkpoint, options, layers)?)?;
            let group = self.start_group(path, checkpoint, options, cpu, Some(layers), &mut |_| {})?;
            return Ok(Some(Box::new(group)));
        }
        Ok(None)
    }

    /// The model's layers are served by a swarm.
    pub fn use_swarm(&mut self) {
        self.swarm.swarm = true;
    }

    /// This machine serves layers to a swarm.
    pub fn serve_swarm(&mut self) {
        self.serves_swarm = true;
    }

    /// How KwaaiNet is used.
    pub fn kwaai(&self) -> &KwaaiOptions {
        &self.swarm.kwaai
    }

    /// How this machine joins a swarm.
    pub fn swarm_network(&self) -> &SwarmNetworkOptions {
        &self.swarm.network
    }

    /// Draft tokens of a step, if nothing else is asked for: in a swarm every step takes round trips, and a draft may save some.
    pub fn draft_tokens_default(&self) -> usize {
        // A server of KwaaiNet cannot discard rejected tokens: every rejection would be a replay.
        let is_worth_it = self.swarm.swarm && !self.swarm.kwaai.has_servers();
        if is_worth_it { SWARM_DRAFT_TOKENS } else { 0 }
    }

    /// Looks for machines on this network, unless the options name some.
    pub fn imply_cluster(&mut self) {
        self.cluster.imply_cluster();
    }

    /// Whether layers may run on other machines.
    pub fn uses_cluster(&self) -> bool {
        self.cluster.is_used() || self.cake.is_used() || self.swarm.swarm
    }

    /// Whether peers of a swarm run the layers.
    pub fn uses_swarm(&self) -> bool {
        self.swarm.swarm
    }

    /// Whether layers run on cake workers.
    pub fn uses_cake(&self) -> bool {
        self.cake.is_used()
    }

    /// The number of rank processes.
    pub fn ranks(&self) -> usize {
        usize::from(self.size())
    }

    /// The number of rank processes on this machine.
    pub fn local_ranks(&self) -> usize {
        if self.tp_hosts.is_empty() { self.ranks() } else { 1 }
    }

    /// Compute threads of each rank.
    pub fn threads(&self, asked: &ThreadOption) -> usize {
        asked.threads.map_or_else(|| (cpus() / self.local_ranks()).max(1), NonZeroUsize::get)
    }

    /// Prompt tokens in one step.
    pub fn chunk(&self) -> usize {
        self.chunk.map_or(CHUNK_DEFAULT, NonZeroUsize::get).min(CHUNK_MAX)
    }

    /// The value of `--context`, which must not exceed the maximum of the model, else `default_context`, reduced to that maximum.
    pub fn context(&self, checkpoint: &Checkpoint, default_context: usize) -> Result<usize, UsageError> {
        let max = checkpoint.description().positions_max;
        match self.context {
            Some(asked) if asked.get() > max => Err(UsageError::new(format!(
                "--context {asked} is more than the {max} tokens that this model was made for"
            ))),
            Some(asked) => Ok(asked.get()),
            None => Ok(default_context.min(max)),
        }
    }

    /// The instruction level to use: the CPU's best, or a lower one from `--cpu-level`.
    pub fn level(&self) -> Result<Level> {
        self.cpu_level.level()
    }

    fn keep(&self) -> Result<Option<DType>, UsageError> {
        match (self.compute, self.quant) {
            (ComputeOption::F32, Some(_)) => Err(UsageError::new("--compute f32 and --quant exclude each other")),
            (ComputeOption::F32, None) => Ok(Some(DType::F32)),
            (ComputeOption::Auto, quant) => Ok(quant),
        }
    }

    /// The data type of the KV cache on this level, which may differ from [`Self::kv`]: see [`KvType::on`].
    pub fn effective_kv_type(&self, checkpoint: &Checkpoint) -> Result<KvType> {
        let level = self.level()?;
        let kv = self.kv(checkpoint, level);
        kv.on(level).with_context(|| format!("keys and values cannot be kept as {kv:?} on {level}"))
    }

    /// The data type of the KV cache: about as exact as the weights.
    pub fn kv(&self, checkpoint: &Checkpoint, level: Level) -> KvType {
        match self.kv {
            KvOption::F32 => KvType::F32,
            KvOption::F16 => KvType::F16,
            KvOption::Auto if self.compute == ComputeOption::F32 => KvType::F32,
            KvOption::Auto => match if self.quant.is_some() { KvType::F16 } else { kv_default(checkpoint, level) } {
                // bf16, which f16 becomes on this level, would be the least exact part of exact arithmetic.
                KvType::F16 if level == Level::Amx && self.prompt_math == PromptMathOption::Exact => KvType::Split,
                kind => kind,
            },
        }
    }
}

/// The data type of the KV cache of a model as it is stored.
pub fn kv_default(checkpoint: &Checkpoint, level: Level) -> KvType {
    match level {
        _ if checkpoint.has(DType::is_quantised) => KvType::F16,
        Level::Amx if checkpoint.has(|dtype| dtype == DType::BF16) => KvType::Split,
        _ => KvType::F32,
    }
}

/// The path of the running executable. On Linux it is valid even if the file was replaced.
pub fn current_executable() -> PathBuf {
    if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { env::current_exe().unwrap_or_default() }
}

pub fn cpus() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}
