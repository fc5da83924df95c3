use std::sync::Arc;

use axum::http::Method;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use server::{ApiKeys, Config};

use crate::client::{Client, named_events, wait_until};
use testing::fragile::{Fragile, Switch};
use testing::served_model::{self, MODEL};

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
        assert_eq!((&whole["store"], &whole["object"]), (&json!(true), &json!("response")));
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
        (json!({"temperature": 2.5}), "temperature"),
        (json!({"background": true, "store": false}), "background"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"truncation": "always"}), "truncation"),
        (json!({"tools": [{"type": "teleport"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name"),
        (json!({"tools": [{"type": "custom", "name": "a"}, {"type": "custom", "name": "a"}]}), "tools[1].name"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
    ];
    for (fields, param) in cases {
        let (status, error) = client.error(RESPONSES, &ask(fields).to_string()).await;
        assert_eq!(status, 400, "{error}");
        assert!(error["param"].as_str().is_some_and(|found| found.starts_with(param)), "{error}");
    }
}

#[tokio::test]
async fn a_tool_of_a_namespace_and_a_custom_one_are_called_in_their_own_forms() {
    let client = Client::new();
    let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
    let tools = json!([
        {"type": "namespace", "name": "agents", "description": "d", "tools": [
            {"type": "function", "name": "wait", "parameters": none, "strict": true},
        ]},
        {"type": "custom", "name": "pick", "format": {"type": "grammar", "syntax": "regex", "definition": "(red|blue) \\n\\\"[a-c]"}},
        {"type": "web_search"},
    ]);
    let ask = |choice: Value| {
        ask(json!({"tools": tools, "tool_choice": choice, "input": [
            {"role": "user", "content": "Which one?"},
            {"type": "custom_tool_call", "call_id": "c", "name": "pick", "input": "red"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "no"},
        ]}))
    };
    let called = client.post(RESPONSES, ask(json!({"type": "function", "name": "agents.wait"}))).await;
    let call = &called["output"][0];
    assert_eq!(
        (&call["type"], &call["namespace"], &call["name"]),
        (&json!("function_call"), &json!("agents"), &json!("wait"))
    );
    assert_eq!(called["tools"].as_array().unwrap().len(), 2, "the search is left out");

    let pick = json!({"type": "custom", "name": "pick"});
    let called = client.post(RESPONSES, ask(pick.clone())).await;
    let call = &called["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("custom_tool_call"), &json!("pick")), "{called}");
    let input = call["input"].as_str().unwrap();
    let [colour, letter] = input.split(" \n\"").collect::<Vec<_>>()[..] else { panic!("{input}") };
    assert!(["red", "blue"].contains(&colour) && ["a", "b", "c"].contains(&letter), "{input}");
    let events = named_events(&client, RESPONSES, ask(pick)).await;
    let deltas = events.iter().filter(|(name, _)| name == "response.custom_tool_call_input.delta");
    let streamed: String = deltas.map(|(_, event)| event["delta"].as_str().unwrap()).collect();
    assert_eq!(streamed, input);
}

#[tokio::test]
async fn the_oldest_turns_are_left_out_where_the_client_allows_it() {
    let client = Client::new();
    let turns = (0..40).flat_map(|number| {
        let question = format!("Question {number}: what is the weather in a town by the river today?");
        [json!({"role": "user", "content": question}), json!({"role": "assistant", "content": "It is sunny there."})]
    });
    let input: Vec<Value> = turns.chain([json!({"role": "user", "content": "And now?"})]).collect();
    let body =
        |truncation: &str| ask(json!({"input": input, "truncation": truncation, "max_output_tokens": 4, "tools": []}));
    let (status, error) = client.error(RESPONSES, &body("disabled").to_string()).await;
    assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")));
    let response = client.post(RESPONSES, body("auto")).await;
    let models = client.get("/v1/models").await.json();
    let context = models["data"][0]["max_model_len"].as_u64().unwrap();
    let used = response["usage"]["input_tokens"].as_u64().unwrap();
    assert!(used + 4 <= context && used > context / 2, "{used} of {context}");
}

#[tokio::test]
async fn a_stored_response_is_continued_listed_and_deleted() {
    let client = Client::new();
    let one = |more: Value| {
        let mut body =
            json!({"model": MODEL, "max_output_tokens": 3, "temperature": 0, "reasoning": {"effort": "none"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let first = client.post(RESPONSES, one(json!({"input": "Hello", "instructions": "Be brief"}))).await;
    let id = first["id"].as_str().unwrap();
    let again = client.get(&format!("{RESPONSES}/{id}")).await.json();
    assert_eq!(again, first);

    let mut events =
        named_events(&client, RESPONSES, one(json!({"input": "And you?", "previous_response_id": id}))).await;
    let second = events.pop().unwrap().1["response"].take();
    assert_eq!(second["previous_response_id"], *id);
    let mut input = vec![json!({"role": "user", "content": "Hello"})];
    input.extend(first["output"].as_array().unwrap().iter().cloned());
    input.push(json!({"role": "user", "content": "And you?"}));
    let whole = client.post(RESPONSES, one(json!({"input": input, "store": false}))).await;
    assert_eq!(whole["output"][0]["content"], second["output"][0]["content"]);
    assert_eq!(whole["usage"]["input_tokens"], second["usage"]["input_tokens"]);
    assert_eq!(client.get(&format!("{RESPONSES}/{}", whole["id"].as_str().unwrap())).await.status.as_u16(), 404);

    let second = second["id"].as_str().unwrap();
    let items = client.get(&format!("{RESPONSES}/{second}/input_items?order=asc&limit=2")).await.json();
    assert_eq!(
        (&items["data"][0]["content"][0]["text"], &items["has_more"]),
        (&json!("Hello"), &json!(true)),
        "{items}"
    );
    let deleted = client.call(Method::DELETE, &format!("{RESPONSES}/{id}"), "").await;
    assert_eq!((deleted.status.as_u16(), &deleted.json()["deleted"]), (200, &json!(true)));
    let (status, error) =
        client.error(RESPONSES, &one(json!({"input": "x", "previous_response_id": id})).to_string()).await;
    assert_eq!(
        (status, &error["code"], &error["param"]),
        (400, &json!("previous_response_not_found"), &json!("previous_response_id"))
    );
    assert_eq!(error["message"], format!("Previous response with id '{id}' not found."));
}

#[tokio::test]
async fn items_keep_the_ids_that_the_client_gave_them() {
    let client = Client::new();
    let item = |id: Value, text: &str| json!({"role": "user", "content": text, "id": id});
    let input = json!([item(json!("msg_mine"), "a"), item(json!(null), "b"), item(json!("msg_last"), "c")]);
    let response = client.post(RESPONSES, json!({"model": MODEL, "input": input, "max_output_tokens": 1})).await;
    let path = format!("{RESPONSES}/{}/input_items?order=asc", response["id"].as_str().unwrap());
    let items = client.get(&path).await.json();
    assert_eq!((&items["first_id"], &items["last_id"]), (&json!("msg_mine"), &json!("msg_last")), "{items}");
    assert!(items["data"][1]["id"].as_str().unwrap().starts_with("msg_"));
    let rest = client.get(&format!("{path}&after=msg_mine")).await.json();
    assert_eq!(rest["data"].as_array().unwrap().len(), 2);
    let unknown = client.get(&format!("{path}&after=msg_other")).await;
    assert_eq!((unknown.status.as_u16(), &unknown.json()["error"]["param"]), (400, &json!("after")));
}

/// A response repeats the setting that was in effect: a forced call is one call unless the request says otherwise.
#[tokio::test]
async fn parallel_tool_calls_are_reported_as_they_are_allowed() {
    let client = Client::new();
    for (given, choice, effective) in [
        (json!(null), "auto", true),
        (json!(null), "required", false),
        (json!(false), "auto", false),
        (json!(true), "required", true),
    ] {
        let fields = json!({"parallel_tool_calls": given, "tool_choice": choice, "max_output_tokens": 1});
        let response = client.post(RESPONSES, ask(fields)).await;
        assert_eq!(response["parallel_tool_calls"], effective, "{given} {choice}");
    }
}

#[tokio::test]
async fn a_conversation_that_is_longer_than_a_body_is_not_stored() {
    let config = Config { body_bytes_max: 2000, ..served_model::config() };
    let client = Client::of(&served_model::ready(config, served_model::shared()));
    let body = |more: Value| {
        let mut body = json!({"model": MODEL, "input": "x".repeat(300), "max_output_tokens": 1, "truncation": "auto"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let mut response = client.post(RESPONSES, body(json!({}))).await;
    let mut stored = 0;
    while response["store"] == true {
        stored += 1;
        assert!(stored < 10, "the conversation grows without a limit");
        response = client.post(RESPONSES, body(json!({"previous_response_id": response["id"]}))).await;
    }
    assert!(stored > 1);
    let next = body(json!({"previous_response_id": response["id"]}));
    let (_, error) = client.error(RESPONSES, &next.to_string()).await;
    assert_eq!(error["code"], "previous_response_not_found");
}

#[tokio::test]
async fn a_response_is_its_key_s_alone_and_nothing_is_stored_where_the_operator_wants_that() {
    let keys = ApiKeys::new(["one", "two"]).unwrap();
    let app = served_model::ready(Config { keys, ..served_model::config() }, served_model::shared());
    let client = |key: &str| Client::of(&app).with_header("x-api-key", key);
    let body = json!({"model": MODEL, "input": "Hello", "max_output_tokens": 1});
    let response = client("one").post(RESPONSES, body.clone()).await;
    let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    for (key, status) in [("two", 404), ("one", 200)] {
        assert_eq!(client(key).get(&path).await.status.as_u16(), status);
        let items = client(key).get(&format!("{path}/input_items")).await;
        assert_eq!(items.status.as_u16(), status);
        assert_eq!(client(key).call(Method::DELETE, &path, "").await.status.as_u16(), status);
    }

    let config = Config { stores_responses: false, ..served_model::config() };
    let client = Client::of(&served_model::ready(config, served_model::shared()));
    let response = client.post(RESPONSES, body).await;
    assert_eq!(response["store"], false);
    assert_eq!(client.get(&format!("{RESPONSES}/{}", response["id"].as_str().unwrap())).await.status.as_u16(), 404);
}

/// A request for a response in the background that does not end before `release`.
fn held() -> (Client, Switch) {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    switch.hold_after(12);
    (Client::of(&served_model::ready(served_model::config(), served)), switch)
}

fn in_background(more: Value) -> Value {
    let mut body = json!({"model": MODEL, "input": "Hello", "max_output_tokens": 20, "temperature": 0,
        "reasoning": {"effort": "none"}, "background": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_response_in_the_background_is_polled_and_its_events_are_read_again() {
    let (client, switch) = held();
    let first = client.post(RESPONSES, in_background(json!({}))).await;
    assert_eq!((&first["background"], &first["status"]), (&json!(true), &json!("in_progress")));
    switch.release();
    let path = format!("{RESPONSES}/{}", first["id"].as_str().unwrap());
    wait_until("the response has ended", async || client.get(&path).await.json()["status"] != "in_progress").await;
    let last = client.get(&path).await.json();
    assert_eq!((&last["id"], &last["usage"]["output_tokens"]), (&first["id"], &json!(20)), "{last}");

    let events = async |query: &str| {
        let text = client.get(&format!("{path}?stream=true{query}")).await.text();
        let event = |event: &str| {
            let (id, rest) = event.split_once("\n").unwrap();
            let data = rest.split_once("\ndata: ").unwrap().1;
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(id, format!("id: {}", data["sequence_number"]));
            data
        };
        text.split_terminator("\n\n").map(event).collect::<Vec<_>>()
    };
    let all = events("").await;
    assert_eq!(all[0]["type"], "response.created");
    assert_eq!(all.last().unwrap()["response"], last);
    let rest = events("&starting_after=4").await;
    assert_eq!(rest[..], all[5..]);

    // It is stored like any other.
    let next = in_background(json!({"previous_response_id": first["id"], "background": false}));
    assert_eq!(client.post(RESPONSES, next).await["previous_response_id"], first["id"]);
    assert_eq!(client.call(Method::DELETE, &path, "").await.status.as_u16(), 200);
    assert_eq!(client.get(&path).await.status.as_u16(), 404);
}

#[tokio::test]
async fn a_response_in_the_background_goes_on_without_its_client_and_is_cancelled() {
    let (client, switch) = held();
    let stream = client.send(Method::POST, RESPONSES, in_background(json!({"stream": true})).to_string()).await;
    let mut body = stream.into_body().into_data_stream();
    let created = String::from_utf8(body.next().await.unwrap().unwrap().to_vec()).unwrap();
    let created: Value = serde_json::from_str(created.split_once("data: ").unwrap().1).unwrap();
    drop(body);
    let path = format!("{RESPONSES}/{}", created["response"]["id"].as_str().unwrap());
    assert_eq!(client.get(&path).await.json()["status"], "in_progress");
    let cancelled = client.call(Method::POST, &format!("{path}/cancel"), "").await.json();
    assert_eq!(cancelled["status"], "cancelled", "{cancelled}");
    switch.release();
    assert_eq!(client.get(&path).await.json(), cancelled);
    let again = client.call(Method::POST, &format!("{path}/cancel"), "").await.json();
    assert_eq!(again, cancelled, "it stays as it is");
    let unknown = client.call(Method::POST, &format!("{RESPONSES}/resp_none/cancel"), "").await;
    assert_eq!(unknown.status.as_u16(), 404);
}

#[tokio::test]
async fn a_chat_completion_goes_on_without_its_client_and_is_resumed() {
    let (client, switch) = held();
    let id = "an-answer-of-the-page";
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0,
        "stream": true, "answer_id": id, "reasoning_effort": "none"});
    let path = "/v1/chat/completions";
    let response = client.send(Method::POST, path, body.to_string()).await;
    assert_eq!(response.status().as_u16(), 200);
    let mut begun = response.into_body().into_data_stream();
    let first = begun.next().await.unwrap().unwrap();
    assert!(first.starts_with(b"id: 0\ndata: {"), "{first:?}");
    drop(begun);
    let (status, error) = client.error(path, &body.to_string()).await;
    assert_eq!((status, &error["code"]), (400, &json!("answer_exists")));
    switch.release();

    let answer = format!("/v1/answers/{id}");
    let all = client.get(&answer).await.text();
    assert!(all.starts_with(std::str::from_utf8(&first).unwrap()) && all.ends_with("data: [DONE]\n\n"), "{all}");
    let rest = client.get(&format!("{answer}?starting_after=3")).await.text();
    assert!(rest.starts_with("id: 4\n") && all.ends_with(&rest), "{rest}");
    let mut plain = body.clone();
    plain.as_object_mut().unwrap().remove("answer_id");
    let contents = |events: &[Value]| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
    };
    let kept: Vec<Value> = all
        .split_terminator("\n\n")
        .filter_map(|event| serde_json::from_str(event.split_once("data: ").unwrap().1).ok())
        .collect();
    assert_eq!(contents(&kept), contents(&client.stream(path, plain).await));

    assert_eq!(client.get("/v1/answers/another-answer-id").await.status.as_u16(), 404);
    assert_eq!(client.get(&format!("{answer}?starting_after=x")).await.status.as_u16(), 400);
}

#[tokio::test]
async fn a_kept_chat_completion_is_cancelled_and_belongs_to_its_key() {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    switch.hold_after(12);
    let keys = ApiKeys::new(["one", "two"]).unwrap();
    let app = served_model::ready(Config { keys, ..served_model::config() }, served);
    let client = |key: &str| Client::of(&app).with_header("x-api-key", key);
    let id = "0123456789abcdef";
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 200, "stream": true,
        "answer_id": id, "stream_options": {"include_usage": true}});
    let mine = client("one");
    let response = mine.send(Method::POST, "/v1/chat/completions", body.to_string()).await;
    let path = format!("/v1/answers/{id}");
    assert_eq!(client("two").get(&path).await.status.as_u16(), 404);
    assert_eq!(client("two").call(Method::POST, &format!("{path}/cancel"), "").await.status.as_u16(), 404);
    assert_eq!(
        mine.call(Method::POST, &format!("{path}/cancel"), "").await.json(),
        json!({"id": id, "cancelled": true})
    );
    let text = response.into_body().collect().await.unwrap().to_bytes();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("\"finish_reason\":\"cancelled\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    switch.release();

    // A refusal has its status, and leaves no answer.
    let mut wrong = body.clone();
    (wrong["model"], wrong["answer_id"]) = (json!("unknown"), json!("fedcba9876543210"));
    let (status, error) = mine.error("/v1/chat/completions", &wrong.to_string()).await;
    assert_eq!((status, &error["code"]), (404, &json!("model_not_found")));
    assert_eq!(mine.get("/v1/answers/fedcba9876543210").await.status.as_u16(), 404);
    wrong["answer_id"] = json!("no/such/id/is/possible");
    assert_eq!(mine.error("/v1/chat/completions", &wrong.to_string()).await.1["param"], "answer_id");
}
