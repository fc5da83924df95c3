//! `Process`: a rank's state, and what each request does to it. It handles one request at a time. Whatever happens in
//! one, it sends a reply and handles the next.

#[cfg(debug_assertions)]
mod faults;
mod group;

use std::fs;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use tracing::{debug, info, warn};
use types::Rank;

use super::Options;
#[cfg(debug_assertions)]
use super::fault::{Fault, Point};
use super::neuron::NeuronState;
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
    pub(super) rank: Rank,
    cuda_device: u32,
    build: String,
    #[cfg(debug_assertions)]
    fault: Option<Fault>,
    replies: ReplyWriter,
    pub(super) collective: GroupCollective,
    /// The model of `load`.
    shard: Option<LoadedShard>,
    /// What a foreign leader has asked for.
    pub(super) neuron: NeuronState,
    pub(super) threads_max: usize,
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
            neuron: NeuronState::new(init_timeout, collective_timeout),
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
        debug!(rank = self.rank.index(), op, id, seconds = begun.elapsed().as_secs_f64(), "served");
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
            warn!(rank = self.rank.index(), op, id, "refused: {message}");
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
            RankRequest::Init { .. }
            | RankRequest::NcclSanityCheck
            | RankRequest::LoadDenseShard { .. }
            | RankRequest::GenerateStep { .. }
            | RankRequest::GenerateStepWithImages { .. }
            | RankRequest::ClearKvCache { .. } => self.handle_neuron(request),
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

    pub(super) fn check_unused(&self, model_id: &str) -> Result<(), RequestError> {
        let is_shard = self.shard.as_ref().is_some_and(|shard| shard.model_id() == model_id);
        if is_shard || self.neuron.has_model(model_id) {
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
        info!(rank = self.rank.index(), model = loaded.model_id(), seconds = begun.elapsed().as_secs_f64(), "loaded");
        let reply = loaded.load_ok(id);
        self.shard = Some(loaded);
        Ok(reply)
    }

    fn unload(&mut self, model_id: &str) -> Result<RankReply, RequestError> {
        let was_shard = self.shard.take_if(|shard| shard.model_id() == model_id).is_some();
        if was_shard || self.neuron.unload(model_id) { Ok(RankReply::Unloaded) } else { Err(not_loaded(model_id)) }
    }

    fn shard(&mut self) -> Result<&mut LoadedShard, RequestError> {
        self.shard.as_mut().ok_or_else(|| RequestError::new(ErrorKind::ModelNotLoaded, "no model is loaded"))
    }

    /// Runs a step and counts its time. If it fails, the epoch is aborted, so that the other ranks do not wait for this
    /// one.
    pub(super) fn step<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<T, RequestError>,
    ) -> Result<T, RequestError> {
        if !self.collective.is_complete() {
            return Err(RequestError::new(ErrorKind::NcclNotInitialised, "the rank is in no group"));
        }
        let begun = Instant::now();
        let result = {
            let _stepping = self.neuron.stepping();
            run(self)
        };
        self.steps += 1;
        self.stepping += begun.elapsed();
        if result.is_err() {
            self.collective.abandon();
        }
        result.map_err(|error| match error.kind {
            ErrorKind::Aborted => self.neuron.why_ended().unwrap_or(error),
            _ => error,
        })
    }

    pub(super) fn forget_sessions(&mut self) {
        if let Some(shard) = &mut self.shard {
            shard.regroup(self.collective.clone());
        }
        self.neuron.regroup(&self.collective);
    }

    fn stats(&self) -> RankStats {
        let (collectives, collective_us) = self.collective.spent();
        RankStats {
            epoch: self.collective.epoch().map_or(0, |epoch| epoch.0),
            sessions: self.of_shard(LoadedShard::sessions) + self.neuron.sessions(),
            weight_bytes: self.of_shard(LoadedShard::weight_bytes) + self.neuron.weight_bytes(),
            kv_bytes: self.of_shard(LoadedShard::kv_bytes) + self.neuron.kv_bytes(),
            resident_bytes: resident_bytes().unwrap_or(0),
            steps: self.steps,
            collectives,
            step_us: self.stepping.as_micros() as u64,
            collective_us,
            capacity: self.shard.as_ref().map(|shard| shard.capacity().into()),
        }
    }

    /// Of the model of `load`.
    fn of_shard(&self, shard: impl Fn(&LoadedShard) -> u64) -> u64 {
        self.shard.as_ref().map_or(0, shard)
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

pub(super) fn not_loaded(model_id: &str) -> RequestError {
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
