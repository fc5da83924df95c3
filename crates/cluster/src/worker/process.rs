//! `Process`: a rank's state, and what each request does to it. One request at a time; whatever happens in one, it is
//! answered and the next is served.

mod group;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use types::Rank;

use super::Options;
use super::dense::{Dense, Parts};
use super::fault::{Deed, Fault, Point};
use super::outlet::Outlet;
use super::queue::{Queue, Work};
use super::refusal::Refusal;
use super::share::LoadedShare;
use crate::collective::GroupCollective;
use crate::protocol::session::RankStats;
use crate::protocol::share::Share;
use crate::protocol::{ErrorKind, Message as _, Reply, Request, VERSION, WriteError, check_hello};
use crate::shared_memory::Generation;

/// The least time between two `loading` lines.
const LOADING_EVERY: Duration = Duration::from_millis(100);

pub struct Process {
    rank: Rank,
    cuda_device: u32,
    build: String,
    fault: Option<Fault>,
    outlet: Outlet,
    link: GroupCollective,
    /// What `load` loaded.
    share: Option<LoadedShare>,
    /// What `load_dense_shard` loaded, by `model_id`.
    dense: BTreeMap<String, Dense>,
    init_deadline: Duration,
    threads_max: u64,
    /// Where the ranks of other hosts call, until the group is joined.
    listener: Option<TcpListener>,
    steps: u64,
    stepping: Duration,
}

impl Process {
    pub fn new(options: Options, outlet: Outlet, link: GroupCollective) -> Self {
        let Options { rank, cuda_device, build, init_deadline, threads_max, fault } = options;
        Self {
            rank,
            cuda_device,
            build,
            fault,
            outlet,
            link,
            share: None,
            dense: BTreeMap::new(),
            init_deadline,
            threads_max: threads_max.map_or(u64::MAX, |max| max.get() as u64),
            listener: None,
            steps: 0,
            stepping: Duration::ZERO,
        }
    }

    /// Works off requests until one is `shutdown` or the queue has ended. An error: nobody takes the answers.
    pub fn serve(mut self, queue: &Queue) -> Result<(), WriteError> {
        self.unasked(Point::Spawn)?;
        loop {
            if self.is_idle() && queue.is_empty() {
                self.unasked(Point::Idle)?;
            }
            match queue.pop() {
                None => return Ok(()),
                Some(Work::Answer(reply)) => self.outlet.write(&reply)?,
                Some(Work::Run(request)) => {
                    let is_last = request == Request::Shutdown;
                    self.answer(request)?;
                    if is_last {
                        return Ok(());
                    }
                }
            }
        }
    }

    fn answer(&mut self, request: Request) -> Result<(), WriteError> {
        let (op, id, begun) = (request.op(), request.id(), Instant::now());
        let point = point(&request);
        let deed = point.and_then(|point| self.strike(point));
        if deed == Some(Deed::CloseStdout) {
            self.outlet.close();
        }
        let done = if deed == Some(Deed::Oom) { Err(self.starve(point)) } else { self.handle_safely(request, deed) };
        if let Some(fault) = self.fault.as_ref().filter(|_| deed == Some(Deed::Slow)) {
            thread::sleep(fault.delay(begun.elapsed()));
        }
        if deed == Some(Deed::Garbage) {
            return self.outlet.garble();
        }
        debug!(rank = self.rank.index(), op, id, took = ?begun.elapsed(), "served");
        let reply = done.unwrap_or_else(|Refusal { kind, message }| {
            warn!(rank = self.rank.index(), op, id, ?kind, message, "refused");
            Reply::error(id, kind, &message)
        });
        self.outlet.write(&reply)
    }

    /// A panic becomes a refusal. The models' sessions may be half-changed then: they are closed.
    fn handle_safely(&mut self, request: Request, deed: Option<Deed>) -> Result<Reply, Refusal> {
        let kind = match request {
            Request::Load { .. } | Request::LoadDenseShard { .. } => ErrorKind::LoadFailed,
            _ => ErrorKind::ForwardFailed,
        };
        let handle = || {
            assert_ne!(deed, Some(Deed::Panic), "a fault that was asked for");
            self.handle(request)
        };
        catch_unwind(AssertUnwindSafe(handle)).unwrap_or_else(|_| {
            self.link.abandon();
            self.forget_sessions();
            Err(Refusal::new(kind, "a panic: see the log of the rank"))
        })
    }

