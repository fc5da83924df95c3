//! [`KwaaiPeer`]: a block server of KwaaiNet as a peer of a client's chains.

use kwaai::KwaaiWireError;
use std::time::Duration;
use tokio::sync::mpsc;
use types::LayerRange;

use super::finder::KwaaiModel;
use super::span::{KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, SpanError};
use crate::block::BlockRows;
use crate::client::{ForeignLoss, ForeignPeer, ForeignTask};
use crate::wire::{Activations, Encoding, Returned, Run};

/// A server, of which all of the block is used.
pub struct KwaaiPeer {
    route: KwaaiRoute,
    shape: KwaaiSpanShape,
}

impl KwaaiPeer {
    /// `None` if the model has no such layers.
    pub fn new(route: KwaaiRoute, layers: LayerRange, model: &KwaaiModel) -> Option<Self> {
        let output = match layers.end() == model.layers {
            true => KwaaiSpanOutput::Logits { vocab: model.vocab },
            false => KwaaiSpanOutput::States,
        };
        let shape = KwaaiSpanShape { layers, hidden: model.hidden, output };
        (layers.end() <= model.layers).then_some(Self { route, shape })
    }
}

impl ForeignPeer for KwaaiPeer {
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
    let why = error.to_string().into();
    match error {
        SpanError::Replay { .. } => ForeignLoss::Replay,
        // Values beyond f16 are this client's.
        SpanError::Nonsense(KwaaiWireError::NotFinite) => ForeignLoss::Malformed { why },
        error if error.is_misbehaviour() => ForeignLoss::Malformed { why },
        _ => ForeignLoss::Lost { why },
    }
}
