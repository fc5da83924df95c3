//! `Process`: a rank's state, and what each request does to it. It handles one request at a time. Whatever happens in
//! one, it sends a reply and handles the next.

#[cfg(debug_assertions)]
mod faults;
mod group;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use types::Rank;

use super::Options;
use super::dense::{DenseModel, DenseSource};
#[cfg(debug_assertions)]
use super::fault::{Fault, Point};
use super::peers::{Peers, RequestDigest};
use super::queue::{QueuedLine, RequestQueue};
use super::replies::ReplyWriter;
use super::request_error::RequestError;
use super::shard::LoadedShard;
use crate::protocol::output::WireOutput;
use crate::protocol::session::RankStats;
use crate::protocol::shard::ShardSpec;
use crate::protocol::{ErrorKind, LineMessage as _, RankReply, RankRequest, VERSION, WriteError, check_hello};
use collectives::GroupCollective;
use collectives::shared_memory::Epoch;

/// The minimum time between two `loading` lines.
const LOADING_EVERY: Duration = Duration::from_millis(100);

pub struct RankServer {
    rank: Rank,
    cuda_device: u32,
    build: String,
    #[cfg(debug_assertions)]
    fault: Option<Fault>,
    replies: ReplyWriter,
    collective: GroupCollective,
    /// The model of `load`.
    shard: Option<LoadedShard>,
    /// The models of `load_dense_shard`, by `model_id`.
    dense: BTreeMap<String, DenseModel>,
    /// The other ranks of an `init`.
    peers: Option<Peers>,
    init_timeout: Duration,
    collective_timeout: Duration,
    threads_max: usize,
    /// Where ranks on other hosts connect, until the group is joined.
    listener: Option<TcpListener>,
    steps: u64,
    stepping: Duration,
    /// The output of the previous step, kept for its memory.
    spare_output: WireOutput,
}

impl RankServer {
    pub fn new(options: Options, replies: ReplyWriter, collective: GroupCollective) -> Self {
        let Options { rank, cuda_device, build, init_timeout, collective_timeout, threads_max, .. } = options;
        Self {
            rank,
            cuda_device,
            build,
            #[cfg(debug_assertions)]
            fault: options.fault,
            replies,
            collective,
            shard: None,
            dense: BTreeMap::new(),
            peers: None,
            init_timeout,
            collective_timeout,
            threads_max: threads_max.map_or(usize::MAX, NonZeroUsize::get),
            listener: None,
            steps: 0,
            stepping: Duration::ZERO,
            spare_output: WireOutput::default(),
        }
    }

