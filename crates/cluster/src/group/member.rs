//! `Member`: one rank as its supervisor knows it: how far it is, what it has been asked, and who it is at present.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use engine::RankReport;
use tracing::info;
use types::{Rank, SessionId};

use super::process::Process;
use crate::protocol::session::RankStats;

/// The longest wait before a rank that keeps failing is started once more.
const PAUSE_MAX: Duration = Duration::from_secs(10);
const PAUSE_FIRST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Member {
    pub rank: Rank,
    /// Where it runs, if that is not here.
    pub host: Option<String>,
    pub phase: Phase,
    pub process: Option<Process>,
    /// Where ranks of other hosts find it, once it listens.
    pub port: u16,
    /// What it has been asked and has not answered, in order.
    pub pending: VecDeque<Pending>,
    /// It holds its share of the weights.
    pub loaded: bool,
    /// Layers that it has loaded so far.
    pub layers: u64,
    /// Since when it was seen to be stopped.
    pub stopped: Option<Instant>,
    /// Failures since a step last went well.
    pub faults: u32,
    /// When it may be started.
    pub not_before: Instant,
    pub starts: u64,
    pub stats: RankStats,
    /// Of its weights.
    pub layer_bytes: u64,
    pub head_bytes: u64,
    pub send_time: Duration,
    /// When it was told to leave what it did.
    pub told_to_leave: Option<Instant>,
    pub drains: u64,
    pub drain_max: Duration,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// There is no process.
    Absent,
    /// It was started and has not said who it is.
    Greeting,
    /// It was asked something when the group was aborted, and has not answered.
    Draining,
    /// It waits to join an epoch.
    Outside,
    /// It was told to listen to ranks of other hosts.
    Calling,
    /// It listens, and waits for all others to do so.
    Listening,
    Joining,
    Loading,
    Ready,
}

impl Phase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Greeting => "starting",
            Self::Draining => "draining",
            Self::Outside | Self::Calling | Self::Listening | Self::Joining => "joining",
            Self::Loading => "loading",
            Self::Ready => "ready",
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Pending {
    pub id: u64,
    pub expected: Expected,
    pub deadline: Instant,
}

/// What the answer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expected {
    Hello,
    Listening,
    Attached,
    Loaded,
    Opened { session: SessionId, computed: usize },
    Truncated { computed: usize },
    Closed,
    Step,
    Stats,
}

impl Expected {
    /// What was asked, for people.
    pub fn question(self) -> &'static str {
        match self {
            Self::Hello => "the greeting",
            Self::Listening => "the call to listen",
            Self::Attached => "the call to join",
            Self::Loaded => "the call to load",
            Self::Opened { .. } | Self::Truncated { .. } | Self::Closed => "a change of sessions",
            Self::Step => "a step",
            Self::Stats => "the call for its counts",
        }
    }
}

impl Member {
    pub fn new(rank: Rank, host: Option<String>) -> Self {
        Self {
            rank,
            host,
            phase: Phase::Absent,
            process: None,
            port: 0,
            pending: VecDeque::new(),
            loaded: false,
            layers: 0,
            stopped: None,
            faults: 0,
            not_before: Instant::now(),
            starts: 0,
            stats: RankStats::default(),
            layer_bytes: 0,
            head_bytes: 0,
            send_time: Duration::ZERO,
            told_to_leave: None,
            drains: 0,
            drain_max: Duration::ZERO,
        }
    }

    /// It has a process, which for a rank elsewhere is known when it answers.
    pub fn started(&mut self, pid: Option<u32>) {
        info!(rank = self.rank.index(), pid, host = self.host, "rank started");
        self.starts += 1;
    }

    /// For people.
    pub fn name(&self) -> String {
        let rank = self.rank.index();
        self.host.as_ref().map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"))
    }

    /// The epoch is over: it has to answer what it was asked, before `deadline`, and do nothing else.
    pub fn leave(&mut self, deadline: Instant) {
        self.phase = if self.pending.is_empty() { Phase::Outside } else { Phase::Draining };
        // Also where the time for an answer is up already: who waited for others answers when told to give way.
        self.pending.iter_mut().for_each(|pending| pending.deadline = deadline);
        self.told_to_leave = Some(Instant::now());
    }

    /// It answered, while it was leaving.
    pub fn left(&mut self) {
        if self.pending.is_empty() {
            self.phase = Phase::Outside;
            let took = self.told_to_leave.take().map_or(Duration::ZERO, |told| told.elapsed());
            self.drains += 1;
            self.drain_max = self.drain_max.max(took);
        }
    }

    /// Ends its process. The next one may start after a pause that grows with the failures.
    pub fn dismiss(&mut self) {
        if let Some(process) = self.process.take() {
            // Its host had started it, though it never answered.
            self.starts += u64::from(self.phase == Phase::Greeting && process.route().is_some());
            process.kill();
        }
        self.phase = Phase::Absent;
        self.pending.clear();
        (self.loaded, self.layers, self.stopped) = (false, 0, None);
        let pause = match self.faults {
            0 => Duration::ZERO,
            faults => PAUSE_FIRST.saturating_mul(1 << (faults - 1).min(10)).min(PAUSE_MAX),
        };
        self.faults = self.faults.saturating_add(1);
        self.not_before = Instant::now() + pause;
    }

    pub fn report(&self) -> RankReport {
        let RankStats { weight_bytes, kv_bytes, resident_bytes, steps, step_us, collective_us, .. } = self.stats;
        RankReport {
            rank: self.rank,
            pid: self.process.as_ref().and_then(Process::pid),
            ready: self.phase == Phase::Ready,
            state: self.phase.name(),
            restarts: self.starts.saturating_sub(1),
            weight_bytes,
            kv_bytes,
            resident_bytes,
            steps,
            step_time: Duration::from_micros(step_us),
            wait_time: Duration::from_micros(collective_us),
            send_time: self.send_time,
            drains: self.drains,
            drain_max: self.drain_max,
        }
    }
}
