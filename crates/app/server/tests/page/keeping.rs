//! Conversations in the browser: stored, found, renamed, exported, imported, deleted.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{complete, exchange, on_page, pick, send};

#[test]
fn a_conversation_survives_a_reload() {
    on_page(|site, tab| {
        exchange(site, tab, "Remember me", "I **will**");
        tab.reload();
        tab.wait("document.querySelectorAll('.message').length === 2");
        assert_eq!(tab.text(".user .body"), "Remember me");
        assert_eq!(tab.text(".assistant strong"), "will");
        assert_eq!(tab.text("#conversations [aria-current]"), "Remember me");
        let asked = send(site, tab, "Again");
        assert_eq!(asked.body["messages"].as_array().unwrap().len(), 3);
        complete(tab, asked.answer(), "Yes");
    });
}

#[test]
fn an_answer_that_the_server_has_lost_keeps_its_beginning() {
    on_page(|site, tab| {
        tab.expect_error("404");
        let answer = send(site, tab, "Slow").answer();
        answer.write("Beg");
        tab.wait_text(".assistant .body", "Beg");
        // The page saves at most once a second, so more events are sent until it has saved.
        let kept = "new Promise((resolve) => { const open = indexedDB.open('consort', 1); open.onsuccess = () => {
            const all = open.result.transaction('conversations').objectStore('conversations').getAll();
            all.onsuccess = () => resolve(all.result[0].messages[1].content); }; })";
        let deadline = Instant::now() + Duration::from_secs(120);
        while tab.eval(kept) == "" {
            assert!(Instant::now() < deadline, "nothing was kept");
            answer.write(".");
        }
        tab.reload();
        tab.wait_text(".assistant .body", "Beg");
        tab.wait_text(".assistant .facts", "interrupted");
    });
}

#[test]
fn an_answer_goes_on_while_another_conversation_is_on_show() {
    on_page(|site, tab| {
        let first = send(site, tab, "Long story").answer();
        first.write("Once");
        tab.wait_text(".assistant .body", "Once");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        assert_eq!(tab.count("#conversations .running"), 1);
        exchange(site, tab, "Short", "Done");
        first.write(" upon a time");
        first.finish("stop");
        tab.wait("!document.querySelector('#conversations .running')");
        assert_eq!(tab.text(".assistant .body").trim(), "Done");
        // The end of the generation moves the conversation to the top. A click before that would miss it.
        tab.wait_text("#conversations li:first-child a", "Long story");
        tab.click("#conversations a:not([aria-current])");
        tab.wait_text(".assistant .body", "Once upon a time");
    });
}

#[test]
fn conversations_are_renamed_exported_and_deleted_with_a_way_back() {
    on_page(|site, tab| {
        exchange(site, tab, "First title", "Answer");
        let act = |number: u32| {
            tab.click("#conversations li [aria-label^='Actions']");
            tab.click(&format!("#conversations .menu:popover-open button:nth-child({number})"));
        };
        act(1);
        tab.wait("document.activeElement.matches('#conversations input')");
        tab.fill("#conversations input", "Second title");
        tab.press("Enter");
        tab.wait_text("#conversations a", "Second title");

        tab.eval("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }");
        act(2);
        assert_eq!(
            tab.eval("window.saved.text()"),
            "# Second title\n\n## You\n\nFirst title\n\n## Assistant\n\nAnswer\n"
        );
        act(3);
        assert_eq!(tab.eval("window.saved.text().then((text) => JSON.parse(text).messages.length)"), 2);

        act(4);
        tab.wait("!document.querySelector('#conversations li') && !document.querySelector('#welcome').hidden");
        tab.click(".toast button");
        tab.wait_text("#conversations a", "Second title");
        tab.wait_text(".assistant .body", "Answer");
        act(4);
        tab.wait("!document.querySelector('#conversations li')");
        tab.reload();
        assert_eq!(tab.count("#conversations li"), 0);
    });
}

