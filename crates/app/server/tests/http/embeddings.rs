use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::client::Client;

const EMBEDDINGS: &str = "/v1/embeddings";

fn vector(answer: &Value, index: usize) -> Vec<f32> {
    let list = answer["data"][index]["embedding"].as_array().unwrap();
    list.iter().map(|value| value.as_f64().unwrap() as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[tokio::test]
async fn vectors_have_length_one_and_equal_texts_have_equal_ones() {
    let input = json!(["a river", "something else", "a river"]);
    let answer = Client::new().post(EMBEDDINGS, json!({"input": input})).await;
    let vectors: Vec<_> = (0..3).map(|index| vector(&answer, index)).collect();
    for vector in &vectors {
        assert!((dot(vector, vector) - 1.0).abs() < 1e-5);
    }
    assert_eq!(vectors[0], vectors[2]);
    assert!(dot(&vectors[0], &vectors[1]) < 0.999);
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 3);
}

#[tokio::test]
async fn base64_holds_the_same_numbers() {
    let client = Client::new();
    let floats = vector(&client.post(EMBEDDINGS, json!({"input": "a river"})).await, 0);
    let encoded = client.post(EMBEDDINGS, json!({"input": "a river", "encoding_format": "base64"})).await;
    let bytes = BASE64_STANDARD.decode(encoded["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let decoded: Vec<_> = bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(decoded, floats);
}

#[tokio::test]
async fn pooling_is_the_mean_or_the_last_token() {
    let client = Client::new();
    let pooled = async |input: Value, pooling: &str| {
        vector(&client.post(EMBEDDINGS, json!({"input": input, "pooling": pooling})).await, 0)
    };
    assert_ne!(pooled(json!("a river"), "mean").await, pooled(json!("a river"), "last").await);
    assert_eq!(pooled(json!([65]), "mean").await, pooled(json!([65]), "last").await);
}

#[tokio::test]
async fn other_lengths_are_refused() {
    let (status, error) = Client::new().error(EMBEDDINGS, r#"{"input": "x", "dimensions": 8}"#).await;
    assert_eq!((status, &error["param"]), (400, &json!("dimensions")));
}
