//! The status tab and the line in the header.

use axum::http::StatusCode;
use serde_json::json;

use crate::on_page;
use crate::site::ready_status;

#[test]
fn the_status_tab_shows_numbers_and_draws_speed() {
    on_page(|site, tab| {
        tab.click("#tab-status");
        tab.wait_text("#status-running", "3");
        for (name, value) in [
            ("model", "test/tiny-model"),
            ("state", "ready"),
            ("memory", "657 MB"),
            ("uptime", "1 h 15 min"),
            ("waiting", "1"),
            ("finished", "128"),
            ("kv_used", "9,300 tokens"),
            ("kv_total", "65,536 tokens"),
            ("generated_total", "18,544"),
        ] {
            assert_eq!(tab.text(&format!("#status-{name}")), value, "{name}");
        }
        assert_eq!(tab.text("#state").trim(), "tiny-model");
        let mut status = ready_status();
        status["requests"]["running"] = json!(7);
        status["tokens"]["generated_total"] = json!(18_644);
        site.set_status(StatusCode::OK, status);
        tab.wait_text("#status-running", "7");
        tab.wait(
            "Number(/at most ([\\d.,]+)/.exec(document.querySelector('.plot svg').getAttribute('aria-label'))[1]) > 0",
        );
        tab.wait("document.querySelector('.plot .line').getAttribute('d').includes('L')");
        tab.picture("status-speed");
        tab.click("#tab-chat");
        tab.wait("document.querySelector('#status').hidden && !document.querySelector('#chat').hidden");
    });
}

#[test]
fn a_model_that_loads_shows_how_far_it_is() {
    on_page(|site, tab| {
        let mut status = ready_status();
        status["state"] = json!("loading");
        status["progress"] = json!({ "doing": "weights", "done": 42, "total": 100, "fraction": 0.42 });
        site.set_status(StatusCode::OK, status);
        tab.click("#tab-status");
        tab.wait_text("#state", "loading tiny-model 42 %");
        tab.wait_text("#status-doing", "weights");
        assert_eq!(tab.eval("document.querySelector('#status progress').value"), 0.42);
        site.set_status(StatusCode::OK, ready_status());
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        assert_eq!(tab.eval("document.querySelector('#status progress').hidden"), true);
    });
}

#[test]
fn a_server_that_fails_or_wants_a_key_says_so_in_the_header() {
    on_page(|site, tab| {
        tab.expect_error("500");
        tab.expect_error("401");
        tab.click("#tab-status");
        site.set_status(StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": { "message": "something broke" } }));
        tab.wait_text("#state", "something broke");
        tab.wait_text("#status .problem", "something broke");
        site.set_status(StatusCode::UNAUTHORIZED, json!({ "error": { "message": "a key is needed" } }));
        tab.wait_text("#state", "API key needed");
        tab.wait("document.querySelector('#key').open");
        tab.press("Escape");
        tab.wait("!document.querySelector('#key').open");
    });
}
