//! Tests that model files are described correctly, and that unknown models, odd sizes, missing or misshapen tensors and
//! formats that cannot hold a row are refused.

use std::error::Error;
use std::fs;
use std::path::Path;

use kernels::StepLimits;
use model::{Block, Checkpoint, Description, Embedding, FeedForward, Limits, LmHead, LoadError, LoadOptions, Scaling};
use serde_json::{Value as Json, json};
use tempfile::TempDir;
use testing::driver::{ARCHITECTURES, Fixture, MODELS};
use testing::reference::Reference;
use types::{DType, LayerRange, Rank};

fn config(architecture: &str) -> Json {
    config_of(&Fixture::open(architecture).primary().0.join("config.json"))
}

fn config_of(path: &Path) -> Json {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// A fixture's config with some members replaced; `null` removes one.
fn changed(architecture: &str, changes: Json) -> Json {
    let mut config = config(architecture);
    for (key, value) in changes.as_object().unwrap() {
        match value {
            Json::Null => drop(config.as_object_mut().unwrap().remove(key)),
            value => config[key] = value.clone(),
        }
    }
    config
}

fn refused(architecture: &str, changes: Json, naming: &str) {
    let error = Description::from_config(&changed(architecture, changes.clone())).expect_err(&changes.to_string());
    assert!(error.to_string().contains(naming), "{changes}: {error}");
}

#[test]
fn the_config_of_transformers_5_describes_the_same_model() {
    for model in MODELS {
        let path = Fixture::open(model).path("config.transformers5.json");
        let five: Json = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        let (five, hub) = (Description::from_config(&five), Description::from_config(&config(model)));
        assert_eq!(five.unwrap(), hub.unwrap(), "{model}");
    }
}

#[test]
fn a_config_and_its_files_are_the_model_of_their_folder() {
    let folder = Fixture::open("llama").path("model-bf16-sharded");
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    let shards = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<_> = shards.filter(|path| path.extension().is_some_and(|kind| kind == "safetensors")).collect();
    assert!(shards.len() > 1);
    let parts = Checkpoint::from_parts(&config, &shards).unwrap();
    let whole = Checkpoint::open(&folder).unwrap();
    assert_eq!(parts.description(), whole.description());
    let weights = |checkpoint: &Checkpoint| {
        let step = StepLimits { rows: 4, sequences: 1, pages: 1 };
        let limits = Limits { step, logit_rows: 1, kv_pages: 1, positions: 16 };
        let options = LoadOptions { keep: None, limits };
        let layers = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
        Block::load(&Reference, checkpoint, layers, Rank::SINGLE, &options, &mut |_| {})
            .map(|block| block.weight_bytes())
    };
    assert_eq!(weights(&parts).unwrap(), weights(&whole).unwrap());

    let twice = [shards[0].clone(), shards[0].clone()];
    assert!(matches!(Checkpoint::from_parts(&config, &twice), Err(LoadError::File(_))), "two tensors of one name");
    shards.pop();
    let partial = Checkpoint::from_parts(&config, &shards).unwrap();
    assert!(matches!(weights(&partial), Err(LoadError::Missing { .. })));
    assert!(matches!(Checkpoint::from_parts("{", &[]), Err(LoadError::ConfigSyntax { .. })));
}

#[test]
fn gemma3_has_five_layers_with_a_window_to_one_without() {
    let description = Description::from_config(&config("gemma3")).unwrap();
    let windows: Vec<_> = description.layers.iter().map(|layer| layer.window.is_some()).collect();
    assert_eq!(windows, [true, true, true, true, true, false, true]);
    assert_eq!((description.layers[0].rope.base, description.layers[5].rope.base), (1e4, 1e6));
    assert_eq!((description.norm_offset, description.embedding_scale), (1.0, 8.0));
}

#[test]
fn gemma3s_text_part_is_taken_and_its_silence_filled_in() {
    // The config of the hub's 4B model.
    let description = Description::from_config(&json!({
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024
        },
        "vision_config": { "hidden_size": 1152 }
    }))
    .unwrap();
    assert_eq!((description.heads, description.kv_heads, description.head_dim), (8, 4, 256));
    assert_eq!((description.vocab, description.positions_max, description.tied), (262_208, 131_072, true));
    assert_eq!(description.attention_scale, 1.0 / 16.0);
    assert_eq!(description.layers[0].rope.scaling, Scaling::None);
    assert_eq!(description.layers[5].rope.scaling, Scaling::Linear { factor: 8.0 });
}

