//! `Member`: the supervisor's state of one rank: its phase, its pending requests and its process.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use engine::RankReport;
use tracing::info;
use types::{Rank, SessionId};

use super::process::Process;
use crate::protocol::session::RankStats;

/// The longest wait before a rank that keeps failing is restarted.
const PAUSE_MAX: Duration = Duration::from_secs(10);
const PAUSE_FIRST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Member {
    pub rank: Rank,
    /// The host it runs on; `None`: this one.
    pub host: Option<String>,
    pub phase: MemberPhase,
    pub process: Option<Process>,
    /// The port on which it listens for ranks on other hosts.
    pub port: u16,
    /// Requests without a reply so far, in order.
    pub pending: VecDeque<Pending>,
    /// It holds its shard of the weights.
    pub loaded: bool,
    /// Layers that it has loaded so far.
    pub layers: u64,
    /// Since when its process has been seen stopped.
    pub stopped: Option<Instant>,
    /// Failures since the last step that succeeded.
    pub faults: u32,
    /// The earliest time of its next start.
    pub restart_at: Instant,
    pub starts: u64,
    pub stats: RankStats,
    /// Bytes of its weights.
    pub layer_bytes: u64,
    pub head_bytes: u64,
    pub send_time: Duration,
    /// When its epoch was aborted.
    pub drain_began: Option<Instant>,
    pub drains: u64,
    pub drain_max: Duration,
}

/// The phase of a rank between start and ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberPhase {
    /// There is no process.
    Absent,
    /// It was started and has not replied to the hello.
    Starting,
    /// It had pending requests when the epoch was aborted, and has not replied to all of them.
    Draining,
    /// It waits to join an epoch.
    Idle,
    /// It was asked to listen for ranks on other hosts.
    ListenRequested,
    /// It listens, and waits until all others do.
    Listening,
    Joining,
    Loading,
    Ready,
}

impl MemberPhase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Starting => "starting",
            Self::Draining => "draining",
            Self::Idle | Self::ListenRequested | Self::Listening | Self::Joining => "joining",
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

/// The reply that a request must get.
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
    /// The request, for messages.
    pub fn request_name(self) -> &'static str {
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
            phase: MemberPhase::Absent,
            process: None,
            port: 0,
            pending: VecDeque::new(),
            loaded: false,
            layers: 0,
            stopped: None,
            faults: 0,
            restart_at: Instant::now(),
            starts: 0,
            stats: RankStats::default(),
            layer_bytes: 0,
            head_bytes: 0,
            send_time: Duration::ZERO,
            drain_began: None,
            drains: 0,
            drain_max: Duration::ZERO,
        }
    }

    /// Counts a start. For a rank on another host the pid is known only after its first reply.
    pub fn started(&mut self, pid: Option<u32>) {
        info!(rank = self.rank.index(), pid, host = self.host, "rank started");
        self.starts += 1;
    }

    /// For messages.
    pub fn name(&self) -> String {
        let rank = self.rank.index();
        self.host.as_ref().map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank} on {host}"))
    }

    /// The epoch was aborted: the rank must reply to its pending requests before `deadline`, and does nothing else.
    pub fn leave(&mut self, deadline: Instant) {
        self.phase = if self.pending.is_empty() { MemberPhase::Idle } else { MemberPhase::Draining };
        // Also for requests past their deadline: a rank that waited for others replies once the epoch is aborted.
        self.pending.iter_mut().for_each(|pending| pending.deadline = deadline);
        self.drain_began = Some(Instant::now());
    }

    /// Handles a reply while draining.
    pub fn left(&mut self) {
        if self.pending.is_empty() {
            self.phase = MemberPhase::Idle;
            let took = self.drain_began.take().map_or(Duration::ZERO, |reported| reported.elapsed());
            self.drains += 1;
            self.drain_max = self.drain_max.max(took);
        }
    }

    /// Kills its process. The next one starts after a pause that grows with the number of failures.
    pub fn dismiss(&mut self) {
        if let Some(process) = self.process.take() {
            // Its host had started it, though it never replied.
            self.starts += u64::from(self.phase == MemberPhase::Starting && process.route().is_some());
            process.kill();
        }
        self.phase = MemberPhase::Absent;
        self.pending.clear();
        (self.loaded, self.layers, self.stopped) = (false, 0, None);
        let pause = match self.faults {
            0 => Duration::ZERO,
            faults => PAUSE_FIRST.saturating_mul(1 << (faults - 1).min(10)).min(PAUSE_MAX),
        };
        self.faults = self.faults.saturating_add(1);
        self.restart_at = Instant::now() + pause;
    }

    pub fn report(&self) -> RankReport {
        let RankStats { weight_bytes, kv_bytes, resident_bytes, steps, step_us, collective_us, .. } = self.stats;
        RankReport {
            rank: self.rank,
            pid: self.process.as_ref().and_then(Process::pid),
            ready: self.phase == MemberPhase::Ready,
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
