//! What makes the page pleasant to use: models to choose, drafts, answers to change, shortcuts, days, toasts, the drawer.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::site::ready_status;
use crate::tab::Tab;
use crate::{complete, exchange, on_page, pick, send};

fn three_models() -> Value {
    json!([
        { "id": "test/tiny-model", "state": "ready", "size": 657_000_000 },
        { "id": "test/other-model", "state": "unloaded", "size": 2_500_000_000_u64 },
        { "id": "test/third-model", "state": "loading", "size": 1_000, "progress": 0.25 },
    ])
}

#[test]
fn each_conversation_has_its_model() {
    on_page(|site, tab| {
        // A reload may come before the end of an answer is kept; this server has none to resume.
        tab.expect_error("404");
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        assert_eq!(tab.eval("document.querySelector('#picker').hidden"), true, "one model is no choice");
        site.set_models(three_models());
        tab.reload();
        tab.wait("!document.querySelector('#picker').hidden");
        let options = "[...document.querySelectorAll('#model option')].map((option) => option.textContent)";
        assert_eq!(
            tab.eval(options),
            json!(["tiny-model · 657 MB", "other-model · 2.5 GB", "third-model · 1 kB · loading 25 %"])
        );
        assert_eq!(tab.eval("document.querySelector('#model').value"), "test/tiny-model");
        exchange(site, tab, "To the first", "Yes");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        let mut status = ready_status();
        (status["model"], status["state"]) = (json!("test/other-model"), json!("unloaded"));
        site.set_status(StatusCode::OK, status);
        choose(tab, "test/other-model");
        tab.wait_text("#state", "not loaded");
        let asked = send(site, tab, "To the other");
        assert_eq!(asked.body["model"], "test/other-model");
        complete(tab, asked.answer(), "Yes");
        // Each conversation keeps its own, and new ones begin with the last.
        tab.click("#conversations a:not([aria-current])");
        tab.wait("document.querySelector('#model').value === 'test/tiny-model' || location.hash");
        tab.wait_text(".user .body", "To the first");
        choose(tab, "test/third-model");
        let asked = send(site, tab, "Again");
        assert_eq!(asked.body["model"], "test/third-model");
        complete(tab, asked.answer(), "Yes");
        tab.reload();
        tab.wait("document.querySelector('#model').value === 'test/third-model'");
        tab.click("#conversations a:not([aria-current])");
        tab.wait("document.querySelector('#model').value === 'test/other-model'");
        tab.picture("picker");
        tab.resize(320, 568, true);
        tab.wait("document.documentElement.scrollWidth <= innerWidth");
        tab.picture("phone-320-picker");
    });
}

fn choose(tab: &Tab, model: &str) {
    tab.eval(&format!(
        "(() => {{ const list = document.querySelector('#model'); list.value = {}; list.dispatchEvent(new Event('change')); }})()",
        json!(model)
    ));
}

#[test]
fn drafts_are_kept_for_each_conversation() {
    on_page(|site, tab| {
        // A reload may come before the end of an answer is kept; this server has none to resume.
        tab.expect_error("404");
        let field = "document.querySelector('#prompt').value";
        tab.click("#prompt");
        tab.write("half a thought");
        tab.reload();
        assert_eq!(tab.eval(field), "half a thought");
        tab.press("Enter");
        complete(tab, site.asked().answer(), "Hm");
        assert_eq!(tab.eval(field), "");
        tab.click("#prompt");
        tab.write("and another");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        assert_eq!(tab.eval(field), "");
        tab.click("#prompt");
        tab.write("new");
        tab.click("#conversations a");
        tab.wait_text(".user .body", "half a thought");
        tab.wait(&format!("{field} === 'and another'"));
        tab.reload();
        assert_eq!(tab.eval(field), "and another");
        tab.press("Enter");
        complete(tab, site.asked().answer(), "Hm");
        tab.reload();
        assert_eq!(tab.eval(field), "");
        tab.click("#new-chat");
        tab.wait(&format!("{field} === 'new'"));
    });
}

#[test]
fn answers_are_changed_and_deleted_with_a_way_back() {
    on_page(|site, tab| {
        exchange(site, tab, "A river", "The Rein");
        exchange(site, tab, "Another", "The Elbe");
        tab.click(".assistant:nth-child(2) [aria-label='Edit answer']");
        tab.fill(".edit textarea", "The **Rhine**");
        tab.click(".edit .primary");
        tab.wait_text(".assistant:nth-child(2) strong", "Rhine");
        tab.wait_text(".assistant:nth-child(2) .facts", "edited");
        assert!(!site.was_asked(), "an answer is changed, not asked for again");
        tab.click(".assistant:last-child [aria-label='Delete answer']");
        tab.wait("document.querySelectorAll('.message').length === 3");
        tab.click(".toast .plain");
        tab.wait("document.querySelectorAll('.message').length === 4");
        tab.click(".user:nth-child(3) [aria-label='Delete message']");
        tab.wait("document.querySelectorAll('.message').length === 2");
        tab.reload();
        tab.wait("document.querySelectorAll('.message').length === 2");
        let asked = send(site, tab, "Sure?");
        assert_eq!(asked.body["messages"][1]["content"], "The **Rhine**");
        complete(tab, asked.answer(), "Yes");
        // Of several versions of an answer, another one is shown.
        tab.click(".assistant:last-child [aria-label='Regenerate']");
        complete(tab, site.asked().answer(), "No");
        tab.click(".assistant:last-child [aria-label='Delete answer']");
        tab.wait_text(".assistant:last-child .body", "Yes");
        assert_eq!(tab.count(".assistant:last-child .count"), 0);
    });
}

