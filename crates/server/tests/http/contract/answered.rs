//! Valid requests that together contain every field in every form of `/openapi.json`.

use serde_json::{Value, json};

use crate::fixture::MODEL;

/// Paths and bodies.
pub fn requests() -> Vec<(&'static str, Value)> {
    let mut requests = Vec::new();
    let mut add = |path, bodies: Vec<Value>| requests.extend(bodies.into_iter().map(|body| (path, body)));
    add("/v1/chat/completions", chat());
    add("/v1/completions", completions());
    add("/v1/embeddings", embeddings());
    add("/tokenize", tokenize());
    add("/detokenize", vec![json!({"model": MODEL, "tokens": [1, 2]})]);
    add("/v1/responses", responses());
    add("/v1/messages", messages());
    add("/v1/messages/count_tokens", messages().into_iter().map(countable).collect());
    requests
}

fn chat() -> Vec<Value> {
    let format = |format: Value| json!({"messages": conversation(), "max_tokens": 1, "response_format": format});
    let rest = json!({
        "messages": conversation(), "max_completion_tokens": 1, "max_tokens": 1, "logprobs": true, "top_logprobs": 1,
        "tools": [tool()], "tool_choice": "auto", "parallel_tool_calls": true,
        "chat_template_kwargs": {}, "reasoning_effort": "low", "add_generation_prompt": true, "continue_final_message": false,
        "modalities": ["text"], "audio": null, "functions": null, "function_call": null, "prediction": null,
        "web_search_options": null,
    });
    let named = json!({"type": "function", "function": {"name": "look"}});
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"type": "object"}}});
    vec![
        with(rest, generation()),
        with(json!({"messages": conversation(), "max_tokens": 1}), guided()),
        with(format(json!({"type": "text"})), json!({"structured_outputs": structured()})),
        with(format(json!({"type": "json_object"})), json!({"tools": [tool()], "tool_choice": named})),
        format(schema),
    ]
}

fn completions() -> Vec<Value> {
    let rest = json!({"prompt": "a river", "max_tokens": 1, "logprobs": 1, "echo": false, "suffix": "", "best_of": 1});
    vec![
        with(rest, generation()),
        with(json!({"prompt": [1, 2], "max_tokens": 1}), guided()),
        json!({"prompt": ["a", "b"], "max_tokens": 1, "structured_outputs": structured()}),
        json!({"prompt": [[1], [2]], "max_tokens": 1}),
    ]
}

/// The fields that all generation requests share.
fn generation() -> Value {
    json!({
        "model": MODEL, "n": 1, "temperature": 1, "top_p": 0.5, "top_k": 1, "min_p": 0.1, "repetition_penalty": 1,
        "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {"1": 0.5}, "seed": 1, "stop": "no",
        "stop_token_ids": [1], "ignore_eos": false, "min_tokens": 0, "skip_special_tokens": true, "stream": false,
        "stream_options": {"include_usage": true}, "guided_regex": null, "guided_grammar": null,
    })
}

fn guided() -> Value {
    json!({"stop": ["no"], "guided_choice": ["a", "b"]})
}

fn structured() -> Value {
    json!({"json": null, "regex": null, "choice": ["a", "b"], "grammar": null, "json_object": false})
}

/// A conversation in OpenAI's format.
fn conversation() -> Value {
    json!([
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "x", "refusal": null}], "name": "me"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ])
}

fn tool() -> Value {
    json!({"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}, "strict": false}})
}

fn embeddings() -> Vec<Value> {
    vec![json!({"model": MODEL, "input": "x", "encoding_format": "float", "dimensions": null, "pooling": "mean"})]
}

fn tokenize() -> Vec<Value> {
    let chat = json!({
        "messages": conversation(), "tools": [tool()], "add_generation_prompt": true, "continue_final_message": false,
        "chat_template_kwargs": {},
    });
    vec![json!({"model": MODEL, "prompt": "x", "add_special_tokens": true, "return_token_strs": true}), chat]
}

fn responses() -> Vec<Value> {
    let base = || json!({"model": MODEL, "input": "x", "max_output_tokens": 1});
    let rest = json!({
        "instructions": "Be brief", "metadata": {}, "parallel_tool_calls": true, "reasoning": {"effort": "low"},
        "stream": false, "temperature": 1, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [function()], "top_logprobs": 1, "top_p": 0.5, "truncation": "disabled", "include": ["reasoning"],
        "user": "me", "background": false, "conversation": null, "previous_response_id": null, "prompt": null,
    });
    let items = json!([
        {"role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
    ]);
    let named = json!({"type": "function", "name": "look"});
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [named]});
    let schema =
        json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "description": "d", "strict": false});
    vec![
        with(base(), rest),
        with(base(), json!({"input": items, "text": {"format": {"type": "json_object"}}})),
        with(base(), json!({"tools": [function()], "tool_choice": named, "text": {"format": schema}})),
        with(base(), json!({"tools": [function()], "tool_choice": allowed})),
    ]
}

fn function() -> Value {
    json!({"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": false})
}

fn messages() -> Vec<Value> {
    let base = || json!({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let talk = json!([
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "1", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "y"}]}]},
    ]);
    let tools = json!([{"type": "custom", "name": "look", "description": "d", "input_schema": {"type": "object"}}]);
    let rest = json!({
        "messages": talk, "system": "Be brief", "tools": tools, "thinking": {"type": "enabled", "display": "omitted"},
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "stream": false, "temperature": 1, "top_p": 0.5, "top_k": 1, "stop_sequences": ["no"],
    });
    let system = json!([{"type": "text", "text": "Be brief"}]);
    let any = json!({"type": "any", "disable_parallel_tool_use": true});
    let tool = json!({"type": "tool", "name": "look", "disable_parallel_tool_use": true});
    vec![
        with(base(), rest),
        with(base(), json!({"system": system, "thinking": {"type": "adaptive", "display": "summarized"}})),
        with(base(), json!({"tools": tools, "tool_choice": any, "thinking": {"type": "between_tools"}})),
        with(base(), json!({"tools": tools, "tool_choice": tool, "thinking": {"type": "disabled"}})),
        with(base(), json!({"tools": tools, "tool_choice": {"type": "none"}})),
    ]
}

/// Converts a request of `/v1/messages` to one of `/v1/messages/count_tokens`.
fn countable(mut body: Value) -> Value {
    let unread = ["max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"];
    body.as_object_mut().unwrap().retain(|name, _| !unread.contains(&name.as_str()));
    body
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("{more} has no fields") };
    body.as_object_mut().unwrap().extend(more);
    body
}
