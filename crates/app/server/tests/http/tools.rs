use serde_json::{Value, json};

use crate::client::Client;
use testing::served_model::MODEL;

const CHAT: &str = "/v1/chat/completions";

fn ask(fields: Value) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": city, "strict": true}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "tools": [tool("weather"), tool("time")],
        "chat_template_kwargs": {"enable_thinking": false},
        "temperature": 1, "seed": 11, "max_tokens": 600,
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn check_call(call: &Value, names: &[&str]) {
    assert!(call["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(call["type"], "function");
    assert!(names.contains(&call["function"]["name"].as_str().unwrap()), "{call}");
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{call}");
}

#[tokio::test]
async fn a_call_that_is_required_is_made_and_follows_its_schema() {
    let client = Client::new();
    let cases = [
        (json!("required"), vec!["weather", "time"]),
        (json!({"type": "function", "function": {"name": "time"}}), vec!["time"]),
    ];
    for (choice, names) in cases {
        let fields = json!({"tool_choice": choice, "parallel_tool_calls": false});
        let answer = client.post(CHAT, ask(fields)).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        check_call(&calls[0], &names);
    }
}

#[tokio::test]
async fn calls_are_streamed_with_their_arguments() {
    let client = Client::new();
    let fields = json!({"tool_choice": "required", "parallel_tool_calls": false});
    let whole = client.post(CHAT, ask(fields.clone())).await;
    let events = client.stream(CHAT, ask(fields)).await;
    let deltas: Vec<_> =
        events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"][0].as_object()).collect();
    assert!(deltas.len() > 1, "arguments come in pieces");
    let mut call = Value::Object(deltas[0].clone());
    let arguments: String = deltas.iter().map(|delta| delta["function"]["arguments"].as_str().unwrap()).collect();
    call["function"]["arguments"] = arguments.into();
    check_call(&call, &["weather", "time"]);
    assert_eq!(call["function"], whole["choices"][0]["message"]["tool_calls"][0]["function"]);
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn the_model_does_not_see_tools_that_it_may_not_call() {
    let client = Client::new();
    let seen = client.post(CHAT, ask(json!({"max_tokens": 1}))).await;
    let hidden = client.post(CHAT, ask(json!({"max_tokens": 1, "tool_choice": "none"}))).await;
    assert!(hidden["usage"]["prompt_tokens"].as_u64() < seen["usage"]["prompt_tokens"].as_u64());
}

#[tokio::test]
async fn calls_and_their_results_are_part_of_a_conversation() {
    let call = json!({"id": "call_1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}});
    let messages = json!([
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]);
    let answer = Client::new().post(CHAT, ask(json!({"messages": messages, "max_tokens": 4}))).await;
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 20);
}

#[tokio::test]
async fn a_call_that_was_cut_off_may_come_back() {
    let client = Client::new();
    for arguments in ["{\"city\": \"Ro", "{\"city\"", "", "nonsense"] {
        let function = json!({"name": "weather", "arguments": arguments});
        let chat = json!([
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ]);
        client.post(CHAT, ask(json!({"messages": chat, "max_tokens": 1}))).await;
        let input = json!([
            {"role": "user", "content": "How is the weather?"},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        ]);
        client.post("/v1/responses", json!({"model": MODEL, "input": input, "max_output_tokens": 1})).await;
    }
    // Anthropic's clients replace such arguments by an empty object.
    let messages = json!([
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]},
    ]);
    client.post("/v1/messages", json!({"model": MODEL, "messages": messages, "max_tokens": 1})).await;
}

#[tokio::test]
async fn no_call_is_made_twice() {
    // The grammar has four different calls, and the reply is long enough for many more.
    for seed in 0..4 {
        let fields = json!({"tool_choice": "required", "parallel_tool_calls": true, "seed": seed, "temperature": 0.2});
        let answer = Client::new().post(CHAT, ask(fields)).await;
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
        let repeated = (1..functions.len()).any(|at| functions[..at].contains(&functions[at]));
        assert!(!functions.is_empty() && !repeated, "{functions:?}");
    }
}

#[tokio::test]
async fn tools_that_make_no_sense_are_refused() {
    let client = Client::new();
    let cases = [
        (json!({"tool_choice": {"type": "function", "function": {"name": "fly"}}}), "tool_choice"),
        (json!({"tool_choice": "required", "tools": []}), "tool_choice"),
        (json!({"tools": [{"type": "function", "function": {"name": ""}}]}), "tools[0].function.name"),
        (json!({"tools": [{"type": "browser"}]}), "tools[0].type"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
    ];
    for (fields, param) in cases {
        let (status, error) = client.error(CHAT, &ask(fields).to_string()).await;
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
    }
}
