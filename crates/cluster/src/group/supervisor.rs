//! `Group`: the supervisor's one loop. It writes what waits to be written, reads what the ranks say, and sees to deadlines;
//! how a group is put together is in `forming`, what it is good for in `executor`.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use engine::{SessionTable, StepPlan};
use model::Limits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use smallvec::SmallVec;
use tracing::{debug, warn};
use types::{Rank, WorldSize};

use super::deadlines::Deadlines;
use super::hosts::Hosts;
use super::launcher::Launcher;
use super::member::{Expected, Member, Pending, Phase};
use super::process::Process;
use crate::EXCHANGE_ELEMENTS_MAX;
use crate::protocol::output::WireOutput;
use crate::protocol::plan::WirePlan;
use crate::protocol::share::Share;
use crate::protocol::{ErrorKind, Message, Reply, Request, clean, encode};
use crate::shared_memory::{Epoch, GroupLimits, Segment, SegmentError};
use crate::worker::build_id_of;

/// How often ranks are looked at while nothing is heard of them.
const LOOK: Duration = Duration::from_millis(100);

/// Descriptors that are polled without an allocation: two for each of eight ranks.
const POLLED: usize = 16;

/// Failures of one rank in a row after which its process is not trusted any more, even if it answers.
const FAULTS_MAX: u32 = 2;

/// What a group runs, and how.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    pub world: WorldSize,
    /// What ranks run: this very binary, unless a test drives it from outside.
    pub program: PathBuf,
    pub model_id: String,
    pub share: Share,
    /// As in `share`.
    pub limits: Limits,
    pub vocab: usize,
    pub deadlines: Deadlines,
    /// For the ranks, beside what this process has in its own.
    pub environment: Vec<(String, String)>,
    /// Where all ranks but the first run; `None`: all run here, and share memory.
    pub hosts: Option<Hosts>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("make the memory that ranks share")]
    Segment(#[from] SegmentError),
    #[error("start the thread that starts ranks")]
    Launcher(#[source] io::Error),
    /// It would fail again in the same way.
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
    pub(super) flight: Option<Flight>,
    pub(super) refusal: Option<Refusal>,
    /// The plan of the step before, kept for its memory; likewise as it is sent.
    pub(super) spare_plan: StepPlan,
    pub(super) wire_plan: WirePlan,
    next_id: u64,
    line: Vec<u8>,
    looked: Instant,
    /// When the last turn ended.
    pub(super) turned: Instant,
    /// When the ranks were last asked for their counts.
    pub(super) counted: Instant,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Ready,
    /// `told`: whoever drives the group knows that its sessions are gone.
    Forming {
        why: Arc<str>,
        told: bool,
    },
}

/// A rank that said why it can not load, and would say so again.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub rank: Rank,
    pub kind: ErrorKind,
    pub message: String,
}

/// The step that runs.
#[derive(Debug)]
pub(super) struct Flight {
    pub id: u64,
    pub plan: StepPlan,
    /// What the first rank gave.
    pub output: Option<WireOutput>,
    pub submitted: Instant,
}

