//! `CakeChainBuilder`: forms chains whose stages are cake workers. Every worker gets its layers assigned, is sent the model's
//! files if it asks for them, and has to answer before the chain runs.
//!
//! When a worker is lost, a thread forms the chain again, for as long as that takes.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cluster::chain::{ChainBuilder, ChainLink, FormedChain};
use cluster::node::StageShape;
use engine::{CoordinatorStage, Executor};
use kernels::Backend;
use model::Limits;
use tracing::{info, warn};
use types::LayerRange;

use super::link::{LinkError, greet};
use super::setup::{CakeSetupError, SETUP_WAIT, SetupFiles, set_up_worker};
use super::{CakeExecutor, CakeWorkerAddress};
use crate::auth::CakeKey;
use crate::layer_name::CakeLayerPrefix;
use crate::wire::CakeVariant;

/// The pause between two attempts to form a chain or to reach a worker that loads its weights.
const RETRY: Duration = Duration::from_millis(500);

/// A worker and the layers that it is to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeStagePlan {
    /// `host:port`
    pub host: String,
    pub layers: LayerRange,
}

#[derive(Debug, thiserror::Error)]
pub enum CakeChainError {
    #[error("a cake worker's layers {found} do not begin at layer {expected}, where the ones before them end")]
    Order { expected: usize, found: LayerRange },
    #[error("the layers from {end} on have no machine: the model has {layers}, and this machine has the first ones")]
    Unassigned { end: usize, layers: usize },
    #[error("{host} has no address")]
    NoAddress { host: String },
    #[error("find {host}: {source}")]
    Resolve { host: String, source: io::Error },
    #[error("cake worker {host}: {source}")]
    Setup { host: String, source: CakeSetupError },
    #[error("cake worker {host}: {why}")]
    Worker { host: String, why: String },
    #[error("load the layers of this machine: {0}")]
    Own(String),
    #[error("start a thread: {0}")]
    Thread(#[source] io::Error),
}

/// How much of the files of a worker, by its place in the chain, was sent.
#[derive(Clone, Copy, Debug)]
pub struct CakeSetupProgress {
    pub stage: usize,
    pub sent_bytes: u64,
    pub total_bytes: u64,
}

/// Loads the coordinator's part with this many first layers.
pub type LoadOwn<B> = dyn Fn(usize) -> Result<CoordinatorStage<B>, String> + Send + Sync;

pub struct CakeChainConfig<B: Backend> {
    /// In the order of their layers, which follow one another up to the model's last one. What precedes them is the
    /// coordinator's.
    pub stages: Vec<CakeStagePlan>,
    pub key: CakeKey,
    /// The variant in which files are sent.
    pub variant: CakeVariant,
    pub prefix: CakeLayerPrefix,
    /// Has config.json and safetensors.
    pub folder: PathBuf,
    pub layers: usize,
    pub hidden: usize,
    pub vocab: usize,
    /// Of all stages.
    pub limits: Limits,
    /// How long a worker may take for a step.
    pub step_timeout: Duration,
    pub load_own: Box<LoadOwn<B>>,
}

/// Dropping it ends the thread, after what it is doing.
pub struct CakeChainBuilder<B: Backend> {
    lost: Sender<Option<Box<CoordinatorStage<B>>>>,
    formed: Receiver<FormedChain<B>>,
    is_over: Arc<AtomicBool>,
    missing: Arc<MissingStage>,
    /// Of all workers.
    layers: Option<LayerRange>,
}

/// The layers that a chain cannot be formed without, and why.
type MissingStage = Mutex<Option<(LayerRange, String)>>;

impl<B: Backend> CakeChainBuilder<B> {
    /// Forms the first chain. A worker that cannot be reached is an error here, and is waited for later.
    pub fn start(
        config: CakeChainConfig<B>,
        progress: &(dyn Fn(CakeSetupProgress) + Sync),
    ) -> Result<(Self, FormedChain<B>), CakeChainError> {
        let former = Former::new(config)?;
        let chain = former.form(&mut None, progress)?;
        let (lost, received) = channel();
        let (sender, formed) = channel();
        let (is_over, missing) = (Arc::clone(&former.is_over), Arc::clone(&former.missing));
        let layers = layers_of(&former.config.stages);
        let run = move || former.run(&received, &sender);
        thread::Builder::new().name("consort-cake".to_owned()).spawn(run).map_err(CakeChainError::Thread)?;
        Ok((Self { lost, formed, is_over, missing, layers }, chain))
    }
}

impl<B: Backend> ChainBuilder<B> for CakeChainBuilder<B> {
    fn rebuild(&mut self, why: &str, stage: Option<Box<CoordinatorStage<B>>>) {
        warn!("the chain is lost, and is formed again: {why}");
        // Which worker is away is known after the first attempt.
        *lock(&self.missing) = self.layers.map(|layers| (layers, why.to_owned()));
        // The thread ends with the builder, so there is a receiver.
        let _ = self.lost.send(stage);
    }

