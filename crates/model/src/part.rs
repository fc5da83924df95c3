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
        Self { layers: first_layers(description.layers.len()), has_embedding_and_head: true }
    }

    /// A range of layers.
    pub fn stage(layers: LayerRange) -> Self {
        Self { layers: Some(layers), has_embedding_and_head: false }
    }

    /// The first `layers` layers, possibly none, with the embedding and the head.
    pub fn coordinator(layers: usize) -> Self {
        Self { layers: first_layers(layers), has_embedding_and_head: true }
    }

    /// The descriptions of its layers. Fails if the model does not have them.
    pub(crate) fn layers_of<'a>(&self, description: &'a Description) -> Result<&'a [Layer], LoadError> {
        let Some(layers) = self.layers else { return Ok(&[]) };
        let described = description.layers.get(layers.start()..layers.end());
        described.ok_or(LoadError::Layers { layers, count: description.layers.len() })
    }
}

/// Layers `0..count`. A count beyond the limits of a model becomes a range that no model has.
fn first_layers(count: usize) -> Option<LayerRange> {
    LayerRange::new(0, u32::try_from(count).unwrap_or(u32::MAX))
}
