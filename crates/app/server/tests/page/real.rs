//! The page with the real server and a small model with random weights.

use std::sync::Arc;

use serde_json::json;
use server::{ApiKeys, App, Config, LoadStage, Progress};
use tokio::runtime::Runtime;

use crate::site::serve;
use crate::tab::Tab;
use testing::fragile::{Fragile, Switch, WHY};
use testing::served_model;

fn on_real_page(app: &Arc<App>, test: impl FnOnce(&mut Tab)) {
    let Some(mut tab) = Tab::new() else { return };
    let runtime = Runtime::new().unwrap();
    tab.open(&serve(&runtime, server::router(app)));
    test(&mut tab);
    tab.assert_quiet();
}

fn set(tab: &Tab, settings: &[(&str, &str)]) {
    tab.click("#open-settings");
    for (name, value) in settings {
        tab.fill(&format!("#settings [name={name}]"), value);
    }
    tab.click("#settings .primary");
    tab.wait("!document.querySelector('#settings').open");
}

#[test]
fn a_real_model_answers_and_its_work_is_counted() {
    on_real_page(&served_model::ready(served_model::config(), served_model::shared()), |tab| {
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        assert_eq!(tab.text("#state").trim(), served_model::MODEL);
        tab.click("#open-settings");
        let applies = tab.eval("fetch('/status').then((r) => r.json()).then((s) => String(s.sampling_defaults.top_k))");
        assert_eq!(tab.eval("document.querySelector('#settings [name=top_k]').placeholder"), applies);
        tab.press("Escape");
        set(tab, &[("temperature", "0"), ("max_tokens", "24"), ("system", "Be kind.")]);
        tab.click("#prompt");
        tab.write("Hello there");
        tab.press("Enter");
        tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')");
        assert_eq!(tab.count(".error"), 0);

        // The page shows the same text as the API returns.
        tab.eval("navigator.clipboard.writeText = async (text) => { window.copied = text; }");
        tab.click(".assistant [aria-label='Copy message']");
        let shown = tab.wait("window.copied");
        let body = json!({
            "model": served_model::MODEL, "temperature": 0, "max_tokens": 24,
            "messages": [{ "role": "system", "content": "Be kind." }, { "role": "user", "content": "Hello there" }],
        });
        let script = format!(
            "fetch('/v1/chat/completions', {{ method: 'POST', headers: {{ 'content-type': 'application/json' }}, body: JSON.stringify({body}) }})
                .then((response) => response.json()).then((answer) => answer.choices[0].message.content)"
        );
        assert_eq!(tab.eval(&script), shown);

        tab.click("#tab-status");
        tab.wait("Number(document.querySelector('#status-finished').textContent) >= 2");
        tab.wait("Number(document.querySelector('#status-generated_total').textContent) > 0");
        tab.wait("document.querySelector('#status-running').textContent === '0'");
    });
}

#[test]
fn stopping_ends_the_request_in_the_engine() {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    // The answer does not end before it is stopped.
    switch.hold_after(20);
    on_real_page(&served_model::ready(served_model::config(), served), |tab| {
        set(tab, &[("max_tokens", "700"), ("seed", "3")]);
        tab.click("#prompt");
        tab.write("Go on and on");
        tab.press("Enter");
        tab.wait("document.querySelector('.message.running .body')");
        tab.press("Escape");
        tab.wait("document.querySelector('.facts')?.textContent.includes('stopped')");
        switch.release();
        tab.click("#tab-status");
        tab.wait("document.querySelector('#status-finished').textContent === '1'");
        assert_eq!(tab.text("#status-running"), "0");
    });
}