#[test]
fn qwen3_moe_has_experts_where_its_config_puts_them() {
    let dense = |changes| {
        let layers = Description::from_config(&changed("qwen3_moe", changes)).unwrap().layers;
        layers.iter().map(|layer| matches!(layer.feed_forward, FeedForward::Dense { .. })).collect::<Vec<_>>()
    };
    assert_eq!(dense(json!({})), [false, true, false, false]);
    assert_eq!(dense(json!({ "decoder_sparse_step": 2, "mlp_only_layers": null })), [true, false, true, false]);
}

#[test]
fn a_window_counts_only_where_it_is_used() {
    let windows = |architecture, changes| {
        let layers = Description::from_config(&changed(architecture, changes)).unwrap().layers;
        layers.iter().map(|layer| layer.window).collect::<Vec<_>>()
    };
    assert_eq!(windows("qwen2", json!({})), [None; 4]);
    let upper = json!({ "use_sliding_window": true, "max_window_layers": 3 });
    assert_eq!(windows("qwen2", upper), [None, None, None, Some(4096)]);
    assert_eq!(windows("mistral", json!({})), [Some(48); 3]);
    assert_eq!(windows("mistral", json!({ "sliding_window": null })), [Some(4096); 3], "transformers' default");
    let mut none = config("mistral");
    none["sliding_window"] = Json::Null;
    assert!(Description::from_config(&none).unwrap().layers.iter().all(|layer| layer.window.is_none()));
}

#[test]
fn an_unknown_architecture_is_refused_by_name_with_the_list_of_the_known() {
    let error = Description::from_config(&changed("llama", json!({ "model_type": "mamba2" }))).unwrap_err().to_string();
    assert!(error.contains("mamba2"), "{error}");
    ARCHITECTURES.iter().for_each(|known| assert!(error.contains(known), "{error}"));
}

#[test]
fn impossible_sizes_are_refused_by_the_key_that_holds_them() {
    for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"] {
        for value in [json!(0), json!(-1), json!(1u64 << 40), json!(u64::MAX), json!(1.5), json!("64"), json!([64])] {
            refused("llama", json!({ key: value }), key);
        }
    }
    refused("llama", json!({ "num_key_value_heads": 3 }), "num_key_value_heads");
    refused("llama", json!({ "num_key_value_heads": 0 }), "num_key_value_heads");
    for size in [0u64, 15, 514, 1 << 40] {
        refused("llama", json!({ "head_dim": size }), &format!("head_dim of {size} (it must be even and at most 512)"));
    }
    refused("llama", json!({ "rms_norm_eps": -1.0 }), "rms_norm_eps");
    refused("llama", json!({ "hidden_size": null }), "hidden_size");
    refused("mistral", json!({ "sliding_window": 0 }), "sliding_window");
    refused("qwen3_moe", json!({ "num_experts_per_tok": 9 }), "num_experts_per_tok");
    refused("qwen3_moe", json!({ "num_experts": 1u64 << 40 }), "num_experts");
}

#[test]
fn what_we_do_not_compute_is_refused_not_ignored() {
    refused("llama", json!({ "attention_bias": true }), "attention_bias");
    refused("llama", json!({ "mlp_bias": true }), "mlp_bias");
    refused("llama", json!({ "hidden_act": "relu" }), "relu");
    refused("llama", json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor");
    refused("llama", json!({ "rope_scaling": { "rope_type": "yarn", "factor": 4.0 } }), "yarn");
    refused("gemma3", json!({ "final_logit_softcapping": 30.0 }), "final_logit_softcapping");
    refused("gemma3", json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping");
    refused("qwen3_moe", json!({ "use_sliding_window": true }), "use_sliding_window");
    refused("llama", json!({ "quantization_config": { "quant_method": "gptq" } }), "gptq");
}

#[test]
fn a_gguf_file_describes_the_model_it_was_made_from() {
    for (architecture, file) in [("llama", "gguf/tiny-llama-f16.gguf"), ("qwen3", "gguf/tiny-qwen3-q8_0.gguf")] {
        let fixture = Fixture::open(architecture);
        let from_gguf = Checkpoint::open(&fixture.path(file)).unwrap();
        assert!(from_gguf.gguf().is_some());
        let from_gguf = from_gguf.description().clone();
        let mut expected = Description::from_config(&config(architecture)).unwrap();
        expected.rope_layout = from_gguf.rope_layout; // the rows are in another order
        for (ours, theirs) in expected.layers.iter_mut().zip(&from_gguf.layers) {
            if let Scaling::Divisors(_) = theirs.rope.scaling {
                let (a, b) = (ours.rope.inv_freq(expected.head_dim), theirs.rope.inv_freq(expected.head_dim));
                assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= a * 1e-6), "{a:?} {b:?}");
                ours.rope = theirs.rope.clone();
            }
        }
        assert_eq!(from_gguf, expected, "{architecture}");
    }
}

