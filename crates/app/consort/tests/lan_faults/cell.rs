//! One cell of the matrix: a server with three machines, one of which has a fault, and streams before, during and after it.

use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::lab::Lab;
use crate::link;
use crate::streams;
use testing::bounded::{ended, wait_until};
use testing::network::Network;
use testing::serving::{Server, ask, kill};

/// The places of the fault: the machine with the first layers, and so on.
pub const STAGES: [usize; 3] = [1, 2, 3];
/// Of the packets, if some are lost.
const LOSS_PERCENT: u32 = 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    Kill,
    Stop,
    Cut,
    Loss,
    Slow,
    Garbage,
    Lie,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Joining,
    Weights,
    Prefill,
    Decode,
    Idle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub fault: FaultKind,
    pub moment: Moment,
    pub stage: usize,
    pub has_spare: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Outcome {
    pub problem: Option<String>,
    pause: Duration,
    elapsed: Duration,
}

impl FaultKind {
    pub const ALL: [Self; 7] = [Self::Kill, Self::Stop, Self::Cut, Self::Loss, Self::Slow, Self::Garbage, Self::Lie];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Cut => "cut",
            Self::Loss => "30 % loss",
            Self::Slow => "slow",
            Self::Garbage => "garbage",
            Self::Lie => "lie",
        }
    }

    /// What the process does to itself. The link's faults are made from outside, as soon as it says when.
    fn action(self) -> &'static str {
        match self {
            Self::Cut | Self::Loss => "notify",
            other => other.name(),
        }
    }
}

impl Moment {
    pub const ALL: [Self; 5] = [Self::Joining, Self::Weights, Self::Prefill, Self::Decode, Self::Idle];

    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Weights => "weights",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Idle => "idle",
        }
    }

    /// How often the point is passed before the fault hits.
    fn after(self) -> u32 {
        match self {
            Self::Decode => 20,
            _ => 0,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spare = if self.has_spare { "a spare" } else { "no spare" };
        write!(f, "{}, {}, stage {}, {spare}", self.fault.name(), self.moment.name(), self.stage)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mark = if self.problem.is_some() { "FAILED " } else { "" };
        write!(f, "{mark}{:.1}/{:.0}", self.pause.as_secs_f64(), self.elapsed.as_secs_f64())
    }
}

impl Cell {
    /// `expected`: the texts that the streams get without a fault.
    pub fn run(self, lab: &mut Lab, expected: &[String]) -> Outcome {
        let begun = Instant::now();
        let folder = tempfile::tempdir().unwrap();
        let claim = folder.path().join("claimed");
        let fault = format!(
            "at={},after={},do={},once={}",
            self.moment.name(),
            self.moment.after(),
            self.fault.action(),
            claim.display()
        );
        lab.restart(self.stage, Some(&fault));
        let mut outcome = Outcome::default();
        let tried = panic::catch_unwind(AssertUnwindSafe(|| self.try_run(lab, expected, &claim, &mut outcome)));
        outcome.problem = tried.unwrap_or_else(|_| Err("it panicked, see above".to_owned())).err();
        self.mend_link(&lab.network);
        outcome.elapsed = begun.elapsed();
        // The machine is there again for other cells.
        lab.restart(self.stage, None);
        outcome
    }

    fn try_run(self, lab: &mut Lab, expected: &[String], claim: &Path, outcome: &mut Outcome) -> Result<(), String> {
        let network = &lab.network;
        let mut server = lab.serve(self.has_spare);
        let address = server.address.clone();
        let is_over = &AtomicBool::new(false);
        let during = thread::scope(|scope| {
            let _over = SetOnDrop(is_over);
            scope.spawn(|| self.break_link(network, claim, is_over));
            network.within(0, || {
                wait_until("the server is ready", || ask(&address, "GET /ready", "", "").starts_with("HTTP/1.1 200"));
            });
            let during = streams::run(network, &address, expected);
            // A fault of an idle machine happens on its own, shortly after the last stream.
            if self.moment == Moment::Idle && during.is_ok() {
                wait_until("the fault happens", || claim.exists());
            }
            during.map_err(|problem| format!("first streams: {problem}: {}", server.log.so_far()))
        });
        outcome.pause = during?;
        if !claim.exists() {
            return Err("the fault never happened: the cell shows nothing".to_owned());
        }
        let after = streams::run(network, &address, expected);
        let after = after.map_err(|problem| format!("second streams: {problem}: {}", server.log.so_far()))?;
        if self.moment == Moment::Idle {
            outcome.pause = after;
        }
        end(&mut server)?;
        lab.end(self.stage);
        lab.wait_until_idle(self.stage)
    }

    /// Breaks the machine's link, if that is the fault, once the moment has come.
    fn break_link(self, network: &Network, claim: &Path, is_over: &AtomicBool) {
        while !claim.exists() {
            if is_over.load(Ordering::Acquire) {
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
        match self.fault {
            FaultKind::Cut => network.unplug(self.stage),
            FaultKind::Loss => link::lose_packets(network, self.stage, LOSS_PERCENT),
            _ => {}
        }
    }

    fn mend_link(self, network: &Network) {
        match self.fault {
            FaultKind::Cut => network.plug(self.stage),
            FaultKind::Loss => link::lose_no_packets(network, self.stage),
            _ => {}
        }
    }
}

/// Also after a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Ends the server as a service manager does.
fn end(server: &mut Server) -> Result<(), String> {
    kill("TERM", server.child.id());
    match ended(&mut server.child).code() {
        Some(0) => Ok(()),
        code => Err(format!("the server ended with {code:?}: {}", server.log.so_far())),
    }
}
