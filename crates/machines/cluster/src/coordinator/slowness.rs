//! `Slowness`: machines that take much longer for their layers than they were measured to need. A plan counts them as so much
//! slower. A machine that is not used any more is believed to recover, but less readily each time it was found slow.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// A machine is slow if it takes so many times as long as predicted,
const FACTOR_MIN: f64 = 3.0;
/// and so much longer for a step: short steps are mostly overhead.
const EXCESS_MIN: f64 = 5e-3;
/// How long it takes until half of a slowness is forgotten, after it was found once. It doubles with each time.
const HALF_LIFE: Duration = Duration::from_secs(60);
const DOUBLINGS_MAX: u32 = 6;

#[derive(Debug, Default)]
pub(super) struct Slowness(HashMap<SocketAddr, SlowNode>);

#[derive(Clone, Copy, Debug)]
struct SlowNode {
    factor: f64,
    /// When it was last observed.
    at: Instant,
    /// How often it turned slow.
    times: u32,
    /// The last observation was of a slow machine. One may be chance.
    is_suspected: bool,
}

impl Slowness {
    /// A step took a machine so long on average, and was predicted to take it `predicted` seconds. Returns whether the
    /// machine has turned slow.
    pub fn observe(&mut self, address: SocketAddr, seconds: f64, predicted: f64, now: Instant) -> bool {
        let factor = seconds / predicted.max(1e-9);
        let is_slow = factor >= FACTOR_MIN && seconds - predicted >= EXCESS_MIN;
        let known = self.0.entry(address).or_insert(SlowNode { factor: 1.0, at: now, times: 0, is_suspected: false });
        let was_slow = known.factor > 1.0 && known.is_suspected;
        let is_certain = is_slow && known.is_suspected;
        let has_turned = is_certain && !was_slow;
        known.times += u32::from(has_turned);
        (known.is_suspected, known.at) = (is_slow, now);
        if is_certain || !is_slow {
            known.factor = if is_slow { factor } else { 1.0 };
        }
        has_turned
    }

    /// How many times as long as measured a machine is believed to take.
    pub fn factor(&self, address: SocketAddr, now: Instant) -> f64 {
        let Some(known) = self.0.get(&address) else { return 1.0 };
        let half_life = HALF_LIFE * 2u32.pow(known.times.saturating_sub(1).min(DOUBLINGS_MAX));
        let halves = now.saturating_duration_since(known.at).as_secs_f64() / half_life.as_secs_f64();
        1.0 + (known.factor - 1.0) * 0.5f64.powf(halves)
    }

    /// Why a machine is not used, if it is for this.
    pub fn reason(&self, address: SocketAddr, now: Instant) -> Option<String> {
        let factor = self.factor(address, now);
        (factor >= FACTOR_MIN).then(|| format!("it took {factor:.0} times as long as it was measured to need"))
    }

    pub fn is_empty(&self) -> bool {
        self.0.values().all(|known| known.factor <= 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_slow_when_it_is_so_twice_and_recovers_less_readily_each_time() {
        let (start, address) = (Instant::now(), "10.0.0.2:1".parse().unwrap());
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut slowness = Slowness::default();
        let mut check = |at, seconds, turned, factor: f64| {
            assert_eq!(slowness.observe(address, seconds, 0.01, after(at)), turned, "at {at}");
            assert_eq!(slowness.factor(address, after(at)).round(), factor, "at {at}");
        };
        check(0, 0.2, false, 1.0);
        check(2, 0.01, false, 1.0);
        check(4, 0.2, false, 1.0);
        check(6, 0.1, true, 10.0);
        check(8, 0.3, false, 30.0);
        check(10, 0.02, false, 1.0);
        check(12, 0.5, false, 1.0);
        check(14, 0.41, true, 41.0);
        // It is not used any more. It was found slow twice.
        assert_eq!(slowness.factor(address, after(14 + 120)).round(), 21.0);
        assert!(slowness.reason(address, after(14)).is_some_and(|why| why.contains("41 times")));
        assert!(slowness.reason(address, after(1_000)).is_none());
        // Twenty times a short time is no reason for another plan.
        assert!(!slowness.observe("10.0.0.3:1".parse().unwrap(), 2e-3, 1e-4, start));
    }
}
