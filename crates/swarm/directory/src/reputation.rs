//! Misbehaviour of peers as this process saw it, fading with time. Nobody else's opinion is asked: it could be a lie.

use std::collections::HashMap;
use std::fmt;

use chains::{Blame, BlamePolicy, Verdict};

use crate::identity::{PeerId, UnixTime};

/// The time in which a score halves.
pub const HALF_LIFE_MS: u64 = 10 * 60 * 1000;
/// A peer whose misbehaviour has this score or more is not used. One that only fails is avoided where there are others.
pub const EXCLUDED_AT: f64 = 4.0;
/// After so many peers that others told of and that could not be reached, those that were reached come first.
pub const FAILED_CLAIMS_MAX: f64 = 3.0;
/// The most peers that are remembered.
pub const JUDGED_PEERS_MAX: usize = 16 << 10;

/// No score is higher, so that every peer gets another chance: after five half-lives at most.
const SCORE_MAX: f64 = 32.0 * EXCLUDED_AT;
const POLICY: BlamePolicy = BlamePolicy {
    half_life_ms: HALF_LIFE_MS,
    last_choice_at: EXCLUDED_AT,
    avoided_at: EXCLUDED_AT,
    points_max: SCORE_MAX,
};
/// How wrong claims of others are held against all claims.
const CLAIMS: BlamePolicy = BlamePolicy {
    half_life_ms: HALF_LIFE_MS,
    last_choice_at: FAILED_CLAIMS_MAX - 0.5,
    // Points fade between reports.
    avoided_at: FAILED_CLAIMS_MAX - 0.5,
    // So it takes a half-life, and perhaps another try, until claims count again.
    points_max: 2.0 * FAILED_CLAIMS_MAX,
};
/// Added to the predicted time of a chain, for each point of a peer's score.
const SECONDS_PER_POINT: f64 = 0.25;
/// A lower score is forgotten.
const SCORE_MIN: f64 = 0.01;

/// What a peer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offence {
    /// Much slower than it announced.
    Slow,
    /// It refused a session that its record has room for.
    Refused,
    /// The connection ended, or no reply came in time.
    Lost,
    /// Bytes that are no message, wrong shapes, numbers that are not finite.
    Malformed,
    /// A result that was recomputed and is wrong.
    WrongResult,
}

impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Slow => "much slower than announced",
            Self::Refused => "a session was refused",
            Self::Lost => "no reply",
            Self::Malformed => "a malformed message",
            Self::WrongResult => "a wrong result",
        })
    }
}

impl Offence {
    fn points(self) -> f64 {
        match self {
            Self::Slow | Self::Refused => 0.5,
            Self::Lost => 1.0,
            // Excluded for one half-life.
            Self::Malformed => 2.0 * EXCLUDED_AT,
            Self::WrongResult => SCORE_MAX,
        }
    }

    /// Whether no machine does it that merely fails.
    fn is_misbehaviour(self) -> bool {
        matches!(self, Self::Malformed | Self::WrongResult)
    }
}

/// The scores of peers.
#[derive(Clone, Debug, Default)]
pub struct Reputation {
    scores: HashMap<PeerId, Score>,
    /// Peers that others told of and that were not there.
    claims: Blame,
}

#[derive(Clone, Copy, Debug, Default)]
struct Score {
    all: Blame,
    /// The part of it that excludes a peer.
    misbehaviour: Blame,
}

impl Score {
    fn points(self, now: UnixTime) -> f64 {
        POLICY.points(self.all, now.0)
    }
}

impl Reputation {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn report(&mut self, peer: PeerId, offence: Offence, now: UnixTime) {
        if self.scores.len() >= JUDGED_PEERS_MAX && !self.scores.contains_key(&peer) {
            self.make_room(now);
        }
        let score = self.scores.entry(peer).or_default();
        score.all = POLICY.add(score.all, offence.points(), now.0);
        if offence.is_misbehaviour() {
            score.misbehaviour = POLICY.add(score.misbehaviour, offence.points(), now.0);
        }
    }

    /// A peer that this process has never reached was not there.
    pub fn report_claim(&mut self, now: UnixTime) {
        self.claims = CLAIMS.add(self.claims, 1.0, now.0);
    }

    /// Whether what others tell of peers has turned out wrong too often of late.
    pub fn doubts_claims(&self, now: UnixTime) -> bool {
        CLAIMS.verdict(self.claims, now.0) == Verdict::Avoid
    }

    /// The number of peers that are remembered.
    pub fn len(&self) -> usize {
        self.scores.len()
    }

    pub fn is_empty(&self) -> bool {
        self.scores.is_empty()
    }

    /// 0 for a peer without an offence.
    pub fn score(&self, peer: &PeerId, now: UnixTime) -> f64 {
        self.scores.get(peer).map_or(0.0, |score| score.points(now))
    }

    pub fn is_excluded(&self, peer: &PeerId, now: UnixTime) -> bool {
        let is_excluded = |score: &Score| POLICY.verdict(score.misbehaviour, now.0) == Verdict::Avoid;
        self.scores.get(peer).is_some_and(is_excluded)
    }

    /// What a peer's offences add to the time of a chain with it.
    pub fn penalty_seconds(&self, peer: &PeerId, now: UnixTime) -> f64 {
        self.score(peer, now) * SECONDS_PER_POINT
    }

    /// Forgets what has faded; if that is nothing, the half with the lowest scores.
    fn make_room(&mut self, now: UnixTime) {
        self.scores.retain(|_, score| score.points(now) >= SCORE_MIN);
        if self.scores.len() < JUDGED_PEERS_MAX {
            return;
        }
        let mut points: Vec<_> = self.scores.iter().map(|(peer, score)| (score.points(now), *peer)).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, peer) in &points[..points.len() / 2] {
            self.scores.remove(peer);
        }
    }
}
