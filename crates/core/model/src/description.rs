//! `Description`: everything about a model except its weights, checked once. No size is zero, and the product of the sizes
//! of a tensor does not overflow.

use kernels::{Activation, HEAD_DIM_MAX, RopeLayout, Routing};
use serde_json::{Map, Value as Json};

use crate::architecture::{Architecture, SUPPORTED, WeightKind};
use crate::files::Gguf;
use crate::metadata::{GgufSource, Key, ModelMetadata, member};
use crate::rope::Rope;

/// Limits far above any existing model. Larger values are refused before anything is allocated.
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
    /// Positions that the model supports.
    pub positions_max: usize,
    /// Whether the head shares the embedding's weights.
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
    /// With a window `w`, position `p` attends to the positions above `p - w` up to `p`.
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
    /// From a parsed config.json. For a multimodal model, describes its text part.
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
        Self::from_gguf_source(file)
    }

    pub(crate) fn from_gguf_source(file: &dyn GgufSource) -> Result<Self, DescriptionError> {
        let key = "general.architecture";
        let name = file.get(key).ok_or_else(|| DescriptionError::Missing { key: key.into() })?;
        let name = name.as_str().ok_or_else(|| DescriptionError::value(key, format!("{name:?}")))?;
        let architecture = Architecture::by_gguf_name(name)
            .ok_or_else(|| DescriptionError::Architecture { name: shown(name.to_owned()) })?;
        let (prefix, layout) = architecture.gguf.expect("found by this name");
        Self::read(&ModelMetadata::Gguf { file, prefix }, architecture, layout)
    }

    fn read(
        metadata: &ModelMetadata<'_>,
        architecture: &'static Architecture,
        rope_layout: RopeLayout,
    ) -> Result<Self, DescriptionError> {
        reject_unsupported(metadata, architecture)?;
        let hidden = within(metadata, Key::HIDDEN, FEATURES_MAX)?;
        let heads = within(metadata, Key::HEADS, HEADS_MAX)?;
        let kv_heads = metadata.count_if(Key::KV_HEADS)?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(DescriptionError::value(
                metadata.name(Key::KV_HEADS),
                format!("{kv_heads} (with {heads} heads)"),
            ));
        }
        let head_dim = match metadata.count_if(Key::HEAD_DIM)? {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(DescriptionError::Missing { key: metadata.name(Key::HEAD_DIM) }),
        };
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > HEAD_DIM_MAX {
            let key = metadata.name(Key::HEAD_DIM);
            let size = format!("{key} of {head_dim} (it must be even and at most {HEAD_DIM_MAX})");
            return Err(DescriptionError::Unsupported(size));
        }
        let eps = metadata.number_if(Key::EPS)?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&eps) {
            return Err(DescriptionError::value(metadata.name(Key::EPS), eps.to_string()));
        }
        let layer = Layer {
            window: None,
            rope: metadata.rope("full_attention", Key::ROPE_BASE, 10_000.0, head_dim)?,
            feed_forward: FeedForward::Dense { inner: inner(metadata, architecture)? },
        };
        let mut description = Self {
            architecture,
            hidden,
            heads,
            kv_heads,
            head_dim,
            vocab: vocab(metadata)?,
            eps: eps as f32,
            positions_max: within(metadata, Key::POSITIONS, POSITIONS_MAX)?,
            tied: tied(metadata, architecture)?,
            activation: activation(metadata, architecture)?,
            norm_offset: 0.0,
            embedding_scale: 1.0,
            attention_scale: (head_dim as f64).sqrt().recip() as f32,
            rope_layout,
            layers: vec![layer; within(metadata, Key::LAYERS, LAYERS_MAX)?],
        };
        (architecture.refine)(metadata, &mut description)?;
        description.check_layers()?;
        Ok(description)
    }

    pub(crate) fn set_window(&mut self, window: Option<usize>) {
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

/// Truncates a value from a file for use in an error message.
fn shown(mut found: String) -> String {
    const BYTES_MAX: usize = 80;
    if found.len() > BYTES_MAX {
        let cut = (0..=BYTES_MAX).rev().find(|at| found.is_char_boundary(*at)).expect("0 is one");
        found.truncate(cut);
        found.push('…');
    }
    found
}

fn within(metadata: &ModelMetadata<'_>, key: Key, max: usize) -> Result<usize, DescriptionError> {
    let count = metadata.count(key)?;
    match (1..=max).contains(&count) {
        true => Ok(count),
        false => Err(DescriptionError::value(metadata.name(key), count.to_string())),
    }
}

/// The inner size of the dense layers. A model in which all layers have experts may omit it.
fn inner(metadata: &ModelMetadata<'_>, architecture: &Architecture) -> Result<usize, DescriptionError> {
    match metadata.count_if(Key::INNER)? {
        Some(0) | None if architecture.tensor(WeightKind::Router).is_some() => metadata.count(Key::EXPERT_INNER),
        _ => within(metadata, Key::INNER, FEATURES_MAX),
    }
}

fn vocab(metadata: &ModelMetadata<'_>) -> Result<usize, DescriptionError> {
    let ModelMetadata::Gguf { file, .. } = metadata else {
        return within(metadata, Key::config("vocab_size"), VOCAB_MAX);
    };
    let missing = || DescriptionError::Missing { key: "tensor token_embd.weight".into() };
    let rows = *file.shape("token_embd.weight").and_then(<[usize]>::first).ok_or_else(missing)?;
    match (1..=VOCAB_MAX).contains(&rows) {
        true => Ok(rows),
        false => Err(DescriptionError::value("token_embd.weight", format!("{rows} rows"))),
    }
}

fn tied(metadata: &ModelMetadata<'_>, architecture: &Architecture) -> Result<bool, DescriptionError> {
    match metadata {
        ModelMetadata::Gguf { file, .. } => Ok(file.shape("output.weight").is_none()),
        ModelMetadata::Config { .. } => metadata.flag("tie_word_embeddings", architecture.tied),
    }
}

fn activation(metadata: &ModelMetadata<'_>, architecture: &Architecture) -> Result<Activation, DescriptionError> {
    let stated = match metadata.text_if(Key::config("hidden_activation"))? {
        Some(name) => Some(name),
        None => metadata.text_if(Key::config("hidden_act"))?,
    };
    match stated {
        None => Ok(architecture.activation),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(other) => Err(DescriptionError::Unsupported(format!("activation {other:?}"))),
    }
}

fn reject_unsupported(metadata: &ModelMetadata<'_>, architecture: &Architecture) -> Result<(), DescriptionError> {
    metadata.refuse_flag("mlp_bias")?;
    if architecture.tensor(WeightKind::QueryBias).is_none() {
        metadata.refuse_flag("attention_bias")?;
    }
    let (key, value) = (Key::HEAD_DIM, Key::gguf("attention.value_length"));
    if let (Some(key), Some(value)) = (metadata.count_if(key)?, metadata.count_if(value)?)
        && metadata.is_gguf()
        && key != value
    {
        return Err(DescriptionError::Unsupported(format!("keys of {key} and values of {value} elements")));
    }
    Ok(())
}
