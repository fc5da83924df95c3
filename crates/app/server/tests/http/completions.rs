use serde_json::{Value, json};

use crate::client::Client;

const COMPLETIONS: &str = "/v1/completions";

fn ask(prompt: Value, fields: Value) -> Value {
    let mut body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

#[tokio::test]
async fn prompts_may_be_text_or_tokens_one_or_many() {
    let client = Client::new();
    let tokens = client.post("/tokenize", json!({"prompt": "a river"})).await["tokens"].clone();
    let one = client.post(COMPLETIONS, ask(json!("a river"), json!({}))).await;
    assert_eq!(one["object"], "text_completion");
    for prompt in [json!(["a river"]), tokens.clone(), json!([tokens])] {
        let same = client.post(COMPLETIONS, ask(prompt, json!({}))).await;
        assert_eq!(same["choices"], one["choices"]);
    }
    let many = client.post(COMPLETIONS, ask(json!(["a river", "b"]), json!({"n": 2}))).await;
    let choices = many["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(choices[0]["text"], one["choices"][0]["text"]);
    assert_eq!(choices[1]["text"], one["choices"][0]["text"]);
    assert_eq!(many["usage"]["completion_tokens"], 32);
}

#[tokio::test]
async fn a_stream_says_what_the_whole_completion_says() {
    let client = Client::new();
    let fields = json!({"echo": true, "logprobs": 2});
    let whole = client.post(COMPLETIONS, ask(json!("a river"), fields.clone())).await;
    let events = client.stream(COMPLETIONS, ask(json!("a river"), fields)).await;
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"]);
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let streamed = events.iter().filter_map(|event| event["choices"][0]["logprobs"][list].as_array()).flatten();
        assert_eq!(streamed.cloned().collect::<Value>(), whole["choices"][0]["logprobs"][list], "{list}");
    }
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn echo_gives_the_prompt_with_its_log_probabilities_and_nothing_else() {
    let client = Client::new();
    let tokens = client.post("/tokenize", json!({"prompt": "a long river"})).await["tokens"].clone();
    let fields = json!({"echo": true, "logprobs": 1, "max_tokens": 0});
    let answer = client.post(COMPLETIONS, ask(json!("a long river"), fields)).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "a long river");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), tokens.as_array().unwrap().len());
    assert!(logprobs[0].is_null() && logprobs[1..].iter().all(|value| value.as_f64().unwrap() < 0.0));
    let joined: String = choice["logprobs"]["tokens"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(joined, "a long river");
    assert_eq!(choice["logprobs"]["text_offset"][1].as_u64().unwrap() as usize, {
        choice["logprobs"]["tokens"][0].as_str().unwrap().chars().count()
    });
}

/// lm-eval relies on this: the log probabilities of a text are the same as output and as prompt.
#[tokio::test]
async fn an_answer_that_is_read_back_has_the_log_probabilities_it_was_written_with() {
    let client = Client::new();
    let prompt = client.post("/tokenize", json!({"prompt": "a long river"})).await["tokens"].clone();
    let written = client.post(COMPLETIONS, ask(prompt.clone(), json!({"logprobs": 1}))).await;
    let written = &written["choices"][0]["logprobs"];
    let answer = client.post("/tokenize", json!({"prompt": "x"})).await;
    assert_eq!(answer["count"], 1, "a letter is a token");

    let whole: Vec<_> = prompt.as_array().unwrap().iter().chain([&answer["tokens"][0]]).cloned().collect();
    let fields = json!({"echo": true, "logprobs": 1, "max_tokens": 1});
    let read = client.post(COMPLETIONS, ask(json!([whole]), fields)).await;
    let read = &read["choices"][0]["logprobs"];
    assert_eq!(read["token_logprobs"].as_array().unwrap().len(), whole.len() + 1);
    let at = prompt.as_array().unwrap().len();
    // The most probable first token is the one that was generated, with the same probability.
    let best = numbers(&json!(read["top_logprobs"][at].as_object().unwrap().values().collect::<Vec<_>>()));
    let best = best.into_iter().fold(f64::NEG_INFINITY, f64::max);
    assert!((best - written["token_logprobs"][0].as_f64().unwrap()).abs() < 1e-3);
}

/// lm-eval requests one token after a text and drops the last log probability, whichever token it is.
#[tokio::test]
async fn a_token_that_ends_an_answer_has_its_log_probability_but_no_text() {
    let client = Client::new();
    let x = client.post("/tokenize", json!({"prompt": "x"})).await["tokens"][0].as_u64().unwrap();
    let bias = json!({x.to_string(): 100});
    let mut body = ask(json!("a river"), json!({"echo": true, "logprobs": 1, "max_tokens": 1, "logit_bias": bias}));
    let said = client.post(COMPLETIONS, body.clone()).await;
    assert_eq!(said["choices"][0]["text"], "a riverx");

    body["stop_token_ids"] = json!([x]);
    let ended = client.post(COMPLETIONS, body.clone()).await;
    let choice = &ended["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("a river"), &json!("stop")));
    assert_eq!(choice["logprobs"], said["choices"][0]["logprobs"]);
    let events = client.stream(COMPLETIONS, body).await;
    let streamed = events.iter().filter_map(|event| event["choices"][0]["logprobs"]["token_logprobs"].as_array());
    assert_eq!(streamed.flatten().cloned().collect::<Value>(), choice["logprobs"]["token_logprobs"]);

    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat =
        json!({"messages": messages, "temperature": 0, "logprobs": true, "logit_bias": bias, "stop_token_ids": [x]});
    let chat = client.post("/v1/chat/completions", chat).await;
    assert_eq!(chat["choices"][0]["logprobs"]["content"], json!([]), "a chat tells the tokens of its text");
}

/// How lm-eval detects whether a text was the greedy output.
#[tokio::test]
async fn the_likeliest_token_has_the_same_number_in_both_lists() {
    let answer = Client::new().post(COMPLETIONS, ask(json!("a river"), json!({"logprobs": 2, "max_tokens": 32}))).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    let chosen = numbers(&logprobs["token_logprobs"]);
    assert_eq!(chosen.len(), 32);
    for (chosen, top) in chosen.into_iter().zip(logprobs["top_logprobs"].as_array().unwrap()) {
        let top = top.as_object().unwrap().values().map(|value| value.as_f64().unwrap());
        assert_eq!(chosen, top.fold(f64::NEG_INFINITY, f64::max));
    }
}
