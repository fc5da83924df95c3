//! `Description`: everything about a model except its weights, checked once. Whoever holds one may multiply its sizes
//! without fear: none is zero, and no product of the few that make a tensor overflows.

use kernels::{Activation, HEAD_DIM_MAX, RopeLayout, Routing};
use serde_json::{Map, Value as Json};

use crate::architecture::{Architecture, SUPPORTED, WeightKind};
use crate::facts::{Key, ModelMetadata, member};
use crate::files::Gguf;
use crate::rope::Rope;

/// Far above any model there is; what goes beyond is garbage, and is refused before anything is allocated for it.
const FEATURES_MAX: usize = 1 << 20;
const LAYERS_MAX: usize = 1 << 12;
const HEADS_MAX: usize = 1 << 12;
const EXPERTS_MAX: usize = 1 << 13;
const VOCAB_MAX: usize = 1 << 24;
const POSITIONS_MAX: usize = 1 << 28;

#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    #[error("architecture {name:?} is not supported (supported: {})", supported())]
    Architecture { name: String },
    #[error("{key} is missing")]
    Missing { key: String },
    #[error("{key} has the impossible value {found}")]
    Value { key: String, found: String },
    #[error("{0} is not supported")]
    Unsupported(String),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    pub architecture: &'static Architecture,
    /// Width of the residual stream.
    pub hidden: usize,
    pub heads: usize,
    /// Divides `heads`.
    pub kv_heads: usize,
    /// Even.
    pub head_dim: usize,
    pub vocab: usize,
    pub eps: f32,
    /// Positions that the model was made for.
    pub positions_max: usize,
    /// Whether the head is the embedding.
    pub tied: bool,
    pub activation: Activation,
    /// Added to every norm's weight.
    pub norm_offset: f32,
    pub embedding_scale: f32,
    pub attention_scale: f32,
    pub rope_layout: RopeLayout,
    /// Never empty.
    pub layers: Vec<Layer>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// With a window `w`, position `p` sees the positions above `p - w` up to `p`.
    pub window: Option<usize>,
    pub rope: Rope,
    pub feed_forward: FeedForward,
}

#[derive(Clone, Copy, Debug)]
pub enum FeedForward {
    Dense { inner: usize },
    Experts { inner: usize, routing: Routing },
}

impl PartialEq for FeedForward {
    fn eq(&self, other: &Self) -> bool {
        let key = |this: &Self| match *this {
            Self::Dense { inner } => (inner, None),
            Self::Experts { inner, routing } => (inner, Some((routing.experts, routing.chosen, routing.normalise))),
        };
        key(self) == key(other)
    }
}

impl Description {
    /// From the text of a config.json. Of a model that sees images as well, its text part.
    pub fn from_config(config: &Json) -> Result<Self, DescriptionError> {
        let object = |value: &Json| DescriptionError::value("config.json", value.to_string());
        let outer = config.as_object().ok_or_else(|| object(config))?;
        let name = model_type(outer)?;
        if let Some(quantised) = member(outer, "quantization_config") {
            let method = quantised.get("quant_method").and_then(Json::as_str).unwrap_or("of an unnamed method");
            let method = shown(method.to_owned());
            return Err(DescriptionError::Unsupported(format!("weights quantised in safetensors ({method})")));
        }
        let architecture = Architecture::by_model_type(name)
            .ok_or_else(|| DescriptionError::Architecture { name: shown(name.to_owned()) })?;
        let text = match member(outer, "text_config") {
            Some(text) => text.as_object().ok_or_else(|| object(text))?,
            None => outer,
        };
        Self::read(&ModelMetadata::Config { config: text, architecture }, architecture, RopeLayout::Halves)
    }

    pub fn from_gguf(file: &Gguf) -> Result<Self, DescriptionError> {
        let key = "general.architecture";
        let name = file.get(key).ok_or_else(|| DescriptionError::Missing { key: key.into() })?;
        let name = name.as_str().ok_or_else(|| DescriptionError::value(key, format!("{name:?}")))?;
        let architecture = Architecture::by_gguf_name(name)
            .ok_or_else(|| DescriptionError::Architecture { name: shown(name.to_owned()) })?;
        let (prefix, layout) = architecture.gguf.expect("found by this name");
        Self::read(&ModelMetadata::Gguf { file, prefix }, architecture, layout)
    }

