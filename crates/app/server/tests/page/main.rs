//! Tests of the page in headless Chromium. CONSORT_PAGE_PICTURES=folder saves screenshots.
#![allow(clippy::unwrap_used)] // helpers of tests

mod access;
mod axe;
mod chat;
mod chromium;
mod cluster;
mod cluster_events;
mod context;
mod conveniences;
mod failures;
mod files;
mod keeping;
mod looks;
mod markdown;
mod maths;
mod pdf;
mod real;
mod resuming;
mod site;
mod status;
mod tab;

use site::{Answer, Asked, Site};
use tab::Tab;

/// Runs a test on a newly opened page. The console must have no errors but those that the test expects.
fn on_page(test: impl FnOnce(&Site, &mut Tab)) {
    let Some(mut tab) = Tab::new() else { return };
    let site = Site::start();
    tab.open(&site.address);
    test(&site, &mut tab);
    tab.assert_quiet();
}

/// Sends a message and returns the resulting request.
fn send(site: &Site, tab: &Tab, text: &str) -> Asked {
    tab.click("#prompt");
    tab.write(text);
    tab.press("Enter");
    site.asked()
}

/// Sends a message and responds at once.
fn exchange(site: &Site, tab: &Tab, question: &str, answer: &str) {
    complete(tab, send(site, tab, question).answer(), answer);
}

fn complete(tab: &Tab, answer: Answer, text: &str) {
    answer.write(text);
    answer.finish("stop");
    tab.wait("!document.querySelector('.message.running') && document.querySelector('#stop').hidden");
}

/// Picks files with a file field, as the browser's dialog does.
fn pick(tab: &Tab, selector: &str, files: &[(&str, &str)]) {
    let list: Vec<_> = files.iter().map(|(name, text)| serde_json::json!([name, text])).collect();
    tab.eval(&format!(
        "(() => {{
            const field = document.querySelector({});
            const transfer = new DataTransfer();
            for (const [name, text] of {}) transfer.items.add(new File([text], name));
            field.files = transfer.files;
            field.dispatchEvent(new Event('change'));
        }})()",
        serde_json::json!(selector),
        serde_json::json!(list)
    ));
}
