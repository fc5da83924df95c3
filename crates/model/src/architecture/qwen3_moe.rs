//! Qwen3 MoE: Qwen3's attention; most layers have many small feed-forwards and a router that chooses a few of them
//! for each token, the rest a dense one. The router runs on every rank, so all choose alike without an exchange.

use kernels::{Activation, RopeLayout, Routing};

use super::Axis::{Heads, Inner, KvHeads};
use super::Split::{Column, Experts, Replicated, Row};
use super::WeightKind::*;
use super::{Architecture, Tensor, tensor};
use crate::description::{Description, DescriptionError, FeedForward};
use crate::facts::{Key as Fact, ModelMetadata};

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

fn refine(facts: &ModelMetadata<'_>, description: &mut Description) -> Result<(), DescriptionError> {
    if facts.flag("use_sliding_window", false)? {
        return Err(DescriptionError::Unsupported("qwen3_moe with use_sliding_window".into()));
    }
    let experts = match facts.count_if(Fact::EXPERTS)? {
        Some(experts) => experts,
        None => facts.count(Fact::config("num_local_experts"))?,
    };
    let chosen = facts.count(Fact::EXPERTS_CHOSEN)?;
    let inner = facts.count(Fact::EXPERT_INNER)?;
    // transformers' class says "no" when the config is silent; every GGUF reader says "yes".
    let normalise = facts.flag_if(Fact::EXPERTS_NORMALISED)?.unwrap_or(facts.is_gguf());
    let routing = Routing { experts, chosen, normalise };

    let every = facts.count_if(Fact::config("decoder_sparse_step"))?.unwrap_or(1);
    let dense = facts.counts("mlp_only_layers")?;
    for (index, layer) in description.layers.iter_mut().enumerate() {
        if every > 0 && (index + 1).is_multiple_of(every) && !dense.contains(&index) {
            layer.feed_forward = FeedForward::Experts { inner, routing };
        }
    }
    Ok(())
}
