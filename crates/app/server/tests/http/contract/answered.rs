//! Valid requests that together contain every field in every form of `/openapi.json`.

use serde_json::{Value, json};

use testing::served_model::MODEL;

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
    add("/api/chat", ollama_chat());
    add("/api/generate", ollama_generate());
    let embed = json!({"model": MODEL, "input": "x", "truncate": true, "dimensions": 8, "keep_alive": "5m"});
    add("/api/embed", vec![embed, json!({"model": MODEL, "input": ["x"], "keep_alive": 5})]);
    add("/api/embeddings", vec![json!({"model": MODEL, "prompt": "x", "keep_alive": "5m"})]);
    add("/api/show", vec![json!({"model": MODEL, "name": "tiny"})]);
    add("/api/pull", vec![json!({"model": MODEL, "name": "tiny", "stream": false})]);
    add("/models/load", vec![json!({"model": "a", "stream": false})]);
    add("/models/unload", vec![json!({"model": "a", "stream": false})]);
    let unchanged =
        json!({"system": "", "template": "", "parameters": {}, "files": {}, "adapters": {}, "messages": []});
    let named = json!({"model": "m", "name": "m", "from": "a", "modelfile": "FROM a", "quantize": "", "stream": false});
    add("/api/create", vec![with(named, unchanged)]);
    add("/api/copy", vec![json!({"source": "a", "destination": "b"})]);
    requests
}

/// Whether only a server of several models answers requests to this path.
pub fn needs_library(path: &str) -> bool {
    ["/models/load", "/models/unload", "/api/create", "/api/copy"].contains(&path)
}

