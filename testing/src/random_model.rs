//! Writes models with random weights, of any sizes, as folders with config.json and model.safetensors. Tests of other crates
//! also use it.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value as Json, json};
use types::DType;

/// Sizes of a Qwen3 model, which normalises each query and key head. There are four query heads per KV head.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub kv_heads: usize,
    pub head_dim: usize,
    pub hidden: usize,
    pub inner: usize,
}

/// Head sizes that are not a multiple of the vector size.
pub const ODD_HEADS: [usize; 4] = [20, 24, 100, 120];

/// A test prompt, longer than a page.
pub const PROMPT: [u32; 40] = {
    let mut ids = [0; 40];
    let mut i = 0;
    while i < ids.len() {
        ids[i] = (i * i * 7 + i * 3) as u32 % VOCAB as u32;
        i += 1;
    }
    ids
};

const VOCAB: usize = 90;
const LAYERS: usize = 2;
const GROUP: usize = 4;

impl Sizes {
    /// A model that can be split over three ranks and whose rows are whole blocks of 32.
    pub fn of_heads(head_dim: usize) -> Self {
        Self { kv_heads: 6, head_dim, hidden: 32, inner: 96 }
    }

    /// A model whose rows are whole blocks of 256.
    pub fn of_heads_in_superblocks(head_dim: usize) -> Self {
        Self { kv_heads: 16, head_dim, hidden: 256, inner: 256 }
    }

    /// Writes a model whose weights are stored as `dtype`: f32, f16 or bf16.
    pub fn write(self, folder: &Path, dtype: DType) {
        let Self { kv_heads, head_dim, hidden, inner } = self;
        let heads = GROUP * kv_heads;
        let config = json!({
            "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": LAYERS,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": VOCAB,
            "max_position_embeddings": 400, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        });
        fs::write(folder.join("config.json"), config.to_string()).unwrap();

        let mut file = Writer { header: Map::new(), bytes: vec![], dtype };
        file.tensor("model.embed_tokens.weight", &[VOCAB, hidden]);
        file.tensor("model.norm.weight", &[hidden]);
        for layer in 0..LAYERS {
            let mut tensor = |name: &str, shape: &[usize]| {
                file.tensor(&format!("model.layers.{layer}.{name}.weight"), shape);
            };
            tensor("input_layernorm", &[hidden]);
            tensor("post_attention_layernorm", &[hidden]);
            tensor("self_attn.q_proj", &[heads * head_dim, hidden]);
            tensor("self_attn.k_proj", &[kv_heads * head_dim, hidden]);
            tensor("self_attn.v_proj", &[kv_heads * head_dim, hidden]);
            tensor("self_attn.o_proj", &[hidden, heads * head_dim]);
            tensor("self_attn.q_norm", &[head_dim]);
            tensor("self_attn.k_norm", &[head_dim]);
            tensor("mlp.gate_proj", &[inner, hidden]);
            tensor("mlp.up_proj", &[inner, hidden]);
            tensor("mlp.down_proj", &[hidden, inner]);
        }
        let header = Json::Object(file.header).to_string();
        let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &file.bytes].concat();
        fs::write(folder.join("model.safetensors"), bytes).unwrap();
    }
}

struct Writer {
    header: Map<String, Json>,
    bytes: Vec<u8>,
    dtype: DType,
}

impl Writer {
    /// Writes random values, scaled so that activations neither vanish nor grow. Vectors are norm weights, around one.
    fn tensor(&mut self, name: &str, shape: &[usize]) {
        let start = self.bytes.len();
        let (offset, scale) = match shape {
            [_, cols] => (0.0, (3.0 / *cols as f32).sqrt()),
            _ => (1.0, 0.3),
        };
        let mut state = (self.header.len() as u32).wrapping_mul(2_654_435_761).wrapping_add(1);
        for _ in 0..shape.iter().product() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = offset + scale * ((state >> 8) as f32 / (1 << 23) as f32 - 1.0);
            match self.dtype {
                DType::F32 => self.bytes.extend(value.to_le_bytes()),
                DType::BF16 => self.bytes.extend(&value.to_le_bytes()[2..]),
                DType::F16 => self.bytes.extend(f16_bits(value).to_le_bytes()),
                other => panic!("no model is written as {other}"),
            }
        }
        let dtype = self.dtype.to_string().to_uppercase();
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, self.bytes.len()] });
        self.header.insert(name.to_owned(), entry);
    }
}

/// Converts to f16, rounding towards zero. Values that would be subnormal in f16 become zero.
fn f16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let magnitude = (bits >> 13 & 0x3_ffff).checked_sub(112 << 10).filter(|magnitude| *magnitude >= 1 << 10);
    (bits >> 16 & 0x8000) as u16 | magnitude.unwrap_or(0) as u16
}
