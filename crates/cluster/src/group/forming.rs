//! How a group comes together, at first and after each loss: processes for the ranks that are missing, a communicator of the next
//! epoch for everybody, weights for those that have none.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use tracing::info;

use super::hosts::Hosts;
use super::member::{Expected, Phase};
use super::supervisor::{Group, GroupConfig, Refusal, StartError, State};
use crate::EXCHANGE_ELEMENTS_MAX;
use crate::protocol::Request;
use crate::protocol::session::WireCapacity;
use crate::shared_memory::Epoch;

/// Times that a rank may fail before a group that never ran is given up.
const START_FAULTS_MAX: u32 = 3;

/// How often whoever waits for the start hears of it.
const PROGRESS_LOOK: Duration = Duration::from_millis(100);

impl Group {
    /// Starts the ranks and waits until all are ready. `progress` is told how many layers all of them have.
    pub fn start(config: GroupConfig, progress: &mut dyn FnMut(usize)) -> Result<Self, StartError> {
        let mut group = Self::new(config)?;
        while !group.is_ready() {
            group.form();
            group.turn(Instant::now() + PROGRESS_LOOK);
            let layers = group.members.iter().map(|member| if member.loaded { u64::MAX } else { member.layers }).min();
            progress(layers.map_or(0, |layers| usize::try_from(layers).unwrap_or(usize::MAX)));
            if let Some(Refusal { rank, kind, message }) = group.refusal.take() {
                return Err(StartError::Refused { rank, kind, message });
            }
            if let State::Forming { why, .. } = &group.state
                && group.members.iter().any(|member| member.faults > START_FAULTS_MAX)
            {
                return Err(StartError::GaveUp { why: why.clone() });
            }
        }
        Ok(group)
    }

    /// Does what can be done next to get a whole group.
    pub(super) fn form(&mut self) {
        let now = Instant::now();
        for index in 0..self.members.len() {
            if self.members[index].phase == Phase::Absent && self.members[index].not_before <= now {
                self.launch(index);
            }
        }
        let all = |phase| self.members.iter().all(|member| member.phase == phase);
        if all(Phase::Outside) {
            // Nobody is within an exchange any more: that is what the next epoch asks for.
            match &self.config.hosts {
                None => self.send_attach(),
                Some(_) => self.call_to_listen(),
            }
        } else if let Some(Hosts { activations, .. }) = self.config.hosts
            && all(Phase::Listening)
        {
            self.call_to_join(activations);
        } else if all(Phase::Ready) && matches!(self.state, State::Forming { told: true, .. }) {
            info!(epoch = self.epoch.0, ranks = self.members.len(), "the group is ready");
            self.state = State::Ready;
        }
    }

    /// The next one. The segment counts them, also where ranks of several hosts do not share it, and knows when one is over.
    pub(super) fn begin_generation(&mut self) -> Option<Epoch> {
        // Four billion losses: ranks of a new segment would have to be started, which nobody will live to see.
        self.epoch = self.segment.reform().ok()?;
        Some(self.epoch)
    }

    fn send_attach(&mut self) {
        let Some(epoch) = self.begin_generation() else { return };
        let (segment_fd, world_size) = (self.segment_fd.as_raw_fd() as u32, self.config.world.get() as u16);
        for index in 0..self.members.len() {
            self.members[index].phase = Phase::Joining;
            let rank = self.members[index].rank.index() as u16;
            let attach = |id| Request::Attach {
                id,
                segment_fd,
                world_size,
                rank,
                elements_max: EXCHANGE_ELEMENTS_MAX as u64,
                epoch: epoch.0,
            };
            self.ask(index, attach, Expected::Attached);
        }
    }

    /// A rank has joined the epoch.
    pub(super) fn joined(&mut self, index: usize) {
        if self.members[index].loaded {
            return self.members[index].phase = Phase::Ready;
        }
        self.members[index].phase = Phase::Loading;
        let (model_id, share) = (self.config.model_id.clone(), self.config.share.clone());
        self.ask(index, |id| Request::Load { id, model_id, share }, Expected::Loaded);
    }

    /// A rank has its weights; by now the epoch in which it began to load may be over.
    pub(super) fn loaded(&mut self, index: usize, capacity: WireCapacity) {
        let own = WireCapacity::from(self.sessions.capacity());
        if capacity != own {
            return self.lose(index, "it has room for something else than its group");
        }
        self.members[index].loaded = true;
        let is_over = self.segment.abort(self.epoch).cause().is_some();
        self.members[index].phase = if is_over { Phase::Outside } else { Phase::Ready };
    }
}
