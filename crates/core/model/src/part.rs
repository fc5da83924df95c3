//! `ModelPart`: the part of a model that a process holds: the whole of it, a range of layers, or what the coordinator of a chain holds.

use types::LayerRange;

use crate::description::{Description, Layer};
use crate::load::LoadError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelPart {
    /// Its decoder layers, if it has any.
    pub layers: Option<LayerRange>,
    /// Whether it has the embedding, the final norm and the LM head.
    pub has_embedding_and_head: bool,
}

impl ModelPart {
    pub fn whole(description: &Description) -> Self {
        Self::coordinator(description.layers.len())
    }

    /// A range of layers.
    pub fn stage(layers: LayerRange) -> Self {
        Self { layers: Some(layers), has_embedding_and_head: false }
    }

    /// The first `layers` layers of a whole model, possibly none, with the embedding and the head.
    pub fn coordinator(layers: usize) -> Self {
        Self { layers: None, has_embedding_and_head: true }.first(layers)
    }

    /// What the coordinator of a chain for this part holds: its first `count` layers, possibly none, and the embedding and the
    /// head if it has them. More layers than it has become a range that it does not have.
    pub fn first(self, count: usize) -> Self {
        let start = self.layers.map_or(0, |layers| layers.start());
        let [start, end] = [start, start.saturating_add(count)].map(|layer| u32::try_from(layer).unwrap_or(u32::MAX));
        Self { layers: LayerRange::new(start, end), ..self }
    }

    /// The descriptions of its layers. Fails if the model does not have them.
    pub(crate) fn layers_of<'a>(&self, description: &'a Description) -> Result<&'a [Layer], LoadError> {
        let Some(layers) = self.layers else { return Ok(&[]) };
        let described = description.layers.get(layers.start()..layers.end());
        described.ok_or(LoadError::Layers { layers, count: description.layers.len() })
    }
}
