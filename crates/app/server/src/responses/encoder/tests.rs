use super::super::tools::OfferedTools;
use super::*;
use engine::Logprobs;
use serde_json::{Value, json};
use types::TokenId;

const USAGE: Usage = Usage { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 3, reasoning_tokens: 1 };

/// An encoder whose ids all end in 1, and whose tokens are characters.
fn encoder() -> ResponsesEncoder {
    let tools = json!([
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "wait"}]},
        {"type": "local_shell"},
        {"type": "web_search"},
    ]);
    let request = json!({"model": "m", "input": "hi", "temperature": 0.5, "tools": tools});
    let encode_logprob = |token: &ScoredToken| {
        let bytes = vec![token.id.0 as u8];
        let token = char::from(bytes[0]).to_string();
        Some(ResponsesLogprob { token, bytes, logprob: -0.5, top_logprobs: Vec::new() })
    };
    let request: ResponsesRequest = serde_json::from_value(request).unwrap();
    let forms = OfferedTools::new(request.tools.as_deref().unwrap()).unwrap().into_forms();
    let encoder = ResponsesEncoder::new(request, forms, None, encode_logprob).unwrap();
    ResponsesEncoder { new_id: |prefix| format!("{prefix}1"), ..encoder }
}

/// An encoder for a request with these fields.
fn encoder_of(fields: Value) -> Result<ResponsesEncoder, ApiError> {
    let mut request = json!({"model": "m", "input": "hi"});
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let request: ResponsesRequest = serde_json::from_value(request).unwrap();
    let forms = OfferedTools::new(request.tools.as_deref().unwrap_or_default())?.into_forms();
    ResponsesEncoder::new(request, forms, None, |_| None)
}

#[test]
fn what_is_sent_while_nothing_happens_is_short() {
    let long = "x".repeat(500_000);
    let tools = json!([{"type": "function", "name": "f", "description": long}]);
    let mut encoder = encoder_of(json!({"tools": tools, "instructions": long, "user": long})).unwrap();
    let mut sent = Vec::new();
    encoder.event(0, text(&long), USAGE, &mut sent);
    encoder.event(0, delta(Delta::Reasoning("hm".into()), ""), USAGE, &mut sent);
    sent.clear();
    encoder.idle(&mut sent);
    let event: Value = serde_json::from_slice(&sent[0].data).unwrap();
    assert_eq!((&event["type"], &event["response"]["status"]), (&json!("response.in_progress"), &json!("in_progress")));
    assert!(sent[0].data.len() < 2000, "{} bytes", sent[0].data.len());
}

#[test]
fn the_settings_that_a_response_repeats_have_a_limit() {
    let long = "x".repeat(SETTINGS_BYTES_MAX);
    let schema = json!({"type": "json_schema", "name": "s", "schema": {"description": long}});
    for fields in [
        json!({"tools": [{"type": "function", "name": "f", "description": long}]}),
        json!({"text": {"format": schema}}),
        json!({"tool_choice": {"type": "function", "name": long}}),
        json!({"user": long}),
    ] {
        let error = encoder_of(fields).err().unwrap();
        assert_eq!((error.status().as_u16(), error.param.as_deref()), (400, Some("tools")));
    }
    assert!(encoder_of(json!({"instructions": long})).is_ok(), "instructions are part of the prompt");
}

/// A response with a text.
pub fn finished_response() -> ResponsesReply {
    let mut output = ChoiceOutput::default();
    output.push(text("hello"));
    encoder().into_body(vec![output], USAGE)
}

fn delta(delta: Delta, tokens: &str) -> GenerationEvent {
    let token =
        |byte: u8| ScoredToken { id: TokenId(byte.into()), logprobs: Some(Logprobs { chosen: -0.5, top: vec![] }) };
    GenerationEvent::Delta { deltas: vec![delta], tokens: tokens.bytes().map(token).collect() }
}

fn text(text: &str) -> GenerationEvent {
    delta(Delta::Text(text.to_owned()), "")
}

fn finished(finish: ChoiceFinish) -> Result<GenerationEvent, ApiError> {
    Ok(GenerationEvent::Finished(finish))
}

