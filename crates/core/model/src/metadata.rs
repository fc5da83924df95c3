//! `ModelMetadata`: a model's configuration values, read with one `Key` from a config.json (of the hub, or in the form of
//! transformers 5) or from GGUF metadata. Both are untrusted: a value of the wrong type is an error that names its key.

use kernels::HEAD_DIM_MAX;
use serde_json::{Map, Value as Json};
use types::DType;

use crate::architecture::Architecture;
use crate::description::DescriptionError;
use crate::files::{Gguf, Value};
use crate::rope::Rope;

/// The name of a value in config.json and in GGUF metadata (without the architecture's prefix); empty if it has none there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub config: &'static str,
    pub gguf: &'static str,
}

impl Key {
    pub const HIDDEN: Self = Self::both("hidden_size", "embedding_length");
    pub const LAYERS: Self = Self::both("num_hidden_layers", "block_count");
    pub const HEADS: Self = Self::both("num_attention_heads", "attention.head_count");
    pub const KV_HEADS: Self = Self::both("num_key_value_heads", "attention.head_count_kv");
    pub const HEAD_DIM: Self = Self::both("head_dim", "attention.key_length");
    pub const INNER: Self = Self::both("intermediate_size", "feed_forward_length");
    pub const POSITIONS: Self = Self::both("max_position_embeddings", "context_length");
    pub const EPS: Self = Self::both("rms_norm_eps", "attention.layer_norm_rms_epsilon");
    pub const WINDOW: Self = Self::both("sliding_window", "attention.sliding_window");
    pub const WINDOW_PATTERN: Self = Self::both("sliding_window_pattern", "attention.sliding_window_pattern");
    pub const ROPE_BASE: Self = Self::both("rope_theta", "rope.freq_base");
    pub const LOCAL_ROPE_BASE: Self = Self::both("rope_local_base_freq", "rope.freq_base_swa");
    pub const EXPERTS: Self = Self::both("num_experts", "expert_count");
    pub const EXPERTS_CHOSEN: Self = Self::both("num_experts_per_tok", "expert_used_count");
    pub const EXPERTS_NORMALISED: Self = Self::both("norm_topk_prob", "expert_weights_norm");
    pub const EXPERT_INNER: Self = Self::both("moe_intermediate_size", "expert_feed_forward_length");
    pub const ATTENTION_SOFTCAP: Self = Self::both("attn_logit_softcapping", "attn_logit_softcapping");
    pub const FINAL_SOFTCAP: Self = Self::both("final_logit_softcapping", "final_logit_softcapping");

    pub const fn both(config: &'static str, gguf: &'static str) -> Self {
        Self { config, gguf }
    }

    pub const fn config(name: &'static str) -> Self {
        Self::both(name, "")
    }

    pub const fn gguf(name: &'static str) -> Self {
        Self::both("", name)
    }
}

/// A GGUF file, or a manifest that was made from one.
pub(crate) trait GgufSource {
    fn get(&self, key: &str) -> Option<&Value>;

    /// The shape of a tensor, outermost dimension first.
    fn shape(&self, tensor: &str) -> Option<&[usize]>;

    /// `rope_freqs.weight`: Llama 3's scaling, computed by the program that converted the file.
    fn rope_divisors(&self) -> Result<Option<Vec<f32>>, DescriptionError>;
}

impl GgufSource for Gguf {
    fn get(&self, key: &str) -> Option<&Value> {
        self.get(key)
    }

    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        self.tensor(tensor).map(|view| view.shape)
    }

    fn rope_divisors(&self) -> Result<Option<Vec<f32>>, DescriptionError> {
        let name = "rope_freqs.weight";
        let Some(view) = self.tensor(name) else { return Ok(None) };
        let (DType::F32, &[count @ 0..=HEAD_DIM_MAX]) = (view.dtype, view.shape) else {
            return Err(DescriptionError::value(name, format!("{} {:?}, expected a few f32", view.dtype, view.shape)));
        };
        let mut values = vec![0.0; count];
        kernels::quant::dequantise(view.dtype, view.bytes, &mut values);
        Ok(Some(values))
    }
}

/// The configuration values of one file.
pub(crate) enum ModelMetadata<'a> {
    Config { config: &'a Map<String, Json>, architecture: &'static Architecture },
    Gguf { file: &'a dyn GgufSource, prefix: &'static str },
}

