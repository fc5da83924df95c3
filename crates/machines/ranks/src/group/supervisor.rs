//! `Group`: the supervisor's one loop. It writes queued requests, reads replies and checks deadlines. `forming` forms
//! the group; `executor` implements [`Executor`](engine::Executor).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{SessionTable, StepPlan};
use model::{CheckpointDigest, Limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use tracing::{debug, warn};
use types::{Rank, WorldSize};

use super::deadlines::Deadlines;
use super::hosts::Hosts;
use super::launcher::Launcher;
use super::member::{Expected, Member, MemberPhase, Pending};
use super::process::Process;
use crate::protocol::limits::STATE_VALUES_MAX;
use crate::protocol::output::WireOutput;
use crate::protocol::plan::WirePlan;
use crate::protocol::shard::ShardSpec;
use crate::protocol::{ErrorKind, LineMessage, RankReply, RankRequest, clean, encode};
use crate::worker::build_id_of;
use collectives::EXCHANGE_ELEMENTS_MAX;
use collectives::shared_memory::{Epoch, GroupLimits, Segment, SegmentError};

/// How often the supervisor checks for stopped processes.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Descriptors that are polled without an allocation: two for each of eight ranks.
const POLLED: usize = 16;

/// Failures of one rank in a row after which its process is replaced, even if it replies.
const FAULTS_MAX: u32 = 2;

/// The configuration of a group.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub world: WorldSize,
    /// The binary that ranks run: this one, except in tests.
    pub program: PathBuf,
    pub model_id: String,
    pub shard: ShardSpec,
    /// The limits of `shard`.
    pub limits: Limits,
    pub vocab: usize,
    /// Columns of activations, for a stage of a chain.
    pub hidden: usize,
    /// Identifies the model's files here. Every rank must have read the same.
    pub digest: CheckpointDigest,
    pub deadlines: Deadlines,
    /// Environment variables of the ranks, beside those of this process.
    pub environment: Vec<(String, String)>,
    /// Where all ranks but rank 0 run; `None`: all run here and use shared memory.
    pub hosts: Option<Hosts>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("make the memory that ranks share")]
    Segment(#[from] SegmentError),
    #[error("start the thread that starts ranks")]
    Launcher(#[source] io::Error),
    #[error(
        "steps of {rows} rows of {hidden} activations are too large for ranks: {STATE_VALUES_MAX} values are the limit"
    )]
    StepTooLarge { rows: usize, hidden: usize },
    /// The rank cannot load the model; a new process would fail in the same way.
    #[error("rank {rank}: {message}")]
    Refused { rank: Rank, kind: ErrorKind, message: String },
    #[error("the group did not come together: {why}")]
    GaveUp { why: Arc<str> },
}

/// An executor made of rank processes.
#[derive(Debug)]
pub struct Group {
    pub(super) config: GroupConfig,
    build: String,
    launcher: Launcher,
    pub(super) segment: Segment,
    /// Ranks inherit it.
    pub(super) segment_fd: OwnedFd,
    pub(super) epoch: Epoch,
    pub(super) members: Vec<Member>,
    pub(super) sessions: SessionTable,
    pub(super) state: State,
    pub(super) flight: Option<StepInFlight>,
    pub(super) load_failure: Option<LoadFailure>,
    /// The plan of the previous step and its wire form, kept for their memory.
    pub(super) spare_plan: StepPlan,
    pub(super) wire_plan: WirePlan,
    /// Rank 0's reply to the previous step, kept for its memory.
    pub(super) spare_reply: Option<RankReply>,
    next_id: u64,
    line: Vec<u8>,
    checked_at: Instant,
    /// When the last `poll_once` ended.
    pub(super) polled_at: Instant,
    /// When the ranks' counters were last requested.
    pub(super) stats_asked_at: Instant,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Ready,
    /// `reported`: the engine knows that its sessions are gone.
    Forming {
        why: Arc<str>,
        reported: bool,
    },
}

/// A rank cannot load the model; a new process would fail in the same way.
#[derive(Clone, Debug)]
pub(super) struct LoadFailure {
    pub rank: Rank,
    pub kind: ErrorKind,
    pub message: String,
}

/// The step in flight.
#[derive(Debug)]
pub(super) struct StepInFlight {
    pub id: u64,
    pub plan: StepPlan,
    /// Rank 0's output.
    pub output: Option<WireOutput>,
    pub submitted: Instant,
}