/// Encodes generation events and an end. The last event must contain the same response as the single body.
fn encode(events: Vec<GenerationEvent>, end: Result<GenerationEvent, ApiError>) -> Vec<Value> {
    let (mut streaming, mut output, mut sent) = (encoder(), ChoiceOutput::default(), Vec::new());
    streaming.start(Usage::default(), &mut sent);
    for event in events {
        output.push(event.clone());
        streaming.event(0, event, USAGE, &mut sent);
    }
    let finished = end.is_ok();
    match end {
        Ok(end) => {
            output.push(end.clone());
            streaming.event(0, end, USAGE, &mut sent);
        }
        Err(error) => streaming.error(error, &mut sent),
    }
    let json = |(number, StreamEvent { name, data }): (usize, StreamEvent)| {
        let mut data: Value = serde_json::from_slice(&data).unwrap();
        assert_eq!(data["type"].as_str(), name);
        assert_eq!(data.as_object_mut().unwrap().remove("sequence_number"), Some(json!(number)));
        data
    };
    let sent: Vec<_> = sent.into_iter().enumerate().map(json).collect();
    if finished {
        let mut whole = serde_json::to_value(encoder().into_body(vec![output], USAGE)).unwrap();
        let last = &sent.last().unwrap()["response"];
        for varies in ["id", "created_at", "completed_at"] {
            whole[varies] = last[varies].clone();
        }
        assert_eq!(whole, *last);
    }
    sent
}

/// The events between the first two and the last, and the output of the last.
fn items(events: Vec<GenerationEvent>, finish: ChoiceFinish) -> (Vec<Value>, Value) {
    let mut sent = encode(events, finished(finish));
    let mut last = sent.pop().unwrap();
    (sent.split_off(2), last["response"]["output"].take())
}

fn names(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap().trim_start_matches("response.")).collect()
}

#[test]
fn an_empty_answer_has_no_item_and_no_event() {
    assert_eq!(items(vec![], ChoiceFinish::Stop), (vec![], json!([])));
}

#[test]
fn a_text_is_announced_grows_and_is_closed_with_its_part() {
    let (events, items) = items(vec![text("he"), text("llo")], ChoiceFinish::Stop);
    let part = |text: &str| json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    let item = |status: &str, content: Value| json!({"type": "message", "id": "msg_1", "status": status, "role": "assistant", "content": content});
    let at = |more: Value| {
        let mut event = json!({"item_id": "msg_1", "output_index": 0, "content_index": 0});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        event
    };
    let expected = vec![
        json!({"type": "response.output_item.added", "output_index": 0, "item": item("in_progress", json!([]))}),
        at(json!({"type": "response.content_part.added", "part": part("")})),
        at(json!({"type": "response.output_text.delta", "delta": "he", "logprobs": []})),
        at(json!({"type": "response.output_text.delta", "delta": "llo", "logprobs": []})),
        at(json!({"type": "response.output_text.done", "text": "hello", "logprobs": []})),
        at(json!({"type": "response.content_part.done", "part": part("hello")})),
        json!({"type": "response.output_item.done", "output_index": 0,
            "item": item("completed", json!([part("hello")]))}),
    ];
    assert_eq!(events, expected);
    assert_eq!(items, json!([item("completed", json!([part("hello")]))]));
}

#[test]
fn reasoning_text_and_calls_are_items_one_after_the_other() {
    let deltas = [
        Delta::Reasoning("hm".into()),
        Delta::Text("well".into()),
        Delta::ToolCall { index: 0, name: "find".into() },
        Delta::Arguments { index: 0, json: "{".into() },
        Delta::Arguments { index: 0, json: "}".into() },
        Delta::ToolCall { index: 1, name: "stop".into() },
        Delta::Arguments { index: 1, json: "{\"a".into() },
    ];
    let (events, items) = items(deltas.map(|one| delta(one, "")).into(), ChoiceFinish::Length);
    let reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"];
    let text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done"];
    let done = ["content_part.done", "output_item.done"];
    let (delta, end) = ("function_call_arguments.delta", ["function_call_arguments.done", "output_item.done"]);
    let first_call = ["output_item.added", delta, delta];
    let second_call = ["output_item.added", delta];
    let expected = [&reasoning[..], &done, &text, &done, &first_call, &end, &second_call, &end].concat();
    assert_eq!(names(&events), expected);
    let call = |name: &str, arguments: &str, status: &str| {
        json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": name, "arguments": arguments,
            "status": status})
    };
    assert_eq!(
        items,
        json!([
            {"type": "reasoning", "id": "rs_1", "summary": [], "status": "completed",
                "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "well", "annotations": [], "logprobs": []}]},
            call("find", "{}", "completed"),
            call("stop", "{\"a", "incomplete"),
        ])
    );
}

/// The events and the item of one call.
fn call(name: &str, pieces: &[&str]) -> (Vec<Value>, Value) {
    let arguments = pieces.iter().map(|json| Delta::Arguments { index: 0, json: (*json).to_owned() });
    let deltas = std::iter::once(Delta::ToolCall { index: 0, name: name.to_owned() }).chain(arguments);
    let (events, mut items) = items(deltas.map(|one| delta(one, "")).collect(), ChoiceFinish::ToolCalls);
    (events, items[0].take())
}

