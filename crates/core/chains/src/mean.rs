//! `MeanTime`: of the latest times, most of all of the last ones.

use std::time::Duration;

/// The part of a new measurement.
const WEIGHT: f64 = 0.1;

/// A running mean and a sum, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeanTime {
    pub mean_s: f64,
    pub total_s: f64,
    pub count: u64,
}

impl MeanTime {
    pub fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.mean_s = if self.count == 0 { seconds } else { self.mean_s + WEIGHT * (seconds - self.mean_s) };
        self.total_s += seconds;
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_time_counts_whole_and_each_later_one_a_tenth() {
        let mut mean = MeanTime::default();
        mean.add(Duration::from_secs(10));
        assert_eq!(mean, MeanTime { mean_s: 10.0, total_s: 10.0, count: 1 });
        mean.add(Duration::from_secs(20));
        assert_eq!(mean, MeanTime { mean_s: 11.0, total_s: 30.0, count: 2 });
    }
}
