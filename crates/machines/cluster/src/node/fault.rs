//! Faults that tests inject into a node. Only debug builds have them.
//!
//! Written as `at=decode,after=2,do=kill,once=PATH`: at the third step in which nothing but tokens are generated, the process
//! kills itself. The fault hits once, in the first process that can create the file at `once`, except `slow`, which stays.

use std::fs::File;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};

/// How many times as long as its computation a step of a slow node takes.
const SLOW_FACTOR: u32 = 10;
/// The delay of what a slow node does besides steps.
const SLOW_DELAY: Duration = Duration::from_secs(2);

static FAULT: OnceLock<Mutex<NodeFault>> = OnceLock::new();

/// Where the fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultPoint {
    /// A coordinator has connected.
    Joining,
    /// Weights are being received.
    Weights,
    /// A step with tokens of a prompt.
    Prefill,
    /// A step with generated tokens only.
    Decode,
    Idle,
}

/// What the fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FaultAction {
    /// By SIGKILL.
    Kill,
    /// By SIGSTOP: the process exists and does nothing.
    Stop,
    /// A message that cannot be read.
    Garbage,
    /// A message that can be read and is not true.
    Lie,
    Slow,
    /// Nothing: whoever set the fault sees the file, and acts.
    Notify,
}

#[derive(Debug)]
pub struct NodeFault {
    at: FaultPoint,
    after: u32,
    action: FaultAction,
    once: PathBuf,
    state: FaultState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultState {
    Armed,
    Lasting,
    Spent,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no fault of a node: write at=POINT,after=N,do=ACTION,once=PATH")]
pub struct NodeFaultError(String);

const POINTS: [(&str, FaultPoint); 5] = [
    ("joining", FaultPoint::Joining),
    ("weights", FaultPoint::Weights),
    ("prefill", FaultPoint::Prefill),
    ("decode", FaultPoint::Decode),
    ("idle", FaultPoint::Idle),
];

const ACTIONS: [(&str, FaultAction); 6] = [
    ("kill", FaultAction::Kill),
    ("stop", FaultAction::Stop),
    ("garbage", FaultAction::Garbage),
    ("lie", FaultAction::Lie),
    ("slow", FaultAction::Slow),
    ("notify", FaultAction::Notify),
];

impl FromStr for NodeFault {
    type Err = NodeFaultError;

    fn from_str(text: &str) -> Result<Self, NodeFaultError> {
        let bad = || NodeFaultError(text.to_owned());
        let (mut at, mut after, mut action, mut once) = (None, 0, None, None);
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(bad)?;
            match name {
                "at" => at = POINTS.iter().find(|(name, _)| *name == value),
                "after" => after = value.parse().map_err(|_| bad())?,
                "do" => action = ACTIONS.iter().find(|(name, _)| *name == value),
                "once" => once = Some(PathBuf::from(value)),
                _ => return Err(bad()),
            }
        }
        let (&(_, at), &(_, action)) = at.zip(action).ok_or_else(bad)?;
        Ok(Self { at, after, action, once: once.ok_or_else(bad)?, state: FaultState::Armed })
    }
}

impl NodeFault {
    /// Sets the fault of this process. Only the first call has an effect.
    pub fn install(self) {
        let _ = FAULT.set(Mutex::new(self));
    }

    fn hit(&mut self, point: FaultPoint) -> Option<FaultAction> {
        if self.at != point || self.state == FaultState::Spent {
            return None;
        }
        if let Some(after) = self.after.checked_sub(1) {
            self.after = after;
            return None;
        }
        let is_new = self.state == FaultState::Armed;
        if is_new && File::create_new(&self.once).is_err() {
            self.state = FaultState::Spent;
            return None;
        }
        self.state = if self.action == FaultAction::Slow { FaultState::Lasting } else { FaultState::Spent };
        Some(self.action)
    }
}

/// What the fault does here, if it hits. Signals have been sent when this returns.
pub(super) fn hit(point: FaultPoint) -> Option<FaultAction> {
    let action = FAULT.get()?.lock().unwrap_or_else(PoisonError::into_inner).hit(point)?;
    let signal = match action {
        FaultAction::Kill => Signal::KILL,
        FaultAction::Stop => Signal::STOP,
        other => return Some(other),
    };
    // The kernel ends or stops the process before this returns.
    let _ = kill_process(getpid(), signal);
    None
}

/// At a point without a message of its own: returns what is sent instead of the next message.
pub(super) fn hit_between_steps(point: FaultPoint) -> Option<FaultAction> {
    let action = hit(point)?;
    if action == FaultAction::Slow {
        thread::sleep(SLOW_DELAY);
    }
    Some(action)
}

/// The time that a slow node adds to a computation that took this long.
pub(super) fn slow_down(computed: Duration) {
    thread::sleep(computed * (SLOW_FACTOR - 1));
}

/// Bytes that are no message.
pub(super) fn garbage() -> Vec<u8> {
    (0..100_u8).map(|byte| byte.wrapping_mul(151) ^ 0x5a).collect()
}