/// A model folder with the given config and a fixture's weights.
fn folder(architecture: &str, config: &Json) -> TempDir {
    let place = tempfile::tempdir().unwrap();
    let weights = Fixture::open(architecture).path("model-f32/model.safetensors");
    fs::copy(weights, place.path().join("model.safetensors")).unwrap();
    fs::write(place.path().join("config.json"), config.to_string()).unwrap();
    place
}

fn load(path: &Path, keep: Option<DType>, positions: usize) -> Result<(), LoadError> {
    let checkpoint = Checkpoint::open(path)?;
    let step = StepLimits { rows: 4, sequences: 1, pages: 4 };
    let options = LoadOptions { keep, limits: Limits { step, logit_rows: 4, kv_pages: 4, positions } };
    let range = LayerRange::new(0, checkpoint.description().layers.len() as u32).unwrap();
    Block::load(&Reference, &checkpoint, range, Rank::SINGLE, &options, &mut |_| {})?;
    let embedding = Embedding::load(&Reference, &checkpoint, &options, Rank::SINGLE)?;
    LmHead::load(&Reference, &checkpoint, &options, Rank::SINGLE, &embedding)?;
    Ok(())
}

fn load_refused(path: &Path, keep: Option<DType>, naming: &[&str]) {
    let error = load(path, keep, 64).expect_err(naming[0]);
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    naming.iter().for_each(|name| assert!(text.contains(name), "{text}"));
}

#[test]
fn a_folder_that_is_no_model_gets_one_clear_sentence() {
    let place = tempfile::tempdir().unwrap();
    load_refused(&place.path().join("absent"), None, &["absent"]);
    load_refused(place.path(), None, &["no config.json"]);
    fs::write(place.path().join("model-q8_0.gguf"), b"GGUF").unwrap();
    load_refused(place.path(), None, &["name one of them", "model-q8_0.gguf"]);
    load_refused(&place.path().join("model-q8_0.gguf"), None, &["model-q8_0.gguf"]);
    fs::write(place.path().join("config.json"), b"{").unwrap();
    load_refused(place.path(), None, &["config.json is not valid JSON"]);
    fs::write(place.path().join("config.json"), b"[]").unwrap();
    load_refused(place.path(), None, &["config.json"]);
    fs::write(place.path().join("config.json"), config("llama").to_string()).unwrap();
    load_refused(place.path(), None, &["model.safetensors"]);
    load_refused(&place.path().join("config.json"), None, &["name the folder"]);
    fs::write(place.path().join("config.json"), vec![b' '; 5 << 20]).unwrap();
    load_refused(place.path(), None, &["too large"]);
}

#[test]
fn a_missing_tensor_is_named() {
    let more = folder("llama", &changed("llama", json!({ "num_hidden_layers": 5 })));
    load_refused(more.path(), None, &["model.layers.4.input_layernorm.weight is missing"]);
    let untied = folder("qwen2", &changed("qwen2", json!({ "tie_word_embeddings": false })));
    load_refused(untied.path(), None, &["lm_head.weight is missing"]);
    let biased = folder("llama", &changed("llama", json!({ "model_type": "qwen2" })));
    load_refused(biased.path(), None, &["model.layers.0.self_attn.q_proj.bias is missing"]);
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let wider = folder("llama", &changed("llama", json!({ "intermediate_size": 130 })));
    load_refused(wider.path(), None, &["model.layers.0.mlp.gate_proj.weight", "[128, 64]", "[130, 64]"]);
    let words = folder("llama", &changed("llama", json!({ "vocab_size": 321 })));
    load_refused(words.path(), None, &["model.embed_tokens.weight", "[320, 64]", "[321, 64]"]);
    let experts = folder("qwen3_moe", &changed("qwen3_moe", json!({ "num_experts": 7 })));
    load_refused(experts.path(), None, &["model.layers.0.mlp.gate.weight", "[8, 64]", "[7, 64]"]);
}

