//! Conversations that fill the context: their oldest turns are forgotten, and the page says so.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::site::{Asked, Site, ready_status};
use crate::tab::Tab;
use crate::{complete, on_page, send};

const FULL: StatusCode = StatusCode::BAD_REQUEST;

/// Gives the model a context of 1,000 tokens, and waits until the page knows.
fn small_context(site: &Site, tab: &Tab) {
    let mut status = ready_status();
    status["context"] = json!(1000);
    site.set_status(StatusCode::OK, status);
    tab.reload();
    tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
}

/// The first characters of the messages of a request.
fn beginnings(asked: &Asked) -> Vec<String> {
    let messages = asked.body["messages"].as_array().unwrap();
    messages.iter().map(|message| message["content"].as_str().unwrap().chars().take(3).collect()).collect()
}

/// The text before and after the line that says what is forgotten.
fn around_the_line(tab: &Tab) -> Value {
    tab.eval("['previousSibling', 'nextSibling'].map((side) => document.querySelector('.forgotten')[side].querySelector('.body').textContent.slice(0, 3).trim())")
}

#[test]
fn the_oldest_turns_are_forgotten_before_the_context_is_full() {
    on_page(|site, tab| {
        small_context(site, tab);
        assert_eq!(tab.eval("document.querySelector('#context').hidden"), true);
        let answer = send(site, tab, &format!("one {}", "x".repeat(400))).answer();
        answer.write("1st");
        answer.finish_with_usage("stop", 410, 190);
        tab.wait_text("#context .words", "600 / 1,000 tokens");
        assert_eq!(tab.eval("document.querySelector('#context').ariaValueNow"), "600");

        // The fake server counts a token for each character. 750 of 1,000 may be prompt.
        let asked = send(site, tab, &format!("two {}", "y".repeat(300)));
        assert_eq!(beginnings(&asked), ["one", "1st", "two"], "all of it fits");
        let answer = asked.answer();
        answer.write("2nd");
        answer.finish_with_usage("stop", 720, 100);
        tab.wait_text("#context .words", "820 / 1,000 tokens");
        assert_eq!(tab.count(".forgotten"), 0);

        let asked = send(site, tab, &format!("six {}", "z".repeat(300)));
        assert_eq!(beginnings(&asked), ["two", "2nd", "six"]);
        tab.wait_text(".forgotten", "no longer sent");
        assert_eq!(around_the_line(tab), json!(["1st", "two"]));
        complete(tab, asked.answer(), "3rd");
        tab.wait_text("#announcer", "no longer sent");
        assert_eq!(tab.count(".message"), 6, "nothing leaves the page");

        // What is forgotten stays forgotten, also after a reload.
        tab.reload();
        tab.wait("document.querySelectorAll('.message').length === 6");
        let asked = send(site, tab, "ten");
        assert_eq!(beginnings(&asked), ["two", "2nd", "six", "3rd", "ten"]);
        complete(tab, asked.answer(), "4th");
        tab.picture("forgotten");
    });
}

#[test]
fn a_system_prompt_that_grows_is_counted() {
    on_page(|site, tab| {
        small_context(site, tab);
        let answer = send(site, tab, &format!("one {}", "x".repeat(300))).answer();
        answer.write("1st");
        answer.finish_with_usage("stop", 310, 190);
        tab.wait_text("#context .words", "500 / 1,000 tokens");
        tab.click("#open-settings");
        tab.fill("#settings [name=system]", &"S".repeat(460));
        tab.click("#settings .primary");
        let asked = send(site, tab, "two");
        assert_eq!(beginnings(&asked), ["SSS", "two"], "750 tokens may be prompt");
        complete(tab, asked.answer(), "2nd");
    });
}

#[test]
fn a_refusal_of_the_server_forgets_turn_after_turn() {
    on_page(|site, tab| {
        tab.expect_error("400");
        for (question, answer) in [("one", "1st"), ("two", "2nd")] {
            crate::exchange(site, tab, question, answer);
        }
        let refuse =
            |asked: Asked| asked.refuse_with_code(FULL, "context_length_exceeded", "the prompt is too long", &[]);
        refuse(send(site, tab, "six"));
        let asked = site.asked();
        assert_eq!(beginnings(&asked), ["two", "2nd", "six"]);
        refuse(asked);
        let asked = site.asked();
        assert_eq!(beginnings(&asked), ["six"]);
        // The last message is never forgotten: if it does not fit alone, that is an error.
        refuse(asked);
        tab.wait_text(".error", "The prompt is too long. Shorten the message");
        assert!(!site.was_asked());
        assert_eq!(around_the_line(tab), json!(["2nd", "six"]));
    });
}
