//! Qwen3: Llama's layer with query and key normalised within each head.

use kernels::{Activation, RopeLayout};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, qwen2, tensor};

pub static QWEN3: Architecture = Architecture {
    name: "qwen3",
    aliases: &[],
    gguf: Some(("qwen3", RopeLayout::Halves)),
    tensors: &TENSORS,
    activation: Activation::Silu,
    defaults: &[("head_dim", 128)],
    tied: false,
    refine: qwen2::set_upper_windows,
};

static TENSORS: [Tensor; 11] = [
    tensor(AttentionNorm, "input_layernorm.weight", "attn_norm.weight", Replicated),
    tensor(Query, "self_attn.q_proj.weight", "attn_q.weight", Column(Heads)),
    tensor(QueryNorm, "self_attn.q_norm.weight", "attn_q_norm.weight", Replicated),
    tensor(Key, "self_attn.k_proj.weight", "attn_k.weight", Column(KvHeads)),
    tensor(KeyNorm, "self_attn.k_norm.weight", "attn_k_norm.weight", Replicated),
    tensor(Value, "self_attn.v_proj.weight", "attn_v.weight", Column(KvHeads)),
    tensor(Output, "self_attn.o_proj.weight", "attn_output.weight", Row(Heads)),
    tensor(FeedForwardNorm, "post_attention_layernorm.weight", "ffn_norm.weight", Replicated),
    tensor(Gate, "mlp.gate_proj.weight", "ffn_gate.weight", Column(Inner)),
    tensor(Up, "mlp.up_proj.weight", "ffn_up.weight", Column(Inner)),
    tensor(Down, "mlp.down_proj.weight", "ffn_down.weight", Row(Inner)),
];
