//! Files written by other programs: the models of `fixtures/oracle`.

use half::f16;
use model::files::{Gguf, SafeTensors};
use testing::oracle;
use types::DType;

#[test]
fn shards_hold_the_same_tensors_as_the_single_file() {
    let single = SafeTensors::open(&oracle("llama/model-bf16")).unwrap();
    let shards = SafeTensors::open(&oracle("llama/model-bf16-sharded")).unwrap();
    assert!(single.tensor_names().eq(shards.tensor_names()));
    assert!(single.tensor_names().len() > 30);
    for name in single.tensor_names() {
        let (a, b) = (single.tensor(name).unwrap().unwrap(), shards.tensor(name).unwrap().unwrap());
        assert_eq!(a.dtype, DType::BF16, "{name}");
        assert_eq!((a.dtype, a.shape, a.bytes), (b.dtype, b.shape, b.bytes), "{name}");
    }
}

#[test]
fn gguf_and_safetensors_agree_on_a_tensor() {
    let hub = SafeTensors::open(&oracle("llama/model-f32")).unwrap();
    let gguf = Gguf::open(&oracle("llama/gguf/tiny-llama-f16.gguf")).unwrap();
    for (hub_name, gguf_name) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.2.mlp.down_proj.weight", "blk.2.ffn_down.weight"),
    ] {
        let (hub, gguf) = (hub.tensor(hub_name).unwrap().unwrap(), gguf.tensor(gguf_name).unwrap());
        assert_eq!(hub.shape, gguf.shape);
        assert_eq!((hub.dtype, gguf.dtype), (DType::F32, DType::F16));
        let rounded = hub.bytes.as_chunks().0.iter().map(|&bytes| f16::from_f32(f32::from_le_bytes(bytes)));
        assert!(rounded.eq(gguf.bytes.as_chunks().0.iter().map(|&bytes| f16::from_le_bytes(bytes))));
    }
    assert_eq!(gguf.get("general.architecture").unwrap().as_str(), Some("llama"));
    assert_eq!(gguf.get("llama.block_count").unwrap().as_u64(), Some(4));
}

#[test]
fn a_quantised_file_opens() {
    let gguf = Gguf::open(&oracle("qwen3/gguf/tiny-qwen3-q8_0.gguf")).unwrap();
    assert!(gguf.tensor_names().any(|name| gguf.tensor(name).unwrap().dtype == DType::Q8_0));
    let tokens = gguf.get("tokenizer.ggml.tokens").unwrap().as_strings().unwrap();
    let types = gguf.get("tokenizer.ggml.token_type").unwrap().as_ints().unwrap();
    assert_eq!(tokens.len(), types.len());
}
