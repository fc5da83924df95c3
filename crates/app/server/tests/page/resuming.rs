//! Answers that outlive the page that asked for them, with the real server: after a reload, and in a second tab.

use std::sync::Arc;

use serde_json::json;
use testing::fragile::{Fragile, Switch};
use testing::served_model;
use tokio::runtime::Runtime;

use crate::site::serve;
use crate::tab::Tab;
use crate::{complete, on_page, send};

const BODY: &str = "document.querySelector('.assistant .body')?.textContent";

/// A page of a model whose answers have `tokens` tokens, and stop in the middle until they are released.
fn on_held_page(tokens: u32, test: impl FnOnce(&str, &Switch, &mut Tab)) {
    let Some(mut tab) = Tab::new() else { return };
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    let runtime = Runtime::new().unwrap();
    let address = serve(&runtime, server::router(&served_model::ready(served_model::config(), served)));
    tab.open(&address);
    tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
    tab.click("#open-settings");
    for (name, value) in [("max_tokens", tokens.to_string()), ("temperature", "0".to_owned())] {
        tab.fill(&format!("#settings [name={name}]"), &value);
    }
    tab.click("#settings .primary");
    tab.wait("!document.querySelector('#settings').open");
    switch.hold_after(24);
    tab.click("#prompt");
    tab.write("Go on and on");
    tab.press("Enter");
    tab.wait(&format!("{BODY}?.length > 3"));
    test(&address, &switch, &mut tab);
    tab.assert_quiet();
}

fn wait_end(tab: &Tab) {
    tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens') && !document.querySelector('.running')");
}

/// The text of the answer, as it is kept.
fn kept(tab: &Tab) -> serde_json::Value {
    tab.eval(
        "new Promise((resolve) => { const open = indexedDB.open('consort', 1); open.onsuccess = () => {
            const all = open.result.transaction('conversations').objectStore('conversations').getAll();
            all.onsuccess = () => resolve(all.result[0].messages.at(-1)); }; })",
    )
}

#[test]
fn an_answer_goes_on_after_a_reload() {
    on_held_page(48, |_, switch, tab| {
        tab.reload();
        tab.wait("document.querySelector('.message.running') && !document.querySelector('#stop').hidden");
        switch.release();
        wait_end(tab);
        assert_eq!(tab.count(".error"), 0);
        let message = kept(tab);
        assert_eq!(message["usage"]["generated"], 48, "{message}");
        // It is the answer that the server gives to a page that stays.
        let whole = tab.eval(&format!(
            "fetch('/v1/chat/completions', {{ method: 'POST', headers: {{ 'content-type': 'application/json' }}, body: JSON.stringify({}) }})
                .then((response) => response.json()).then((answer) => answer.choices[0].message.content)",
            json!({ "temperature": 0, "max_tokens": 48, "messages": [{ "role": "user", "content": "Go on and on" }] })
        ));
        assert_eq!(message["content"], whole);
        tab.reload();
        wait_end(tab);
        assert_eq!(kept(tab)["content"], whole);
    });
}

#[test]
fn a_second_tab_shows_the_same_answer_and_stops_it() {
    on_held_page(600, |address, switch, tab| {
        let id = tab.eval("location.hash");
        let second = tab.beside();
        second.open(&format!("{address}{}", id.as_str().unwrap()));
        second.wait("document.querySelector('.message.running')");
        second.wait(&format!("{BODY}?.length > 3"));
        let (shown, there) = (second.eval(BODY), tab.eval(BODY));
        let both = [shown.as_str().unwrap().trim(), there.as_str().unwrap().trim()];
        assert!(both[0].starts_with(both[1]) || both[1].starts_with(both[0]), "{both:?}");
        second.click("#stop");
        switch.release();
        for tab in [&second, &*tab] {
            tab.wait_text(".assistant .facts", "stopped");
            tab.wait("document.querySelector('#stop').hidden");
        }
        tab.reload();
        tab.wait_text(".assistant .facts", "stopped");
        assert_eq!(tab.count(".message"), 2);
        second.assert_quiet();
    });
}

#[test]
fn a_tab_that_is_open_already_follows_and_keeps_what_the_other_changes() {
    on_held_page(48, |address, switch, tab| {
        let second = tab.beside();
        second.open(&format!("{address}{}", tab.eval("location.hash").as_str().unwrap()));
        second.wait("document.querySelector('.message.running')");
        second.click("#conversations li [aria-label^='Actions']");
        second.click("#conversations .menu:popover-open button:first-of-type");
        second.fill("#conversations input", "A better title");
        second.press("Enter");
        tab.wait_text("#conversations a", "A better title");
        switch.release();
        wait_end(tab);
        wait_end(&second);
        for tab in [&*tab, &second] {
            tab.reload();
            wait_end(tab);
            assert_eq!(tab.text("#conversations a span"), "A better title");
            assert_eq!(tab.count(".message"), 2);
        }
        second.assert_quiet();
    });
}

#[test]
fn a_stopped_answer_is_continued_in_its_own_words() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Count").answer();
        answer.write_counted("one, two", 10, 4);
        tab.wait_text(".assistant .body", "one, two");
        tab.press("Escape");
        answer.wait_hung_up();
        tab.click(".assistant .continue");
        let asked = site.asked();
        let said = json!([{ "role": "user", "content": "Count" }, { "role": "assistant", "content": "one, two" }]);
        assert_eq!(asked.body["messages"], said);
        assert_eq!(
            (&asked.body["continue_final_message"], &asked.body["add_generation_prompt"]),
            (&json!(true), &json!(false))
        );
        let answer = asked.answer();
        answer.write(", three");
        answer.finish_with_usage("length", 14, 3);
        tab.wait_text(".assistant .body", "one, two, three");
        tab.wait_text(".assistant .facts", "7 tokens");
        assert_eq!((tab.count(".assistant"), tab.count(".assistant .count")), (1, 0));
        // A limit is no end either; an answer that is complete is not continued.
        tab.click(".assistant .continue");
        complete(tab, site.asked().answer(), ".");
        assert_eq!(tab.text(".assistant .body").trim(), "one, two, three.");
        assert_eq!(tab.count(".continue"), 0);
        let asked = send(site, tab, "Thanks");
        assert_eq!(asked.body["messages"][1]["content"], "one, two, three.");
        assert!(asked.body["continue_final_message"].is_null());
        complete(tab, asked.answer(), "Welcome");
    });
}

#[test]
fn an_answer_that_failed_half_way_is_continued() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Hello").answer();
        answer.write("Half an ans");
        answer.event(&json!({ "error": { "message": "out of memory", "type": "server_error" } }).to_string());
        tab.click(".error .continue");
        let asked = site.asked();
        assert_eq!(asked.body["messages"][1]["content"], "Half an ans");
        complete(tab, asked.answer(), "wer");
        assert_eq!(tab.text(".assistant .body").trim(), "Half an answer");
        assert_eq!(tab.count(".error"), 0);
    });
}