    /// Handles requests until one is `shutdown` or the queue has ended. An error means that replies cannot be written.
    pub fn serve(mut self, queue: &RequestQueue) -> Result<(), WriteError> {
        #[cfg(debug_assertions)]
        self.inject_idle_fault(Point::Spawn)?;
        loop {
            #[cfg(debug_assertions)]
            if self.is_idle() && queue.is_empty() {
                self.inject_idle_fault(Point::Idle)?;
            }
            match queue.pop() {
                None => return Ok(()),
                Some(QueuedLine::Answer(reply)) => self.replies.write_after(|| queue.finish(), &reply)?,
                Some(QueuedLine::Run(request)) => {
                    let is_last = request == RankRequest::Shutdown;
                    #[cfg(debug_assertions)]
                    self.handle_with_fault(request, queue)?;
                    #[cfg(not(debug_assertions))]
                    self.answer(request, queue)?;
                    if is_last {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn answer(&mut self, request: RankRequest, queue: &RequestQueue) -> Result<(), WriteError> {
        let (op, id, kind, begun) = (request.op(), request.id(), panic_kind(&request), Instant::now());
        let done = self.guard(kind, |process| process.handle(&request));
        debug!(rank = self.rank.index(), op, id, took = ?begun.elapsed(), "served");
        // Before the reply, because the next request may arrive right after it.
        queue.recycle(request);
        self.write(queue, op, id, done)
    }

    fn write(
        &mut self,
        queue: &RequestQueue,
        op: &'static str,
        id: Option<u64>,
        done: Result<RankReply, RequestError>,
    ) -> Result<(), WriteError> {
        let reply = done.unwrap_or_else(|RequestError { kind, message }| {
            warn!(rank = self.rank.index(), op, id, ?kind, message, "refused");
            RankReply::error(id, kind, &message)
        });
        let written = self.replies.write_after(|| queue.finish(), &reply);
        if let RankReply::StepOk { output, .. } = reply {
            self.spare_output = output;
        }
        written
    }

    /// Turns a panic into an error of this kind. The models' sessions may be inconsistent then, so they are closed.
    fn guard(
        &mut self,
        kind: ErrorKind,
        handle: impl FnOnce(&mut Self) -> Result<RankReply, RequestError>,
    ) -> Result<RankReply, RequestError> {
        catch_unwind(AssertUnwindSafe(|| handle(self))).unwrap_or_else(|_| {
            self.collective.abandon();
            self.forget_sessions();
            Err(RequestError::new(kind, "a panic: see the log of the rank"))
        })
    }

    fn handle(&mut self, request: &RankRequest) -> Result<RankReply, RequestError> {
        match *request {
            RankRequest::Ping => Ok(pong(self.rank, self.cuda_device)),
            RankRequest::Init { ref comm_id } => self.init(comm_id),
            RankRequest::NcclSanityCheck => self.sanity_check(),
            RankRequest::LoadDenseShard { ref model_id, ref config_json, ref safetensors_paths, ref quant } => {
                let source = DenseSource { config: config_json, files: safetensors_paths, quant: quant.as_deref() };
                self.load_dense(model_id, &source)
            }
            RankRequest::GenerateStep { ref model_id, ref tokens, offset } => {
                let digest = step_digest(model_id, tokens, offset);
                let prepared = self.dense(model_id).and_then(|dense| dense.prepare(tokens, offset));
                let tokens = self.agree(digest, prepared)?;
                self.step(|process| process.dense(model_id)?.step(&tokens))?;
                Ok(RankReply::GenerateStepOk)
            }
            RankRequest::GenerateStepWithImages { ref model_id, ref tokens, offset, .. } => {
                let unsupported = || RequestError::new(ErrorKind::ForwardFailed, "images are not supported");
                let refused = self.dense(model_id).and_then(|_| Err(unsupported()));
                self.agree(step_digest(model_id, tokens, offset), refused)
            }
            RankRequest::ClearKvCache { ref model_id } => {
                if let Some(peers) = &mut self.peers {
                    peers.leave_epoch();
                }
                let collective = self.collective.clone();
                self.dense(model_id)?.clear(collective);
                Ok(RankReply::KvCacheCleared)
            }
            RankRequest::UnloadModel { ref model_id } => self.unload(model_id),
            RankRequest::Shutdown => Ok(RankReply::Bye),

            RankRequest::Hello { id, protocol, ref build } => self.hello(id, protocol, build),
            RankRequest::Attach { id, segment_fd, world_size, rank, elements_max, epoch } => {
                self.check_rank(world_size, rank)?;
                self.attach(segment_fd, elements_max, Epoch(epoch))?;
                Ok(RankReply::AttachOk { id })
            }
            RankRequest::Listen { id, host } => self.listen(id, host),
            RankRequest::Join { id, world_size, rank, epoch, ref addresses, ref key, encoding, timeouts } => {
                self.check_rank(world_size, rank)?;
                self.join(Epoch(epoch), addresses, key, encoding, timeouts)?;
                Ok(RankReply::AttachOk { id })
            }
            RankRequest::Load { id, ref model_id, ref shard } => self.load(id, model_id, shard),
            RankRequest::Open { id, tokens_max, ref prefix } => {
                let opened = self.shard()?.open(tokens_max, prefix)?;
                Ok(RankReply::Opened { id, session: opened.session.0, computed: opened.computed as u64 })
            }
            RankRequest::Truncate { id, session, tokens } => {
                Ok(RankReply::Truncated { id, computed: self.shard()?.truncate(session, tokens)? as u64 })
            }
            RankRequest::Close { id, session } => {
                self.shard()?.close(session);
                Ok(RankReply::Closed { id })
            }
            RankRequest::Clear { id } => {
                self.shard()?.clear();
                Ok(RankReply::Closed { id })
            }
            RankRequest::Step { id, ref plan } => {
                self.shard()?.prepare(plan)?;
                let mut output = std::mem::take(&mut self.spare_output);
                self.step(|process| process.shard()?.step(&mut output))?;
                Ok(RankReply::StepOk { id, output })
            }
            RankRequest::Stats { id } => Ok(RankReply::StatsOk { id, stats: self.stats() }),
            RankRequest::Cancel { .. } | RankRequest::Abort { .. } => unreachable!("the reading thread answers these"),
        }
    }

    fn load_dense(&mut self, model_id: &str, source: &DenseSource<'_>) -> Result<RankReply, RequestError> {
        self.check_unused(model_id)?;
        let dense = DenseModel::load(source, self.rank, self.threads_max, self.collective.clone())?;
        info!(rank = self.rank.index(), model = model_id, "loaded");
        self.dense.insert(model_id.to_owned(), dense);
        Ok(RankReply::LoadDenseShardOk)
    }

    fn dense(&mut self, model_id: &str) -> Result<&mut DenseModel, RequestError> {
        self.dense.get_mut(model_id).ok_or_else(|| not_loaded(model_id))
    }

    fn check_unused(&self, model_id: &str) -> Result<(), RequestError> {
        let is_shard = self.shard.as_ref().is_some_and(|shard| shard.model_id() == model_id);
        if is_shard || self.dense.contains_key(model_id) {
            return Err(RequestError::new(ErrorKind::AlreadyLoaded, format!("model {model_id} is loaded")));
        }
        Ok(())
    }

    fn hello(&self, id: u64, protocol: u32, build: &str) -> Result<RankReply, RequestError> {
        check_hello(&self.build, protocol, build).map_err(|error| RequestError::of(ErrorKind::BadRequest, &error))?;
        Ok(RankReply::HelloOk { id, protocol: VERSION, build: self.build.clone(), pid: std::process::id() })
    }

    fn load(&mut self, id: u64, model_id: &str, spec: &ShardSpec) -> Result<RankReply, RequestError> {
        self.check_unused(model_id)?;
        if let Some(loaded) = &self.shard {
            let message = format!("sessions and steps are those of model {}", loaded.model_id());
            return Err(RequestError::new(ErrorKind::AlreadyLoaded, message));
        }
        let (replies, mut reported) = (self.replies.clone(), Instant::now());
        let mut progress = |layers: usize| {
            if reported.elapsed() >= LOADING_EVERY {
                reported = Instant::now();
                // The error is ignored: writing the last reply will fail as well.
                let _ = replies.write(&RankReply::Loading { id, layers: layers as u64 });
            }
        };
        let begun = Instant::now();
        let mut spec = spec.clone();
        spec.cpu.threads = spec.cpu.threads.min(self.threads_max as u64);
        let loaded = LoadedShard::load(model_id.to_owned(), &spec, self.rank, self.collective.clone(), &mut progress)?;
        info!(rank = self.rank.index(), model = loaded.model_id(), took = ?begun.elapsed(), "loaded");
        let reply = loaded.load_ok(id);
        self.shard = Some(loaded);
        Ok(reply)
    }

    fn unload(&mut self, model_id: &str) -> Result<RankReply, RequestError> {
        let was_shard = self.shard.take_if(|shard| shard.model_id() == model_id).is_some();
        if was_shard || self.dense.remove(model_id).is_some() {
            Ok(RankReply::Unloaded)
        } else {
            Err(not_loaded(model_id))
        }
    }

    fn shard(&mut self) -> Result<&mut LoadedShard, RequestError> {
        self.shard.as_mut().ok_or_else(|| RequestError::new(ErrorKind::ModelNotLoaded, "no model is loaded"))
    }

    /// Runs a step and counts its time. If it fails, the epoch is aborted, so that the other ranks do not wait for this
    /// one.
    fn step<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, RequestError>) -> Result<T, RequestError> {
        if !self.collective.is_complete() {
            return Err(RequestError::new(ErrorKind::NcclNotInitialised, "the rank is in no group"));
        }
        let begun = Instant::now();
        let stepping = self.peers.as_ref().map(Peers::stepping);
        let result = run(self);
        drop(stepping);
        self.steps += 1;
        self.stepping += begun.elapsed();
        if result.is_err() {
            self.collective.abandon();
        }
        match (result, &self.peers) {
            (Err(RequestError { kind: ErrorKind::Aborted, .. }), Some(peers)) => Err(peers.why_ended().into()),
            (result, _) => result,
        }
    }

    fn forget_sessions(&mut self) {
        if let Some(shard) = &mut self.shard {
            shard.regroup(self.collective.clone());
        }
        self.dense.values_mut().for_each(|dense| dense.regroup(self.collective.clone()));
    }

    fn stats(&self) -> RankStats {
        let (collectives, collective_us) = self.collective.spent();
        RankStats {
            epoch: self.collective.epoch().map_or(0, |epoch| epoch.0),
            sessions: self.sum(LoadedShard::sessions, DenseModel::sessions),
            weight_bytes: self.sum(LoadedShard::weight_bytes, DenseModel::weight_bytes),
            kv_bytes: self.sum(LoadedShard::kv_bytes, DenseModel::kv_bytes),
            resident_bytes: resident_bytes().unwrap_or(0),
            steps: self.steps,
            collectives,
            step_us: self.stepping.as_micros() as u64,
            collective_us,
            capacity: self.shard.as_ref().map(|shard| shard.capacity().into()),
        }
    }

    /// Sum over all models.
    fn sum(&self, shard: impl Fn(&LoadedShard) -> u64, dense: impl Fn(&DenseModel) -> u64) -> u64 {
        self.shard.as_ref().map_or(0, shard) + self.dense.values().map(dense).sum::<u64>()
    }

    #[cfg(debug_assertions)]
    fn is_idle(&self) -> bool {
        self.steps > 0 && self.shard.as_ref().is_some_and(|shard| shard.sessions() == 0)
    }
}

fn panic_kind(request: &RankRequest) -> ErrorKind {
    match request {
        RankRequest::Load { .. } | RankRequest::LoadDenseShard { .. } => ErrorKind::LoadFailed,
        _ => ErrorKind::ForwardFailed,
    }
}

pub fn pong(rank: Rank, cuda_device: u32) -> RankReply {
    RankReply::Pong { rank: rank.index() as u16, world_size: rank.world().get() as u16, cuda_device }
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

fn not_loaded(model_id: &str) -> RequestError {
    RequestError::new(ErrorKind::ModelNotLoaded, format!("model {model_id} is not loaded"))
}

pub fn count(value: u64) -> Result<usize, RequestError> {
    usize::try_from(value).map_err(|_| RequestError::new(ErrorKind::BadRequest, format!("{value} is too many")))
}

fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
