//! Inference: one connection is one sequence. Its session is opened by the first work that comes, so idle connections cost
//! a thread and nothing else.

use std::sync::Arc;
use std::time::Duration;

use tracing::debug;
use types::LayerRange;

use super::super::connection::{CakeConnection, CakeConnectionError};
use super::super::layer_name::layer_range;
use super::super::wire::{
    CakeDType, CakeMessage, CakeOp, CakeTensor, CakeVariant, CakeWorkerInfo, activation_rows, activation_tensor,
};
use super::CakeWorker;
use super::served::ServedModel;
use super::stage::{CakeSession, CakeStage, CakeStageError};

/// The text of an error that is sent to a master.
const ERROR_BYTES_MAX: usize = 1024;

/// The sequence of a connection.
#[derive(Default)]
struct Sequence {
    open: Option<OpenSequence>,
}

/// Fields are dropped in their order: the session before its stage, and that before its model.
struct OpenSequence {
    session: Box<dyn CakeSession>,
    _stage: Arc<dyn CakeStage>,
    model: Arc<ServedModel>,
    layers: LayerRange,
    computed: usize,
}

impl CakeWorker {
    /// Serves a master that has said hello, until it closes the connection.
    pub(super) fn serve_master(
        &self,
        connection: &CakeConnection,
        hello_wait: Duration,
    ) -> Result<(), CakeConnectionError> {
        connection.send(&worker_info(hello_wait), CakeVariant::Head)?;
        let mut sequence = Sequence::default();
        loop {
            let payload = connection.receive(self.message_bytes_max(), None)?;
            let message = payload.message(CakeVariant::Head)?;
            let ops_of_single;
            let (x, ops) = match &message {
                CakeMessage::Goodbye => {
                    sequence.open = None;
                    connection.send(&worker_info(Duration::ZERO), CakeVariant::Head)?;
                    continue;
                }
                CakeMessage::Batch { x, ops } => (x, &ops[..]),
                CakeMessage::SingleOp { x, op } => {
                    ops_of_single = [op.clone()];
                    (x, &ops_of_single[..])
                }
                _ => return Err(CakeConnectionError::Unexpected),
            };
            match sequence.run(self, x, ops) {
                Ok(values) => {
                    let (hidden, dtype) = (values.hidden, x.dtype());
                    let sent = activation_tensor(&values.rows, hidden, dtype, |tensor| {
                        connection.send(&CakeMessage::Tensor(tensor), CakeVariant::Head)
                    });
                    match sent {
                        Ok(sent) => sent?,
                        Err(error) => sequence.fail(connection, &error.to_string())?,
                    }
                }
                Err(CakeStageError(why)) => sequence.fail(connection, &why)?,
            }
        }
    }
}

struct Activations {
    hidden: usize,
    rows: Vec<f32>,
}

impl Sequence {
    fn run(
        &mut self,
        worker: &CakeWorker,
        x: &CakeTensor<'_>,
        ops: &[CakeOp<'_>],
    ) -> Result<Activations, CakeStageError> {
        let layers = layer_range(ops.iter().map(|op| op.layer)).map_err(|error| CakeStageError(error.to_string()))?;
        let position = position(ops)?;
        if self.open.as_ref().is_none_or(|open| open.layers != layers) {
            self.open = None;
            let model = worker.served()?;
            let stage = model.stage(layers)?;
            let session = stage.open()?;
            self.open = Some(OpenSequence { session, _stage: stage, model, layers, computed: 0 });
        }
        let open = self.open.as_mut().ok_or_else(|| CakeStageError("there is no session".to_owned()))?;
        let hidden = open.model.hidden();
        let mut rows = activation_rows(x, hidden).map_err(|error| CakeStageError(error.to_string()))?;
        let count = rows.len() / hidden;
        let (computed, max) = (open.computed, open.model.positions_max());
        if position > computed {
            let why = format!("work at position {position} came, {computed} tokens were computed");
            return Err(CakeStageError(why));
        }
        if count > max - position {
            return Err(CakeStageError(format!("{} tokens are too many, the limit is {max}", position + count)));
        }
        open.session.forward(position, &mut rows)?;
        open.computed = position + count;
        if rows.len() != count * hidden {
            return Err(CakeStageError("the layers gave another number of activations".to_owned()));
        }
        Ok(Activations { hidden, rows })
    }

    /// Reports an error. The session may hold a part of a step, so it is closed.
    fn fail(&mut self, connection: &CakeConnection, why: &str) -> Result<(), CakeConnectionError> {
        debug!("work for a cake master failed: {why}");
        self.open = None;
        let message = &why[..why.floor_char_boundary(ERROR_BYTES_MAX)];
        connection.send(&CakeMessage::WorkerError { message }, CakeVariant::Head)
    }
}

/// The position of the first row, which is the same for all layers.
fn position(ops: &[CakeOp<'_>]) -> Result<usize, CakeStageError> {
    let first = ops.first().map_or(0, |op| op.position);
    if ops.iter().any(|op| op.position != first) {
        return Err(CakeStageError("the layers of a batch have different positions".to_owned()));
    }
    usize::try_from(first).map_err(|_| CakeStageError(format!("position {first} is too large")))
}

fn worker_info(hello_wait: Duration) -> CakeMessage<'static> {
    CakeMessage::WorkerInfo(CakeWorkerInfo {
        version: env!("CARGO_PKG_VERSION"),
        dtype: CakeDType::F32.name(),
        os: std::env::consts::OS,
        arch: std::env::consts::ARCH,
        device: "cpu",
        device_index: 0,
        latency_ms: hello_wait.as_millis(),
    })
}
