//! `Churn`: what happens to the peers, at random.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use crate::coverage::Coverage;
use crate::peer::{LAYERS, Peer};
use crate::random::Random;
use testing::network::Network;

/// Peers that are away at once: in most cases there is a chain without them.
const AWAY_MAX: usize = 3;
/// For how long, in milliseconds: also longer than it takes until a silent peer counts as lost.
const AWAY_MS: std::ops::Range<u64> = 500..8_000;
/// From one disturbance to the next.
const CALM_MS: std::ops::Range<u64> = 100..1_600;
/// In a run of this time or more, there is once no chain for so long that requests fail.
const WITH_BLACKOUT: Duration = Duration::from_secs(300);
const BLACKOUT: Duration = Duration::from_secs(120);

/// Why a peer does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    /// Its process has ended.
    Down,
    Stopped,
    Cut,
}

pub struct Churn<'a> {
    network: &'a Network,
    peers: &'a mut [Peer],
    /// Of each peer, and until when.
    away: Vec<Option<(Away, Instant)>>,
    bootstrap: &'a [String],
    coverage: &'a Coverage,
    random: Random,
    pub events: BTreeMap<&'static str, usize>,
}

impl<'a> Churn<'a> {
    pub fn new(
        network: &'a Network,
        peers: &'a mut [Peer],
        bootstrap: &'a [String],
        coverage: &'a Coverage,
        seed: u64,
    ) -> Self {
        let away = vec![None; peers.len()];
        let churn =
            Self { network, peers, away, bootstrap, coverage, random: Random::new(seed), events: BTreeMap::new() };
        churn.note_coverage();
        churn
    }

    /// Lets things happen for so long, and then all peers serve again.
    pub fn run(&mut self, time: Duration) -> Result<(), String> {
        let begun = Instant::now();
        let mut blackout = (time >= WITH_BLACKOUT).then_some(time / 2);
        while begun.elapsed() < time {
            thread::sleep(self.random.millis(CALM_MS));
            if blackout.is_some_and(|at| begun.elapsed() >= at) {
                blackout = None;
                self.black_out();
            }
            self.peers.iter_mut().try_for_each(Peer::check)?;
            self.end_absences(Some(Instant::now()));
            let away = self.away.iter().flatten().count();
            let index = self.random.below(self.peers.len());
            if away < AWAY_MAX && self.away[index].is_none() {
                self.disturb(index)?;
            }
        }
        self.end_absences(None);
        Ok(())
    }

    fn disturb(&mut self, index: usize) -> Result<(), String> {
        let until = Instant::now() + self.random.millis(AWAY_MS);
        // An identity that others join through stays.
        let is_bootstrap = index < self.bootstrap.len();
        let kind = self.random.below(4);
        // Before it happens: an answer may come right afterwards.
        self.away[index] = Some((if kind < 2 { Away::Down } else { [Away::Stopped, Away::Cut][kind - 2] }, until));
        self.note_coverage();
        let peer = &mut self.peers[index];
        match kind {
            0 => drop(peer.leave()?),
            1 => peer.kill(),
            2 => peer.signal("STOP"),
            _ => self.network.unplug(peer.index),
        }
        if kind < 2 && !is_bootstrap && self.random.below(2) == 0 {
            peer.take_new_identity();
        }
        *self.events.entry(["leave", "kill", "stop", "cut"][kind]).or_default() += 1;
        Ok(())
    }

    /// Cuts off all peers that serve the first layer.
    fn black_out(&mut self) {
        self.end_absences(None);
        let until = Instant::now() + BLACKOUT;
        for index in 0..self.peers.len() {
            if self.peers[index].layers().is_some_and(|(start, _)| start == 0) {
                self.away[index] = Some((Away::Cut, until));
                self.note_coverage();
                self.network.unplug(self.peers[index].index);
                *self.events.entry("cut").or_default() += 1;
            }
        }
    }

    /// Brings back peers whose time has come; `None`: all.
    fn end_absences(&mut self, now: Option<Instant>) {
        for index in 0..self.peers.len() {
            let Some((away, until)) = self.away[index] else { continue };
            if now.is_some_and(|now| now < until) {
                continue;
            }
            let peer = &mut self.peers[index];
            let event = match away {
                Away::Down => {
                    let others: Vec<_> =
                        self.bootstrap.iter().enumerate().filter(|(other, _)| *other != index).collect();
                    let others: Vec<String> = others.into_iter().map(|(_, address)| address.clone()).collect();
                    peer.join(self.network, &others);
                    "join"
                }
                Away::Stopped => {
                    peer.signal("CONT");
                    "continue"
                }
                Away::Cut => {
                    self.network.plug(peer.index);
                    "heal"
                }
            };
            *self.events.entry(event).or_default() += 1;
            self.away[index] = None;
            self.note_coverage();
        }
    }

    fn note_coverage(&self) {
        let present = self.peers.iter().zip(&self.away).filter(|(_, away)| away.is_none());
        self.coverage.set(LAYERS, present.filter_map(|(peer, _)| peer.layers()));
    }
}
