//! `ServedModel`: the model that a worker runs layers of, and the ranges that are loaded.

use std::sync::{Arc, Mutex, PoisonError};

use model::Checkpoint;
use types::LayerRange;

use super::stage::{CakeLoader, CakeStage, CakeStageError};

/// Ranges of layers that are loaded on demand at once.
const RANGES_MAX: usize = 8;

pub(super) struct ServedModel {
    checkpoint: Checkpoint,
    loader: Arc<dyn CakeLoader>,
    /// `None`: whichever layers a master names.
    assigned: Option<Vec<LayerRange>>,
    stages: Mutex<Vec<(LayerRange, Arc<dyn CakeStage>)>>,
}

impl ServedModel {
    /// Loads the assigned layers; without an assignment, layers are loaded when a master names them.
    pub fn load(
        checkpoint: Checkpoint,
        loader: Arc<dyn CakeLoader>,
        assigned: Option<Vec<LayerRange>>,
    ) -> Result<Self, CakeStageError> {
        let layers = checkpoint.description().layers.len();
        let ranges = assigned.as_deref().unwrap_or_default();
        if let Some(range) = ranges.iter().find(|range| range.end() > layers) {
            return Err(CakeStageError(format!("layers {range} were assigned, the model has {layers}")));
        }
        let load = |&range: &LayerRange| Ok((range, loader.load(&checkpoint, range)?));
        let stages = ranges.iter().map(load).collect::<Result<_, CakeStageError>>()?;
        Ok(Self { checkpoint, loader, assigned, stages: Mutex::new(stages) })
    }

    pub fn is_assigned(&self, ranges: &[LayerRange]) -> bool {
        self.assigned.as_deref() == Some(ranges)
    }

    pub fn hidden(&self) -> usize {
        self.checkpoint.description().hidden
    }

    pub fn positions_max(&self) -> usize {
        self.loader.positions_max(&self.checkpoint)
    }

    pub fn stage(&self, layers: LayerRange) -> Result<Arc<dyn CakeStage>, CakeStageError> {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, stage)) = stages.iter().find(|(range, _)| *range == layers) {
            return Ok(Arc::clone(stage));
        }
        let count = self.checkpoint.description().layers.len();
        if self.assigned.is_some() || layers.end() > count {
            return Err(CakeStageError(format!("layers {layers} are not served here")));
        }
        if stages.len() == RANGES_MAX {
            // One without sessions makes room.
            let unused = stages.iter().position(|(_, stage)| Arc::strong_count(stage) == 1);
            let unused = unused.ok_or_else(|| CakeStageError("too many ranges of layers are in use".to_owned()))?;
            stages.remove(unused);
        }
        let stage = self.loader.load(&self.checkpoint, layers)?;
        stages.push((layers, Arc::clone(&stage)));
        Ok(stage)
    }
}