impl ModelMetadata<'_> {
    pub fn is_gguf(&self) -> bool {
        matches!(self, Self::Gguf { .. })
    }

    /// Whether the key is present, even if its value is `null`.
    pub fn mentions(&self, key: Key) -> bool {
        match self {
            Self::Config { config, .. } => config.contains_key(key.config),
            Self::Gguf { .. } => self.metadata(key).is_some(),
        }
    }

    pub fn count(&self, key: Key) -> Result<usize, DescriptionError> {
        self.count_if(key)?.ok_or_else(|| DescriptionError::Missing { key: self.name(key) })
    }

    /// An unsigned integer. For a GGUF array (one value per layer), the value that all entries share.
    pub fn count_if(&self, key: Key) -> Result<Option<usize>, DescriptionError> {
        let count = match self {
            Self::Config { config, architecture } => match member(config, key.config) {
                Some(value) => value.as_u64(),
                None => return Ok(architecture.defaults.iter().find(|(name, _)| *name == key.config).map(|d| d.1)),
            },
            Self::Gguf { .. } => match self.metadata(key) {
                Some(Value::Ints(each)) => match each.split_first() {
                    Some((first, rest)) if rest.iter().all(|other| other == first) => u64::try_from(*first).ok(),
                    _ => {
                        return Err(DescriptionError::Unsupported(format!(
                            "{} that differs between layers",
                            self.name(key)
                        )));
                    }
                },
                Some(value) => value.as_u64(),
                None => return Ok(None),
            },
        };
        let count = count.and_then(|count| usize::try_from(count).ok());
        count.map(Some).ok_or_else(|| self.wrong(key))
    }

    /// The unsigned integers of a list in config.json; empty if there is no list.
    pub fn counts(&self, key: &'static str) -> Result<Vec<usize>, DescriptionError> {
        let Self::Config { config, .. } = self else { return Ok(Vec::new()) };
        let Some(list) = member(config, key) else { return Ok(Vec::new()) };
        let numbers = list.as_array().and_then(|list| {
            list.iter().map(|item| item.as_u64().and_then(|n| usize::try_from(n).ok())).collect::<Option<Vec<_>>>()
        });
        numbers.ok_or_else(|| self.wrong(Key::config(key)))
    }

    pub fn number_if(&self, key: Key) -> Result<Option<f64>, DescriptionError> {
        let number = match self {
            Self::Config { config, .. } => match member(config, key.config) {
                Some(value) => value.as_f64(),
                None => return Ok(None),
            },
            Self::Gguf { .. } => match self.metadata(key) {
                Some(value) => value.as_f64().or_else(|| value.as_i64().map(|n| n as f64)),
                None => return Ok(None),
            },
        };
        number.map(Some).ok_or_else(|| self.wrong(key))
    }

    pub fn flag_if(&self, key: Key) -> Result<Option<bool>, DescriptionError> {
        let flag = match self {
            Self::Config { config, .. } => member(config, key.config).map(Json::as_bool),
            Self::Gguf { .. } => self.metadata(key).map(Value::as_bool),
        };
        flag.map(|flag| flag.ok_or_else(|| self.wrong(key))).transpose()
    }

    /// A flag of config.json. GGUF has no such flags, so the default applies.
    pub fn flag(&self, key: &'static str, default: bool) -> Result<bool, DescriptionError> {
        if self.is_gguf() {
            return Ok(default);
        }
        Ok(self.flag_if(Key::config(key))?.unwrap_or(default))
    }

    /// Refuses a model whose config.json sets `key`.
    pub fn refuse_flag(&self, key: &'static str) -> Result<(), DescriptionError> {
        match self.flag(key, false)? {
            true => Err(DescriptionError::Unsupported(format!("{key}: true"))),
            false => Ok(()),
        }
    }

    pub fn text_if(&self, key: Key) -> Result<Option<&str>, DescriptionError> {
        let text = match self {
            Self::Config { config, .. } => member(config, key.config).map(Json::as_str),
            Self::Gguf { .. } => self.metadata(key).map(Value::as_str),
        };
        text.map(|text| text.ok_or_else(|| self.wrong(key))).transpose()
    }

    /// For each layer, whether it has a sliding window, from `layer_types`; `None` if config.json has no such list.
    pub fn sliding_layers(&self, layers: usize) -> Result<Option<Vec<bool>>, DescriptionError> {
        let Self::Config { config, .. } = self else { return Ok(None) };
        let Some(types) = member(config, "layer_types") else { return Ok(None) };
        let types = types.as_array().filter(|types| types.len() == layers);
        let sliding = types.and_then(|types| {
            let one = |kind: &Json| match kind.as_str()? {
                "full_attention" => Some(false),
                "sliding_attention" => Some(true),
                _ => None,
            };
            types.iter().map(one).collect::<Option<Vec<_>>>()
        });
        sliding.map(Some).ok_or_else(|| self.wrong(Key::config("layer_types")))
    }

    /// The RoPE parameters of the layers of one kind (a name in `layer_types`).
    pub fn rope(&self, kind: &str, base: Key, default_base: f64, head_dim: usize) -> Result<Rope, DescriptionError> {
        match self {
            Self::Config { config, .. } => Rope::from_config(config, kind, base.config, default_base),
            Self::Gguf { file, .. } => {
                let base = self.number_if(base)?.unwrap_or(default_base);
                Rope::from_gguf(self, *file, base, head_dim)
            }
        }
    }

    /// Whether config.json has RoPE parameters for this kind of layer only.
    pub fn has_rope_of_kind(&self, kind: &str) -> bool {
        let Self::Config { config, .. } = self else { return false };
        member(config, "rope_parameters").and_then(|rope| rope.get(kind)).is_some_and(Json::is_object)
    }

    pub fn name(&self, key: Key) -> String {
        match self {
            Self::Config { .. } => key.config.to_owned(),
            Self::Gguf { prefix, .. } => format!("{prefix}.{}", key.gguf),
        }
    }

    fn metadata(&self, key: Key) -> Option<&Value> {
        match self {
            Self::Gguf { file, prefix } if !key.gguf.is_empty() => file.get(&format!("{prefix}.{}", key.gguf)),
            _ => None,
        }
    }

    fn wrong(&self, key: Key) -> DescriptionError {
        let found = match self {
            Self::Config { config, .. } => config.get(key.config).map(Json::to_string),
            Self::Gguf { .. } => self.metadata(key).map(|value| format!("{value:?}")),
        };
        DescriptionError::value(self.name(key), found.unwrap_or_default())
    }
}

/// A member that is present and not `null`.
pub(crate) fn member<'a>(object: &'a Map<String, Json>, key: &str) -> Option<&'a Json> {
    object.get(key).filter(|value| !value.is_null())
}
