//! `TensorNames`: the names of a model's tensors, in Hugging Face's files or in GGUF files, and which of them a part of the
//! model needs.

use crate::architecture::{Tensor, WeightKind};
use crate::description::{Description, FeedForward, Layer};
use crate::load::LoadError;
use crate::part::ModelPart;

/// Gemma 3's prefix in the hub's files of the multimodal models.
const NESTED: &str = "language_model.model.";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TensorNames {
    /// `prefix` precedes `layers.0.…`, `embed_tokens.weight` and `norm.weight`.
    HuggingFace {
        prefix: &'static str,
    },
    Gguf,
}

/// The tensors that are not part of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Embedding,
    Norm,
    Head,
}

impl TensorNames {
    /// Finds the prefix of the text model's tensors among the names of all. Multimodal checkpoints nest it one level deeper.
    pub fn hugging_face<'a, I: Iterator<Item = &'a str>>(names: impl Fn() -> I) -> Self {
        let holds = |prefix: &&str| names().any(|name| name.starts_with(&format!("{prefix}layers.")));
        let prefix = ["model.", "model.language_model.", NESTED, ""].into_iter().find(holds).unwrap_or("model.");
        Self::HuggingFace { prefix }
    }

    /// The name of a layer's tensor, with `{}` for the expert if each expert has its own tensor.
    pub fn layer(self, layer: usize, tensor: &Tensor) -> String {
        match self {
            Self::HuggingFace { prefix } => format!("{prefix}layers.{layer}.{}", tensor.hf),
            Self::Gguf => format!("blk.{layer}.{}", tensor.gguf),
        }
    }

    pub fn global(self, end: End) -> String {
        match (self, end) {
            (Self::Gguf, End::Embedding) => "token_embd.weight".into(),
            (Self::Gguf, End::Norm) => "output_norm.weight".into(),
            (Self::Gguf, End::Head) => "output.weight".into(),
            (Self::HuggingFace { prefix }, End::Embedding) => format!("{prefix}embed_tokens.weight"),
            (Self::HuggingFace { prefix }, End::Norm) => format!("{prefix}norm.weight"),
            (Self::HuggingFace { prefix: NESTED }, End::Head) => "language_model.lm_head.weight".into(),
            (Self::HuggingFace { .. }, End::Head) => "lm_head.weight".into(),
        }
    }

    /// Calls `each` with the names of all tensors that a part needs, until it fails.
    pub fn needed(
        self,
        description: &Description,
        part: ModelPart,
        each: &mut dyn FnMut(String) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let layers = part.layers_of(description)?;
        if part.has_embedding_and_head {
            each(self.global(End::Embedding))?;
            each(self.global(End::Norm))?;
            if !description.tied {
                each(self.global(End::Head))?;
            }
        }
        let first = part.layers.map_or(0, |layers| layers.start());
        for (index, layer) in (first..).zip(layers) {
            for tensor in description.architecture.tensors.iter().filter(|tensor| layer.has(tensor.role)) {
                let name = self.layer(index, tensor);
                match layer.feed_forward {
                    FeedForward::Experts { routing, .. } if name.contains("{}") => {
                        (0..routing.experts).try_for_each(|expert| each(name.replace("{}", &expert.to_string())))?;
                    }
                    _ => each(name)?,
                }
            }
        }
        Ok(())
    }
}

impl Layer {
    /// Whether the layer has the weights of this kind, if its architecture has them.
    fn has(&self, kind: WeightKind) -> bool {
        use WeightKind::{Down, ExpertDown, ExpertGate, ExpertUp, Gate, Router, Up};
        let has_experts = matches!(self.feed_forward, FeedForward::Experts { .. });
        match kind {
            Gate | Up | Down => !has_experts,
            Router | ExpertGate | ExpertUp | ExpertDown => has_experts,
            _ => true,
        }
    }
}
