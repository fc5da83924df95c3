//! [`KwaaiPeer`]: a block server of KwaaiNet as a peer of a client's chains.

use std::error::Error;
use std::time::Duration;

use kwaai::KwaaiFailure;
use tokio::sync::mpsc;
use types::LayerRange;

use super::finder::KwaaiModel;
use super::frames::KwaaiStreamError;
use super::span::{KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, SpanError};
use crate::block::BlockRows;
use crate::client::{ForeignLoss, ForeignPeer, ForeignTask};
use crate::wire::{Activations, Encoding, Returned, Run};

/// A server, of which all of the block is used.
pub struct KwaaiPeer {
    route: KwaaiRoute,
    shape: KwaaiSpanShape,
    name: Option<String>,
}

impl KwaaiPeer {
    /// `None` if the model has no such layers.
    pub fn new(route: KwaaiRoute, layers: LayerRange, model: &KwaaiModel) -> Option<Self> {
        let output = match layers.end() == model.layers {
            true => KwaaiSpanOutput::Logits { vocab: model.vocab },
            false => KwaaiSpanOutput::States,
        };
        let shape = KwaaiSpanShape { layers, hidden: model.hidden, output };
        let name = match &route {
            KwaaiRoute::Local(address) => Some(address.to_string()),
            KwaaiRoute::Peer { .. } => None,
        };
        (layers.end() <= model.layers).then_some(Self { route, shape, name })
    }

    /// Where the user said that it is: people call it that.
    pub fn named(self, name: String) -> Self {
        Self { name: Some(name), ..self }
    }
}

impl ForeignPeer for KwaaiPeer {
    fn name(&self) -> Option<String> {
        self.name.clone()
    }

    fn layers(&self) -> LayerRange {
        self.shape.layers
    }

    fn returns_logits(&self) -> bool {
        matches!(self.shape.output, KwaaiSpanOutput::Logits { .. })
    }

    fn session(
        &self,
        is_last: bool,
        mut runs: mpsc::UnboundedReceiver<Run>,
        returned: mpsc::UnboundedSender<Returned>,
    ) -> ForeignTask {
        let mut span = KwaaiSpan::new(self.route.clone(), self.shape, KwaaiSpanLimits::default());
        Box::pin(async move {
            while let Some(Run { run, position, phase, state_rows, is_silent, activations }) = runs.recv().await {
                let Activations { rows, values, .. } = activations;
                let state_rows = match (is_silent, is_last) {
                    (true, _) => 0,
                    (false, true) => state_rows,
                    (false, false) => rows,
                };
                let ran = match span.run(BlockRows { position, phase, activations: values, state_rows }).await {
                    Ok(ran) => ran,
                    Err(error) => return loss(&error),
                };
                let states = Activations { encoding: Encoding::F32, rows: state_rows, values: ran.states };
                let reply = Returned { run, passed_on: None, compute: ran.compute, queued: Duration::ZERO, states };
                if returned.send(reply).is_err() {
                    break;
                }
            }
            ForeignLoss::Replay
        })
    }
}

fn loss(error: &SpanError) -> ForeignLoss {
    match error {
        SpanError::Replay { .. } => ForeignLoss::Replay,
        SpanError::NotReady(failure) => {
            ForeignLoss::Busy { why: failure.to_string().into(), is_full: matches!(failure, KwaaiFailure::AtCapacity) }
        }
        SpanError::Nonsense(wire) | SpanError::Broken(KwaaiStreamError::Wire(wire)) => {
            ForeignLoss::Malformed { why: wire.to_string().into() }
        }
        error => ForeignLoss::Lost { why: with_cause(error).into() },
    }
}

/// An error and what caused it, each once.
pub(super) fn with_cause(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.contains(&why) {
            text = format!("{text}: {why}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_error_names_its_cause_once() {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let ForeignLoss::Lost { why } = loss(&SpanError::Unreachable(refused())) else { panic!() };
        assert_eq!(&*why, "it could not be reached: connection refused");
        let ForeignLoss::Lost { why } = loss(&SpanError::Unreachable(io::Error::other(refused()))) else { panic!() };
        assert_eq!(why.matches("refused").count(), 1, "{why}");
        let ForeignLoss::Lost { why } = loss(&SpanError::Broken(KwaaiStreamError::Io(refused()))) else { panic!() };
        assert_eq!(&*why, "the connection to the server broke: read or write a frame: connection refused");
    }

    #[test]
    fn a_server_that_is_not_ready_is_busy_and_one_that_sends_nonsense_is_not() {
        let busy = |failure| loss(&SpanError::NotReady(failure));
        assert!(matches!(busy(KwaaiFailure::AtCapacity), ForeignLoss::Busy { is_full: true, .. }));
        let warming_up = busy(KwaaiFailure::WarmingUp(": 3 of 8".to_owned()));
        assert!(matches!(warming_up, ForeignLoss::Busy { is_full: false, .. }), "{warming_up:?}");
        let nonsense = loss(&SpanError::Nonsense(kwaai::KwaaiWireError::NotFinite));
        assert!(matches!(nonsense, ForeignLoss::Malformed { .. }), "{nonsense:?}");
    }
}
