//! Llama 2 and 3, and models with the same layer (SmolLM2, TinyLlama). GGUF files of Mistral also have this name.

use kernels::{Activation, RopeLayout};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, tensor};
use crate::description::{Description, DescriptionError};
use crate::metadata::{Key, ModelMetadata};

pub static LLAMA: Architecture = Architecture {
    name: "llama",
    aliases: &[],
    gguf: Some(("llama", RopeLayout::Pairs)),
    tensors: &TENSORS,
    activation: Activation::Silu,
    defaults: &[],
    tied: false,
    refine,
};

pub(super) static TENSORS: [Tensor; 9] = [
    tensor(AttentionNorm, "input_layernorm.weight", "attn_norm.weight", Replicated),
    tensor(Query, "self_attn.q_proj.weight", "attn_q.weight", Column(Heads)),
    tensor(Key, "self_attn.k_proj.weight", "attn_k.weight", Column(KvHeads)),
    tensor(Value, "self_attn.v_proj.weight", "attn_v.weight", Column(KvHeads)),
    tensor(Output, "self_attn.o_proj.weight", "attn_output.weight", Row(Heads)),
    tensor(FeedForwardNorm, "post_attention_layernorm.weight", "ffn_norm.weight", Replicated),
    tensor(Gate, "mlp.gate_proj.weight", "ffn_gate.weight", Column(Inner)),
    tensor(Up, "mlp.up_proj.weight", "ffn_up.weight", Column(Inner)),
    tensor(Down, "mlp.down_proj.weight", "ffn_down.weight", Row(Inner)),
];

fn refine(metadata: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    if metadata.count_if(Key::EXPERTS)?.is_some_and(|experts| experts > 0) {
        return Err(DescriptionError::Unsupported("a llama with experts (Mixtral)".into()));
    }
    if metadata.is_gguf() {
        description.set_window(metadata.count_if(Key::WINDOW)?);
    }
    Ok(())
}