    fn handle(&mut self, request: Request) -> Result<Reply, Refusal> {
        match request {
            Request::Ping => {
                let (rank, world_size) = (self.rank.index() as u16, self.rank.world().get() as u16);
                Ok(Reply::Pong { rank, world_size, cuda_device: self.cuda_device })
            }
            Request::Init { comm_id } => self.init(&comm_id),
            Request::NcclSanityCheck => self.sanity_check(),
            Request::LoadDenseShard { model_id, config_json, safetensors_paths, quant } => {
                let parts = Parts { config: &config_json, files: &safetensors_paths, quant: quant.as_deref() };
                self.load_dense(model_id, &parts)
            }
            Request::GenerateStep { model_id, tokens, offset } => {
                let tokens = self.dense(&model_id)?.prepare(&tokens, offset)?;
                self.step(|process| process.dense(&model_id)?.step(&tokens))?;
                Ok(Reply::GenerateStepOk)
            }
            Request::GenerateStepWithImages { model_id, .. } => {
                self.dense(&model_id)?;
                Err(Refusal::new(ErrorKind::ForwardFailed, "images are not supported"))
            }
            Request::ClearKvCache { model_id } => {
                self.dense(&model_id)?.clear();
                Ok(Reply::KvCacheCleared)
            }
            Request::UnloadModel { model_id } => self.unload(&model_id),
            Request::Shutdown => Ok(Reply::Bye),

            Request::Hello { id, protocol, build } => self.hello(id, protocol, &build),
            Request::Attach { id, segment_fd, world_size, rank, elements_max, generation } => {
                self.check_place(world_size, rank)?;
                self.attach(segment_fd, elements_max, Generation(generation))?;
                Ok(Reply::AttachOk { id })
            }
            Request::Listen { id, host } => self.listen(id, host),
            Request::Join { id, world_size, rank, generation, addresses, key, encoding, patience } => {
                self.check_place(world_size, rank)?;
                self.join(Generation(generation), &addresses, &key, encoding, patience)?;
                Ok(Reply::AttachOk { id })
            }
            Request::Load { id, model_id, share } => self.load(id, model_id, share),
            Request::Open { id, tokens_max, prefix } => {
                let opened = self.share()?.open(tokens_max, &prefix)?;
                Ok(Reply::Opened { id, session: opened.session.0, computed: opened.computed as u64 })
            }
            Request::Truncate { id, session, tokens } => {
                Ok(Reply::Truncated { id, computed: self.share()?.truncate(session, tokens)? as u64 })
            }
            Request::Close { id, session } => {
                self.share()?.close(session);
                Ok(Reply::Closed { id })
            }
            Request::Step { id, plan } => {
                self.share()?.prepare(&plan)?;
                let output = self.step(|process| process.share()?.step())?;
                Ok(Reply::StepOk { id, output })
            }
            Request::Stats { id } => Ok(Reply::StatsOk { id, stats: self.stats() }),
            Request::Cancel { .. } | Request::Abort { .. } => unreachable!("the reading thread answers these"),
        }
    }

    fn load_dense(&mut self, model_id: String, parts: &Parts<'_>) -> Result<Reply, Refusal> {
        self.check_unused(&model_id)?;
        let dense = Dense::load(parts, self.rank, self.link.clone())?;
        info!(rank = self.rank.index(), model = model_id, "loaded");
        self.dense.insert(model_id, dense);
        Ok(Reply::LoadDenseShardOk)
    }

    fn dense(&mut self, model_id: &str) -> Result<&mut Dense, Refusal> {
        self.dense.get_mut(model_id).ok_or_else(|| not_loaded(model_id))
    }

    fn check_unused(&self, model_id: &str) -> Result<(), Refusal> {
        let is_share = self.share.as_ref().is_some_and(|share| share.model_id() == model_id);
        if is_share || self.dense.contains_key(model_id) {
            return Err(Refusal::new(ErrorKind::AlreadyLoaded, format!("model {model_id} is loaded")));
        }
        Ok(())
    }

    fn hello(&self, id: u64, protocol: u32, build: &str) -> Result<Reply, Refusal> {
        check_hello(&self.build, protocol, build).map_err(|error| Refusal::of(ErrorKind::BadRequest, &error))?;
        Ok(Reply::HelloOk { id, protocol: VERSION, build: self.build.clone(), pid: std::process::id() })
    }

