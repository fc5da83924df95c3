//! Converts the fixtures to GGUF files by llama.cpp's conventions (names, fused experts, permuted heads, offset norms,
//! metadata in place of config.json) and checks that they give the same logits.

use std::path::Path;

use kernels::quant;
use model::files::SafeTensors;
use model::{Checkpoint, Manifest};
use serde_json::Value as Json;
use testing::driver::{Driver, Fixture, distance};
use testing::model_files::{GgufWriter, string};
use testing::reference::Reference;
use types::Rank;

const U32: u32 = 4;
const F32: u32 = 6;
const STRING: u32 = 8;

/// Names within a layer, in both formats. Gemma uses `post_attention_layernorm` for another norm, which is handled below.
const NAMES: [(&str, &str); 18] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.q_proj.bias", "attn_q.bias"),
    ("self_attn.k_proj.bias", "attn_k.bias"),
    ("self_attn.v_proj.bias", "attn_v.bias"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
];

/// Integers of config.json and their GGUF keys.
const COUNTS: [(&str, &str); 11] = [
    ("hidden_size", "embedding_length"),
    ("num_hidden_layers", "block_count"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("intermediate_size", "feed_forward_length"),
    ("max_position_embeddings", "context_length"),
    ("sliding_window", "attention.sliding_window"),
    ("num_experts", "expert_count"),
    ("num_experts_per_tok", "expert_used_count"),
    ("moe_intermediate_size", "expert_feed_forward_length"),
];

struct Converter {
    gguf: &'static str,
    config: Json,
    tensors: SafeTensors,
    writer: GgufWriter,
}

impl Converter {
    fn new(folder: &Path, gguf: &'static str) -> Self {
        let config = std::fs::read(folder.join("config.json")).unwrap();
        let tensors = SafeTensors::open(folder).unwrap();
        let writer = GgufWriter::default().key(b"general.architecture", STRING, &string(gguf.as_bytes()));
        Self { gguf, config: serde_json::from_slice(&config).unwrap(), tensors, writer }
    }

    fn number(mut self, key: &str, value: f64) -> Self {
        let key = format!("{}.{key}", self.gguf);
        self.writer = self.writer.key(key.as_bytes(), F32, &(value as f32).to_le_bytes());
        self
    }

    fn metadata(mut self) -> Self {
        for (config, key) in COUNTS {
            if let Some(count) = self.config[config].as_u64() {
                let key = format!("{}.{key}", self.gguf);
                self.writer = self.writer.key(key.as_bytes(), U32, &(count as u32).to_le_bytes());
            }
        }
        let number = |key: &str| self.config[key].as_f64().unwrap();
        let (eps, base) = (number("rms_norm_eps"), number("rope_theta"));
        self.number("attention.layer_norm_rms_epsilon", eps).number("rope.freq_base", base)
    }

    fn tensor(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let writer = std::mem::take(&mut self.writer);
        self.writer = writer.tensor(name.as_bytes(), &dims, 0, &bytes);
    }

    fn stored(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let view = self.tensors.tensor(name).unwrap()?;
        let mut values = vec![0.0; view.shape.iter().product()];
        quant::dequantise(view.dtype, view.bytes, &mut values);
        Some((view.shape.to_vec(), values))
    }

    fn weights(mut self) -> Self {
        let gemma = self.gguf == "gemma3";
        let norm = |name: &str| name.contains("norm");
        let ends = [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];
        for (hf, gguf) in ends {
            let Some((shape, mut values)) = self.stored(&format!("{hf}.weight")) else { continue };
            values.iter_mut().for_each(|value| *value += f32::from(gemma && norm(hf)));
            self.tensor(&format!("{gguf}.weight"), &shape, &values);
        }
        for layer in 0..self.config["num_hidden_layers"].as_u64().unwrap() {
            for (hf, gguf) in NAMES {
                if hf.starts_with("post_attention") && (gguf == "ffn_norm.weight") == gemma {
                    continue;
                }
                let Some((shape, mut values)) = self.stored(&format!("model.layers.{layer}.{hf}")) else { continue };
                values.iter_mut().for_each(|value| *value += f32::from(gemma && norm(hf)));
                if self.gguf == "llama" && ["attn_q.weight", "attn_k.weight"].contains(&gguf) {
                    values = self.interleaved(&values, shape[1]);
                }
                self.tensor(&format!("blk.{layer}.{gguf}"), &shape, &values);
            }
            for kind in ["gate", "up", "down"] {
                let one = |expert| format!("model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight");
                let all: Vec<_> = (0..).map_while(|expert| self.stored(&one(expert))).collect();
                let Some((shape, _)) = all.first() else { continue };
                let shape = [all.len(), shape[0], shape[1]];
                let values: Vec<f32> = all.into_iter().flat_map(|(_, values)| values).collect();
                self.tensor(&format!("blk.{layer}.ffn_{kind}_exps.weight"), &shape, &values);
            }
        }
        self
    }

    /// Permutes the rows of a head from the RoPE layout `Halves` to `Pairs`.
    fn interleaved(&self, values: &[f32], cols: usize) -> Vec<f32> {
        let count = |key: &str| self.config[key].as_u64().map(|n| n as usize);
        let head =
            count("head_dim").unwrap_or_else(|| count("hidden_size").unwrap() / count("num_attention_heads").unwrap());
        let row = |at: usize| {
            let (start, within) = (at / head * head, at % head);
            start + within / 2 + within % 2 * head / 2
        };
        (0..values.len() / cols).flat_map(|at| values[row(at) * cols..][..cols].to_vec()).collect()
    }
}

fn convert(fixture: &Fixture, gguf: &'static str, extra: impl Fn(Converter) -> Converter) -> Checkpoint {
    let (folder, _) = fixture.primary();
    let converted = extra(Converter::new(&folder, gguf).metadata()).weights();
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("model.gguf");
    std::fs::write(&path, converted.writer.bytes()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let manifest = Manifest::from_json(&checkpoint.manifest().unwrap().to_json()).unwrap();
    assert_eq!(manifest.description(), checkpoint.description(), "{gguf} by way of a manifest");
    checkpoint
}

fn check(architecture: &str, gguf: &'static str, extra: impl Fn(Converter) -> Converter) {
    let fixture = Fixture::open(architecture);
    let checkpoint = convert(&fixture, gguf, extra);
    let prompt = fixture.prompt("mid");
    let (logits, _) = Driver::new(&Reference, &checkpoint, None).prefill(&prompt.ids, 64);
    let apart = distance(&logits, &fixture.logits(&prompt, fixture.primary().1).unwrap().0.values);
    assert!(apart <= fixture.tolerance(), "{architecture}: {apart}");
}

#[test]
fn llama_with_permuted_heads_and_rope_divisors() {
    check("llama", "llama", |mut converter| {
        // The divisors that llama.cpp's converter computes from `rope_scaling`.
        let (dim, base, original) = (16.0f64, 500_000.0f64, 64.0);
        let divisors: Vec<f32> = (0..8)
            .map(|i| {
                let wavelength = std::f64::consts::TAU * base.powf(f64::from(2 * i) / dim);
                let smooth = ((original / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
                (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32
            })
            .collect();
        converter.tensor("rope_freqs.weight", &[8], &divisors);
        converter
    });
}

#[test]
fn mistral_under_the_name_of_llama() {
    for model in ["mistral", "mistral_odd"] {
        check(model, "llama", |converter| converter);
    }
}

#[test]
fn qwen2_with_biases() {
    check("qwen2", "qwen2", |converter| converter);
}

#[test]
fn qwen3_with_head_norms() {
    check("qwen3", "qwen3", |converter| converter);
}

#[test]
fn gemma3_with_its_norms_offset_already() {
    check("gemma3", "gemma3", |converter| converter.number("attention.scale", 24.0f64.sqrt().recip()));
}

/// The fixture's layer 1 is dense, which GGUF cannot express, so only the layer before it is compared.
#[test]
fn qwen3_moe_with_all_experts_in_one_tensor() {
    let fixture = Fixture::open("qwen3_moe");
    let ids = fixture.prompt("mid").ids;
    let first_layer =
        |checkpoint: &Checkpoint| Driver::split(&Reference, checkpoint, None, &[1], Rank::SINGLE).prefill(&ids, 64).0;
    let folder = Checkpoint::open(&fixture.variant("f32").unwrap()).unwrap();
    let converted = convert(&fixture, "qwen3moe", |converter| converter);
    assert!(first_layer(&folder) == first_layer(&converted));
}
