//! `Fault`: a fault that is injected into a rank, so that tests can check how the group recovers.
//!
//! Written as `rank=1,at=step,after=2,do=exit,once=/tmp/claimed`: rank 1 runs two steps and exits at the third. Without
//! `once` the fault hits each process that is started with it; with it, only the first that can create the file. It
//! hits once per process, except `slow`, which stays: requests take ten times as long, or longer by `seconds`, if
//! given.

use std::fs::File;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use types::Rank;

/// The exit status of a rank that exits by a fault.
const EXIT_CODE: i32 = 86;

/// How many times as long a slow request takes.
const SLOW_FACTOR: u32 = 10;

#[derive(Debug)]
pub struct Fault {
    rank: Option<u16>,
    at: Point,
    /// How often the point is passed before the fault hits.
    after: u32,
    action: FaultAction,
    /// A fixed delay of slow requests.
    seconds: Option<u32>,
    once: Option<PathBuf>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Armed,
    Claimed,
    Spent,
}

/// Where the fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// Before the first request is read.
    Spawn,
    /// `attach` or `init`.
    Init,
    Load,
    Step,
    /// At least one step was run, no session is open, and no request waits.
    Idle,
    /// `unload_model` or `shutdown`.
    Unload,
}

/// What the fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    Exit,
    /// By SIGKILL.
    Kill,
    /// By SIGSTOP: the process exists and does nothing.
    Stop,
    /// A malformed line instead of the reply.
    Garbage,
    CloseStdout,
    /// An out-of-memory error as the reply; SIGKILL where there is no reply.
    Oom,
    /// In the code that handles the request.
    Panic,
    Slow,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no fault: write rank=R,at=POINT,after=N,do=DEED,seconds=S,once=PATH")]
pub struct FaultError(String);

const POINTS: [(&str, Point); 6] = [
    ("spawn", Point::Spawn),
    ("init", Point::Init),
    ("load", Point::Load),
    ("step", Point::Step),
    ("idle", Point::Idle),
    ("unload", Point::Unload),
];

const ACTIONS: [(&str, FaultAction); 8] = [
    ("exit", FaultAction::Exit),
    ("kill", FaultAction::Kill),
    ("stop", FaultAction::Stop),
    ("garbage", FaultAction::Garbage),
    ("close_stdout", FaultAction::CloseStdout),
    ("oom", FaultAction::Oom),
    ("panic", FaultAction::Panic),
    ("slow", FaultAction::Slow),
];

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let bad = || FaultError(text.to_owned());
        let (mut rank, mut at, mut after, mut action, mut seconds, mut once) = (None, None, 0, None, None, None);
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(bad)?;
            match name {
                "rank" => rank = Some(value.parse().map_err(|_| bad())?),
                "at" => at = named(&POINTS, value),
                "after" => after = value.parse().map_err(|_| bad())?,
                "do" => action = named(&ACTIONS, value),
                "seconds" => seconds = Some(value.parse().map_err(|_| bad())?),
                "once" => once = Some(PathBuf::from(value)),
                _ => return Err(bad()),
            }
        }
        let (at, action) = at.zip(action).ok_or_else(bad)?;
        Ok(Self { rank, at, after, action, seconds, once, state: State::Armed })
    }
}

fn named<T: Copy>(names: &[(&str, T)], name: &str) -> Option<T> {
    names.iter().find(|(known, _)| *known == name).map(|&(_, value)| value)
}

impl Fault {
    /// The action when `rank` is at `point`. Exits and signals have already happened when this returns.
    pub fn trigger(&mut self, rank: Rank, point: Point) -> Option<FaultAction> {
        let is_here = self.at == point && self.rank.is_none_or(|own| usize::from(own) == rank.index());
        if !is_here || self.state == State::Spent {
            return None;
        }
        if let Some(after) = self.after.checked_sub(1) {
            self.after = after;
            return None;
        }
        if self.state == State::Armed && !self.claim() {
            self.state = State::Spent;
            return None;
        }
        self.state = if self.action == FaultAction::Slow { State::Claimed } else { State::Spent };
        let has_answer = !matches!(point, Point::Spawn | Point::Idle);
        match self.action {
            FaultAction::Exit => std::process::exit(EXIT_CODE),
            FaultAction::Kill => signal(Signal::KILL),
            FaultAction::Oom if !has_answer => signal(Signal::KILL),
            FaultAction::Stop => signal(Signal::STOP),
            FaultAction::Garbage
            | FaultAction::CloseStdout
            | FaultAction::Oom
            | FaultAction::Panic
            | FaultAction::Slow => {}
        }
        Some(self.action)
    }

    /// The extra time of a slow request that took `this`.
    pub fn delay(&self, this: Duration) -> Duration {
        let seconds = self.seconds.map(|seconds| Duration::from_secs(seconds.into()));
        seconds.unwrap_or(this * (SLOW_FACTOR - 1))
    }

    fn claim(&self) -> bool {
        self.once.as_ref().is_none_or(|path| File::create_new(path).is_ok())
    }
}

fn signal(signal: Signal) {
    // A process may always signal itself.
    let _ = kill_process(getpid(), signal);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use types::WorldSize;

    fn rank(index: u16) -> Rank {
        WorldSize::new(3).unwrap().rank(index).unwrap()
    }

    #[test]
    fn a_fault_hits_its_rank_at_its_time_and_only_once() {
        let mut fault: Fault = "rank=1,at=step,after=2,do=garbage".parse().unwrap();
        assert_eq!(fault.trigger(rank(0), Point::Step), None);
        assert_eq!(fault.trigger(rank(1), Point::Load), None);
        let struck: Vec<_> = (0..5).map(|_| fault.trigger(rank(1), Point::Step)).collect();
        assert_eq!(struck, [None, None, Some(FaultAction::Garbage), None, None]);
    }

    #[test]
    fn slowness_stays() {
        let mut fault: Fault = "at=step,after=1,do=slow".parse().unwrap();
        let struck: Vec<_> = (0..3).map(|_| fault.trigger(rank(2), Point::Step)).collect();
        assert_eq!(struck, [None, Some(FaultAction::Slow), Some(FaultAction::Slow)]);
        assert_eq!(fault.delay(Duration::from_millis(10)), Duration::from_millis(90));
        let fault: Fault = "at=step,do=slow,seconds=3".parse().unwrap();
        assert_eq!(fault.delay(Duration::from_millis(10)), Duration::from_secs(3));
    }

    #[test]
    fn a_claimed_fault_hits_no_second_process() {
        let path = std::env::temp_dir().join(format!("consort-fault-{}", std::process::id()));
        let text = format!("at=load,do=oom,once={}", path.display());
        let [mut first, mut second]: [Fault; 2] = [text.parse().unwrap(), text.parse().unwrap()];
        assert_eq!(first.trigger(rank(0), Point::Load), Some(FaultAction::Oom));
        assert_eq!(second.trigger(rank(0), Point::Load), None);
        std::fs::remove_file(path).unwrap();
        assert_eq!(second.trigger(rank(0), Point::Load), None, "it has missed its time");
    }

    #[test]
    fn what_is_no_fault_is_refused() {
        for text in
            ["", "at=step", "do=exit", "at=lunch,do=exit", "at=step,do=dance", "at=step,do=exit,after=x", "exit"]
        {
            assert!(text.parse::<Fault>().is_err(), "{text}");
        }
    }
}
