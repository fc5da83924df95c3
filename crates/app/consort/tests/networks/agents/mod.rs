//! Coding agents complete a task with a server, where there is no network: Codex over `/v1/responses`, Claude Code over
//! `/v1/messages`.
//!
//! The model is tiny and has random weights. A proxy between the agent and the server adds to each request what makes the
//! next step a sensible one: the tool to call, a schema or grammar of its input, the form of the answer. Agent, server and
//! engine are the real ones. The agents are fetched with npm on the first run and kept in the build folder.

mod packages;
mod proxy;
mod tiny_model;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use proxy::Proxy;
use testing::bounded;
use testing::network::Network;
use testing::serving::{Server, text};

/// The name under which [`Server`] serves.
const MODEL: &str = "m";
/// More than either agent sends: the tokens of the tiny model are bytes.
const CONTEXT: &str = "98304";
const KEY: &str = "a-key-for-tests";
/// The last words of the model.
const ANSWER: &str = "The file is written.";
const FILE: &str = "greeting.txt";
const GREETING: &str = "hello from the agent";

#[test]
fn codex_and_claude_code_complete_a_task() {
    let Some(network) = Network::new(0) else { return };
    let Some(programs) = packages::folder() else { return };
    network.within(0, || {
        let model = tiny_model::write(CONTEXT);
        let options = ["--api-key", KEY, "--context", CONTEXT];
        let server = Server::start_under("true", model.path(), &options, &[("CONSORT_THREADS", "2")]);
        codex(&server, programs);
        claude_code(&server, programs);
    });
}

/// Codex writes a file with its custom tool `apply_patch`, reads it with its shell, and answers.
fn codex(server: &Server, programs: &Path) {
    let home = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(&server.address, direct_codex);
    fs::write(home.path().join("models.json"), codex_catalog().to_string()).unwrap();
    let config = format!(
        "model = {MODEL:?}\nmodel_provider = \"consort\"\nmodel_catalog_json = \"{home}/models.json\"\n\
        [model_providers.consort]\nname = \"consort\"\nbase_url = \"http://{address}/v1\"\nwire_api = \"responses\"\n\
        env_key = \"CONSORT_KEY\"\n",
        home = home.path().display(),
        address = proxy.address,
    );
    fs::write(home.path().join("config.toml"), config).unwrap();
    let mut command = Command::new(programs.join("codex"));
    command.args(["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Write a greeting."]);
    command.env("CODEX_HOME", home.path()).env("HOME", home.path()).env("CONSORT_KEY", KEY).current_dir(work.path());
    let output = bounded::output(&mut command);
    check(&output, work.path());

    let requests = proxy.requests();
    let kinds: Vec<_> = requests[0]["tools"].as_array().unwrap().iter().map(|tool| tool["type"].clone()).collect();
    for kind in ["function", "custom", "namespace", "web_search"] {
        assert!(kinds.contains(&json!(kind)), "Codex sends no tool of type {kind}: {kinds:?}");
    }
    let last = requests.last().unwrap()["input"].as_array().unwrap();
    let items = |kind: &str| last.iter().filter(|item| item["type"] == kind).cloned().collect::<Vec<_>>();
    let [patch] = &items("custom_tool_call")[..] else { panic!("{last:?}") };
    assert_eq!((&patch["name"], &patch["input"]), (&json!("apply_patch"), &json!(patch_text())));
    let [read] = &items("function_call_output")[..] else { panic!("{last:?}") };
    assert!(read["output"].to_string().contains(GREETING), "{read}");
}

fn patch_text() -> String {
    format!("*** Begin Patch\n*** Add File: {FILE}\n+{GREETING}\n*** End Patch")
}

/// What Codex knows about the model: that it takes patches as text.
fn codex_catalog() -> Value {
    json!({"models": [{
        "slug": MODEL, "display_name": MODEL, "description": null, "supported_reasoning_levels": [],
        "shell_type": "unified_exec", "visibility": "list", "supported_in_api": true, "priority": 1,
        "availability_nux": null, "upgrade": null, "base_instructions": "You are a coding agent.",
        "support_verbosity": false, "default_verbosity": null, "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "bytes", "limit": 10_000}, "context_window": 90_000, "experimental_supported_tools": [],
    }]})
}