    fn poll(&mut self, wait: Duration) -> Option<FormedChain<B>> {
        self.formed.recv_timeout(wait).ok()
    }

    fn missing(&self) -> Option<(LayerRange, String)> {
        lock(&self.missing).clone()
    }
}

fn lock(missing: &MissingStage) -> MutexGuard<'_, Option<(LayerRange, String)>> {
    missing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Backend> Drop for CakeChainBuilder<B> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// What the thread owns.
struct Former<B: Backend> {
    config: CakeChainConfig<B>,
    /// What each worker is sent.
    files: Vec<SetupFiles>,
    is_over: Arc<AtomicBool>,
    missing: Arc<MissingStage>,
}

impl<B: Backend> Former<B> {
    fn new(config: CakeChainConfig<B>) -> Result<Self, CakeChainError> {
        check_layers(&config.stages, config.layers)?;
        let files = config.stages.iter().map(|CakeStagePlan { host, layers }| {
            SetupFiles::of_folder(&config.folder, *layers, config.prefix)
                .map_err(|source| CakeChainError::Setup { host: host.clone(), source })
        });
        let files = files.collect::<Result<_, _>>()?;
        Ok(Self { config, files, is_over: Arc::default(), missing: Arc::default() })
    }

    /// Forms a chain whenever one was lost.
    fn run(&self, lost: &Receiver<Option<Box<CoordinatorStage<B>>>>, formed: &Sender<FormedChain<B>>) {
        for mut stage in lost {
            let Some(chain) = self.form_until_over(&mut stage) else { return };
            if formed.send(chain).is_err() {
                return;
            }
        }
    }

    fn form_until_over(&self, stage: &mut Option<Box<CoordinatorStage<B>>>) -> Option<FormedChain<B>> {
        let mut last = String::new();
        while !self.is_over.load(Ordering::Relaxed) {
            match self.form(stage, &|_| {}) {
                Ok(chain) => return Some(chain),
                Err(error) => {
                    let why = error.to_string();
                    *lock(&self.missing) = self.layers_of(&error).map(|layers| (layers, why.clone()));
                    if why != last {
                        warn!("the chain cannot be formed yet: {why}");
                        last = why;
                    }
                }
            }
            thread::sleep(RETRY);
        }
        None
    }

    /// The layers of the worker that an error is about; of all workers if it is about none.
    fn layers_of(&self, error: &CakeChainError) -> Option<LayerRange> {
        use CakeChainError as Error;
        let stages = &self.config.stages;
        let of = match error {
            Error::NoAddress { host }
            | Error::Resolve { host, .. }
            | Error::Setup { host, .. }
            | Error::Worker { host, .. } => stages.iter().find(|stage| stage.host == *host).map(|stage| stage.layers),
            _ => None,
        };
        of.or_else(|| layers_of(stages))
    }

    /// Prepares all workers at once. `stage` is the coordinator's part of an earlier chain; it stays there after an error.
    fn form(
        &self,
        stage: &mut Option<Box<CoordinatorStage<B>>>,
        progress: &(dyn Fn(CakeSetupProgress) + Sync),
    ) -> Result<FormedChain<B>, CakeChainError> {
        let CakeChainConfig { stages, hidden, vocab, limits, .. } = &self.config;
        let prepared = thread::scope(|scope| {
            let prepare = |stage| scope.spawn(move || self.prepare(stage, progress));
            let threads: Vec<_> = (0..stages.len()).map(prepare).collect();
            self.load_own(stage)?;
            let joined = threads.into_iter().map(|thread| thread.join().expect("a worker's thread does not panic"));
            joined.collect::<Result<Vec<_>, _>>()
        })?;
        let executor = |worker| Box::new(CakeExecutor::new(worker, *hidden, *vocab, limits)) as Box<dyn Executor>;
        let shape = StageShape { rows_max: limits.step.rows, hidden: *hidden };
        let link = ChainLink::in_process(prepared.into_iter().map(executor).collect(), shape);
        let link = link.map_err(CakeChainError::Thread)?;
        let stage = stage.take().ok_or_else(|| CakeChainError::Own("it is gone".to_owned()))?;
        info!(stages = stages.len(), "a chain with cake workers is formed");
        Ok(FormedChain { stage, link: Some(link) })
    }