    fn read(
        facts: &ModelMetadata<'_>,
        architecture: &'static Architecture,
        rope_layout: RopeLayout,
    ) -> Result<Self, DescriptionError> {
        refuse_what_no_layer_has(facts, architecture)?;
        let hidden = within(facts, Key::HIDDEN, FEATURES_MAX)?;
        let heads = within(facts, Key::HEADS, HEADS_MAX)?;
        let kv_heads = facts.count_if(Key::KV_HEADS)?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(DescriptionError::value(facts.name(Key::KV_HEADS), format!("{kv_heads} (with {heads} heads)")));
        }
        let head_dim = match facts.count_if(Key::HEAD_DIM)? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(DescriptionError::Missing { key: facts.name(Key::HEAD_DIM) }),
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > HEAD_DIM_MAX {
            let key = facts.name(Key::HEAD_DIM);
            let size = format!("{key} of {head_dim} (it must be even and at most {HEAD_DIM_MAX})");
            return Err(DescriptionError::Unsupported(size));
        }
        let eps = facts.number_if(Key::EPS)?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&eps) {
            return Err(DescriptionError::value(facts.name(Key::EPS), eps.to_string()));
        }
        let layer = Layer {
            window: None,
            rope: facts.rope("full_attention", Key::ROPE_BASE, 10_000.0, head_dim)?,
            feed_forward: FeedForward::Dense { inner: inner(facts, architecture)? },
        };
        let mut description = Self {
            architecture,
            hidden,
            heads,
            kv_heads,
            head_dim,
            vocab: vocab(facts)?,
            eps: eps as f32,
            positions_max: within(facts, Key::POSITIONS, POSITIONS_MAX)?,
            tied: tied(facts, architecture)?,
            activation: activation(facts, architecture)?,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            attention_scale: (head_dim as f64).sqrt().recip() as f32,
            rope_layout,
            layers: vec![layer; within(facts, Key::LAYERS, LAYERS_MAX)?],
        };
        (architecture.refine)(facts, &mut description)?;
        description.check_layers()?;
        Ok(description)
    }

    pub(crate) fn slide_every_layer(&mut self, window: Option<usize>) {
        for layer in &mut self.layers {
            layer.window = window;
        }
    }

    fn check_layers(&self) -> Result<(), DescriptionError> {
        for layer in &self.layers {
            if layer.window == Some(0) {
                return Err(DescriptionError::value("sliding_window", "0"));
            }
            let (inner, key) = match layer.feed_forward {
                FeedForward::Dense { inner } => (inner, "intermediate_size"),
                FeedForward::Experts { inner, routing } => {
                    if !(1..=EXPERTS_MAX).contains(&routing.experts) {
                        return Err(DescriptionError::value("num_experts", routing.experts.to_string()));
                    }
                    if !(1..=routing.experts).contains(&routing.chosen) {
                        let found = format!("{} (of {} experts)", routing.chosen, routing.experts);
                        return Err(DescriptionError::value("num_experts_per_tok", found));
                    }
                    (inner, "moe_intermediate_size")
                }
            };
            if !(1..=FEATURES_MAX).contains(&inner) {
                return Err(DescriptionError::value(key, inner.to_string()));
            }
        }
        Ok(())
    }
}

impl DescriptionError {
    pub(crate) fn value(key: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Value { key: key.into(), found: shown(found.into()) }
    }
}

fn model_type(config: &Map<String, Json>) -> Result<&str, DescriptionError> {
    let key = "model_type";
    let name = member(config, key).ok_or_else(|| DescriptionError::Missing { key: format!("{key} in config.json") })?;
    name.as_str().ok_or_else(|| DescriptionError::value(key, name.to_string()))
}

fn supported() -> String {
    SUPPORTED.map(|architecture| architecture.name).join(", ")
}

/// A value that came from a file, fit for a message.
fn shown(mut found: String) -> String {
    const BYTES_MAX: usize = 80;
    if found.len() > BYTES_MAX {
        let cut = (0..=BYTES_MAX).rev().find(|at| found.is_char_boundary(*at)).expect("0 is one");
        found.truncate(cut);
        found.push('…');
    }
    found
}

fn within(facts: &ModelMetadata<'_>, key: Key, max: usize) -> Result<usize, DescriptionError> {
    let count = facts.count(key)?;
    match (1..=max).contains(&count) {
        true => Ok(count),
        false => Err(DescriptionError::value(facts.name(key), count.to_string())),
    }
}

/// Of the dense layers. A model whose layers all have experts need not give it.
fn inner(facts: &ModelMetadata<'_>, architecture: &Architecture) -> Result<usize, DescriptionError> {
    match facts.count_if(Key::INNER)? {
        Some(0) | None if architecture.tensor(WeightKind::Router).is_some() => facts.count(Key::EXPERT_INNER),
        _ => within(facts, Key::INNER, FEATURES_MAX),
    }
}

fn vocab(facts: &ModelMetadata<'_>) -> Result<usize, DescriptionError> {
    let ModelMetadata::Gguf { file, .. } = facts else { return within(facts, Key::config("vocab_size"), VOCAB_MAX) };
    let missing = || DescriptionError::Missing { key: "tensor token_embd.weight".into() };
    let rows = *file.tensor("token_embd.weight").ok_or_else(missing)?.shape.first().ok_or_else(missing)?;
    match (1..=VOCAB_MAX).contains(&rows) {
        true => Ok(rows),
        false => Err(DescriptionError::value("token_embd.weight", format!("{rows} rows"))),
    }
}

fn tied(facts: &ModelMetadata<'_>, architecture: &Architecture) -> Result<bool, DescriptionError> {
    match facts {
        ModelMetadata::Gguf { file, .. } => Ok(file.tensor("output.weight").is_none()),
        ModelMetadata::Config { .. } => facts.flag("tie_word_embeddings", architecture.tied),
    }
}

fn activation(facts: &ModelMetadata<'_>, architecture: &Architecture) -> Result<Activation, DescriptionError> {
    let stated = match facts.text_if(Key::config("hidden_activation"))? {
        Some(name) => Some(name),
        None => facts.text_if(Key::config("hidden_act"))?,
    };
    match stated {
        None => Ok(architecture.activation),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(other) => Err(DescriptionError::Unsupported(format!("activation {other:?}"))),
    }
}

fn refuse_what_no_layer_has(facts: &ModelMetadata<'_>, architecture: &Architecture) -> Result<(), DescriptionError> {
    facts.refuse_flag("mlp_bias")?;
    if architecture.tensor(WeightKind::QueryBias).is_none() {
        facts.refuse_flag("attention_bias")?;
    }
    let (key, value) = (Key::HEAD_DIM, Key::gguf("attention.value_length"));
    if let (Some(key), Some(value)) = (facts.count_if(key)?, facts.count_if(value)?)
        && facts.is_gguf()
        && key != value
    {
        return Err(DescriptionError::Unsupported(format!("keys of {key} and values of {value} elements")));
    }
    Ok(())
}