/// The next step of Codex: the patch, then the shell, then the answer.
fn direct_codex(request: &mut Value) {
    let has = |kind: &str| request["input"].as_array().unwrap().iter().any(|item| item["type"] == kind);
    let (patched, read) = (has("custom_tool_call_output"), has("function_call_output"));
    let tool = |request: &mut Value, name: &str, field: &str, value: Value| {
        let tools = request["tools"].as_array_mut().unwrap();
        tools.iter_mut().find(|tool| tool["name"] == name).expect("Codex has this tool")[field] = value;
    };
    request["reasoning"] = json!({"effort": "none"});
    if read {
        let schema = json!({"type": "string", "const": ANSWER});
        request["text"] = json!({"format": {"type": "json_schema", "name": "answer", "schema": schema}});
        request["tool_choice"] = json!("none");
    } else if patched {
        let parameters = json!({"type": "object", "properties": {"cmd": {"type": "string", "const": format!("cat {FILE}")}},
            "required": ["cmd"], "additionalProperties": false});
        tool(request, "exec_command", "parameters", parameters);
        request["tool_choice"] = json!({"type": "function", "name": "exec_command"});
    } else {
        let definition = format!("start: {}", json!(patch_text()));
        tool(request, "apply_patch", "format", json!({"type": "grammar", "syntax": "lark", "definition": definition}));
        request["tool_choice"] = json!({"type": "custom", "name": "apply_patch"});
    }
}

/// Claude Code writes a file with its shell, and answers.
fn claude_code(server: &Server, programs: &Path) {
    let home = tempfile::tempdir().unwrap();
    let work = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(&server.address, direct_claude_code);
    let mut command = Command::new(programs.join("claude"));
    command.args(["-p", "Write a greeting.", "--allowedTools", "Bash", "--output-format", "json"]);
    command.env("HOME", home.path()).env("ANTHROPIC_AUTH_TOKEN", KEY).env("ANTHROPIC_MODEL", MODEL);
    command.env("ANTHROPIC_SMALL_FAST_MODEL", MODEL).env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
    command.env("ANTHROPIC_BASE_URL", format!("http://{}", proxy.address)).current_dir(work.path());
    let output = bounded::output(&mut command);
    check(&output, work.path());

    let requests = proxy.requests();
    let last = requests.last().unwrap()["messages"].to_string();
    assert!(last.contains("tool_use") && last.contains("tool_result"), "{last}");
}

/// The next step of Claude Code: the shell, then the answer.
fn direct_claude_code(request: &mut Value) {
    let called = request["messages"].to_string().contains("\"tool_result\"");
    request["thinking"] = json!({"type": "disabled"});
    let tools = request["tools"].as_array_mut().into_iter().flatten();
    match tools.into_iter().find(|tool| tool["name"] == "Bash").filter(|_| !called) {
        Some(shell) => {
            let command = format!("echo {GREETING} > {FILE}");
            shell["input_schema"] = json!({"type": "object", "properties": {"command": {"type": "string", "const": command}},
                "required": ["command"], "additionalProperties": false});
            request["tool_choice"] = json!({"type": "tool", "name": "Bash"});
        }
        None => {
            let schema = json!({"type": "string", "const": ANSWER});
            request["output_config"] = json!({"format": {"type": "json_schema", "schema": schema}});
            request["tool_choice"] = json!({"type": "none"});
        }
    }
}

/// The agent succeeded, gave the model's answer and left the file.
fn check(output: &Output, work: &Path) {
    let said = format!("{}\n{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(text(&output.stdout).contains(ANSWER), "{said}");
    let written = fs::read_to_string(work.join(FILE)).unwrap_or_else(|error| panic!("{FILE}: {error}\n{said}"));
    assert_eq!(written.trim_end(), GREETING);
}
