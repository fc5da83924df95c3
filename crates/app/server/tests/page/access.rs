//! Accessibility of the page: keyboard, screen reader and contrast.

use axum::http::StatusCode;
use serde_json::json;

use crate::axe::assert_accessible;
use crate::site::shared_status;
use crate::tab::Tab;
use crate::{complete, exchange, on_page, pick};

const RICH: &str = "# Title\n\nText with `code`, a [link](https://a.example) and\n\n> a quote\n\n- [x] done\n\n```js\nlet a;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |";

/// Presses Tab until the element that matches has the focus.
fn tab_to(tab: &Tab, selector: &str) {
    for _ in 0..60 {
        if tab.eval(&format!("document.activeElement.matches({})", json!(selector))) == true {
            let outlined = "(() => { const e = document.activeElement; const s = (x) => getComputedStyle(x);
                return e.matches('textarea, input') || s(e).outlineStyle !== 'none' || s(e.nextElementSibling ?? e).outlineStyle !== 'none'; })()";
            assert_eq!(tab.eval(outlined), true, "{selector} shows that it has the focus");
            return;
        }
        tab.press("Tab");
    }
    panic!("the Tab key does not reach {selector}");
}

#[test]
fn the_keyboard_alone_suffices() {
    on_page(|site, tab| {
        // The message box has the focus at start. Shift+Enter inserts a line break.
        tab.wait("document.activeElement.id === 'prompt'");
        tab.write("two");
        tab.press("Shift+Enter");
        tab.write("lines");
        tab.press("Enter");
        let asked = site.asked();
        assert_eq!(asked.body["messages"][0]["content"], "two\nlines");
        complete(tab, asked.answer(), "Yes");
        // An empty message is not sent.
        tab.press("Enter");
        tab_to(tab, "[data-edit]");
        tab.press("Enter");
        tab.wait("document.activeElement.matches('.edit textarea')");
        tab.press("Escape");
        tab.wait("document.activeElement.matches('[data-edit]')");
        tab_to(tab, "[aria-label='Regenerate']");
        tab.press("Enter");
        complete(tab, site.asked().answer(), "No");
        tab_to(tab, "#open-settings");
        tab.press("Enter");
        tab.wait("document.querySelector('#settings').open");
        tab.press("Escape");
        tab.wait("!document.querySelector('#settings').open && document.activeElement.id === 'open-settings'");
        tab_to(tab, "#theme input");
        tab.press("ArrowRight");
        tab.wait("document.documentElement.dataset.theme === 'light'");
        tab_to(tab, "#conversations .quiet");
        tab.press("Enter");
        tab.wait("document.querySelector('.menu:popover-open')");
        tab_to(tab, ".menu button");
        tab.press("Escape");
        tab.wait("!document.querySelector('.menu:popover-open')");
        tab_to(tab, "#tab-status");
        tab.press("Enter");
        tab.wait("!document.querySelector('#status').hidden");
        assert!(!site.was_asked());
    });
}

/// Finds controls without a name, duplicate ids, images without text, and headings that skip a level.
const FAULTS: &str = r##"(() => {
    const faults = [];
    const shown = (e) => e.checkVisibility({ visibilityProperty: true });
    const say = (what, e) => faults.push(`${what}: ${e.outerHTML.slice(0, 120)}`);
    const nameOf = (e) => {
        const by = e.getAttribute('aria-labelledby');
        if (by) return by.split(' ').map((id) => document.getElementById(id)?.textContent ?? '').join(' ').trim();
        return (e.getAttribute('aria-label') ?? ([...(e.labels ?? [])].map((l) => l.textContent).join(' ') || e.textContent)).trim();
    };
    for (const e of document.querySelectorAll('button, a, input, textarea, select, summary, dialog[open], [role=region], [tabindex="0"]'))
        if (shown(e) && !nameOf(e)) say('no name', e);
    for (const e of document.querySelectorAll('svg')) if (!e.closest('[aria-hidden=true]') && e.getAttribute('role') !== 'img') say('picture', e);
    const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
    for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) faults.push(`id ${id} twice`);
    for (const e of document.querySelectorAll('[aria-controls], [aria-labelledby]'))
        for (const id of `${e.getAttribute('aria-controls') ?? ''} ${e.getAttribute('aria-labelledby') ?? ''}`.split(' '))
            if (id && !document.getElementById(id)) say(`no #${id}`, e);
    if (document.querySelectorAll('main').length !== 1) faults.push('not one main');
    if ([...document.querySelectorAll('h1')].filter(shown).length !== 1) faults.push('not one h1');
    if (!document.documentElement.lang || !document.title) faults.push('no language or title');
    for (const e of document.querySelectorAll('button, summary, select'))
        if (shown(e) && (e.offsetWidth < 24 || e.offsetHeight < 24)) say('too small to hit', e);
    return faults;
})()"##;

