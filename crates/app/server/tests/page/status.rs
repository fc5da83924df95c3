//! The status tab and the status line in the header.

use axum::http::StatusCode;
use serde_json::json;

use crate::on_page;
use crate::site::{ready_status, shared_status};

#[test]
fn the_status_tab_shows_numbers_and_draws_speed() {
    on_page(|site, tab| {
        tab.click("#tab-status");
        tab.wait_text("#status-running", "3");
        for (name, value) in [
            ("model", "test/tiny-model"),
            ("state", "ready"),
            ("memory", "402.5 MB"),
            ("reserved", "657 MB"),
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
            "Number(/peak ([\\d.,]+)/.exec(document.querySelector('.plot svg').getAttribute('aria-label'))[1]) > 0",
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

#[test]
fn ranks_are_a_table_that_polling_does_not_disturb() {
    on_page(|site, tab| {
        tab.click("#tab-status");
        tab.wait_text("#status-running", "3");
        assert_eq!(tab.eval("document.querySelector('#ranks').hidden"), true, "there is but one process");
        site.set_status(StatusCode::OK, shared_status());
        tab.wait("!document.querySelector('#ranks').hidden");
        let row = |number: u32| {
            tab.eval(&format!("[...document.querySelectorAll('#ranks tr')[{number}].cells].map((c) => c.textContent)"))
        };
        assert_eq!(row(0), json!(["Rank", "State", "Process", "Weights", "Resident", "In collectives", "Restarts"]));
        assert_eq!(row(1), json!(["0", "ready", "4100", "310 MB", "402.5 MB", "3.0 %", "0"]));
        assert_eq!(row(2), json!(["1", "ready", "4101", "310 MB", "402.5 MB", "1.3 %", "1"]));
        let scopes = "[...document.querySelectorAll('#ranks th')].map((th) => th.scope).join()";
        assert_eq!(tab.eval(scopes), "col,col,col,col,col,col,col,row,row");
        assert_eq!(tab.text("#ranks caption"), "The processes that share the model");

        tab.eval("window.cell = document.querySelector('#ranks tbody td:nth-child(4)').firstChild");
        let mut status = shared_status();
        status["ranks"][1] = json!({
            "rank": 1, "ready": false, "state": "loading", "pid": null, "restarts": 2, "weight_bytes": 0, "kv_bytes": 0,
            "resident_bytes": 0, "steps": 0, "step_s": 0.0, "wait_s": 0.0,
        });
        site.set_status(StatusCode::OK, status);
        tab.wait_text("#ranks tbody tr:last-child td", "loading");
        assert_eq!(row(2), json!(["1", "loading", "–", "0 B", "0 B", "–", "2"]));
        assert_eq!(tab.eval("window.cell === document.querySelector('#ranks tbody td:nth-child(4)').firstChild"), true);
        for (scheme, width) in [("light", 1200), ("dark", 1200), ("light", 320)] {
            tab.resize(width, 800, width < 1000);
            tab.prefer(scheme);
            tab.eval("document.querySelector('#ranks').scrollIntoView()");
            tab.eval("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => {})))");
            let wide = "document.querySelector('#status').scrollWidth > document.querySelector('#status').clientWidth";
            assert_eq!(tab.eval(wide), false, "{width}");
            tab.picture(&format!("ranks-{scheme}-{width}"));
        }
        site.set_status(StatusCode::OK, ready_status());
        tab.wait("document.querySelector('#ranks').hidden");
    });
}

#[test]
fn a_model_that_is_rebuilt_says_so_and_why() {
    on_page(|site, tab| {
        let mut status = shared_status();
        status["state"] = json!("rebuilding");
        status["reason"] = json!("the model is being rebuilt: rank 1: its process ended");
        site.set_status(StatusCode::OK, status);
        tab.click("#tab-status");
        tab.wait_text("#state", "rebuilding tiny-model");
        assert_eq!(tab.eval("document.querySelector('#state').dataset.kind"), "loading");
        assert_eq!(tab.eval("document.querySelector('#state').title.includes('rank 1')"), true);
        tab.wait_text("#status .problem", "rank 1: its process ended");
        assert_eq!(tab.text("#status-state"), "rebuilding");
        site.set_status(StatusCode::OK, ready_status());
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        assert_eq!(tab.eval("document.querySelector('#status .problem').hidden"), true);
    });
}
