//! Qwen3 MoE: Qwen3's attention. Most layers have many small experts and a router that chooses a few of them for each token;
//! the other layers are dense. The router runs on every rank, so all ranks choose the same experts without communication.

use kernels::{Activation, RopeLayout, Routing};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Experts, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, tensor};
use crate::description::{Description, DescriptionError, FeedForward};
use crate::metadata::{Key, ModelMetadata};

pub static QWEN3_MOE: Architecture = Architecture {
    name: "qwen3_moe",
    aliases: &[],
    gguf: Some(("qwen3moe", RopeLayout::Halves)),
    tensors: &TENSORS,
    activation: Activation::Silu,
    defaults: &[],
    tied: false,
    refine,
};

static TENSORS: [Tensor; 15] = [
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
    tensor(Router, "mlp.gate.weight", "ffn_gate_inp.weight", Replicated),
    tensor(ExpertGate, "mlp.experts.{}.gate_proj.weight", "ffn_gate_exps.weight", Experts),
    tensor(ExpertUp, "mlp.experts.{}.up_proj.weight", "ffn_up_exps.weight", Experts),
    tensor(ExpertDown, "mlp.experts.{}.down_proj.weight", "ffn_down_exps.weight", Experts),
];

fn refine(metadata: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    if metadata.flag("use_sliding_window", false)? {
        return Err(DescriptionError::Unsupported("qwen3_moe with use_sliding_window".into()));
    }
    let experts = match metadata.count_if(Key::EXPERTS)? {
        Some(experts) => experts,
        None => metadata.count(Key::config("num_local_experts"))?,
    };
    let chosen = metadata.count(Key::EXPERTS_CHOSEN)?;
    let inner = metadata.count(Key::EXPERT_INNER)?;
    // If the file does not say, transformers defaults to false and GGUF readers to true.
    let normalise = metadata.flag_if(Key::EXPERTS_NORMALISED)?.unwrap_or(metadata.is_gguf());
    let routing = Routing { experts, chosen, normalise };

    let every = metadata.count_if(Key::config("decoder_sparse_step"))?.unwrap_or(1);
    let dense = metadata.counts("mlp_only_layers")?;
    for (index, layer) in description.layers.iter_mut().enumerate() {
        if every > 0 && (index + 1).is_multiple_of(every) && !dense.contains(&index) {
            layer.feed_forward = FeedForward::Experts { inner, routing };
        }
    }
    Ok(())
}