    fn load_own(&self, stage: &mut Option<Box<CoordinatorStage<B>>>) -> Result<(), CakeChainError> {
        if stage.is_none() {
            let own = self.config.stages.first().map_or(0, |first| first.layers.start());
            *stage = Some(Box::new((self.config.load_own)(own).map_err(CakeChainError::Own)?));
        }
        Ok(())
    }

    /// Assigns a worker its layers, and waits until it answers.
    fn prepare(
        &self,
        stage: usize,
        progress: &(dyn Fn(CakeSetupProgress) + Sync),
    ) -> Result<CakeWorkerAddress, CakeChainError> {
        let CakeStagePlan { host, layers } = &self.config.stages[stage];
        let CakeChainConfig { key, variant, prefix, step_timeout, .. } = &self.config;
        let address = resolve(host)?;
        let mut sent = 0;
        let mut tell = |sent_bytes, total_bytes| {
            if sent == 0 {
                info!(worker = %host, bytes = total_bytes, "sending weights to a cake worker");
            }
            sent = sent_bytes;
            progress(CakeSetupProgress { stage, sent_bytes, total_bytes });
        };
        let wait = match set_up_worker(address, key, &self.files[stage], *variant, &mut tell) {
            // It says so before it has loaded its weights.
            Ok(()) => SETUP_WAIT,
            // A running worker of the older variant takes no assignment. It has its layers.
            Err(CakeSetupError::NotTaken) => Duration::ZERO,
            Err(source) => return Err(CakeChainError::Setup { host: host.clone(), source }),
        };
        info!(worker = %host, %layers, "a cake worker has its layers");
        let (key, step_timeout) = (Some(key.clone()), *step_timeout);
        let worker = CakeWorkerAddress { address, key, layers: *layers, prefix: *prefix, step_timeout };
        let answered = self.wait_for_answer(&worker, Instant::now() + wait);
        answered.map_err(|error| CakeChainError::Worker { host: host.clone(), why: error.to_string() })?;
        Ok(worker)
    }

    /// Waits until a worker answers, while it may still be loading.
    fn wait_for_answer(&self, worker: &CakeWorkerAddress, deadline: Instant) -> Result<(), LinkError> {
        loop {
            match greet(worker) {
                Err(error)
                    if error.may_pass() && Instant::now() < deadline && !self.is_over.load(Ordering::Relaxed) =>
                {
                    thread::sleep(RETRY);
                }
                answered => return answered,
            }
        }
    }
}

/// The layers of all workers.
fn layers_of(stages: &[CakeStagePlan]) -> Option<LayerRange> {
    let number = |layer: usize| u32::try_from(layer).ok();
    LayerRange::new(number(stages.first()?.layers.start())?, number(stages.last()?.layers.end())?)
}

/// Checks that ranges follow one another up to the model's last layer.
fn check_layers(stages: &[CakeStagePlan], layers: usize) -> Result<(), CakeChainError> {
    let mut end = stages.first().map_or(0, |first| first.layers.start());
    for stage in stages {
        if stage.layers.start() != end || stage.layers.end() > layers {
            return Err(CakeChainError::Order { expected: end, found: stage.layers });
        }
        end = stage.layers.end();
    }
    if end == layers { Ok(()) } else { Err(CakeChainError::Unassigned { end, layers }) }
}

/// The first address of a name. It is looked up whenever a chain is formed.
fn resolve(host: &str) -> Result<SocketAddr, CakeChainError> {
    let failed = |source| CakeChainError::Resolve { host: host.to_owned(), source };
    let first = host.to_socket_addrs().map_err(failed)?.next();
    first.ok_or_else(|| CakeChainError::NoAddress { host: host.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layers_of_workers_end_with_the_model_and_have_no_gap() {
        let check = |ranges: &[(u32, u32)]| {
            let stage = |&(start, end): &(u32, u32)| CakeStagePlan {
                host: "host:1".to_owned(),
                layers: LayerRange::new(start, end).unwrap(),
            };
            check_layers(&ranges.iter().map(stage).collect::<Vec<_>>(), 8).map_err(|error| error.to_string())
        };
        for ranges in [&[(0, 8)][..], &[(7, 8)], &[(2, 4), (4, 8)]] {
            assert_eq!(check(ranges), Ok(()));
        }
        assert!(check(&[(2, 4), (5, 8)]).unwrap_err().contains("do not begin at layer 4"));
        assert!(check(&[(2, 4), (3, 8)]).unwrap_err().contains("do not begin at layer 4"));
        assert!(check(&[(2, 9)]).unwrap_err().contains("do not begin"));
        assert!(check(&[(2, 4), (4, 7)]).unwrap_err().contains("the layers from 7 on have no machine"));
        assert!(check(&[]).unwrap_err().contains("the layers from 0 on have no machine"));
    }
}