fn chat() -> Vec<Value> {
    let format = |format: Value| json!({"messages": conversation(), "max_tokens": 1, "response_format": format});
    let rest = json!({
        "messages": conversation(), "max_completion_tokens": 1, "max_tokens": 1, "logprobs": true, "top_logprobs": 1,
        "tools": [tool()], "tool_choice": "auto", "parallel_tool_calls": true,
        "chat_template_kwargs": {}, "reasoning_effort": "low", "add_generation_prompt": true, "continue_final_message": false,
        "answer_id": "contract-answer-1", "modalities": ["text"], "audio": null, "functions": null, "function_call": null, "prediction": null,
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
        "stream_options": {"include_usage": true, "continuous_usage_stats": false}, "guided_regex": null, "guided_grammar": null,
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
        "store": false,
    });
    let items = json!([
        {"role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "x"}]},
        {"type": "reasoning", "content": [{"type": "text", "text": "hm"}]},
        {"type": "function_call", "call_id": "1", "name": "look", "namespace": "eyes", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [
            {"type": "input_text", "text": "x"}, {"type": "output_text", "text": "x"}, {"type": "input_image"}, {"type": "input_file"},
        ]},
        {"type": "custom_tool_call", "call_id": "2", "name": "edit", "namespace": "hands", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "y"},
        {"type": "local_shell_call", "call_id": "3", "action":
            {"type": "exec", "command": ["ls"], "env": {}, "working_directory": "/", "timeout_ms": 1}},
        {"type": "local_shell_call_output", "id": "3", "call_id": "3", "output": "y"},
        {"type": "web_search_call"}, {"type": "file_search_call"}, {"type": "code_interpreter_call"},
        {"type": "image_generation_call"}, {"type": "computer_call"}, {"type": "computer_call_output"},
        {"type": "mcp_list_tools"}, {"type": "mcp_call"}, {"type": "mcp_approval_request"}, {"type": "mcp_approval_response"},
        {"type": "tool_search_call"}, {"type": "tool_search_output"}, {"type": "compaction"},
        {"type": "compaction_trigger"}, {"type": "context_compaction"},
    ]);
    let grammar = json!({"type": "grammar", "syntax": "regex", "definition": "x+"});
    let tools = json!([
        {"type": "custom", "name": "edit", "description": "d", "format": grammar},
        {"type": "namespace", "name": "hands", "description": "d", "tools": [
            {"type": "custom", "name": "edit", "format": {"type": "text"}},
        ]},
        {"type": "local_shell"}, {"type": "web_search"}, {"type": "web_search_2025_08_26"}, {"type": "web_search_preview"},
        {"type": "web_search_preview_2025_03_11"}, {"type": "file_search"}, {"type": "code_interpreter"},
        {"type": "image_generation"}, {"type": "computer"}, {"type": "computer_use_preview"}, {"type": "mcp"},
        {"type": "shell"}, {"type": "apply_patch"}, {"type": "tool_search"},
    ]);
    let named = json!({"type": "function", "name": "look"});
    let custom = json!({"type": "custom", "name": "edit"});
    let allowed = json!({"type": "allowed_tools", "mode": "auto", "tools": [named, custom]});
    let schema =
        json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}, "description": "d", "strict": false});
    vec![
        with(base(), rest),
        with(base(), json!({"input": items, "text": {"format": {"type": "json_object"}}})),
        with(base(), json!({"tools": [function()], "tool_choice": named, "text": {"format": schema}})),
        with(base(), json!({"tools": [function()], "tool_choice": allowed})),
        with(base(), json!({"tools": tools, "tool_choice": custom})),
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
            {"type": "compaction", "content": "x"},
            {"type": "server_tool_use"}, {"type": "web_search_tool_result"}, {"type": "web_fetch_tool_result"},
            {"type": "advisor_tool_result"}, {"type": "code_execution_tool_result"}, {"type": "bash_code_execution_tool_result"},
            {"type": "text_editor_code_execution_tool_result"}, {"type": "tool_search_tool_result"},
            {"type": "mcp_tool_use"}, {"type": "mcp_tool_result"}, {"type": "mcp_tool_listing"}, {"type": "fallback"},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [
                {"type": "text", "text": "y"},
                {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "x"}]},
                {"type": "tool_reference", "tool_name": "look"},
                {"type": "image"}, {"type": "document"}, {"type": "browser_state"},
            ]},
            {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "x"}]},
            {"type": "tool_result", "tool_use_id": "2", "content": "y"},
            {"type": "tool_addition", "tool": {"name": "look"}}, {"type": "tool_removal"},
        ]},
    ]);
    let tools = json!([
        {"type": "custom", "name": "look", "description": "d", "input_schema": {"type": "object"}, "defer_loading": false},
    ]);
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

fn ollama_chat() -> Vec<Value> {
    let call = json!({"id": "1", "function": {"name": "look", "arguments": {}}});
    let talk = json!([
        {"role": "user", "content": "x", "images": []},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_name": "look", "tool_call_id": "1"},
    ]);
    let options = json!({
        "temperature": 1, "top_k": 1, "top_p": 0.5, "min_p": 0.1, "seed": 1, "num_predict": 1, "stop": ["no"],
        "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    });
    let rest = json!({
        "messages": talk, "tools": [tool()], "format": "json", "think": true, "options": options, "keep_alive": "5m",
        "truncate": true, "logprobs": true, "top_logprobs": 1,
    });
    let base = || json!({"model": MODEL, "stream": false, "options": {"num_predict": 1}, "messages": [{"role": "user", "content": "x"}]});
    vec![with(base(), rest), with(base(), json!({"format": {"type": "object"}, "think": "low", "keep_alive": 5}))]
}

fn ollama_generate() -> Vec<Value> {
    let rest = json!({
        "system": "Be brief", "raw": false, "context": [1, 2], "format": "", "think": false, "keep_alive": "5m",
        "logprobs": true, "top_logprobs": 1, "suffix": "", "template": "", "images": [],
    });
    vec![with(json!({"model": MODEL, "prompt": "x", "stream": false, "options": {"num_predict": 1}}), rest)]
}

fn with(mut body: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("{more} has no fields") };
    body.as_object_mut().unwrap().extend(more);
    body
}
