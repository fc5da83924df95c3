//! Shows how weights come: as a progress bar in a terminal, else as lines of the log.

use std::io::{IsTerminal, stderr};
use std::time::Instant;

use cluster::node::{IncomingWeights, NodeObserver};
use tracing::info;

use crate::progress;

#[derive(Clone, Copy, Debug)]
pub struct WeightsProgress {
    bars: bool,
}

impl WeightsProgress {
    pub fn new() -> Self {
        Self { bars: stderr().is_terminal() }
    }
}

impl NodeObserver for WeightsProgress {
    fn receiving(&self, weights: &IncomingWeights<'_>) -> Box<dyn FnMut(u64)> {
        let &IncomingWeights { model, layers, bytes } = weights;
        info!(model, %layers, bytes, "receiving weights");
        let message = format!("weights of layers {layers}");
        let bar = self.bars.then(|| ShownBar(progress::beside_log(progress::bytes(bytes).with_message(message))));
        let mut log = ReceivedLog { bytes, begun: Instant::now(), quarters: 0 };
        Box::new(move |received| {
            bar.iter().for_each(|bar| bar.0.set_position(received));
            if let Some(quarters) = log.next(received)
                && (bar.is_none() || quarters == 4)
            {
                let seconds = log.begun.elapsed().as_secs_f64();
                info!(received, bytes, seconds, "{} % of the weights have come", quarters * 25);
            }
        })
    }
}

/// Is cleared when it is dropped.
struct ShownBar(indicatif::ProgressBar);

impl Drop for ShownBar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Counts the quarters of what is to come.
struct ReceivedLog {
    bytes: u64,
    begun: Instant,
    quarters: u64,
}

impl ReceivedLog {
    /// The quarters that have come, if they are more than at the last call.
    fn next(&mut self, received: u64) -> Option<u64> {
        let quarters = u128::from(received.min(self.bytes)) * 4 / u128::from(self.bytes.max(1));
        let quarters = u64::try_from(quarters).unwrap_or(u64::MAX);
        (quarters > self.quarters).then(|| {
            self.quarters = quarters;
            quarters
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_quarter_is_logged_once() {
        let mut log = ReceivedLog { bytes: 10, begun: Instant::now(), quarters: 0 };
        let next = [0, 2, 3, 3, 8, 10, 10, 11].map(|received| log.next(received));
        assert_eq!(next, [None, None, Some(1), None, Some(3), Some(4), None, None]);
        let mut all = ReceivedLog { bytes: u64::MAX, begun: Instant::now(), quarters: 0 };
        assert_eq!((all.next(u64::MAX), all.next(u64::MAX)), (Some(4), None));
    }
}
