//! The architectures that consort runs: one file each, which lists the tensors of a decoder layer, what each is for,
//! what the two file formats call it and how it is split over ranks, and reads what only this architecture's
//! configuration says. Slicing and loading are derived from these lists.
//!
//! All of them are pre-norm decoders with rotary positions, grouped-query attention and a gated feed-forward:
//!
//! ```text
//! x += post(output(attend(rotate(norm(query n)), rotate(norm(key n)), value n)))     n = norm(x)
//! x += post(down(activation(gate n) * (up n)))                                       n = norm(x)
//! ```
//!
//! where a norm that the list does not name is absent, and a layer of experts has a router and many feed-forwards.

mod gemma3;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use std::fmt;

use kernels::{Activation, RopeLayout};

use crate::description::{Description, DescriptionError};
use crate::facts::ModelMetadata;

pub(crate) static SUPPORTED: [&Architecture; 6] =
    [&llama::LLAMA, &qwen2::QWEN2, &qwen3::QWEN3, &mistral::MISTRAL, &qwen3_moe::QWEN3_MOE, &gemma3::GEMMA3];

pub struct Architecture {
    /// What config.json calls it in `model_type`.
    pub name: &'static str,
    /// Other values of `model_type` that mean the same.
    pub(crate) aliases: &'static [&'static str],
    /// What a GGUF file calls it in `general.architecture`, and which pairs of elements its query and key rows are
    /// ordered for. `None`: GGUF has another name for it, under which it runs.
    pub(crate) gguf: Option<(&'static str, RopeLayout)>,
    pub(crate) tensors: &'static [Tensor],
    pub(crate) activation: Activation,
    /// Sizes that config.json may leave out, as transformers fills them in.
    pub(crate) defaults: &'static [(&'static str, usize)],
    /// Whether the head is the embedding when config.json does not say.
    pub(crate) tied: bool,
    /// Completes a description that holds the sizes and identical full-attention layers.
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

/// One tensor of a decoder layer. A name is what follows `model.layers.N.` or `blk.N.`; one with `{}` stands for a
/// tensor per expert, else a file has all experts in one.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub role: WeightKind,
    pub hf: &'static str,
    pub gguf: &'static str,
    pub split: Split,
}

/// What a tensor is for; its shape follows from this and the description.
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

/// How a tensor `[out, in]` is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Split {
    /// Each rank has some of the output features: rows of a matrix, elements of a bias.
    Column(Axis),
    /// Each rank has some of the input features, and its product is a part of a sum.
    Row(Axis),
    /// Each rank has some of the experts, whole.
    Experts,
    /// Every rank has all of it.
    Replicated,
}

/// What a divided dimension counts. Tensors divided along the same axis are cut at the same places.
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
