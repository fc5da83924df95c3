//! The same conversation through all APIs: the model is given the same prompt.

use std::sync::{Arc, Mutex};

use engine::{Capacity, EngineOptions, Executor, ExecutorError, OpenedSession, Prefix, StepOutput, StepPlan};
use serde_json::{Value, json};
use testing::served_model::{self, MODEL};
use text::{ChatTemplate, SpecialTokens, Tokenizer};
use types::{SessionId, TokenId};

use crate::client::Client;

/// Prints all that a template is told. The tags show that it reasons.
const PRINTS_ALL: &str = "{%- for t in tools or [] %}{{ t | tojson }}\n{% endfor -%}
{%- for m in messages %}<{{ m.role }}{{ ' ' ~ m.name if m.name }}{{ ' of ' ~ m.tool_call_id if m.tool_call_id }}>\
{{ '(' ~ m.reasoning_content ~ ')' if m.reasoning_content }}{{ m.content }}\
{%- for c in m.tool_calls or [] %}[{{ c.id }}: {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{{ '\n' }}{% endfor -%}
{%- if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif -%}
{{ reasoning_effort if reasoning_effort is defined }}{{ '<assistant>' if add_generation_prompt }}";

/// What the four APIs call the same request. `None`: the API cannot say it.
struct Case {
    chat: Value,
    responses: Option<Value>,
    messages: Option<Value>,
    ollama: Option<Value>,
    prompt: &'static str,
}

/// A client of a model with this template, and the tokens that the model was given since they were last taken.
struct Recorded {
    client: Client,
    tokens: Arc<Mutex<Vec<TokenId>>>,
    tokenizer: Tokenizer,
}

impl Recorded {
    fn new(template: &str) -> Self {
        let tokens = Arc::new(Mutex::new(Vec::new()));
        let options = EngineOptions { prefix_cache: false, ..EngineOptions::default() };
        let mut served = served_model::fresh_on(options, |local| Recorder { local, tokens: Arc::clone(&tokens) });
        let template = ChatTemplate::new(template, "", "").unwrap();
        served.format = template.reply_format().clone();
        served.template = Some(template);
        let tokenizer = served.tokenizer.clone();
        let client = Client::of(&served_model::ready(served_model::config(), Arc::new(served)));
        Self { client, tokens, tokenizer }
    }

    /// The prompt of a request for one token.
    async fn prompt(&self, path: &str, mut body: Value) -> String {
        let fields = match path {
            CHAT | MESSAGES => json!({"model": MODEL, "max_tokens": 1}),
            RESPONSES => json!({"model": MODEL, "max_output_tokens": 1}),
            _ => json!({"model": MODEL, "stream": false, "options": {"num_predict": 1}}),
        };
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        self.client.post(path, body).await;
        let tokens = std::mem::take(&mut *self.tokens.lock().unwrap());
        self.tokenizer.decode(&tokens, SpecialTokens::Show)
    }

    async fn check(&self, case: Case) {
        let Case { chat, responses, messages, ollama, prompt } = case;
        let bodies =
            [(CHAT, Some(chat.clone())), (RESPONSES, responses), (MESSAGES, messages.clone()), (OLLAMA, ollama)];
        for (path, body) in bodies {
            let Some(body) = body else { continue };
            assert_eq!(self.prompt(path, body.clone()).await, prompt, "{path} {body}");
        }
        // What is counted is what the model is given.
        if chat.get("reasoning_effort").is_none() {
            let tokens = self.client.post("/tokenize", chat).await["tokens"].clone();
            assert_eq!(self.client.post("/detokenize", json!({"tokens": tokens})).await["prompt"], prompt);
        }
        if let Some(mut body) = messages {
            body["model"] = json!(MODEL);
            let counted = self.client.post("/v1/messages/count_tokens", body).await;
            let tokens = self.tokenizer.encode(prompt, false).unwrap();
            assert_eq!(counted["input_tokens"], tokens.len());
        }
    }
}

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const OLLAMA: &str = "/api/chat";

fn say(role: &str, content: Value) -> Value {
    json!({"role": role, "content": content})
}

fn user() -> Value {
    say("user", json!("hi"))
}

/// A body with these messages.
fn messages(messages: &[Value]) -> Value {
    json!({"messages": messages})
}

fn input(items: &[Value]) -> Value {
    json!({"input": items})
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn turns_and_instructions_are_told_alike() {
    let recorded = Recorded::new(PRINTS_ALL);
    let parts = |kind: &str| json!([{"type": kind, "text": "b"}, {"type": kind, "text": "c"}]);
    let [s, d] = ["system", "developer"].map(|role| say(role, json!(role[..1])));
    let late = say("system", json!("d"));
    let [a, b] = ["a", "b"].map(|text| say("user", json!(text)));
    let begun = say("assistant", json!("It is"));
    let cases = [
        Case {
            chat: messages(&[user()]),
            responses: Some(json!({"input": "hi"})),
            messages: Some(messages(&[user()])),
            ollama: Some(messages(&[user()])),
            prompt: "<user>hi\n<assistant>",
        },
        // The template knows no developer.
        Case {
            chat: messages(&[s.clone(), d.clone(), user(), d.clone(), user()]),
            responses: Some(with(json!({"instructions": "s"}), input(&[d.clone(), user(), d.clone(), user()]))),
            messages: Some(with(json!({"system": "s"}), messages(&[late.clone(), user(), late.clone(), user()]))),
            ollama: Some(messages(&[s.clone(), late.clone(), user(), late, user()])),
            prompt: "<system>s\n\nd\n<user>hi\n<system>d\n<user>hi\n<assistant>",
        },
        Case {
            chat: messages(&[
                say("system", parts("text")),
                user(),
                say("assistant", json!("a")),
                say("user", parts("text")),
            ]),
            responses: Some(input(&[
                say("system", parts("input_text")),
                user(),
                say("assistant", json!("a")),
                say("user", parts("input_text")),
            ])),
            messages: Some(with(
                json!({"system": parts("text")}),
                messages(&[user(), say("assistant", json!("a")), say("user", parts("text"))]),
            )),
            ollama: Some(messages(&[
                say("system", json!("b\nc")),
                user(),
                say("assistant", json!("a")),
                say("user", json!("b\nc")),
            ])),
            prompt: "<system>b\nc\n<user>hi\n<assistant>a\n<user>b\nc\n<assistant>",
        },
        // One message stays one, two stay two.
        Case {
            chat: messages(&[a.clone(), b.clone()]),
            responses: Some(input(&[a.clone(), b.clone()])),
            messages: Some(messages(&[a.clone(), b.clone()])),
            ollama: Some(messages(&[a, b])),
            prompt: "<user>a\n<user>b\n<assistant>",
        },
        // The Responses API has no way to continue a message.
        Case {
            chat: with(messages(&[user(), begun.clone()]), json!({"continue_final_message": true})),
            responses: None,
            messages: Some(messages(&[user(), begun.clone()])),
            ollama: Some(messages(&[user(), begun])),
            prompt: "<user>hi\n<assistant>It is",
        },
    ];
    for case in cases {
        recorded.check(case).await;
    }
    let generate = json!({"system": "s", "prompt": "hi", "think": false});
    let prompt = recorded.prompt("/api/generate", generate).await;
    assert_eq!(prompt, "<system>s\n<user>hi\n<think></think>none<assistant>");
}

#[tokio::test]
async fn a_developer_is_one_where_the_template_knows_developers() {
    let recorded = Recorded::new(&format!("{{# developer #}}{PRINTS_ALL}"));
    let [s, d] = ["system", "developer"].map(|role| say(role, json!(role[..1])));
    recorded
        .check(Case {
            chat: messages(&[s, d.clone(), user()]),
            responses: Some(with(json!({"instructions": "s"}), input(&[d, user()]))),
            messages: None,
            ollama: None,
            prompt: "<system>s\n<developer>d\n<user>hi\n<assistant>",
        })
        .await;
}

#[tokio::test]
async fn a_template_with_strict_turns_is_given_them() {
    let strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
        {{ raise_exception('turns must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}";
    let recorded = Recorded::new(strict);
    let turns = [say("system", json!("s")), user(), say("user", json!("so?"))];
    recorded
        .check(Case {
            chat: messages(&turns),
            responses: Some(input(&turns)),
            messages: Some(with(json!({"system": "s"}), messages(&turns[1..]))),
            ollama: Some(messages(&turns)),
            prompt: "<user>s\n\nhi\n\nso?\n",
        })
        .await;
}

#[tokio::test]
async fn tools_calls_and_results_are_told_alike() {
    let recorded = Recorded::new(PRINTS_ALL);
    let schema = json!({"type": "object"});
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    let chat_tools = json!({"tools": [{"type": "function", "function": function}]});
    let item_tools = json!({"tools": [{"type": "function", "name": "f", "description": "d", "parameters": schema}]});
    let input_tools = json!({"tools": [{"name": "f", "description": "d", "input_schema": schema}]});

    let arguments = |x: u64| json!({"x": x});
    let called = |id: &str, name: &str, x: u64| json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments(x).to_string()}});
    let result = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let call_item = |id: &str, name: &str, x: u64| json!({"type": "function_call", "call_id": id, "name": name, "arguments": arguments(x).to_string()});
    let result_item = |id: &str, text: &str| json!({"type": "function_call_output", "call_id": id, "output": text});
    let use_block =
        |id: &str, name: &str, x: u64| json!({"type": "tool_use", "id": id, "name": name, "input": arguments(x)});
    let result_block = |id: &str, text: &str| json!({"type": "tool_result", "tool_use_id": id, "content": text});
    let bare_call = |name: &str, x: u64| json!({"function": {"name": name, "arguments": arguments(x)}});
    let answer = say("assistant", json!("done"));

    let cases = [
        // A call without an id, or a result that names only its tool, is completed.
        Case {
            chat: with(
                messages(&[
                    user(),
                    json!({"role": "assistant", "content": null, "tool_calls": [called("call_0", "f", 1)]}),
                    result("call_0", "r"),
                ]),
                chat_tools,
            ),
            responses: Some(with(
                input(&[user(), call_item("call_0", "f", 1), result_item("call_0", "r")]),
                item_tools,
            )),
            messages: Some(with(
                messages(&[
                    user(),
                    say("assistant", json!([use_block("call_0", "f", 1)])),
                    say("user", json!([result_block("call_0", "r")])),
                ]),
                input_tools,
            )),
            ollama: Some(with(
                messages(&[
                    user(),
                    json!({"role": "assistant", "tool_calls": [bare_call("f", 1)]}),
                    json!({"role": "tool", "tool_name": "f", "content": "r"}),
                ]),
                json!({"tools": [{"type": "function", "function": function}]}),
            )),
            prompt: "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"description\": \"d\", \"parameters\": {\"type\": \"object\"}}}\n\
                <user>hi\n<assistant>[call_0: f {\"x\": 1}]\n<tool f of call_0>r\n<assistant>",
        },
        // Several results, in another order than the calls, after reasoning and text; then the next turn.
        Case {
            chat: messages(&[
                user(),
                json!({"role": "assistant", "reasoning_content": "hm", "content": "I look.",
                    "tool_calls": [called("a", "f", 1), called("b", "g", 2)]}),
                result("b", "s"),
                result("a", "r"),
                answer.clone(),
                user(),
            ]),
            responses: Some(input(&[
                user(),
                json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}),
                say("assistant", json!("I look.")),
                call_item("a", "f", 1),
                call_item("b", "g", 2),
                result_item("b", "s"),
                result_item("a", "r"),
                answer.clone(),
                user(),
            ])),
            messages: Some(messages(&[
                user(),
                say(
                    "assistant",
                    json!([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "I look."},
                        use_block("a", "f", 1), use_block("b", "g", 2)]),
                ),
                say("user", json!([result_block("b", "s"), result_block("a", "r")])),
                answer.clone(),
                user(),
            ])),
            ollama: Some(messages(&[
                user(),
                json!({"role": "assistant", "thinking": "hm", "content": "I look.",
                    "tool_calls": [with(bare_call("f", 1), json!({"id": "a"})), with(bare_call("g", 2), json!({"id": "b"}))]}),
                json!({"role": "tool", "tool_call_id": "b", "content": "s"}),
                json!({"role": "tool", "tool_name": "f", "content": "r"}),
                answer,
                user(),
            ])),
            prompt: "<user>hi\n<assistant>(hm)I look.[a: f {\"x\": 1}][b: g {\"x\": 2}]\n\
                <tool g of b>s\n<tool f of a>r\n<assistant>done\n<user>hi\n<assistant>",
        },
    ];
    for case in cases {
        recorded.check(case).await;
    }
}

