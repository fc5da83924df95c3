//! The set-up connection: a master assigns layers and, where the worker has no weights for them, sends the model's files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::Checkpoint;
use tracing::{info, warn};
use types::LayerRange;

use super::super::connection::{CakeConnection, CakeConnectionError};
use super::super::layer_name::layer_ranges;
use super::super::wire::{CakeMessage, CakeVariant, FRAME_BYTES_MAX};
use super::served::ServedModel;
use super::store::{CakeStoreError, IncomingModel, ModelHash, StoredModel};
use super::{CakeWorker, CakeWorkerError, Serving, read_config};

/// How long a master may take between two messages: it reads and compresses a chunk in that time.
const CHUNK_WAIT: Duration = Duration::from_secs(120);

/// An assignment that was checked.
struct Assignment {
    layers: Vec<LayerRange>,
    hash: ModelHash,
}

impl CakeWorker {
    /// Answers an assignment. What fails is reported to the master.
    pub(super) fn set_up(
        &self,
        connection: &CakeConnection,
        layers: &[&str],
        model_hash: &str,
    ) -> Result<(), CakeConnectionError> {
        let mut variant = CakeVariant::Head;
        match self.try_set_up(connection, layers, model_hash, &mut variant) {
            Ok(()) => connection.send(&CakeMessage::WorkerReady, variant),
            Err(CakeWorkerError::Connection(error)) => Err(error),
            Err(error) => {
                warn!("a cake master's assignment failed: {error}");
                connection.send(&CakeMessage::WorkerError { message: &error.to_string() }, variant)
            }
        }
    }

    fn try_set_up(
        &self,
        connection: &CakeConnection,
        layers: &[&str],
        model_hash: &str,
        variant: &mut CakeVariant,
    ) -> Result<(), CakeWorkerError> {
        let _turn = self.setup.try_lock().map_err(|_| CakeWorkerError::Busy)?;
        let hash = ModelHash::parse(model_hash).ok_or(CakeWorkerError::ModelHash)?;
        let assignment = Assignment { layers: layer_ranges(layers.iter().copied())?, hash };
        let acknowledge =
            |needs_data| connection.send(&CakeMessage::LayerAssignmentAck { needs_data }, CakeVariant::Head);
        if let Some(same) = self.has_same(&assignment) {
            *variant = same;
            return Ok(acknowledge(false)?);
        }
        if let Some(folder) = &self.settings.model {
            let found = open_local(folder, hash)?;
            self.stop_serving()?;
            // If the layers cannot be loaded, the worker goes on as it began.
            *variant = self.begin_serving(&assignment, found).or_else(|error| {
                *self.serving() = Some(Serving::of_folder(folder, &self.loader)?);
                Err(error)
            })?;
            return Ok(acknowledge(false)?);
        }
        self.stop_serving()?;
        // What was received before may have other layers of the model; then the master sends it again.
        let stored = self.find_stored(&assignment).map(|found| self.begin_serving(&assignment, found));
        match stored {
            Some(Ok(known)) => {
                *variant = known;
                return Ok(acknowledge(false)?);
            }
            Some(Err(error)) => info!("the weights from an earlier start cannot be used: {error}"),
            None => {}
        }
        let incoming = self.store.as_ref().ok_or(CakeWorkerError::NoStore)?.begin(hash)?;
        acknowledge(true)?;
        info!("a cake master sends the files of its model");
        let stored = receive_files(connection, incoming, variant)?;
        let checkpoint = stored.checkpoint()?;
        self.begin_serving(&assignment, Found { checkpoint, config: stored.config, variant: stored.variant })?;
        Ok(())
    }

    /// The variant for the answer, if what is served is what a master assigns.
    fn has_same(&self, assignment: &Assignment) -> Option<CakeVariant> {
        let serving = self.serving();
        let serving = serving.as_ref()?;
        let is_same = serving.model.is_assigned(&assignment.layers) && assignment.hash.is_of(&serving.config);
        is_same.then_some(serving.variant)
    }

    fn find_stored(&self, assignment: &Assignment) -> Option<Found> {
        let stored = self.store.as_ref()?.find(assignment.hash).and_then(|stored| {
            let Some(stored) = stored else { return Ok(None) };
            let checkpoint = stored.checkpoint()?;
            let StoredModel { config, variant, .. } = stored;
            Ok(Some(Found { checkpoint, config, variant }))
        });
        stored.unwrap_or_else(|error| {
            info!("the weights from an earlier start cannot be used: {error}");
            None
        })
    }

    fn begin_serving(&self, assignment: &Assignment, found: Found) -> Result<CakeVariant, CakeWorkerError> {
        let Found { checkpoint, config, variant } = found;
        let model = ServedModel::load(checkpoint, Arc::clone(&self.loader), Some(assignment.layers.clone()))?;
        let layers = assignment.layers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        info!(layers, "serve a cake master");
        *self.serving() = Some(Serving { model: Arc::new(model), config, variant });
        Ok(variant)
    }
}

/// Weights that need not be sent.
struct Found {
    checkpoint: Checkpoint,
    config: String,
    variant: CakeVariant,
}

fn open_local(folder: &Path, hash: ModelHash) -> Result<Found, CakeWorkerError> {
    let config = read_config(folder)?;
    if !hash.is_of(&config) {
        return Err(CakeWorkerError::OtherModel);
    }
    Ok(Found { checkpoint: Checkpoint::open(folder)?, config, variant: CakeVariant::Head })
}

/// Receives files until the master is done, and keeps them. The first chunk tells the variant of the protocol.
fn receive_files(
    connection: &CakeConnection,
    mut incoming: IncomingModel,
    variant: &mut CakeVariant,
) -> Result<StoredModel, CakeWorkerError> {
    match receive_chunks(connection, &mut incoming, variant) {
        Ok(()) => Ok(incoming.finish(*variant)?),
        Err(error) => {
            incoming.abandon();
            Err(error)
        }
    }
}

fn receive_chunks(
    connection: &CakeConnection,
    incoming: &mut IncomingModel,
    variant: &mut CakeVariant,
) -> Result<(), CakeWorkerError> {
    let mut is_first = true;
    loop {
        let payload = connection.receive(FRAME_BYTES_MAX, Some(CHUNK_WAIT))?;
        if is_first {
            *variant = payload.variant().unwrap_or(*variant);
            is_first = false;
        }
        match payload.message_in(*variant).map_err(CakeConnectionError::from)? {
            CakeMessage::ModelDataChunk(chunk) => {
                incoming.transfer.receive(&chunk).map_err(CakeStoreError::from)?;
                if chunk.offset == 0 {
                    info!(file = chunk.file, bytes = chunk.total_bytes, "receiving");
                }
            }
            CakeMessage::ModelDataDone => return Ok(()),
            _ => return Err(CakeConnectionError::Unexpected.into()),
        }
    }
}
