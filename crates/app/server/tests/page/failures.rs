//! How the page reports errors of the server, and recovers.

use axum::http::StatusCode;
use serde_json::json;

use crate::site::ready_status;
use crate::{complete, exchange, on_page, send};

#[test]
fn a_server_that_is_not_ready_is_asked_again() {
    on_page(|site, tab| {
        tab.expect_error("503");
        let refusal = [("retry-after", "5")];
        send(site, tab, "Hello").refuse(StatusCode::SERVICE_UNAVAILABLE, "the model is not ready yet", &refusal);
        tab.wait_text(".error", "The model is not ready yet. Try again in 5 s.");
        assert_eq!(tab.eval("document.querySelector('.error').getAttribute('role')"), "alert");
        tab.picture("error");
        tab.click(".error button");
        let asked = site.asked();
        assert_eq!(
            asked.body["messages"],
            json!([{ "role": "user", "content": "Hello" }]),
            "the failed answer is not sent"
        );
        complete(tab, asked.answer(), "Hi");
        assert_eq!(tab.text(".assistant .body").trim(), "Hi");
        assert_eq!(tab.count(".error"), 0);
    });
}

#[test]
fn a_failure_in_the_middle_keeps_the_text_and_says_so() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Hello").answer();
        answer.write("Half an ans");
        answer.event(&json!({ "error": { "message": "out of memory", "type": "server_error" } }).to_string());
        tab.wait_text(".error", "Out of memory.");
        assert_eq!(tab.text(".assistant .body").trim(), "Half an ans");
    });
}

#[test]
fn a_stream_that_breaks_off_is_no_answer() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Hello").answer();
        answer.write("Half");
        tab.wait_text(".assistant .body", "Half");
        drop(answer);
        tab.wait_text(".error", "closed before the answer ended");
    });
}

#[test]
fn nonsense_from_a_proxy_is_reported() {
    on_page(|site, tab| {
        tab.expect_error("502");
        send(site, tab, "Hello").refuse(StatusCode::BAD_GATEWAY, "", &[]);
        tab.wait_text(".error", "502");
        let asked = send(site, tab, "Anybody?");
        let said = json!([{ "role": "user", "content": "Hello" }, { "role": "user", "content": "Anybody?" }]);
        assert_eq!(asked.body["messages"], said, "an answer that never was is not sent");
        let answer = asked.answer();
        answer.event("{not json");
        tab.wait_text(".message:last-child .error", "The answer broke off");
    });
}

#[test]
fn a_server_that_wants_a_key_gets_one() {
    on_page(|site, tab| {
        tab.expect_error("401");
        send(site, tab, "Hello").refuse(StatusCode::UNAUTHORIZED, "a key is needed", &[]);
        tab.wait("document.querySelector('#key').open");
        tab.write("secret");
        tab.press("Enter");
        tab.wait("!document.querySelector('#key').open");
        tab.click(".error button");
        let asked = site.asked();
        assert_eq!(asked.key.as_deref(), Some("Bearer secret"));
        complete(tab, asked.answer(), "Hi");
        tab.reload();
        let asked = send(site, tab, "Still there?");
        assert_eq!(asked.key.as_deref(), Some("Bearer secret"));
        complete(tab, asked.answer(), "Yes");
    });
}

#[test]
fn a_limit_that_ended_the_answer_is_named() {
    on_page(|site, tab| {
        exchange(site, tab, "First", "ok");
        let answer = send(site, tab, "Long").answer();
        answer.write("cut");
        answer.finish("length");
        tab.wait_text(".message:last-child .facts", "the context is full");
        tab.click("#open-settings");
        tab.fill("#settings [name=max_tokens]", "34");
        tab.click("#settings .primary");
        let answer = send(site, tab, "Short").answer();
        answer.write("cut");
        answer.finish("length");
        tab.wait_text(".message:last-child .facts", "reached Max tokens");
    });
}

#[test]
fn a_page_follows_a_server_that_has_another_model() {
    on_page(|site, tab| {
        tab.expect_error("404");
        exchange(site, tab, "Hello", "Hi");
        let mut status = ready_status();
        status["model"] = json!("test/other-model");
        site.set_status(StatusCode::OK, status);
        let asked = send(site, tab, "Still there?");
        assert_eq!(asked.body["model"], "test/tiny-model");
        let message = "the model `test/tiny-model` does not exist";
        asked.refuse_with_code(StatusCode::NOT_FOUND, "model_not_found", message, &[]);
        let asked = site.asked();
        assert_eq!(asked.body["model"], "test/other-model");
        complete(tab, asked.answer(), "Yes");
        assert_eq!(tab.count(".error"), 0);
        assert_eq!(tab.text("#state").trim(), "other-model");
        // A model that does not come back is asked for once, then it is an error.
        for _ in 0..2 {
            let asked = if tab.count(".user") == 2 { send(site, tab, "And now?") } else { site.asked() };
            asked.refuse_with_code(StatusCode::NOT_FOUND, "model_not_found", "there is no model", &[]);
        }
        tab.wait_text(".error", "There is no model.");
        assert!(!site.was_asked());
    });
}
