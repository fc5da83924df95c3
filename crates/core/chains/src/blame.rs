//! Blame: how failures of a machine, or of a pair of machines, add up, fade and are forgiven.
//!
//! Pure: times are milliseconds since any start, and are passed in. No verdict lasts for ever: points fade, and there is a
//! most that anything can have.

/// What was held against somebody at a time. Nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Blame {
    points: f64,
    at_ms: u64,
}

/// How failures are judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlamePolicy {
    /// The time in which points halve.
    pub half_life_ms: u64,
    /// With so many points or more, it is used only if there is nothing else.
    pub last_choice_at: f64,
    /// With so many points or more, it is not used.
    pub avoided_at: f64,
    /// Nobody has more, so everybody is tried again after a limited time: see [`BlamePolicy::forgiven_ms`].
    pub points_max: f64,
}

/// Whether to use somebody now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    Use,
    /// If there is nobody else.
    LastChoice,
    Avoid,
}

impl BlamePolicy {
    /// The points that are left.
    pub fn points(&self, blame: Blame, now_ms: u64) -> f64 {
        let passed = now_ms.saturating_sub(blame.at_ms) as f64;
        blame.points * (-passed / self.half_life_ms.max(1) as f64).exp2()
    }

    /// After something that counts so many points.
    pub fn add(&self, blame: Blame, points: f64, now_ms: u64) -> Blame {
        Blame { points: (self.points(blame, now_ms) + points).min(self.points_max), at_ms: now_ms.max(blame.at_ms) }
    }

    pub fn verdict(&self, blame: Blame, now_ms: u64) -> Verdict {
        match self.points(blame, now_ms) {
            points if points >= self.avoided_at => Verdict::Avoid,
            points if points >= self.last_choice_at => Verdict::LastChoice,
            _ => Verdict::Use,
        }
    }

    /// How long somebody is avoided at most, whatever it did.
    pub fn forgiven_ms(&self) -> u64 {
        let half_lives = (self.points_max / self.avoided_at).log2().max(0.0);
        (half_lives * self.half_life_ms as f64).ceil() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: BlamePolicy =
        BlamePolicy { half_life_ms: 1000, last_choice_at: 0.25, avoided_at: 0.9, points_max: 8.0 };

    #[test]
    fn points_add_up_and_halve() {
        let blame = POLICY.add(Blame::default(), 1.0, 5000);
        assert_eq!((POLICY.points(blame, 5000), POLICY.points(blame, 6000)), (1.0, 0.5));
        let blame = POLICY.add(blame, 1.0, 6000);
        assert_eq!(POLICY.points(blame, 7000), 0.75);
    }

    #[test]
    fn somebody_that_failed_is_avoided_then_the_last_choice_and_then_used() {
        let blame = POLICY.add(Blame::default(), 1.0, 0);
        let verdicts = [0, 100, 200, 1900, 2100].map(|now| POLICY.verdict(blame, now));
        use Verdict::{Avoid, LastChoice, Use};
        assert_eq!(verdicts, [Avoid, Avoid, LastChoice, LastChoice, Use]);
        assert_eq!(POLICY.verdict(Blame::default(), 0), Use);
    }

    #[test]
    fn each_failure_is_held_against_somebody_for_longer() {
        let avoided = |failures: u32| {
            let blame = (0..failures).fold(Blame::default(), |blame, _| POLICY.add(blame, 1.0, 0));
            (0..100_000).find(|&now| POLICY.verdict(blame, now) != Verdict::Avoid).unwrap()
        };
        assert!(avoided(1) < avoided(2) && avoided(2) < avoided(4));
    }

    #[test]
    fn everything_is_forgiven() {
        let blame = (0..1_000_000).fold(Blame::default(), |blame, _| POLICY.add(blame, 1e9, 0));
        assert_eq!(POLICY.verdict(blame, POLICY.forgiven_ms() - 1), Verdict::Avoid);
        assert_ne!(POLICY.verdict(blame, POLICY.forgiven_ms() + 1), Verdict::Avoid);
    }

    #[test]
    fn a_clock_that_goes_back_changes_nothing() {
        let blame = POLICY.add(Blame::default(), 1.0, 9000);
        assert_eq!(POLICY.points(blame, 1000), 1.0);
        assert_eq!(POLICY.points(POLICY.add(blame, 1.0, 1000), 9000), 2.0);
    }
}
