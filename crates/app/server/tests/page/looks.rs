//! Appearance: light and dark, wide and narrow.

use serde_json::json;

use crate::tab::Tab;
use crate::{exchange, on_page};

const RICH: &str = "## Two ways to sort\n\n**Merge sort** splits, sorts and merges; *bubble sort* swaps neighbours until nothing moves.\n\n\
| algorithm | best | worst | stable |\n|---|--:|--:|:-:|\n| bubble sort | n | n² | yes |\n| merge sort | n log n | n log n | yes |\n\n\
```python\ndef merge(a, b):\n    # takes the smaller head, again and again, until one of the two lists has nothing left to give\n    while a and b:\n        yield (a if a[0] <= b[0] else b).pop(0)\n    yield from a or b\n```\n\n\
1. Split the list with `len(a) // 2`\n2. Sort both halves\n   - each by the same rule\n   - down to one item\n3. Merge\n\n\
> Simple things should be simple.\n\nMore at [an example](https://example.org/a/very/long/address/that/has/no/place/to/break/at/all/and/goes/on/and/on).\n\n\
averyveryveryveryveryveryveryveryveryveryveryveryverylongwordwithoutanyspacesinit";

fn background(tab: &Tab) -> String {
    tab.eval("getComputedStyle(document.body).backgroundColor").as_str().unwrap().to_owned()
}

#[test]
fn the_theme_follows_the_system_until_one_is_chosen() {
    on_page(|site, tab| {
        tab.prefer("light");
        let light = background(tab);
        tab.prefer("dark");
        let dark = background(tab);
        assert_ne!(light, dark);
        tab.click("#theme label:nth-of-type(2)");
        assert_eq!(background(tab), light);
        tab.reload();
        assert_eq!(background(tab), light, "the choice is kept");
        tab.click("#theme label:nth-of-type(3)");
        tab.prefer("light");
        assert_eq!(background(tab), dark);
        tab.click("#theme label:nth-of-type(1)");
        assert_eq!(background(tab), light);
        tab.picture("welcome-light");
        exchange(site, tab, "Compare bubble sort and merge sort, please.", RICH);
        tab.eval("document.querySelector('#scroll').scrollTop = 0");
        tab.picture("chat-light");
        tab.prefer("dark");
        tab.picture("chat-dark");
        tab.click("#open-settings");
        tab.picture("settings-dark");
        tab.press("Escape");
        tab.click("#tab-status");
        tab.wait_text("#status-running", "3");
        tab.picture("status-dark");
        tab.prefer("light");
        tab.picture("status-light");
    });
}

/// Nothing overflows horizontally, neither in the page nor in its scroll areas.
fn assert_fits(tab: &Tab, view: &str) {
    let wide = tab.eval(
        "[document.documentElement, document.querySelector('#scroll'), document.querySelector('#status'), ...document.querySelectorAll('dialog[open]')]
            .filter((e) => e.scrollWidth > e.clientWidth).map((e) => `${e.tagName} ${e.id} ${e.scrollWidth} > ${e.clientWidth}`)",
    );
    assert_eq!(wide, json!([]), "{view}");
    let outside = tab.eval(
        "[...document.querySelectorAll('button, textarea, input, a')].filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.closest('pre, .table, .segments, #sidebar'))
            .filter((e) => { const b = e.getBoundingClientRect(); return b.left < 0 || b.right > innerWidth + 0.5; }).map((e) => e.outerHTML.slice(0, 100))",
    );
    assert_eq!(outside, json!([]), "{view}");
}

#[test]
fn a_phone_has_no_sideways_scroll() {
    on_page(|site, tab| {
        for (width, height) in [(320, 568), (390, 844)] {
            tab.resize(width, height, true);
            tab.open(&site.address);
            tab.picture(&format!("phone-{width}-welcome"));
            assert_fits(tab, "welcome");
            tab.click("#prompt");
            tab.write("Compare bubble sort and merge sort, please.");
            // On touch screens Enter inserts a line break, because touch keyboards have no other key for it.
            tab.press("Enter");
            tab.click("#send");
            crate::complete(tab, site.asked().answer(), RICH);
            assert_fits(tab, "conversation");
            tab.eval("document.querySelector('#scroll').scrollTop = 0");
            tab.picture(&format!("phone-{width}-chat"));
            tab.click("#open-settings");
            assert_fits(tab, "settings");
            tab.picture(&format!("phone-{width}-settings"));
            tab.click("#settings [data-cancel]");
            tab.click("#tab-status");
            tab.wait_text("#status-running", "3");
            assert_fits(tab, "status");
            tab.picture(&format!("phone-{width}-status"));
            tab.click("#tab-cluster");
            tab.wait_text("#chain", "cellar");
            assert_fits(tab, "cluster");
            tab.picture(&format!("phone-{width}-cluster"));
            tab.click("#tab-chat");
            tab.click("#menu");
            tab.wait("document.activeElement.id === 'new-chat'");
            assert_eq!(tab.eval("document.querySelector('#stage').inert"), true, "the drawer holds the focus");
            tab.eval("Promise.all(document.getAnimations().map((a) => a.finished.catch(() => {})))");
            tab.picture(&format!("phone-{width}-drawer"));
            tab.press("Escape");
            tab.wait("!document.body.classList.contains('drawer') && document.activeElement.id === 'menu'");
            assert_eq!(
                tab.eval("document.querySelector('#sidebar').inert"),
                true,
                "what is not seen cannot be focused"
            );
        }
    });
}
