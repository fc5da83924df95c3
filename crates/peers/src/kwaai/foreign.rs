//! [`KwaaiPeer`]: a block server of KwaaiNet as a peer of a client's chains.

use kwaai::KwaaiWireError;
use std::time::Duration;
use tokio::sync::mpsc;
use types::LayerRange;

use super::span::{KwaaiRoute, KwaaiSpan, KwaaiSpanLimits, KwaaiSpanOutput, KwaaiSpanShape, SpanError};
use crate::block::BlockRows;
use crate::client::{ForeignLoss, ForeignPeer, ForeignTask};
use crate::wire::{Activations, Encoding, Returned, Run};

/// A server whose block does not end with the model's last layer: such a one would return logits, and a chain needs states.
pub struct KwaaiPeer {
    route: KwaaiRoute,
    shape: KwaaiSpanShape,
}

impl KwaaiPeer {
    /// `None` if the block ends with the model's last layer.
    pub fn new(route: KwaaiRoute, layers: LayerRange, hidden: usize, model_layers: usize) -> Option<Self> {
        let shape = KwaaiSpanShape { layers, hidden, output: KwaaiSpanOutput::States };
        (layers.end() < model_layers).then_some(Self { route, shape })
    }
}

impl ForeignPeer for KwaaiPeer {
    fn layers(&self) -> LayerRange {
        self.shape.layers
    }

    fn session(
        &self,
        mut runs: mpsc::UnboundedReceiver<Run>,
        returned: mpsc::UnboundedSender<Returned>,
    ) -> ForeignTask {
        let mut span = KwaaiSpan::new(self.route.clone(), self.shape, KwaaiSpanLimits::default());
        Box::pin(async move {
            while let Some(Run { run, position, phase, is_silent, activations, .. }) = runs.recv().await {
                let Activations { rows, values, .. } = activations;
                let state_rows = if is_silent { 0 } else { rows };
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