#[test]
fn a_model_that_loads_is_waited_for() {
    let app = App::new(served_model::config());
    app.set_stage(LoadStage::Loading(Progress { doing: "reading weights".to_owned(), done: 1, total: 4 }));
    on_real_page(&app, |tab| {
        tab.expect_error("503");
        tab.wait_text("#state", "loading tiny-qwen3 25 %");
        tab.click("#prompt");
        tab.write("Hello");
        tab.press("Enter");
        tab.wait_text(".error", "not ready yet");
        app.set_stage(LoadStage::Ready(served_model::shared()));
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        set(tab, &[("max_tokens", "8")]);
        tab.click(".error button");
        tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')");
        assert_eq!(tab.count(".error"), 0);
    });
}

#[test]
fn a_server_with_keys_lets_nobody_in_without_one() {
    let config = Config { keys: ApiKeys::new(["open-sesame"]).unwrap(), ..served_model::config() };
    on_real_page(&served_model::ready(config, served_model::shared()), |tab| {
        tab.expect_error("401");
        tab.wait("document.querySelector('#key').open");
        assert_eq!(tab.text("#state").trim(), "API key needed");
        tab.fill("#key input", "open-barley");
        tab.press("Enter");
        tab.wait_text("#key .problem", "The server does not accept this API key.");
        assert_eq!(tab.eval("document.querySelector('#key').open"), true, "it is asked for again");
        assert_eq!(tab.text("#state").trim(), "API key needed", "a wrong key is not kept");
        tab.fill("#key input", "open-sesame");
        tab.press("Enter");
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");

        // A wrong key does not replace the right one.
        tab.click("#open-key");
        tab.fill("#key input", "open-barley");
        tab.press("Enter");
        tab.wait_text("#key .problem", "The server does not accept this API key.");
        tab.click("#key [data-cancel]");
        set(tab, &[("max_tokens", "8")]);
        tab.click("#prompt");
        tab.write("Hello");
        tab.press("Enter");
        tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')");
        assert_eq!(tab.count(".error"), 0);
    });
}

#[test]
fn a_conversation_that_fills_the_context_goes_on() {
    on_real_page(&served_model::ready(served_model::config(), served_model::shared()), |tab| {
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        set(tab, &[("max_tokens", "8"), ("seed", "1")]);
        for round in 1..=4 {
            tab.click("#prompt");
            tab.write(&format!("{round} {}", "more words ".repeat(60)));
            tab.press("Enter");
            let done = format!("document.querySelectorAll('.assistant .facts').length === {round}");
            tab.wait(&format!("{done} && document.querySelector('#stop').hidden"));
        }
        assert_eq!(tab.count(".error"), 0);
        assert_eq!(tab.count(".message"), 8, "what is forgotten stays on the page");
        assert_eq!(tab.count(".forgotten"), 1);
        tab.wait_text("#context", "/ 900 tokens");
    });
}

#[test]
fn answers_wait_for_a_model_that_is_rebuilt() {
    let switch = Switch::default();
    let served = Arc::new(served_model::fresh_on(Default::default(), |local| Fragile::new(local, &switch)));
    switch.lose();
    on_real_page(&served_model::ready(served_model::config(), served), |tab| {
        tab.wait_text("#state", "rebuilding tiny-qwen3");
        set(tab, &[("max_tokens", "8")]);
        tab.click("#prompt");
        tab.write("Hello");
        tab.press("Enter");
        tab.click("#tab-status");
        tab.wait_text("#status-waiting", "1");
        tab.wait_text("#ranks tbody tr:last-child td", "absent");
        tab.wait_text("#status .problem", WHY);
        switch.mend();
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        tab.wait_text("#ranks tbody tr:last-child td", "ready");
        tab.click("#tab-chat");
        tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')");

        switch.lose_after(3);
        tab.click(".assistant [aria-label='Regenerate']");
        tab.click("#tab-status");
        tab.wait_text("#state", "rebuilding tiny-qwen3");
        assert_eq!(tab.count(".message.running"), 1, "half an answer waits for its other half");
        switch.mend();
        tab.wait("!document.querySelector('.message.running')");
        tab.wait("document.querySelector('.assistant .facts')?.textContent.includes('tokens')");
        assert_eq!(tab.count(".error"), 0);
    });
}
