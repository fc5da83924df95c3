use serde_json::json;

use crate::client::Client;

#[tokio::test]
async fn text_becomes_tokens_and_tokens_text() {
    let client = Client::new();
    let answer = client.post("/tokenize", json!({"prompt": "naïve rivers", "return_token_strs": true})).await;
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(answer["token_strs"].as_array().unwrap().len(), tokens.len());
    assert!(answer["max_model_len"].as_u64().unwrap() > 0);
    let back = client.post("/detokenize", json!({"tokens": tokens})).await;
    assert_eq!(back["prompt"], "naïve rivers");
}

#[tokio::test]
async fn a_conversation_has_as_many_tokens_as_its_answer_is_charged_for() {
    let client = Client::new();
    let messages = json!([{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Tell me"}]);
    let counted = client.post("/tokenize", json!({"messages": messages})).await;
    let answer = client.post("/v1/chat/completions", json!({"messages": messages, "max_tokens": 1})).await;
    assert_eq!(counted["count"], answer["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn tokens_that_do_not_exist_have_no_text() {
    let (status, error) = Client::new().error("/detokenize", r#"{"tokens": [4000000000]}"#).await;
    assert_eq!((status, &error["param"]), (400, &json!("tokens")));
    let (status, error) = Client::new().error("/tokenize", "{}").await;
    assert_eq!((status, &error["param"]), (400, &json!("prompt")));
}

#[tokio::test]
async fn the_tokens_that_begin_and_end_texts_can_be_asked_for() {
    let client = Client::new();
    let info = client.get("/tokenizer_info").await.json();
    assert_eq!(info, json!({"bos_token": null, "eos_token": "<|im_end|>"}));
    let end = client.post("/tokenize", json!({"prompt": info["eos_token"], "add_special_tokens": false})).await;
    assert_eq!(end["count"], 1);
}

#[tokio::test]
async fn what_is_far_too_long_is_not_counted() {
    let client = Client::new();
    let long = "a".repeat(6 << 20);
    let (status, error) = client.error("/tokenize", &json!({"prompt": long}).to_string()).await;
    assert_eq!((status, &error["code"], &error["param"]), (400, &json!("context_length_exceeded"), &json!("prompt")));
    let messages = json!([{"role": "user", "content": long}]);
    let (status, error) = client.error("/tokenize", &json!({"messages": messages}).to_string()).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")));
    let body = json!({"model": testing::served_model::MODEL, "messages": messages});
    let (status, error) = client.error("/v1/messages/count_tokens", &body.to_string()).await;
    assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{error}");
    // Twice the context is counted.
    let context = client.get("/v1/models").await.json()["data"][0]["max_model_len"].as_u64().unwrap();
    let counted = client.post("/tokenize", json!({"prompt": "a b ".repeat(context as usize)})).await;
    assert!(counted["count"].as_u64().unwrap() > context);
}