/// Finds text whose contrast to its background is below 4.5 (3 for large text).
const FAINT: &str = r##"(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
    const rgba = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
    const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] / 255 + below[i] * (1 - top[3] / 255));
    const behind = (e) => e ? over(rgba(getComputedStyle(e).backgroundColor), behind(e.parentElement)) : [255, 255, 255];
    const light = (c) => c.map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const faint = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const e = node.parentElement;
        if (!node.data.trim() || !e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || e.closest('.unseen, :disabled, noscript')) continue;
        const back = behind(e), front = over(rgba(getComputedStyle(e).color), back);
        const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < (parseFloat(getComputedStyle(e).fontSize) >= 24 ? 3 : 4.5)) faint.push(`${ratio.toFixed(2)} ${node.data.trim().slice(0, 40)}`);
    }
    return faint;
})()"##;

#[test]
fn every_control_has_a_name_and_every_text_has_contrast() {
    on_page(|site, tab| {
        let check = |view: &str| {
            assert_eq!(tab.eval(FAULTS), json!([]), "{view}");
            for theme in ["light", "dark"] {
                tab.eval(&format!("document.documentElement.dataset.theme = '{theme}'"));
                tab.eval("Promise.all(document.getAnimations().filter((a) => a.effect.getTiming().iterations === 1).map((a) => a.finished.catch(() => {})))");
                assert_eq!(tab.eval(FAINT), json!([]), "{view}, {theme}");
            }
        };
        check("welcome");
        exchange(site, tab, "Show all", RICH);
        tab.click(".assistant [aria-label='Regenerate']");
        complete(tab, site.asked().answer(), RICH);
        check("conversation");
        tab.click("#open-settings");
        check("settings");
        tab.press("Escape");
        tab.click("#tab-status");
        site.set_status(StatusCode::OK, shared_status());
        tab.wait("!document.querySelector('#ranks').hidden");
        check("status");
        tab.click("#tab-cluster");
        tab.wait("!document.querySelector('#nodes').hidden");
        check("cluster");
    });
}

#[test]
fn axe_finds_nothing_in_any_view_on_a_desk_or_a_phone() {
    on_page(|site, tab| {
        tab.wait("document.querySelector('#state').dataset.kind === 'ready'");
        site.set_status(StatusCode::OK, shared_status());
        let check = |view: &str| assert_accessible(tab, view);
        // The test above compares the colours of both themes.
        for (width, height, theme) in [(1200, 800, "light"), (320, 568, "dark")] {
            let phone = width < 1000;
            tab.resize(width, height, phone);
            tab.eval(&format!("document.documentElement.dataset.theme = '{theme}'"));
            tab.click("#tab-chat");
            tab.eval("location.hash = '#chat'");
            tab.wait("!document.querySelector('#welcome').hidden");
            check(&format!("welcome, {width}"));
            pick(tab, "#pick-files", &[("a.py", "print(1)")]);
            tab.wait("document.querySelector('#attached .chip')");
            tab.click("#prompt");
            tab.write("Show all");
            tab.click("#send");
            let answer = site.asked().answer();
            answer.delta(json!({ "reasoning_content": "Thinking." }));
            complete(tab, answer, &format!("{RICH}\n\n$$\\frac{{a}}{{b}} + \\text{{{}}}$$", "wide ".repeat(40)));
            tab.wait("document.querySelector('.maths .katex')");
            tab.click(".fold summary");
            check(&format!("conversation, {width}"));
            tab.click("[data-edit]");
            check(&format!("edit, {width}"));
            tab.press("Escape");
            tab.click("#open-settings");
            check(&format!("settings, {width}"));
            tab.click("#settings [data-cancel]");
            if phone {
                tab.click("#menu");
                tab.wait("document.activeElement.id === 'new-chat'");
            }
            tab.fill("#search", "show");
            check(&format!("conversations, {width}"));
            tab.fill("#search", "");
            tab.click("#open-key");
            check(&format!("key, {width}"));
            tab.click("#key [data-cancel]");
            if phone {
                tab.eval("document.querySelector('#shade').click()");
                tab.wait("!document.body.classList.contains('drawer')");
            }
            tab.click("#tab-status");
            tab.wait("!document.querySelector('#ranks').hidden");
            check(&format!("status, {width}"));
            tab.click("#tab-cluster");
            tab.wait("!document.querySelector('#nodes').hidden");
            check(&format!("cluster, {width}"));
        }
        // A view that scrolls on a small screen takes the focus and so the keys that scroll.
        for view in ["cluster", "status"] {
            tab.click(&format!("#tab-{view}"));
            tab.wait(&format!("!document.querySelector('#{view}').hidden"));
            tab.eval("document.querySelector('#open-settings').focus()");
            tab.press("Tab");
            assert_eq!(tab.eval("document.activeElement.id"), view);
        }
    });
}

#[test]
fn those_who_want_no_motion_get_none() {
    on_page(|site, tab| {
        let features = json!([{ "name": "prefers-reduced-motion", "value": "reduce" }]);
        tab.call("Emulation.setEmulatedMedia", json!({ "features": features }));
        tab.write("Wait");
        tab.press("Enter");
        let asked = site.asked();
        tab.wait("document.querySelector('.wait i')");
        assert_eq!(tab.eval("document.getAnimations().length"), 0);
        complete(tab, asked.answer(), "Done");
    });
}