#[test]
fn the_call_of_a_custom_tool_is_streamed_as_text() {
    let (events, item) = call("patch", &["{\"inp", "ut\": \"a\\", "nb\"", "}"]);
    let (delta, done) = ("custom_tool_call_input.delta", "custom_tool_call_input.done");
    assert_eq!(names(&events), ["output_item.added", delta, delta, done, "output_item.done"]);
    assert_eq!(
        (&events[1]["delta"], &events[2]["delta"], &events[3]["input"]),
        (&json!("a"), &json!("\nb"), &json!("a\nb"))
    );
    let expected = json!({"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": "patch", "input": "a\nb",
        "status": "completed"});
    assert_eq!(item, expected);
}

#[test]
fn the_call_of_a_tool_in_a_namespace_names_both() {
    let (events, item) = call("agents.wait", &["{}"]);
    assert_eq!(events[2]["name"], "wait");
    let expected = json!({"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "wait", "namespace": "agents",
        "arguments": "{}", "status": "completed"});
    assert_eq!(item, expected);
}

#[test]
fn the_call_of_the_shell_has_its_command() {
    let (events, item) = call("local_shell", &["{\"command\": [", "\"ls\"]}"]);
    assert_eq!(names(&events), ["output_item.added", "output_item.done"]);
    let action = json!({"type": "exec", "command": ["ls"], "env": {}});
    let expected = json!({"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": action, "status": "completed"});
    assert_eq!(item, expected);
}

#[test]
fn tools_that_were_left_out_are_not_in_the_response() {
    let events = encode(vec![], finished(ChoiceFinish::Stop));
    let tools = events[0]["response"]["tools"].as_array().unwrap();
    let kinds: Vec<_> = tools.iter().map(|tool| tool["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["custom", "namespace", "local_shell"]);
}

#[test]
fn log_probabilities_go_with_the_text_and_never_with_reasoning() {
    let (events, items) = items(
        vec![
            delta(Delta::Reasoning("x".into()), "x"),
            delta(Delta::Text("ab".into()), "ab"),
            delta(Delta::Text("c".into()), "c"),
        ],
        ChoiceFinish::Stop,
    );
    let tokens = |logprobs: &Value| {
        let tokens = logprobs.as_array().unwrap().iter().map(|one| one["token"].as_str().unwrap().to_owned());
        tokens.collect::<Vec<_>>()
    };
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(deltas.map(|event| tokens(&event["logprobs"])).collect::<Vec<_>>(), [vec!["a", "b"], vec!["c"]]);
    assert_eq!(tokens(&items[1]["content"][0]["logprobs"]), ["a", "b", "c"]);
}

#[test]
fn a_response_begins_at_once_and_ends_with_its_whole_output() {
    let events =
        encode(vec![GenerationEvent::Prefilled { prompt: vec![] }, text("hello")], finished(ChoiceFinish::Stop));
    assert_eq!(events[0]["type"], "response.created");
    assert_eq!(events[1]["type"], "response.in_progress");
    assert_eq!(events[1]["response"]["status"], "in_progress");
    let last = &events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let response = &last["response"];
    assert_eq!(response["id"], events[0]["response"]["id"]);
    assert_eq!(response["status"], "completed");
    assert_eq!(response["store"], false);
    assert_eq!(response["temperature"], 0.5);
    assert_eq!(response["output"][0]["content"][0]["text"], "hello");
    assert_eq!(
        response["usage"],
        json!({"input_tokens": 5, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 3, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 8})
    );
}

#[test]
fn too_few_tokens_leave_a_response_incomplete() {
    let events = encode(vec![text("hel")], finished(ChoiceFinish::Length));
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}

#[test]
fn a_failure_has_its_code_and_keeps_the_output_so_far() {
    let check = |error: ApiError, code: &str| {
        let message = error.message.clone();
        let events = encode(vec![text("hel")], Err(error));
        let last = events.last().unwrap();
        assert_eq!(last["type"], "response.failed");
        assert_eq!(last["response"]["error"], json!({"code": code, "message": message}));
        assert_eq!(last["response"]["output"][0]["content"][0]["text"], "hel");
    };
    check(ApiError::internal("the device is gone"), "server_error");
    check(ApiError::rank_lost("rank 1 is gone"), "rank_lost");
    check(ApiError::shutting_down(), "shutting_down");
}
