//! Qwen2 and Qwen2.5: Llama's layer with biases on query, key and value.

use kernels::{Activation, RopeLayout};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, tensor};
use crate::description::{Description, DescriptionError};
use crate::metadata::{Key, ModelMetadata};

pub static QWEN2: Architecture = Architecture {
    name: "qwen2",
    aliases: &[],
    gguf: Some(("qwen2", RopeLayout::Halves)),
    tensors: &TENSORS,
    activation: Activation::Silu,
    defaults: &[],
    tied: false,
    refine: set_upper_windows,
};

static TENSORS: [Tensor; 12] = [
    tensor(AttentionNorm, "input_layernorm.weight", "attn_norm.weight", Replicated),
    tensor(Query, "self_attn.q_proj.weight", "attn_q.weight", Column(Heads)),
    tensor(QueryBias, "self_attn.q_proj.bias", "attn_q.bias", Column(Heads)),
    tensor(Key, "self_attn.k_proj.weight", "attn_k.weight", Column(KvHeads)),
    tensor(KeyBias, "self_attn.k_proj.bias", "attn_k.bias", Column(KvHeads)),
    tensor(Value, "self_attn.v_proj.weight", "attn_v.weight", Column(KvHeads)),
    tensor(ValueBias, "self_attn.v_proj.bias", "attn_v.bias", Column(KvHeads)),
    tensor(Output, "self_attn.o_proj.weight", "attn_output.weight", Row(Heads)),
    tensor(FeedForwardNorm, "post_attention_layernorm.weight", "ffn_norm.weight", Replicated),
    tensor(Gate, "mlp.gate_proj.weight", "ffn_gate.weight", Column(Inner)),
    tensor(Up, "mlp.up_proj.weight", "ffn_up.weight", Column(Inner)),
    tensor(Down, "mlp.down_proj.weight", "ffn_down.weight", Row(Inner)),
];

/// `use_sliding_window` (rare) gives a window to the layers from `max_window_layers` on, or to those that `layer_types`
/// lists. Without it, `sliding_window` in the file is ignored.
pub(super) fn set_upper_windows(
    metadata: &ModelMetadata<'_>,
    description: &mut Description,
) -> Result<(), DescriptionError> {
    if !metadata.flag("use_sliding_window", false)? {
        return Ok(());
    }
    let window = metadata.count_if(Key::WINDOW)?;
    let sliding = metadata.sliding_layers(description.layers.len())?;
    let full = metadata.count_if(Key::config("max_window_layers"))?.unwrap_or(28);
    for (index, layer) in description.layers.iter_mut().enumerate() {
        let slides = sliding.as_ref().map_or(index >= full, |sliding| sliding[index]);
        layer.window = window.filter(|_| slides);
    }
    Ok(())
}