#[tokio::test]
async fn an_effort_means_the_same_everywhere() {
    let recorded = Recorded::new(PRINTS_ALL);
    let thinking = |kind: &str| json!({"thinking": {"type": kind}});
    let chat = |effort: &str| json!({"reasoning_effort": effort});
    let responses = |effort: &str| Some(json!({"reasoning": {"effort": effort}}));
    let output = |effort: &str| json!({"output_config": {"effort": effort}});
    let think = |think: Value| Some(json!({"think": think}));
    let cases = [
        (json!({}), Some(json!({})), Some(json!({})), think(json!(null)), "<user>hi\n<assistant>"),
        (
            chat("none"),
            responses("none"),
            Some(with(thinking("disabled"), output("high"))),
            think(json!(false)),
            "<user>hi\n<think></think>none<assistant>",
        ),
        (
            json!({"chat_template_kwargs": {"enable_thinking": true}}),
            None,
            Some(thinking("enabled")),
            think(json!(true)),
            "<user>hi\n<think><assistant>",
        ),
        (chat("minimal"), responses("minimal"), None, None, "<user>hi\n<think>low<assistant>"),
        (chat("low"), responses("low"), Some(output("low")), think(json!("low")), "<user>hi\n<think>low<assistant>"),
        (
            chat("medium"),
            responses("medium"),
            Some(with(thinking("enabled"), output("medium"))),
            think(json!("medium")),
            "<user>hi\n<think>medium<assistant>",
        ),
        (
            chat("high"),
            responses("high"),
            Some(with(thinking("adaptive"), output("high"))),
            think(json!("high")),
            "<user>hi\n<think>high<assistant>",
        ),
        (chat("xhigh"), responses("xhigh"), Some(output("xhigh")), None, "<user>hi\n<think>high<assistant>"),
        (chat("max"), responses("max"), Some(output("max")), think(json!("max")), "<user>hi\n<think>high<assistant>"),
    ];
    for (chat, responses, anthropic, ollama, prompt) in cases {
        recorded
            .check(Case {
                chat: with(messages(&[user()]), chat),
                responses: responses.map(|fields| with(json!({"input": "hi"}), fields)),
                messages: anthropic.map(|fields| with(messages(&[user()]), fields)),
                ollama: ollama.map(|fields| with(messages(&[user()]), fields)),
                prompt,
            })
            .await;
    }
    // A word of one template, and variables, which have precedence.
    let chat = async |fields: Value| recorded.prompt(CHAT, with(messages(&[user()]), fields)).await;
    assert_eq!(chat(json!({"reasoning_effort": "extreme"})).await, "<user>hi\nextreme<assistant>");
    let override_both = json!({"enable_thinking": false, "reasoning_effort": "some"});
    let fields = json!({"reasoning_effort": "high", "chat_template_kwargs": override_both});
    assert_eq!(chat(fields).await, "<user>hi\n<think></think>some<assistant>");
}