#[test]
fn a_bias_that_would_not_be_added_is_refused() {
    let biased = folder("qwen2", &changed("qwen2", json!({ "model_type": "llama" })));
    load_refused(biased.path(), None, &["model.layers.0.self_attn.q_proj.bias", "llama"]);
}

#[test]
fn a_format_that_cannot_hold_a_row_is_refused_by_the_tensors_name() {
    let fixture = Fixture::open("qwen3_moe");
    let folder = fixture.variant("f32").unwrap();
    load_refused(&folder, Some(DType::Q8_0), &["experts.0.down_proj.weight", "24 elements", "q8_0"]);
    let llama = Fixture::open("llama").variant("f32").unwrap();
    load_refused(&llama, Some(DType::Q4_K), &["layers.0.self_attn.q_proj.weight", "64 elements", "q4_k"]);
}

#[test]
fn stored_blocks_are_widened_but_not_quantised_again() {
    let llama = Fixture::open("llama").path("gguf/tiny-llama-q8_0.gguf");
    load_refused(&llama, Some(DType::Q4_0), &["blk.0.attn_q.weight", "q8_0", "q4_0"]);
    load(&llama, Some(DType::F32), 64).unwrap();
    load(&llama, Some(DType::Q8_0), 64).unwrap();
}

#[test]
fn more_positions_than_the_model_is_made_for_are_refused() {
    let llama = Fixture::open("llama").variant("f32").unwrap();
    load(&llama, None, 1024).unwrap();
    let error = load(&llama, None, 1025).unwrap_err();
    assert!(matches!(error, LoadError::Positions { positions: 1025, max: 1024 }), "{error}");
}

#[test]
fn layers_beyond_the_last_are_refused() {
    let checkpoint = Checkpoint::open(&Fixture::open("mistral").variant("f32").unwrap()).unwrap();
    let step = StepLimits { rows: 1, sequences: 1, pages: 1 };
    let options = LoadOptions { keep: None, limits: Limits { step, logit_rows: 1, kv_pages: 1, positions: 1 } };
    let range = LayerRange::new(2, 4).unwrap();
    let error = Block::load(&Reference, &checkpoint, range, Rank::SINGLE, &options, &mut |_| {}).err().unwrap();
    assert!(matches!(error, LoadError::Layers { count: 3, .. }), "{error}");
}

fn digest(path: &Path) -> String {
    Checkpoint::open(path).unwrap().digest().to_string()
}

/// A copy of a fixture's folder.
fn copy_of(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    copy
}

#[test]
fn a_copy_has_the_digest_of_its_original() {
    let fixture = Fixture::open("llama");
    let mut digests = Vec::new();
    for folder in ["model-f32", "model-bf16", "model-bf16-sharded"].map(|name| fixture.path(name)) {
        digests.push(digest(&folder));
        assert_eq!(digest(copy_of(&folder).path()), *digests.last().unwrap());
    }
    let gguf = fixture.path("gguf/tiny-llama-q8_0.gguf");
    let copy = tempfile::tempdir().unwrap();
    fs::copy(&gguf, copy.path().join("other-name.gguf")).unwrap();
    digests.push(digest(&gguf));
    assert_eq!(digest(&copy.path().join("other-name.gguf")), *digests.last().unwrap());
    assert!(digests.iter().all(|digest| digest.len() == 64));
    digests.sort();
    digests.dedup();
    assert_eq!(digests.len(), 4, "other files are other models");
}

#[test]
fn another_config_or_another_weight_gives_another_digest() {
    let folder = Fixture::open("llama").path("model-f32");
    let original = digest(&folder);
    let copy = copy_of(&folder);
    let weights = copy.path().join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    // The last bytes of the file are those of its last tensor.
    for changed in [bytes.len() - 1, bytes.len() - 4096] {
        let mut other = bytes.clone();
        other[changed] ^= 1;
        fs::write(&weights, other).unwrap();
        assert_ne!(digest(copy.path()), original, "byte {changed}");
    }
    fs::write(&weights, bytes).unwrap();
    assert_eq!(digest(copy.path()), original);
    let config = copy.path().join("config.json");
    let mut value = config_of(&config);
    value["rope_theta"] = json!(12_345.0);
    fs::write(&config, value.to_string()).unwrap();
    assert_ne!(digest(copy.path()), original);
}
