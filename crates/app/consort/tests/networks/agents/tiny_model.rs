//! A model with one layer and random weights, a long context, and the tokenizer and template of the small Qwen3 in
//! `fixtures/oracle`.

use std::fs;
use std::path::Path;

use serde_json::{Map, json};
use tempfile::TempDir;

use testing::oracle;

const VOCABULARY: usize = 320;
const HIDDEN: usize = 64;
const HEADS: usize = 1;
const HEAD: usize = 32;

/// Writes the model to a folder.
pub fn write(context: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let original = oracle("qwen3/model-f32");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        fs::copy(original.join(file), folder.path().join(file)).unwrap();
    }
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "max_position_embeddings": context.parse::<usize>().unwrap(), "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": 1,
        "head_dim": HEAD, "rope_theta": 1_000_000, "tie_word_embeddings": true, "attention_bias": false,
        "eos_token_id": 302, "bos_token_id": 300, "torch_dtype": "float32",
    });
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    write_weights(&folder.path().join("model.safetensors"));
    folder
}

fn write_weights(path: &Path) {
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    let tensors = [
        ("model.embed_tokens.weight".to_owned(), vec![VOCABULARY, HIDDEN]),
        (layer("input_layernorm"), vec![HIDDEN]),
        (layer("self_attn.q_proj"), vec![HEADS * HEAD, HIDDEN]),
        (layer("self_attn.k_proj"), vec![HEAD, HIDDEN]),
        (layer("self_attn.v_proj"), vec![HEAD, HIDDEN]),
        (layer("self_attn.o_proj"), vec![HIDDEN, HEADS * HEAD]),
        (layer("self_attn.q_norm"), vec![HEAD]),
        (layer("self_attn.k_norm"), vec![HEAD]),
        (layer("post_attention_layernorm"), vec![HIDDEN]),
        (layer("mlp.gate_proj"), vec![HIDDEN, HIDDEN]),
        (layer("mlp.up_proj"), vec![HIDDEN, HIDDEN]),
        (layer("mlp.down_proj"), vec![HIDDEN, HIDDEN]),
        ("model.norm.weight".to_owned(), vec![HIDDEN]),
    ];
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut state = 1_u64;
    for (name, shape) in tensors {
        let begin = data.len();
        for _ in 0..shape.iter().product() {
            // An LCG's high bits, as a number from -0.5 to 0.5.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            data.extend_from_slice(&((state >> 40) as f32 / (1_u64 << 24) as f32 - 0.5).to_le_bytes());
        }
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = json!(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(path, [&length[..], header.as_bytes(), &data].concat()).unwrap();
}