#[tokio::test]
async fn variables_that_a_template_cannot_be_given_are_the_client_s_mistake() {
    let recorded = Recorded::new(&format!("{{% for d in documents or [] %}}{{{{ d }}}}{{% endfor %}}{PRINTS_ALL}"));
    for args in [
        json!({"messages": []}),
        json!({"tools": 7}),
        json!({"add_generation_prompt": false}),
        json!({"bos_token": "x"}),
        json!({"eos_token": null}),
        json!({"documents": 7}),
    ] {
        let body = with(messages(&[user()]), json!({"chat_template_kwargs": args}));
        for path in [CHAT, "/tokenize"] {
            let (status, error) = recorded.client.error(path, &body.to_string()).await;
            assert_eq!((status, &error["param"]), (400, &json!("chat_template_kwargs")), "{body}: {error}");
        }
    }
    let body = with(messages(&[user()]), json!({"chat_template_kwargs": {"documents": ["a", "b"]}}));
    assert_eq!(recorded.prompt(CHAT, body).await, "ab<user>hi\n<assistant>");
}

/// Keeps the tokens that it is given.
struct Recorder<E> {
    local: E,
    tokens: Arc<Mutex<Vec<TokenId>>>,
}

impl<E: Executor> Executor for Recorder<E> {
    fn depth(&self) -> usize {
        self.local.depth()
    }

    fn capacity(&self) -> Capacity {
        self.local.capacity()
    }

    fn open(&mut self, tokens_max: usize, prefix: Prefix<'_>) -> Result<OpenedSession, ExecutorError> {
        self.local.open(tokens_max, prefix)
    }

    fn truncate(&mut self, session: SessionId, tokens: usize) -> Result<usize, ExecutorError> {
        self.local.truncate(session, tokens)
    }

    fn close(&mut self, session: SessionId) {
        self.local.close(session);
    }

    fn submit(&mut self, plan: &StepPlan) -> Result<(), ExecutorError> {
        self.tokens.lock().unwrap().extend_from_slice(plan.all_tokens());
        self.local.submit(plan)
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), ExecutorError> {
        self.local.collect(output)
    }
}
