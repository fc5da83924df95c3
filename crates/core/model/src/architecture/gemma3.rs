//! Gemma 3, text only: norms before and after attention and feed-forward, query and key normalised within each head, the
//! embedding scaled by the square root of the hidden size, and five sliding-window layers with their own RoPE base for each
//! full-attention layer.

use kernels::{Activation, RopeLayout};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, tensor};
use crate::description::{Description, DescriptionError};
use crate::metadata::{Key, ModelMetadata};
use crate::rope::{Rope, Scaling};

pub static GEMMA3: Architecture = Architecture {
    name: "gemma3",
    aliases: &["gemma3_text"],
    gguf: Some(("gemma3", RopeLayout::Halves)),
    tensors: &TENSORS,
    activation: Activation::GeluTanh,
    defaults: &[
        ("vocab_size", 262_208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("max_position_embeddings", 131_072),
    ],
    tied: true,
    refine,
};

static TENSORS: [Tensor; 13] = [
    tensor(AttentionNorm, "input_layernorm.weight", "attn_norm.weight", Replicated),
    tensor(Query, "self_attn.q_proj.weight", "attn_q.weight", Column(Heads)),
    tensor(QueryNorm, "self_attn.q_norm.weight", "attn_q_norm.weight", Replicated),
    tensor(Key, "self_attn.k_proj.weight", "attn_k.weight", Column(KvHeads)),
    tensor(KeyNorm, "self_attn.k_norm.weight", "attn_k_norm.weight", Replicated),
    tensor(Value, "self_attn.v_proj.weight", "attn_v.weight", Column(KvHeads)),
    tensor(Output, "self_attn.o_proj.weight", "attn_output.weight", Row(Heads)),
    tensor(AttentionPostNorm, "post_attention_layernorm.weight", "post_attention_norm.weight", Replicated),
    tensor(FeedForwardNorm, "pre_feedforward_layernorm.weight", "ffn_norm.weight", Replicated),
    tensor(Gate, "mlp.gate_proj.weight", "ffn_gate.weight", Column(Inner)),
    tensor(Up, "mlp.up_proj.weight", "ffn_up.weight", Column(Inner)),
    tensor(Down, "mlp.down_proj.weight", "ffn_down.weight", Row(Inner)),
    tensor(FeedForwardPostNorm, "post_feedforward_layernorm.weight", "post_ffw_norm.weight", Replicated),
];

/// Every `PATTERN`-th layer has full attention.
const PATTERN: usize = 6;
const WINDOW: usize = 4096;
const ROPE_BASE: f64 = 1e6;
const LOCAL_ROPE_BASE: f64 = 1e4;
/// Layers of the 27B model. It has a different attention scale, which its GGUF files do not contain.
const LAYERS_27B: usize = 62;

fn refine(metadata: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    metadata.refuse_flag("use_bidirectional_attention")?;
    for softcap in [Key::ATTENTION_SOFTCAP, Key::FINAL_SOFTCAP] {
        if metadata.number_if(softcap)?.is_some_and(|cap| cap != 0.0) {
            return Err(DescriptionError::Unsupported(format!("gemma3 with {}", softcap.config)));
        }
    }

    description.embedding_scale = (description.hidden as f32).sqrt();
    description.attention_scale = attention_scale(metadata, description)?;
    if !metadata.is_gguf() {
        description.norm_offset = 1.0; // a norm multiplies by 1 + w; GGUF's converter has already added the 1
    }

    let window = metadata.count_if(Key::WINDOW)?.unwrap_or(WINDOW);
    let pattern = match metadata.count_if(Key::WINDOW_PATTERN)? {
        Some(pattern) => pattern,
        None => metadata.count_if(Key::config("_sliding_window_pattern"))?.unwrap_or(PATTERN),
    };
    let sliding = metadata.sliding_layers(description.layers.len())?;
    let full = metadata.rope("full_attention", Key::ROPE_BASE, ROPE_BASE, description.head_dim)?;
    let local = metadata.rope("sliding_attention", Key::LOCAL_ROPE_BASE, LOCAL_ROPE_BASE, description.head_dim)?;
    // In the older form there is one `rope_scaling`, which applies only to the full-attention layers.
    let local =
        if metadata.has_rope_of_kind("sliding_attention") { local } else { Rope { scaling: Scaling::None, ..local } };

    for (index, layer) in description.layers.iter_mut().enumerate() {
        let by_pattern = pattern == 0 || !(index + 1).is_multiple_of(pattern);
        let slides = sliding.as_ref().map_or(by_pattern, |sliding| sliding[index]);
        layer.window = slides.then_some(window);
        layer.rope = if slides { local.clone() } else { full.clone() };
    }
    Ok(())
}

fn attention_scale(metadata: &ModelMetadata<'_>, description: &Description) -> Result<f32, DescriptionError> {
    if metadata.is_gguf() {
        let given = metadata.number_if(Key::gguf("attention.scale"))?;
        let per_head = match description.layers.len() {
            LAYERS_27B => description.hidden / description.heads,
            _ => description.head_dim,
        };
        return Ok(given.map_or_else(|| (per_head as f32).sqrt().recip(), |scale| scale as f32));
    }
    let scalar = metadata.number_if(Key::config("query_pre_attn_scalar"))?.unwrap_or(256.0);
    if !(scalar.is_finite() && scalar > 0.0) {
        return Err(DescriptionError::Value { key: "query_pre_attn_scalar".into(), found: scalar.to_string() });
    }
    Ok(scalar.sqrt().recip() as f32)
}
