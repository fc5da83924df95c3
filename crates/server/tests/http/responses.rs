use serde_json::{Value, json};

use crate::client::{Client, named_events};
use crate::fixture::MODEL;

const RESPONSES: &str = "/v1/responses";

fn ask(fields: Value) -> Value {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
        "additionalProperties": false});
    let mut body = json!({
        "model": MODEL, "input": "How is the weather?", "temperature": 0, "max_output_tokens": 200,
        "reasoning": {"effort": "none"}, "parallel_tool_calls": false,
        "tools": [{"type": "function", "name": "weather", "parameters": city, "strict": true}],
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Removes ids, times and cache counts, which differ between requests.
fn without_what_varies(response: &Value) -> Value {
    let mut response = response.clone();
    for key in ["id", "created_at", "completed_at"] {
        response[key].take();
    }
    response["usage"]["input_tokens_details"].take();
    for item in response["output"].as_array_mut().unwrap() {
        assert!(!item["id"].take().as_str().unwrap().is_empty());
        if let Some(id) = item.get_mut("call_id") {
            assert!(id.take().as_str().unwrap().starts_with("call_"));
        }
    }
    response
}

#[tokio::test]
async fn the_last_event_holds_the_response_that_is_given_whole() {
    let client = Client::new();
    let cases = [
        (json!({"max_output_tokens": 9}), "incomplete", "message"),
        (json!({"tool_choice": "required"}), "completed", "function_call"),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "b", "schema": {"type": "boolean"}}}, "tools": []}),
            "completed",
            "message",
        ),
    ];
    for (fields, status, kind) in cases {
        let whole = client.post(RESPONSES, ask(fields.clone())).await;
        assert_eq!((&whole["status"], &whole["output"][0]["type"]), (&json!(status), &json!(kind)), "{whole}");
        assert_eq!((&whole["store"], &whole["object"]), (&json!(false), &json!("response")));
        let events = named_events(&client, RESPONSES, ask(fields)).await;
        for (number, (name, event)) in events.iter().enumerate() {
            assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(number)));
        }
        let (name, last) = events.last().unwrap();
        assert_eq!(*name, format!("response.{status}"));
        assert_eq!(without_what_varies(&last["response"]), without_what_varies(&whole));
        assert_eq!((events[0].0.as_str(), events[1].0.as_str()), ("response.created", "response.in_progress"));
    }
}

#[tokio::test]
async fn a_call_and_its_result_are_taken_back() {
    let client = Client::new();
    let response = client.post(RESPONSES, ask(json!({"tool_choice": {"type": "function", "name": "weather"}}))).await;
    let call = response["output"].as_array().unwrap().last().unwrap();
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(["Paris", "Rome"].contains(&arguments["city"].as_str().unwrap()), "{call}");
    let mut input = vec![json!({"role": "user", "content": "How is the weather?"})];
    input.extend(response["output"].as_array().unwrap().iter().cloned());
    input.push(json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}));
    let after = client.post(RESPONSES, ask(json!({"input": input, "max_output_tokens": 2}))).await;
    assert!(after["usage"]["input_tokens"].as_u64() > response["usage"]["input_tokens"].as_u64());
}

#[tokio::test]
async fn log_probabilities_come_with_the_text_that_they_are_of() {
    let fields =
        json!({"top_logprobs": 2, "max_output_tokens": 6, "tools": [], "include": ["message.output_text.logprobs"]});
    let response = Client::new().post(RESPONSES, ask(fields)).await;
    let logprobs = response["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), 6, "{response}");
    assert!(logprobs.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2));
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_by_name() {
    let client = Client::new();
    let cases = [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0]"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0]"),
    ];
    for (fields, param) in cases {
        let (status, error) = client.error(RESPONSES, &ask(fields).to_string()).await;
        assert_eq!(status, 400, "{error}");
        assert!(error["param"].as_str().is_some_and(|found| found.starts_with(param)), "{error}");
    }
}