    fn load(&mut self, id: u64, model_id: String, mut share: Share) -> Result<Reply, Refusal> {
        self.check_unused(&model_id)?;
        if let Some(loaded) = &self.share {
            let message = format!("sessions and steps are those of model {}", loaded.model_id());
            return Err(Refusal::new(ErrorKind::AlreadyLoaded, message));
        }
        let (outlet, mut told) = (self.outlet.clone(), Instant::now());
        let mut progress = |layers: usize| {
            if told.elapsed() >= LOADING_EVERY {
                told = Instant::now();
                // If nobody takes it, the last reply will show.
                let _ = outlet.write(&Reply::Loading { id, layers: layers as u64 });
            }
        };
        let begun = Instant::now();
        share.cpu.threads = share.cpu.threads.min(self.threads_max);
        let loaded = LoadedShare::load(model_id, &share, self.rank, self.link.clone(), &mut progress)?;
        info!(rank = self.rank.index(), model = loaded.model_id(), took = ?begun.elapsed(), "loaded");
        let reply = loaded.load_ok(id);
        self.share = Some(loaded);
        Ok(reply)
    }

    fn unload(&mut self, model_id: &str) -> Result<Reply, Refusal> {
        let was_share = self.share.take_if(|share| share.model_id() == model_id).is_some();
        if was_share || self.dense.remove(model_id).is_some() { Ok(Reply::Unloaded) } else { Err(not_loaded(model_id)) }
    }

    fn share(&mut self) -> Result<&mut LoadedShare, Refusal> {
        self.share.as_mut().ok_or_else(|| Refusal::new(ErrorKind::ModelNotLoaded, "no model is loaded"))
    }

    /// Runs a step, timed. If it fails, the generation is over: the others shall not wait for this rank.
    fn step<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, Refusal>) -> Result<T, Refusal> {
        if !self.link.is_complete() {
            return Err(Refusal::new(ErrorKind::NcclNotInitialised, "the rank has no seat in a group"));
        }
        let begun = Instant::now();
        let result = run(self);
        self.steps += 1;
        self.stepping += begun.elapsed();
        if result.is_err() {
            self.link.abandon();
        }
        result
    }

    fn forget_sessions(&mut self) {
        if let Some(share) = &mut self.share {
            share.regroup(self.link.clone());
        }
        self.dense.values_mut().for_each(|dense| dense.regroup(self.link.clone()));
    }

    fn stats(&self) -> RankStats {
        let (collectives, collective_us) = self.link.spent();
        RankStats {
            generation: self.link.generation().map_or(0, |generation| generation.0),
            sessions: self.sum(LoadedShare::sessions, Dense::sessions),
            weight_bytes: self.sum(LoadedShare::weight_bytes, Dense::weight_bytes),
            kv_bytes: self.sum(LoadedShare::kv_bytes, Dense::kv_bytes),
            resident_bytes: resident_bytes().unwrap_or(0),
            steps: self.steps,
            collectives,
            step_us: self.stepping.as_micros() as u64,
            collective_us,
            capacity: self.share.as_ref().map(|share| share.capacity().into()),
        }
    }

    /// Over all models.
    fn sum(&self, share: impl Fn(&LoadedShare) -> u64, dense: impl Fn(&Dense) -> u64) -> u64 {
        self.share.as_ref().map_or(0, share) + self.dense.values().map(dense).sum::<u64>()
    }

    fn is_idle(&self) -> bool {
        self.steps > 0 && self.share.as_ref().is_some_and(|share| share.sessions() == 0)
    }

    fn strike(&mut self, point: Point) -> Option<Deed> {
        self.fault.as_mut()?.strike(self.rank, point)
    }

    /// A fault where there is nothing to answer.
    fn unasked(&mut self, point: Point) -> Result<(), WriteError> {
        match self.strike(point) {
            Some(Deed::Garbage) => self.outlet.garble(),
            Some(Deed::CloseStdout) => {
                self.outlet.close();
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// As if memory had run out, which ends a step like any other error.
    fn starve(&self, point: Option<Point>) -> Refusal {
        if point == Some(Point::Step) {
            self.link.abandon();
        }
        Refusal::new(ErrorKind::InsufficientMemory, "not enough memory (a fault that was asked for)")
    }
}

fn point(request: &Request) -> Option<Point> {
    match request {
        Request::Attach { .. } | Request::Join { .. } | Request::Init { .. } => Some(Point::Init),
        Request::Load { .. } | Request::LoadDenseShard { .. } => Some(Point::Load),
        Request::Step { .. } | Request::GenerateStep { .. } => Some(Point::Step),
        Request::UnloadModel { .. } | Request::Shutdown => Some(Point::Unload),
        _ => None,
    }
}

fn not_loaded(model_id: &str) -> Refusal {
    Refusal::new(ErrorKind::ModelNotLoaded, format!("model {model_id} is not loaded"))
}

pub fn count(value: u64) -> Result<usize, Refusal> {
    usize::try_from(value).map_err(|_| Refusal::new(ErrorKind::BadRequest, format!("{value} is too many")))
}

fn resident_bytes() -> Option<u64> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