#[test]
fn keys_do_what_the_list_of_shortcuts_says() {
    on_page(|site, tab| {
        exchange(site, tab, "First", "One");
        tab.press("Control+Shift+O");
        tab.wait("!document.querySelector('#welcome').hidden");
        tab.press("Control+k");
        assert_eq!(tab.eval("document.activeElement.id"), "search");
        tab.press("?");
        assert_eq!(tab.eval("document.querySelector('#shortcuts').open"), false, "in a field it is a character");
        assert_eq!(tab.eval("document.querySelector('#search').value"), "?");
        tab.press("Escape");
        tab.eval("document.activeElement.blur()");
        tab.press("?");
        tab.wait("document.querySelector('#shortcuts').open");
        assert_eq!(tab.count("#shortcuts dt"), tab.count("#shortcuts dd"));
        tab.wait_text("#shortcuts", "New chat");
        crate::axe::assert_accessible(tab, "shortcuts");
        tab.picture("shortcuts");
        tab.press("Control+Shift+O");
        tab.press("Escape");
        tab.wait("!document.querySelector('#shortcuts').open");
        tab.click("#open-shortcuts");
        tab.wait("document.querySelector('#shortcuts').open");
        tab.click("#shortcuts [data-cancel]");
        let docs = tab.eval("fetch(document.querySelector('#open-docs').href).then((response) => response.text())");
        assert!(docs.as_str().unwrap().contains("/v1/chat/completions"));
    });
}

#[test]
fn conversations_stand_under_their_days() {
    on_page(|site, tab| {
        let old = |title: &str, updated: &str| {
            let updated = tab.eval(&format!("Date.parse('{updated}')"));
            json!({ "title": title, "updated": updated, "messages": [{ "id": "a", "role": "user", "content": title }] })
        };
        let file = json!([old("Long ago", "2021-03-09T12:00"), old("As long ago", "2021-03-02T12:00")]).to_string();
        pick(tab, "#pick-import", &[("chats.json", &file)]);
        tab.wait("document.querySelectorAll('#conversations li').length === 2");
        tab.wait_text(".user .body", "Long ago");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        exchange(site, tab, "Now", "Yes");
        let shown = "[...document.querySelectorAll('#conversations section')].map((group) => [...group.querySelectorAll('h2, a span')].map((e) => e.textContent))";
        assert_eq!(tab.eval(shown), json!([["Today", "Now"], ["March 2021", "Long ago", "As long ago"]]));
        tab.picture("days");
        tab.click("#conversations section:last-child a");
        tab.wait_text(".user .body", "Long ago");
        let asked = send(site, tab, "And now?");
        complete(tab, asked.answer(), "Now");
        tab.wait("document.querySelectorAll('#conversations section:first-child li').length === 2");
        assert_eq!(tab.eval(shown), json!([["Today", "Long ago", "Now"], ["March 2021", "As long ago"]]));
    });
}

#[test]
fn a_toast_covers_nothing() {
    on_page(|site, tab| {
        exchange(site, tab, "Hello", "Hi");
        for (width, height, mobile) in [(1200, 800, false), (390, 844, true)] {
            tab.resize(width, height, mobile);
            pick(tab, "#pick-import", &[("chat.json", "no json")]);
            tab.wait_text(".toast", "Nothing was imported");
            let covered = tab.eval(
                "(() => { const box = document.querySelector('.toast').getBoundingClientRect();
                    return [...document.querySelectorAll('header, #scroll, #composer, #sidebar')].filter((e) => e.checkVisibility())
                        .map((e) => [e.id || e.tagName, e.getBoundingClientRect()])
                        .filter(([, b]) => b.width && b.top < box.bottom && b.bottom > box.top && b.left < box.right && b.right > box.left)
                        .map(([name]) => name); })()",
            );
            assert_eq!(covered, json!([]), "{width}");
            tab.picture(&format!("toast-{width}"));
            tab.click(".toast [aria-label=Dismiss]");
            assert_eq!(tab.count(".toast"), 0);
        }
    });
}

#[test]
fn the_drawer_of_a_phone_closes_by_touch_and_by_escape() {
    on_page(|site, tab| {
        exchange(site, tab, "First", "One");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        exchange(site, tab, "Second", "Two");
        tab.resize(390, 844, true);
        let open = |tab: &Tab| {
            tab.tap("#menu");
            tab.wait("document.body.classList.contains('drawer')");
            tab.eval("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => {})))");
        };
        let closed = "!document.body.classList.contains('drawer')";
        open(tab);
        tab.tap("#conversations a:not([aria-current])");
        tab.wait(closed);
        tab.wait_text(".user .body", "First");
        open(tab);
        tab.tap("#conversations a[aria-current]");
        tab.wait(closed);
        open(tab);
        tab.tap_at(380.0, 500.0);
        tab.wait(closed);
        open(tab);
        tab.eval("document.activeElement.blur()");
        tab.press("Escape");
        tab.wait(closed);
        // What is undone from a toast can be reached while the drawer is open.
        open(tab);
        tab.tap("#conversations li:first-child [aria-label^='Actions']");
        tab.tap("#conversations .menu:popover-open .danger");
        tab.wait("document.querySelectorAll('#conversations li').length === 1");
        tab.tap(".toast .plain");
        tab.wait("document.querySelectorAll('#conversations li').length === 2");
    });
}
