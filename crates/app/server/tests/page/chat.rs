//! Chat on the page: sending, stopping, regenerating, and the contents of requests.

use serde_json::{Value, json};

use crate::{complete, exchange, on_page, send};

const ANSWER: &str = ".assistant:last-child .body";

#[test]
fn an_answer_appears_as_it_is_streamed() {
    on_page(|site, tab| {
        let asked = send(site, tab, "Why is the sky blue?");
        assert_eq!(asked.body["messages"], json!([{ "role": "user", "content": "Why is the sky blue?" }]));
        assert_eq!(asked.body["model"], "test/tiny-model");
        assert_eq!(asked.body["stream"], true);
        assert_eq!(asked.body["stream_options"], json!({ "include_usage": true, "continuous_usage_stats": true }));
        assert_eq!(asked.key, None);
        tab.wait("document.querySelector('.assistant .wait')");
        let answer = asked.answer();
        answer.raw(": keep-alive\n\n");
        answer.write("Because");
        tab.wait_text(ANSWER, "Because");
        assert_eq!(tab.eval("document.querySelector('.assistant').getAttribute('aria-busy')"), "true");
        // Events may be split anywhere by the network, even within a character of several bytes.
        answer.raw("data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" light");
        answer.raw(" is scattered – Rayleigh\"}}]}\r\n\r");
        answer.raw("\n");
        tab.wait_text(ANSWER, "Because light is scattered – Rayleigh");
        answer.finish("stop");
        tab.wait_text(".assistant .facts", "34 tokens");
        assert_eq!(tab.eval("document.querySelector('.assistant').getAttribute('aria-busy')"), "false");
        assert_eq!(tab.eval("document.activeElement.id"), "prompt");
    });
}

#[test]
fn the_next_question_brings_the_conversation_along() {
    on_page(|site, tab| {
        exchange(site, tab, "One", "1");
        let asked = send(site, tab, "Two");
        let roles = [("user", "One"), ("assistant", "1"), ("user", "Two")];
        let wanted: Vec<Value> =
            roles.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
        assert_eq!(asked.body["messages"], json!(wanted));
        complete(tab, asked.answer(), "2");
    });
}

#[test]
fn stopping_hangs_up_and_keeps_what_was_written() {
    on_page(|site, tab| {
        for (round, stop_by_key) in [true, false].into_iter().enumerate() {
            let answer = send(site, tab, "Count").answer();
            answer.write_counted("one,", 21, 2);
            tab.wait_text(ANSWER, "one,");
            // An event may have the text of several tokens.
            answer.write_counted(" two", 21, 5);
            tab.wait_text(ANSWER, "one, two");
            if stop_by_key {
                tab.press("Escape");
            } else {
                tab.click("#stop");
            }
            answer.wait_hung_up();
            tab.wait_text(".assistant:last-child .facts", "stopped · 5 tokens · ");
            tab.wait_text(".assistant:last-child .facts", " tokens/s · time to first token ");
            assert_eq!(tab.text(ANSWER).trim(), "one, two");
            assert_eq!(tab.count(".error"), 0);
            assert_eq!(tab.count(".assistant"), round as u64 + 1);
            assert_eq!(tab.eval("document.activeElement.id"), "prompt");
        }
        let asked = send(site, tab, "Go on");
        assert_eq!(asked.body["messages"][3]["content"], "one, two");
        complete(tab, asked.answer(), "three");
    });
}

#[test]
fn a_message_is_edited_and_asked_again_and_both_branches_stay() {
    on_page(|site, tab| {
        exchange(site, tab, "Name a river", "The Rhine");
        exchange(site, tab, "Another", "The Elbe");
        tab.click(".user:first-child [data-edit]");
        tab.fill(".edit textarea", "Name a mountain");
        tab.press("Enter");
        let asked = site.asked();
        assert_eq!(asked.body["messages"], json!([{ "role": "user", "content": "Name a mountain" }]));
        complete(tab, asked.answer(), "The Eiger");
        assert_eq!(tab.count(".message"), 2);
        assert_eq!(tab.text(".user .count"), "2 / 2");
        tab.click(".user [aria-label='Earlier version']");
        tab.wait("document.querySelectorAll('.message').length === 4");
        assert_eq!(tab.text(".user:first-child .body"), "Name a river");
        assert_eq!(tab.text(ANSWER).trim(), "The Elbe");
        // An edit that is cancelled changes nothing.
        tab.click(".user:first-child [data-edit]");
        tab.press("Escape");
        tab.wait("!document.querySelector('.edit')");
        assert_eq!(tab.count(".message"), 4);
        assert!(!site.was_asked());
    });
}

#[test]
fn an_answer_is_asked_for_again() {
    on_page(|site, tab| {
        exchange(site, tab, "Toss a coin", "Heads");
        tab.click(".assistant [aria-label='Regenerate']");
        let asked = site.asked();
        assert_eq!(asked.body["messages"], json!([{ "role": "user", "content": "Toss a coin" }]));
        complete(tab, asked.answer(), "Tails");
        assert_eq!(tab.text(ANSWER).trim(), "Tails");
        assert_eq!(tab.text(".assistant .count"), "2 / 2");
        tab.click(".assistant [aria-label='Earlier version']");
        tab.wait_text(ANSWER, "Heads");
    });
}

#[test]
fn settings_are_sent_and_wrong_ones_are_not_taken() {
    on_page(|site, tab| {
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        tab.click("#open-settings");
        // What applies is shown where nothing was set.
        for (name, value) in [("temperature", "0.7"), ("top_p", "0.95"), ("top_k", "40"), ("presence_penalty", "0")] {
            let placeholder = tab.eval(&format!("document.querySelector('#settings [name={name}]').placeholder"));
            assert_eq!(placeholder, value, "{name}");
        }
        let numbers = [
            ("temperature", "0.3"),
            ("top_p", "0.9"),
            ("top_k", "50"),
            ("min_p", "0.1"),
            ("repetition_penalty", "1.1"),
            ("presence_penalty", "-0.5"),
            ("frequency_penalty", "0.25"),
            ("max_tokens", "77"),
            ("seed", "42"),
        ];
        for (name, value) in [("system", "Be brief."), ("stop", "END\n\\n\\n")].into_iter().chain(numbers) {
            tab.fill(&format!("#settings [name={name}]"), value);
        }
        tab.fill("#settings [name=tools]", "[{");
        tab.click("#settings .primary");
        tab.wait_text("#settings .problem", "Tools are not JSON");
        tab.fill("#settings [name=tools]", r#"[{"type": "function", "function": {"name": "look_up"}}]"#);
        tab.fill("#settings [name=temperature]", "7");
        tab.click("#settings .primary");
        assert_eq!(tab.eval("document.querySelector('#settings').open"), true, "a temperature of 7 is out of bounds");
        tab.fill("#settings [name=temperature]", "0.3");
        tab.click("#settings .primary");
        tab.wait("!document.querySelector('#settings').open");

        let asked = send(site, tab, "Hello");
        assert_eq!(asked.body["messages"][0], json!({ "role": "system", "content": "Be brief." }));
        for (name, value) in numbers {
            assert_eq!(asked.body[name], serde_json::from_str::<Value>(value).unwrap(), "{name}");
        }
        assert_eq!(asked.body["stop"], json!(["END", "\n\n"]));
        assert_eq!(asked.body["tools"][0]["function"]["name"], "look_up");
        complete(tab, asked.answer(), "Hi");

        // A new conversation keeps the settings. Empty settings are not sent.
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        tab.click("#open-settings");
        assert_eq!(tab.eval("document.querySelector('#settings [name=seed]').value"), "42");
        tab.eval("for (const field of document.querySelectorAll('#settings [name]')) field.value = ''");
        tab.click("#settings .primary");
        let asked = send(site, tab, "Hello");
        let mut names: Vec<_> = asked.body.as_object().unwrap().keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["answer_id", "messages", "model", "stream", "stream_options"]);
        complete(tab, asked.answer(), "Hi");
    });
}

#[test]
fn reasoning_is_folded_and_not_sent_back() {
    on_page(|site, tab| {
        let answer = send(site, tab, "2 + 2?").answer();
        answer.delta(json!({ "reasoning_content": "Two and two" }));
        tab.wait_text(".fold summary", "Thinking");
        answer.delta(json!({ "reasoning_content": " make four." }));
        answer.write("4");
        tab.wait_text(".fold summary", "Thoughts");
        assert_eq!(tab.text(".folded"), "Two and two make four.");
        assert_eq!(tab.eval("document.querySelector('.fold').open"), false);
        answer.finish("stop");
        tab.wait("!document.querySelector('.message.running')");
        tab.click(".fold summary");
        tab.wait("document.querySelector('.fold').open");
        let asked = send(site, tab, "Sure?");
        assert_eq!(asked.body["messages"][1], json!({ "role": "assistant", "content": "4" }));
        complete(tab, asked.answer(), "Yes");
    });
}

#[test]
fn calls_of_tools_are_shown_and_take_their_results() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Weather in Rome and Oslo?").answer();
        let call = |index: usize, id: &str, name: &str| json!({ "tool_calls": [{ "index": index, "id": id, "type": "function", "function": { "name": name, "arguments": "" } }] });
        let part =
            |index: usize, text: &str| json!({ "tool_calls": [{ "index": index, "function": { "arguments": text } }] });
        answer.delta(call(0, "call_a", "weather"));
        answer.delta(part(0, "{\"city\":"));
        tab.wait_text(".call code", "{\"city\":");
        answer.delta(part(0, "\"Rome\"}"));
        answer.delta(call(1, "call_b", "weather"));
        answer.delta(part(1, "{\"city\":\"Oslo\"}"));
        answer.finish("tool_calls");
        tab.wait("document.querySelectorAll('.call form').length === 2");
        assert_eq!(tab.text(".call summary"), "Calls weather");
        assert_eq!(tab.text(".call code"), "{\n  \"city\": \"Rome\"\n}");
        tab.fill(".call textarea", "21 °C");
        tab.click(".call form button");
        tab.wait("document.querySelectorAll('.call form').length === 1");
        assert!(!site.was_asked(), "one result is still missing");
        tab.fill(".call textarea", "3 °C");
        tab.click(".call form button");
        let asked = site.asked();
        let messages = &asked.body["messages"];
        assert_eq!(messages[1]["tool_calls"][1]["function"]["arguments"], "{\"city\":\"Oslo\"}");
        assert_eq!(messages[2], json!({ "role": "tool", "tool_call_id": "call_a", "content": "21 °C" }));
        assert_eq!(messages[3], json!({ "role": "tool", "tool_call_id": "call_b", "content": "3 °C" }));
        complete(tab, asked.answer(), "Warm in Rome, cold in Oslo.");
    });
}

#[test]
fn the_page_follows_an_answer_until_the_reader_scrolls_up() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Tell me a lot").answer();
        let below = "(() => { const s = document.querySelector('#scroll'); return s.scrollHeight - s.clientHeight - s.scrollTop; })()";
        answer.write(&"A line.\n\n".repeat(60));
        tab.wait(&format!("document.querySelectorAll('.assistant p').length === 60 && {below} < 2"));
        tab.eval("document.querySelector('#scroll').scrollTop = 100");
        tab.wait("!document.querySelector('#latest').hidden");
        answer.write(&"More.\n\n".repeat(20));
        tab.wait("document.querySelectorAll('.assistant p').length === 80");
        assert_eq!(tab.eval("document.querySelector('#scroll').scrollTop"), 100);
        tab.click("#latest");
        tab.wait(&format!("document.querySelector('#latest').hidden && {below} < 2"));
        answer.finish("stop");
    });
}
