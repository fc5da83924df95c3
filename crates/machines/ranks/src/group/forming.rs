//! How a group is formed, at the start and after each loss: the supervisor starts processes for absent ranks, has all
//! ranks join a communicator of the next epoch, and has ranks without weights load.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use tracing::info;

use super::hosts::Hosts;
use super::member::{Expected, MemberPhase};
use super::supervisor::{Group, GroupConfig, LoadFailure, StartError, State};
use crate::protocol::session::WireCapacity;
use crate::protocol::{ErrorKind, RankRequest, clean};
use collectives::EXCHANGE_ELEMENTS_MAX;
use collectives::shared_memory::Epoch;

/// Failures of one rank after which [`Group::start`] gives up.
const START_FAULTS_MAX: u32 = 3;

/// How often [`Group::start`] reports progress.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Digits of a digest in messages.
const DIGITS_SHOWN: usize = 12;

impl Group {
    /// Starts the ranks and waits until all are ready. `progress` gets the number of layers that every rank has loaded.
    pub fn start(config: GroupConfig, progress: &mut dyn FnMut(usize)) -> Result<Self, StartError> {
        let mut group = Self::new(config)?;
        group.restore(progress)?;
        Ok(group)
    }

    /// Waits until all ranks are ready, after a loss that the caller knows of: its sessions are gone. After an error the group
    /// is of no use any more.
    pub fn restore(&mut self, progress: &mut dyn FnMut(usize)) -> Result<(), StartError> {
        self.load_failure = None;
        while !self.is_ready() {
            if let State::Forming { reported, .. } = &mut self.state {
                *reported = true;
            }
            self.form();
            self.poll_once(Instant::now() + PROGRESS_INTERVAL);
            let layers = self.members.iter().map(|member| if member.loaded { u64::MAX } else { member.layers }).min();
            progress(layers.map_or(0, |layers| usize::try_from(layers).unwrap_or(usize::MAX)));
            if let Some(LoadFailure { rank, kind, message }) = self.load_failure.take() {
                return Err(StartError::Refused { rank, kind, message });
            }
            if let State::Forming { why, .. } = &self.state
                && self.members.iter().any(|member| member.faults > START_FAULTS_MAX)
            {
                return Err(StartError::GaveUp { why: why.clone() });
            }
        }
        Ok(())
    }

    /// Takes the next possible step towards a ready group.
    pub(super) fn form(&mut self) {
        let now = Instant::now();
        for index in 0..self.members.len() {
            if self.members[index].phase == MemberPhase::Absent && self.members[index].restart_at <= now {
                self.launch(index);
            }
        }
        let all = |phase| self.members.iter().all(|member| member.phase == phase);
        if all(MemberPhase::Idle) {
            // No rank is in a collective any more, which the next epoch requires.
            match &self.config.hosts {
                None => self.send_attach(),
                Some(_) => self.request_listen(),
            }
        } else if let Some(Hosts { activations, .. }) = self.config.hosts
            && all(MemberPhase::Listening)
        {
            self.request_join(activations);
        } else if all(MemberPhase::Ready) && matches!(self.state, State::Forming { reported: true, .. }) {
            info!(epoch = self.epoch.0, ranks = self.members.len(), "the group is ready");
            self.state = State::Ready;
        }
    }

    /// Begins the next epoch. The segment counts epochs, also where ranks on several hosts do not map it, and knows
    /// when one is over.
    pub(super) fn begin_epoch(&mut self) -> Option<Epoch> {
        // This fails after 2^32 losses; the group then never forms again.
        self.epoch = self.segment.begin_epoch().ok()?;
        Some(self.epoch)
    }

    fn send_attach(&mut self) {
        let Some(epoch) = self.begin_epoch() else { return };
        let (segment_fd, world_size) = (self.segment_fd.as_raw_fd() as u32, self.config.world.get() as u16);
        for index in 0..self.members.len() {
            self.members[index].phase = MemberPhase::Joining;
            let rank = self.members[index].rank.index() as u16;
            let attach = |id| RankRequest::Attach {
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
            return self.members[index].phase = MemberPhase::Ready;
        }
        self.members[index].phase = MemberPhase::Loading;
        let (model_id, shard) = (self.config.model_id.clone(), self.config.shard.clone());
        self.ask(index, |id| RankRequest::Load { id, model_id, shard }, Expected::Loaded);
    }

    /// A rank has loaded its weights from files with this digest. The epoch in which it began to load may be over by now.
    pub(super) fn loaded(&mut self, index: usize, capacity: WireCapacity, digest: &str) {
        let expected = self.config.digest.to_string();
        if digest != expected {
            let found = clean(&digest.chars().take(DIGITS_SHOWN).collect::<String>());
            let expected = &expected[..DIGITS_SHOWN];
            let why = format!("its model files are not those of the group: their digest is {found}…, not {expected}…");
            return self.refuse(index, ErrorKind::LoadFailed, &why, &why);
        }
        let own = WireCapacity::from(self.sessions.capacity());
        if capacity != own {
            return self.lose(index, "its capacity differs from that of its group");
        }
        self.members[index].loaded = true;
        let is_over = self.segment.abort(self.epoch).cause().is_some();
        self.members[index].phase = if is_over { MemberPhase::Idle } else { MemberPhase::Ready };
    }
}