#[test]
fn words_are_found_in_all_conversations() {
    on_page(|site, tab| {
        exchange(site, tab, "Rivers of Europe", "The Rhine and the Danube");
        tab.click("#new-chat");
        tab.wait("!document.querySelector('#welcome').hidden");
        exchange(site, tab, "Mountains", "The Eiger");
        let shown = "[...document.querySelectorAll('#conversations a')].map((a) => a.firstChild.textContent)";
        assert_eq!(tab.eval(shown), json!(["Mountains", "Rivers of Europe"]));
        tab.fill("#search", "danube EUROPE");
        tab.wait("document.querySelectorAll('#conversations li').length === 1");
        assert_eq!(tab.eval(shown), json!(["Rivers of Europe"]));
        assert_eq!(tab.text("#conversations small"), "The Rhine and the Danube");
        tab.fill("#search", "volcano");
        tab.wait("!document.querySelector('#none-found').hidden");
        assert_eq!(tab.count("#conversations li"), 0);
        tab.press("Escape");
        tab.wait("document.querySelectorAll('#conversations li').length === 2");
        assert_eq!(tab.eval("document.querySelector('#none-found').hidden"), true);
    });
}

#[test]
fn what_was_exported_is_imported_and_what_is_damaged_is_not() {
    on_page(|site, tab| {
        exchange(site, tab, "Keep this", "I **will**");
        tab.eval("URL.createObjectURL = (blob) => { window.saved = blob; return 'data:,'; }");
        tab.click("#conversations li [aria-label^='Actions']");
        tab.click("#conversations .menu:popover-open button:nth-child(3)");
        let exported = tab.eval("window.saved.text()").as_str().unwrap().to_owned();
        tab.click("#conversations li [aria-label^='Actions']");
        tab.click("#conversations .menu:popover-open .danger");
        tab.wait("!document.querySelector('#conversations li')");

        let import = |text: &str| pick(tab, "#pick-import", &[("chat.json", text)]);
        import("no json");
        tab.wait_text(".toast", "Nothing was imported: the file is not JSON.");
        import("{\"messages\": [{\"id\": \"a\", \"role\": \"user\", \"content\": \"x\", \"parent\": \"a\"}]}");
        tab.wait_text(".toast", "Nothing was imported: a message in the file is damaged.");
        assert_eq!(tab.count("#conversations li"), 0);
        import(&exported);
        tab.wait_text("#conversations a", "Keep this");
        tab.wait_text(".assistant strong", "will");
        let asked = send(site, tab, "Again");
        assert_eq!(asked.body["messages"].as_array().unwrap().len(), 3);
        complete(tab, asked.answer(), "Yes");
        import(&exported);
        tab.wait("document.querySelectorAll('#conversations li').length === 2");
    });
}

#[test]
fn an_import_that_fails_half_way_says_how_far_it_came() {
    on_page(|_, tab| {
        let conversation =
            |title: &str| json!({ "title": title, "messages": [{ "id": "a", "role": "user", "content": title }] });
        tab.eval(
            "(() => { const { put } = IDBObjectStore.prototype; let left = 1;
                IDBObjectStore.prototype.put = function (value) {
                    if (left-- > 0) return put.call(this, value);
                    throw new Error('the disk is full');
                }; })()",
        );
        let file = json!([conversation("One"), conversation("Two"), conversation("Three")]).to_string();
        pick(tab, "#pick-import", &[("chats.json", &file)]);
        tab.wait_text(".toast", "Imported 1 of 3: the disk is full.");
        tab.wait_text("#conversations [aria-current]", "One");
        assert_eq!(tab.count("#conversations li"), 1);
    });
}

#[test]
fn deleting_a_conversation_stops_its_answer_for_good() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Endless").answer();
        answer.write("on and on");
        tab.wait_text(".assistant .body", "on and on");
        tab.click("#conversations li [aria-label^='Actions']");
        tab.click("#conversations .menu:popover-open .danger");
        answer.wait_hung_up();
        tab.wait("!document.querySelector('#welcome').hidden");
        tab.reload();
        assert_eq!(tab.eval("document.querySelectorAll('#conversations li').length"), json!(0));
    });
}
