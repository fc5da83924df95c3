//! The group as an [`Executor`]. The supervisor's session table decides about sessions and pages, and the ranks follow.
//! A step is sent to all ranks; rank 0 returns its output.

use std::time::{Duration, Instant};

use engine::{Capacity, Executor, ExecutorError, Health, OpenedSession, Prefix, RankReport, StepOutput, StepPlan};
use tracing::debug;
use types::SessionId;

use super::member::Expected;
use super::supervisor::{Group, State, StepInFlight};
use crate::protocol::{RankReply, RankRequest, session};

/// Age at which the ranks' counters are requested again while the group is idle.
const STATS_AGE_MAX: Duration = Duration::from_secs(1);

/// How often `poll_health` polls the pipes of a ready group. Steps follow each other faster than that, and poll
/// themselves.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

impl Group {
    /// The error of a group that is not ready. The engine that gets it knows that all sessions are gone.
    fn lost(&mut self) -> ExecutorError {
        let why = match &mut self.state {
            State::Forming { why, reported } => {
                *reported = true;
                why.clone()
            }
            State::Ready => "it was not".into(),
        };
        ExecutorError::Lost { why }
    }

    fn check_whole(&mut self) -> Result<(), ExecutorError> {
        if self.is_ready() { Ok(()) } else { Err(self.lost()) }
    }

    /// Bytes of the layers' weights, on all ranks together.
    pub fn layer_bytes(&self) -> usize {
        self.members.iter().map(|member| member.layer_bytes).sum::<u64>() as usize
    }

    /// Bytes of the head's weights, on all ranks together.
    pub fn head_bytes(&self) -> usize {
        self.members.iter().map(|member| member.head_bytes).sum::<u64>() as usize
    }

    /// Closes all sessions and empties the prefix cache. A step in flight is waited for, and its output dropped. The ranks keep
    /// their weights. If a rank is lost meanwhile, or was before, [`Executor::poll_health`] tells.
    pub fn clear(&mut self) {
        while self.is_ready() && self.flight.as_ref().is_some_and(|flight| flight.output.is_none()) {
            self.poll_once(Instant::now() + self.config.deadlines.step);
        }
        if !self.is_ready() {
            return; // its sessions are gone
        }
        self.flight = None;
        self.sessions.clear();
        self.ask_all(|id| RankRequest::Clear { id }, Expected::Closed);
    }

    /// Requests the counters of all ranks and waits for the replies.
    pub fn count(&mut self) -> Result<Vec<RankReport>, ExecutorError> {
        self.check_whole()?;
        self.ask_all(|id| RankRequest::Stats { id }, Expected::Stats);
        while self.members.iter().any(|member| !member.pending.is_empty()) {
            self.poll_once(Instant::now() + self.config.deadlines.session);
            self.check_whole()?;
        }
        Ok(self.ranks())
    }
}

impl Executor for Group {
    fn depth(&self) -> usize {
        1
    }

    fn capacity(&self) -> Capacity {
        self.sessions.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.check_whole()?;
        let opened = self.sessions.open(tokens_max, prefix)?;
        let (tokens_max, prefix) = (tokens_max as u64, session::WirePrefix::from(prefix));
        let OpenedSession { session, computed } = opened;
        self.ask_all(|id| RankRequest::Open { id, tokens_max, prefix }, Expected::Opened { session, computed });
        Ok(opened)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.check_whole()?;
        let computed = self.sessions.truncate(session, tokens)?;
        let (session, tokens) = (session.0, tokens as u64);
        self.ask_all(|id| RankRequest::Truncate { id, session, tokens }, Expected::Truncated { computed });
        Ok(computed)
    }

    fn close(&mut self, session: SessionId) {
        if self.is_ready() && self.sessions.is_open(session) {
            self.sessions.close(session);
            self.ask_all(|id| RankRequest::Close { id, session: session.0 }, Expected::Closed);
        }
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.check_whole()?;
        if self.flight.is_some() {
            return Err(ExecutorError::PipelineFull { depth: self.depth() });
        }
        // A plan that a rank would fail at never leaves this process.
        match self.config.shard.layers {
            Some(_) => plan.check_stage(self.config.hidden).and_then(|()| plan.check_all_layers())?,
            None => plan.check_model()?,
        }
        self.sessions.check(plan)?;
        self.sessions.reserve(plan)?;
        self.sessions.advance(plan);
        let submitted = Instant::now();
        let mut wire = std::mem::take(&mut self.wire_plan);
        wire.assign(plan);
        let mut copy = std::mem::take(&mut self.spare_plan);
        copy.clone_from(plan);
        // Set before sending: if a rank cannot be written to, `abort_epoch` clears it.
        self.flight = Some(StepInFlight { id: 0, plan: copy, output: None, submitted });
        let id = self.send_step(wire);
        if let Some(flight) = &mut self.flight {
            flight.id = id;
        }
        debug!(id, rows = plan.rows(), fan_out_us = submitted.elapsed().as_micros() as u64, "step sent");
        Ok(())
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        output.clear();
        loop {
            self.check_whole()?;
            match &self.flight {
                None => return Err(ExecutorError::NoStepInFlight),
                Some(StepInFlight { output: Some(_), .. }) => break,
                Some(_) => self.poll_once(Instant::now() + self.config.deadlines.step),
            }
        }
        let Some(StepInFlight { id, plan, output: Some(given), submitted }) = self.flight.take() else {
            return Err(ExecutorError::NoStepInFlight);
        };
        debug!(id, step_us = submitted.elapsed().as_micros() as u64, "step done");
        let filled = given.fill(&plan, self.sessions.capacity().vocab, output);
        self.spare_plan = plan;
        self.spare_reply = Some(RankReply::StepOk { id, output: given });
        if let Err(error) = filled {
            output.clear();
            self.lose(0, &format!("it gave what was not asked for: {error}"));
            return Err(self.lost());
        }
        let sessions = &self.sessions;
        output.samples.retain(|sample| sessions.is_open(sample.session));
        output.prompt_logprobs.retain(|logprobs| sessions.is_open(logprobs.session));
        output.embeddings.retain(|embedding| sessions.is_open(embedding.session));
        Ok(())
    }

    fn poll_health(&mut self, wait: Duration) -> Health {
        let end = Instant::now() + wait;
        loop {
            if let State::Forming { why, reported: reported @ false } = &mut self.state {
                *reported = true;
                return Health::Rebuilding { why: why.clone() };
            }
            let was_ready = self.is_ready();
            if !was_ready || self.polled_at.elapsed() > POLL_INTERVAL {
                self.poll_once(if was_ready { Instant::now() } else { end });
            }
            match &self.state {
                State::Ready if was_ready && self.stats_asked_at.elapsed() > STATS_AGE_MAX => {
                    self.stats_asked_at = Instant::now();
                    self.ask_all(|id| RankRequest::Stats { id }, Expected::Stats);
                    return Health::Ready;
                }
                State::Ready => return Health::Ready,
                State::Forming { reported: false, .. } => {}
                _ if Instant::now() < end => {}
                State::Forming { why, .. } => return Health::Rebuilding { why: why.clone() },
            }
        }
    }

    fn ranks(&self) -> Vec<RankReport> {
        self.members.iter().map(super::member::Member::report).collect()
    }
}