impl Group {
    pub(super) fn new(config: GroupConfig) -> Result<Self, StartError> {
        let hosts = config.hosts.as_ref().map_or(&[][..], |hosts| &hosts.addresses);
        let (rows, hidden, is_stage) = (config.limits.step.rows, config.hidden, config.shard.layers.is_some());
        if is_stage && rows.saturating_mul(hidden) > STATE_VALUES_MAX {
            return Err(StartError::StepTooLarge { rows, hidden });
        }
        assert!(hosts.is_empty() || hosts.len() + 1 == config.world.get(), "a rank runs here, and one on each host");
        let member = |rank: Rank| Member::new(rank, rank.index().checked_sub(1).and_then(|i| hosts.get(i)).cloned());
        let members = config.world.ranks().map(member).collect();
        let limits = GroupLimits { world: config.world, elements_max: EXCHANGE_ELEMENTS_MAX };
        let (segment, fd) = Segment::create(limits)?;
        // A duplicate is not closed on exec, so that ranks inherit it under the same number.
        let segment_fd =
            rustix::io::dup(&fd).map_err(|errno| SegmentError::Io { what: "hand on", source: errno.into() })?;
        let launcher =
            Launcher::start(config.program.clone(), config.environment.clone()).map_err(StartError::Launcher)?;
        let now = Instant::now();
        Ok(Self {
            build: build_id_of(&config.program),
            launcher,
            epoch: segment.epoch(),
            segment,
            segment_fd,
            members,
            sessions: SessionTable::new(&config.limits, config.vocab),
            state: State::Forming { why: "it is being started".into(), reported: true },
            flight: None,
            load_failure: None,
            spare_plan: StepPlan::new(),
            wire_plan: WirePlan::default(),
            spare_reply: None,
            next_id: 0,
            line: Vec::new(),
            checked_at: now,
            polled_at: now,
            stats_asked_at: now,
            config,
        })
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready)
    }

    /// One iteration: waits until a rank replies or a deadline passes, but not beyond `until`.
    pub(super) fn poll_once(&mut self, until: Instant) {
        let deadlines = self.members.iter().filter_map(|member| member.pending.front().map(|pending| pending.deadline));
        let starts = self.members.iter().filter(|m| m.phase == MemberPhase::Absent).map(|member| member.restart_at);
        let now = Instant::now();
        let end = deadlines.chain(starts).chain([until, now + CHECK_INTERVAL]).min().unwrap_or(until);
        for (index, events) in self.wait(end.saturating_duration_since(now)) {
            if events.intersects(PollFlags::OUT | PollFlags::ERR) {
                self.flush(index);
            }
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                self.receive(index);
            }
            // `collect` waits for this output; the replies of other ranks can wait until the next iteration.
            if self.flight.as_ref().is_some_and(|flight| flight.output.is_some()) {
                break;
            }
        }
        self.check_deadlines();
        self.check_stopped();
        if !self.is_ready() {
            self.form();
        }
        self.polled_at = Instant::now();
    }

    /// Sends a request to one rank.
    pub(super) fn ask(&mut self, index: usize, request: impl FnOnce(u64) -> RankRequest, expected: Expected) {
        let id = self.claim_id();
        self.encode(&request(id));
        self.send(index, id, expected);
    }

    /// Sends the same request to all ranks.
    pub(super) fn ask_all(&mut self, request: impl FnOnce(u64) -> RankRequest, expected: Expected) -> u64 {
        let id = self.claim_id();
        self.encode(&request(id));
        (0..self.members.len()).for_each(|index| self.send(index, id, expected));
        id
    }

    /// Sends a step to all ranks. The plan's memory is kept for the next step.
    pub(super) fn send_step(&mut self, plan: WirePlan) -> u64 {
        let id = self.claim_id();
        let request = RankRequest::Step { id, plan };
        self.encode(&request);
        (0..self.members.len()).for_each(|index| self.send(index, id, Expected::Step));
        if let RankRequest::Step { plan, .. } = request {
            self.wire_plan = plan;
        }
        id
    }

    /// Starts a process for a rank and sends it the hello.
    pub(super) fn launch(&mut self, index: usize) {
        let Member { rank, host, .. } = &self.members[index];
        let started = match (host, &self.config.hosts) {
            (Some(host), Some(hosts)) => Process::remote(host, &hosts.key, *rank, &self.config.deadlines),
            _ => self.launcher.launch(*rank).and_then(Process::new),
        };
        match started {
            Ok(process) => {
                let pid = process.pid();
                let member = &mut self.members[index];
                (member.process, member.phase) = (Some(process), MemberPhase::Starting);
                if pid.is_some() {
                    member.started(pid);
                }
                let (protocol, build) = (crate::protocol::VERSION, self.build.clone());
                self.ask(index, |id| RankRequest::Hello { id, protocol, build }, Expected::Hello);
            }
            Err(error) => self.lose(index, &format!("it can not be started: {error}")),
        }
    }

    /// As [`Group::lose`], for a rank that cannot serve the model. During the start of the group that is final.
    pub(super) fn refuse(&mut self, index: usize, kind: ErrorKind, message: &str, why: &str) {
        let Member { rank, host, .. } = &self.members[index];
        let at = host.as_ref().map_or(String::new(), |host| format!("host {host}: "));
        self.load_failure = Some(LoadFailure { rank: *rank, kind, message: at + message });
        self.lose(index, why);
    }

    /// Kills a rank's process and aborts the epoch, so that the group forms anew.
    pub(super) fn lose(&mut self, index: usize, why: &str) {
        let rank = self.members[index].rank;
        self.members[index].dismiss();
        self.abort_epoch(rank, why);
    }

    fn claim_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn encode(&mut self, request: &RankRequest) {
        self.line.clear();
        if let Err(error) = encode(request, &mut self.line) {
            // No request comes near the limit. If one did, an empty line would be sent, and the request's deadline
            // would pass.
            warn!(op = request.op(), "{error}");
        }
    }

    fn send(&mut self, index: usize, id: u64, expected: Expected) {
        let deadlines = &self.config.deadlines;
        let limit = match expected {
            Expected::Hello => deadlines.start,
            Expected::Listening | Expected::Attached => deadlines.join,
            Expected::Loaded => deadlines.load,
            Expected::Step => deadlines.step,
            Expected::Opened { .. } | Expected::Truncated { .. } | Expected::Closed | Expected::Stats => {
                deadlines.session
            }
        };
        let member = &mut self.members[index];
        let Some(process) = &mut member.process else { return };
        let begun = Instant::now();
        member.pending.push_back(Pending { id, expected, deadline: begun + limit });
        let sent = process.send(&self.line);
        member.send_time += begun.elapsed();
        if let Err(error) = sent {
            self.lose_ended(index, &format!("it can not be written to: {error}"));
        }
    }

    fn wait(&self, limit: Duration) -> SmallVec<[(usize, PollFlags); POLLED]> {
        let mut owners = SmallVec::<[usize; POLLED]>::new();
        let mut fds = SmallVec::<[PollFd<'_>; POLLED]>::new();
        for (index, member) in self.members.iter().enumerate() {
            let Some(process) = &member.process else { continue };
            owners.push(index);
            fds.push(PollFd::from_borrowed_fd(process.output(), PollFlags::IN));
            if let Some(input) = process.input() {
                owners.push(index);
                fds.push(PollFd::from_borrowed_fd(input, PollFlags::OUT));
            }
        }
        let limit = Timespec::try_from(limit).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match poll(&mut fds, Some(&limit)) {
            // Interrupted by a signal, or short of kernel memory: the next iteration polls again.
            Err(_) => SmallVec::new(),
            Ok(_) => owners.into_iter().zip(fds.iter().map(PollFd::revents)).filter(|(_, e)| !e.is_empty()).collect(),
        }
    }

    fn flush(&mut self, index: usize) {
        if let Some(process) = &mut self.members[index].process
            && let Err(error) = process.flush()
        {
            self.lose_ended(index, &format!("it can not be written to: {error}"));
        }
    }

    fn receive(&mut self, index: usize) {
        let Some(process) = &mut self.members[index].process else { return };
        let received = process.receive();
        while let Some(process) = &mut self.members[index].process {
            // Only rank 0 returns more than an empty output.
            let spare = if index == 0 { &mut self.spare_reply } else { &mut None };
            match process.next_reply(spare) {
                None => break,
                Some(Ok(reply)) => self.handle_reply(index, reply),
                Some(Err(error)) => self.lose(index, &format!("it does not speak the protocol: {error}")),
            }
        }
        match received {
            Ok(true) => {}
            Ok(false) => self.lose_ended(index, "it closed its output"),
            Err(error) => self.lose(index, &format!("it can not be read from: {error}")),
        }
    }

    /// As [`Group::lose`], for a process that has most likely ended by itself.
    fn lose_ended(&mut self, index: usize, otherwise: &str) {
        let Some(process) = &mut self.members[index].process else { return };
        let why = process.exit_reason().unwrap_or_else(|| otherwise.to_owned());
        self.lose(index, &why);
    }

    fn handle_reply(&mut self, index: usize, reply: RankReply) {
        if matches!(reply, RankReply::Aborted { .. }) {
            return; // the reply to the aborted request is what counts; it comes before or after this one
        }
        let member = &mut self.members[index];
        let front = member.pending.front().copied();
        let (id, expected) = match (front, reply.id()) {
            (Some(Pending { id, expected, .. }), Some(own)) if own == id => (id, expected),
            (front, Some(late)) if late < front.map_or(self.next_id + 1, |pending| pending.id) => {
                return debug!(rank = member.rank.index(), id = late, "late reply dropped");
            }
            _ => return self.lose(index, &format!("it said {} without being asked", reply.op())),
        };
        debug!(rank = member.rank.index(), id, op = reply.op(), "reply");
        if let RankReply::Loading { layers, .. } = reply {
            member.layers = layers;
            member.pending[0].deadline = Instant::now() + self.config.deadlines.load;
            return;
        }
        member.pending.pop_front();
        match (reply, expected) {
            (RankReply::Error { kind, message, .. }, _) => self.handle_failure(index, expected, kind, &message),
            _ if self.members[index].phase == MemberPhase::Draining => self.members[index].left(),
            (reply, expected) => self.handle_success(index, reply, expected),
        }
    }

    fn handle_success(&mut self, index: usize, reply: RankReply, expected: Expected) {
        let is_right = match (reply, expected) {
            (RankReply::HelloOk { protocol, build, pid, .. }, Expected::Hello) => {
                let member = &mut self.members[index];
                return match crate::protocol::check_hello(&self.build, protocol, &build) {
                    Ok(()) => {
                        if member.host.is_some() {
                            member.started(Some(pid));
                        }
                        member.phase = MemberPhase::Idle;
                    }
                    Err(error) => self.lose(index, &error.to_string()),
                };
            }
            (RankReply::Listening { port, .. }, Expected::Listening) => {
                let member = &mut self.members[index];
                return (member.port, member.phase) = (port, MemberPhase::Listening);
            }
            (RankReply::AttachOk { .. }, Expected::Attached) => return self.joined(index),
            (RankReply::LoadOk { capacity, weight_bytes, head_bytes, kv_bytes, digest, .. }, Expected::Loaded) => {
                let member = &mut self.members[index];
                (member.layer_bytes, member.head_bytes) = (weight_bytes, head_bytes);
                (member.stats.weight_bytes, member.stats.kv_bytes) = (weight_bytes + head_bytes, kv_bytes);
                return self.loaded(index, capacity, &digest);
            }
            (RankReply::StepOk { id, output }, Expected::Step) => return self.stepped(index, id, output),
            (RankReply::StatsOk { stats, .. }, Expected::Stats) => {
                self.members[index].stats = stats;
                true
            }
            (RankReply::Opened { session, computed, .. }, Expected::Opened { session: own, computed: known }) => {
                (session, computed) == (own.0, known as u64)
            }
            (RankReply::Truncated { computed, .. }, Expected::Truncated { computed: known }) => {
                computed == known as u64
            }
            (RankReply::Closed { .. }, Expected::Closed) => true,
            _ => false,
        };
        if !is_right {
            self.lose(index, &format!("it has another answer to {} than its group", expected.request_name()));
        }
    }

    fn stepped(&mut self, index: usize, id: u64, output: WireOutput) {
        self.members[index].faults = 0;
        if let Some(flight) = self.flight.as_mut().filter(|flight| index == 0 && flight.id == id) {
            flight.output = Some(output);
        }
    }

    fn handle_failure(&mut self, index: usize, expected: Expected, kind: ErrorKind, message: &str) {
        let member = &mut self.members[index];
        let rank = member.rank;
        let why = clean(&format!("it failed at {}: {message}", expected.request_name()));
        // A rank that could not connect is not necessarily at fault: the other rank may not have accepted.
        let is_elsewhere = self.config.hosts.is_some() && kind == ErrorKind::NcclInitFailed;
        match (expected, kind) {
            // It left its collective because the epoch was aborted.
            _ if member.phase == MemberPhase::Draining => self.members[index].left(),
            // Another rank ended the epoch; its own error or end says why.
            (Expected::Attached, kind)
                if member.faults < FAULTS_MAX
                    && (is_elsewhere || matches!(kind, ErrorKind::Stale | ErrorKind::Aborted)) =>
            {
                member.faults += 1;
                self.abort_epoch(rank, &why);
            }
            (Expected::Step, ErrorKind::Aborted | ErrorKind::Stale) => self.abort_epoch(rank, &why),
            (Expected::Loaded, ErrorKind::LoadFailed | ErrorKind::UnsupportedArch | ErrorKind::BadRequest) => {
                self.refuse(index, kind, message, &why);
            }
            // The process works and reports an error: it keeps its weights, unless it fails again and again.
            (Expected::Step, _) if member.faults < FAULTS_MAX => {
                member.faults += 1;
                self.abort_epoch(rank, &why);
            }
            _ => self.lose(index, &why),
        }
    }

    /// Aborts the current epoch because of `rank`: all other ranks leave their collectives, and all sessions are gone.
    fn abort_epoch(&mut self, rank: Rank, why: &str) {
        let why: Arc<str> = format!("{}: {why}", self.members[rank.index()].name()).into();
        self.segment.abort(self.epoch).lost(rank);
        self.abort_hosts();
        let drained = Instant::now() + self.config.deadlines.drain;
        for member in &mut self.members {
            if matches!(
                member.phase,
                MemberPhase::Ready | MemberPhase::Joining | MemberPhase::ListenRequested | MemberPhase::Listening
            ) {
                member.leave(drained);
            }
        }
        self.sessions.clear();
        self.flight = None;
        match &mut self.state {
            State::Forming { why: first, .. } => {
                warn!("while the group forms anew: {why}");
                *first = why;
            }
            State::Ready => {
                warn!("the group forms anew: {why}");
                self.state = State::Forming { why, reported: false };
            }
        }
    }

    /// Sends the abort to ranks that do not map the segment.
    fn abort_hosts(&mut self) {
        if self.config.hosts.is_none() {
            return;
        }
        let (id, epoch) = (self.claim_id(), self.epoch.0);
        self.encode(&RankRequest::Abort { id, epoch });
        for member in &mut self.members {
            let may_wait = matches!(member.phase, MemberPhase::Ready | MemberPhase::Joining | MemberPhase::Loading);
            if let Some(process) = member.process.as_mut().filter(|_| may_wait) {
                // If the write fails, the next read from this process fails too, and is handled there.
                let _ = process.send(&self.line);
            }
        }
    }

    fn check_deadlines(&mut self) {
        let now = Instant::now();
        for index in 0..self.members.len() {
            let member = &self.members[index];
            let Some(&Pending { expected, .. }) = member.pending.front().filter(|pending| pending.deadline <= now)
            else {
                continue;
            };
            let why = format!("it did not answer {} in time", expected.request_name());
            let waits_for_others = member.phase == MemberPhase::Ready
                || (member.phase == MemberPhase::Joining && self.config.hosts.is_some());
            if waits_for_others {
                // The rank that the others wait for is named. Whether it has to be replaced shows in the drain: a rank
                // that only waited replies to the abort. Ranks on several hosts do not map the segment, so of them the
                // first one is named until the drain is over.
                let waited_for = self.segment.last_to_arrive(self.epoch).filter(|_| self.config.hosts.is_none());
                self.abort_epoch(waited_for.unwrap_or(member.rank), &why);
            } else {
                self.lose(index, &why);
            }
        }
    }

    fn check_stopped(&mut self) {
        let now = Instant::now();
        if now - self.checked_at < CHECK_INTERVAL {
            return;
        }
        self.checked_at = now;
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            let is_stopped = member.process.as_ref().is_some_and(Process::is_stopped);
            let since = *member.stopped.get_or_insert(now);
            if !is_stopped {
                member.stopped = None;
            } else if now - since >= self.config.deadlines.stopped {
                self.lose(index, "its process was stopped");
            }
        }
    }
}

impl Drop for Group {
    /// Asks all ranks to exit, and kills those that do not.
    fn drop(&mut self) {
        self.segment.abort(self.epoch).stop();
        self.abort_hosts();
        for request in [RankRequest::UnloadModel { model_id: self.config.model_id.clone() }, RankRequest::Shutdown] {
            self.encode(&request);
            for process in self.members.iter_mut().filter_map(|member| member.process.as_mut()) {
                let _ = process.send(&self.line); // the process may have ended already, so the error is ignored
            }
        }
        let end = Instant::now() + self.config.deadlines.shutdown;
        for member in &mut self.members {
            let Some(mut process) = member.process.take() else { continue };
            while !process.reap(Duration::from_millis(5)) && Instant::now() < end {
                let _ = (process.flush(), process.receive());
            }
            process.kill();
        }
        self.members.iter_mut().for_each(|member| member.pending = VecDeque::new());
    }
}
