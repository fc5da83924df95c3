//! The supported architectures, one file each. A file lists the tensors of a decoder layer with their kind, their names in
//! both file formats and their split over ranks, and reads configuration that only this architecture has. Slicing and
//! loading are derived from these lists.
//!
//! All are pre-norm decoders with RoPE, grouped-query attention and a gated feed-forward:
//!
//! ```text
//! x += post(output(attend(rotate(norm(query n)), rotate(norm(key n)), value n)))     n = norm(x)
//! x += post(down(activation(gate n) * (up n)))                                       n = norm(x)
//! ```
//!
//! A norm that is not in the list is absent. A layer with experts has a router and many feed-forwards.

mod gemma3;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use std::fmt;

use kernels::{Activation, RopeLayout};

use crate::description::{Description, DescriptionError};
use crate::metadata::ModelMetadata;

pub(crate) static SUPPORTED: [&Architecture; 6] =
    [&llama::LLAMA, &qwen2::QWEN2, &qwen3::QWEN3, &mistral::MISTRAL, &qwen3_moe::QWEN3_MOE, &gemma3::GEMMA3];

pub struct Architecture {
    /// Its name in `model_type` of config.json.
    pub name: &'static str,
    /// Other values of `model_type` that mean the same.
    pub(crate) aliases: &'static [&'static str],
    /// Its name in `general.architecture` of GGUF files, and the RoPE layout of their query and key rows. `None` if GGUF
    /// files use the name of another architecture.
    pub(crate) gguf: Option<(&'static str, RopeLayout)>,
    pub(crate) tensors: &'static [Tensor],
    pub(crate) activation: Activation,
    /// Sizes that config.json may omit, with the defaults of transformers.
    pub(crate) defaults: &'static [(&'static str, usize)],
    /// Whether the head shares the embedding's weights if config.json does not say.
    pub(crate) tied: bool,
    /// Completes a description that has the sizes and identical full-attention layers.
    pub(crate) refine: fn(&ModelMetadata<'_>, &mut Description) -> Result<(), DescriptionError>,
}

impl Architecture {
    pub(crate) fn by_model_type(name: &str) -> Option<&'static Self> {
        SUPPORTED.into_iter().find(|a| a.name == name || a.aliases.contains(&name))
    }

    pub(crate) fn by_gguf_name(name: &str) -> Option<&'static Self> {
        SUPPORTED.into_iter().find(|a| a.gguf.is_some_and(|(gguf, _)| gguf == name))
    }

    pub(crate) fn tensor(&self, role: WeightKind) -> Option<&'static Tensor> {
        self.tensors.iter().find(|tensor| tensor.role == role)
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// One tensor of a decoder layer. Names are given without the prefix `model.layers.N.` or `blk.N.`. A name with `{}` means
/// one tensor per expert; without it, one tensor holds all experts.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub role: WeightKind,
    pub hf: &'static str,
    pub gguf: &'static str,
    pub split: Split,
}

/// The purpose of a tensor. It determines the shape, together with the description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightKind {
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryBias,
    KeyBias,
    ValueBias,
    QueryNorm,
    KeyNorm,
    Output,
    AttentionPostNorm,
    FeedForwardNorm,
    Gate,
    Up,
    Down,
    Router,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    FeedForwardPostNorm,
}

/// How a tensor `[out, in]` is split over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Each rank has some of the output features: rows of the stored matrix, elements of a bias.
    Column(Axis),
    /// Each rank has some of the input features; the product is the sum over all ranks.
    Row(Axis),
    /// Each rank has some of the experts, each one whole.
    Experts,
    /// Every rank has all of it.
    Replicated,
}

/// The dimension along which a tensor is split. All tensors with the same axis are split at the same positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    /// Query heads, `head_dim` features each.
    Heads,
    /// Key and value heads: those that the rank's query heads read.
    KvHeads,
    /// Inner features of the feed-forward.
    Inner,
}

const fn tensor(role: WeightKind, hf: &'static str, gguf: &'static str, split: Split) -> Tensor {
    Tensor { role, hf, gguf, split }
}