impl Group {
    pub(super) fn new(config: GroupConfig) -> Result<Self, StartError> {
        let hosts = config.hosts.as_ref().map_or(&[][..], |hosts| &hosts.addresses);
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
            state: State::Forming { why: "it is being started".into(), told: true },
            flight: None,
            refusal: None,
            spare_plan: StepPlan::new(),
            wire_plan: WirePlan::default(),
            next_id: 0,
            line: Vec::new(),
            looked: now,
            turned: now,
            counted: now,
            config,
        })
    }

    pub(super) fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready)
    }

    /// One turn: waits until a rank says something or a deadline passes, but not beyond `until`.
    pub(super) fn turn(&mut self, until: Instant) {
        let deadlines = self.members.iter().filter_map(|member| member.pending.front().map(|pending| pending.deadline));
        let starts = self.members.iter().filter(|m| m.phase == Phase::Absent).map(|member| member.not_before);
        let now = Instant::now();
        let end = deadlines.chain(starts).chain([until, now + LOOK]).min().unwrap_or(until);
        for (index, events) in self.wait(end.saturating_duration_since(now)) {
            if events.intersects(PollFlags::OUT | PollFlags::ERR) {
                self.flush(index);
            }
            if events.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) {
                self.receive(index);
            }
            // What the step gave is waited for. What others say about it can wait until the next turn.
            if self.flight.as_ref().is_some_and(|flight| flight.output.is_some()) {
                break;
            }
        }
        self.check_deadlines();
        self.check_stopped();
        if !self.is_ready() {
            self.form();
        }
        self.turned = Instant::now();
    }

    /// Asks one rank.
    pub(super) fn ask(&mut self, index: usize, request: impl FnOnce(u64) -> Request, expected: Expected) {
        let id = self.claim_id();
        self.encode(&request(id));
        self.send(index, id, expected);
    }

    /// Asks all ranks the same.
    pub(super) fn ask_all(&mut self, request: impl FnOnce(u64) -> Request, expected: Expected) -> u64 {
        let id = self.claim_id();
        self.encode(&request(id));
        (0..self.members.len()).for_each(|index| self.send(index, id, expected));
        id
    }

    /// Sends all ranks a step. The plan's memory is kept for the next one.
    pub(super) fn send_step(&mut self, plan: WirePlan) -> u64 {
        let id = self.claim_id();
        let request = Request::Step { id, plan };
        self.encode(&request);
        (0..self.members.len()).for_each(|index| self.send(index, id, Expected::Step));
        if let Request::Step { plan, .. } = request {
            self.wire_plan = plan;
        }
        id
    }

    /// Starts a process for a rank and greets it.
    pub(super) fn launch(&mut self, index: usize) {
        let Member { rank, host, .. } = &self.members[index];
        let started = match (host, &self.config.hosts) {
            (Some(host), Some(hosts)) => Process::elsewhere(host, &hosts.key, *rank, &self.config.deadlines),
            _ => self.launcher.launch(*rank).and_then(Process::new),
        };
        match started {
            Ok(process) => {
                let pid = process.pid();
                let member = &mut self.members[index];
                (member.process, member.phase) = (Some(process), Phase::Greeting);
                if pid.is_some() {
                    member.started(pid);
                }
                let (protocol, build) = (crate::protocol::VERSION, self.build.clone());
                self.ask(index, |id| Request::Hello { id, protocol, build }, Expected::Hello);
            }
            Err(error) => self.lose(index, &format!("it can not be started: {error}")),
        }
    }

    /// Gives a rank up: its process is ended, and the group has to form anew.
    pub(super) fn lose(&mut self, index: usize, why: &str) {
        let rank = self.members[index].rank;
        self.members[index].dismiss();
        self.abort_epoch(rank, why);
    }

    fn claim_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn encode(&mut self, request: &Request) {
        self.line.clear();
        if let Err(error) = encode(request, &mut self.line) {
            // No request of ours comes near the limit: an empty line is passed over, and the deadline passes.
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
            // Interrupted by a signal, or out of kernel memory for a moment: the next turn sees more.
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
            match process.next_reply() {
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
        let why = process.ending().unwrap_or_else(|| otherwise.to_owned());
        self.lose(index, &why);
    }

    /// Takes in a reply.
    fn handle_reply(&mut self, index: usize, reply: Reply) {
        if matches!(reply, Reply::Aborted { .. }) {
            return; // it comes before or after what it cuts short, which is what counts
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
        if let Reply::Loading { layers, .. } = reply {
            member.layers = layers;
            member.pending[0].deadline = Instant::now() + self.config.deadlines.load;
            return;
        }
        member.pending.pop_front();
        match (reply, expected) {
            (Reply::Error { kind, message, .. }, _) => self.handle_failure(index, expected, kind, &message),
            _ if self.members[index].phase == Phase::Draining => self.members[index].left(),
            (reply, expected) => self.handle_answer(index, reply, expected),
        }
    }

    fn handle_answer(&mut self, index: usize, reply: Reply, expected: Expected) {
        let is_right = match (reply, expected) {
            (Reply::HelloOk { protocol, build, pid, .. }, Expected::Hello) => {
                let member = &mut self.members[index];
                return match crate::protocol::check_hello(&self.build, protocol, &build) {
                    Ok(()) => {
                        if member.host.is_some() {
                            member.started(Some(pid));
                        }
                        member.phase = Phase::Outside;
                    }
                    Err(error) => self.lose(index, &error.to_string()),
                };
            }
            (Reply::Listening { port, .. }, Expected::Listening) => {
                let member = &mut self.members[index];
                return (member.port, member.phase) = (port, Phase::Listening);
            }
            (Reply::AttachOk { .. }, Expected::Attached) => return self.joined(index),
            (Reply::LoadOk { capacity, weight_bytes, head_bytes, kv_bytes, .. }, Expected::Loaded) => {
                let member = &mut self.members[index];
                (member.layer_bytes, member.head_bytes) = (weight_bytes, head_bytes);
                (member.stats.weight_bytes, member.stats.kv_bytes) = (weight_bytes + head_bytes, kv_bytes);
                return self.loaded(index, capacity);
            }
            (Reply::StepOk { id, output }, Expected::Step) => return self.stepped(index, id, output),
            (Reply::StatsOk { stats, .. }, Expected::Stats) => {
                self.members[index].stats = stats;
                true
            }
            (Reply::Opened { session, computed, .. }, Expected::Opened { session: own, computed: known }) => {
                (session, computed) == (own.0, known as u64)
            }
            (Reply::Truncated { computed, .. }, Expected::Truncated { computed: known }) => computed == known as u64,
            (Reply::Closed { .. }, Expected::Closed) => true,
            _ => false,
        };
        if !is_right {
            self.lose(index, &format!("it has another answer to {} than its group", expected.question()));
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
        let why = clean(&format!("it failed at {}: {message}", expected.question()));
        // Who could not connect may be the one that was not answered.
        let is_elsewhere = self.config.hosts.is_some() && kind == ErrorKind::NcclInitFailed;
        match (expected, kind) {
            // It gave way, as it was told to.
            _ if member.phase == Phase::Draining => self.members[index].left(),
            // Somebody else ended the epoch, which is heard of from them.
            (Expected::Attached, kind)
                if member.faults < FAULTS_MAX
                    && (is_elsewhere || matches!(kind, ErrorKind::Stale | ErrorKind::Aborted)) =>
            {
                member.faults += 1;
                self.abort_epoch(rank, &why);
            }
            (Expected::Step, ErrorKind::Aborted | ErrorKind::Stale) => self.abort_epoch(rank, &why),
            (Expected::Loaded, ErrorKind::LoadFailed | ErrorKind::UnsupportedArch | ErrorKind::BadRequest) => {
                let at = member.host.as_ref().map_or(String::new(), |host| format!("host {host}: "));
                self.refusal = Some(Refusal { rank, kind, message: at + message });
                self.lose(index, &why);
            }
            // It is in its senses and says what went wrong: it keeps its weights, unless that happens again and again.
            (Expected::Step, _) if member.faults < FAULTS_MAX => {
                member.faults += 1;
                self.abort_epoch(rank, &why);
            }
            _ => self.lose(index, &why),
        }
    }

    /// Ends the present epoch because of a rank: all others leave what they do together, and every session is gone.
    fn abort_epoch(&mut self, rank: Rank, why: &str) {
        let why: Arc<str> = format!("{}: {why}", self.members[rank.index()].name()).into();
        self.segment.abort(self.epoch).lost(rank);
        self.abort_hosts();
        let drained = Instant::now() + self.config.deadlines.drain;
        for member in &mut self.members {
            if matches!(member.phase, Phase::Ready | Phase::Joining | Phase::Calling | Phase::Listening) {
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
                self.state = State::Forming { why, told: false };
            }
        }
    }

    /// Tells ranks that share no memory what the segment tells the others.
    fn abort_hosts(&mut self) {
        if self.config.hosts.is_none() {
            return;
        }
        let (id, epoch) = (self.claim_id(), self.epoch.0);
        self.encode(&Request::Abort { id, epoch });
        for member in &mut self.members {
            let may_wait = matches!(member.phase, Phase::Ready | Phase::Joining | Phase::Loading);
            if let Some(process) = member.process.as_mut().filter(|_| may_wait) {
                // One that can not be written to is found when it is read from.
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
            let why = format!("it did not answer {} in time", expected.question());
            let waits_for_others =
                member.phase == Phase::Ready || (member.phase == Phase::Joining && self.config.hosts.is_some());
            if waits_for_others {
                // Who is to blame, and who only waited for that one, shows when all are told to give way.
                self.abort_epoch(member.rank, &why);
            } else {
                self.lose(index, &why);
            }
        }
    }

    fn check_stopped(&mut self) {
        let now = Instant::now();
        if now - self.looked < LOOK {
            return;
        }
        self.looked = now;
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
    /// Tells all ranks to end, and ends those that do not.
    fn drop(&mut self) {
        self.segment.abort(self.epoch).stop();
        self.abort_hosts();
        for request in [Request::UnloadModel { model_id: self.config.model_id.clone() }, Request::Shutdown] {
            self.encode(&request);
            for process in self.members.iter_mut().filter_map(|member| member.process.as_mut()) {
                let _ = process.send(&self.line); // one that is gone need not be told
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
