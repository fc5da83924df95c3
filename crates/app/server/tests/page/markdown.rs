//! Markdown in answers: what the renderer supports, and what it must block.

use serde_json::json;

use crate::tab::Tab;
use crate::{exchange, on_page, send};

const BODY: &str = ".assistant:last-child .body";
/// The page's script, which exports its modules.
const BUNDLE: &str = "import(document.querySelector('script[type=module]').src)";

/// The HTML of a Markdown text, without classes and buttons.
fn render(tab: &Tab, source: &str) -> String {
    let script = format!(
        "(async () => {{
            const {{ LiveMarkdown }} = (await {BUNDLE}).modules['app/markdown/live.js'];
            const root = document.createElement('div');
            new LiveMarkdown(root).update({}, true);
            for (const extra of root.querySelectorAll('.code-head')) extra.remove();
            for (const span of root.querySelectorAll('pre span')) span.replaceWith(span.textContent);
            for (const element of root.querySelectorAll('*'))
                for (const name of ['class', 'tabindex', 'role', 'aria-label', 'scope', 'target', 'rel']) element.removeAttribute(name);
            return root.innerHTML;
        }})()",
        json!(source)
    );
    tab.eval(&script).as_str().unwrap().to_owned()
}

#[test]
fn markdown_becomes_elements() {
    on_page(|_, tab| {
        let check = |source: &str, wanted: &str| assert_eq!(render(tab, source), wanted, "{source:?}");
        check("plain", "<p>plain</p>");
        check("a\nb\n\nc", "<p>a<br>b</p><p>c</p>");
        check("# One\n## Two ##\n####### seven", "<h2>One</h2><h3>Two</h3><p>####### seven</p>");
        check("#tag\n# ", "<p>#tag</p><h2></h2>");
        check(
            "**bold** *it* _it_ ~~gone~~ ***both***",
            "<p><strong>bold</strong> <em>it</em> <em>it</em> <del>gone</del> <em><strong>both</strong></em></p>",
        );
        check("snake_case_name 2*3*4 2 * 3 ** 4", "<p>snake_case_name 2<em>3</em>4 2 * 3 ** 4</p>");
        check("**a *b* c** *a **b** c*", "<p><strong>a <em>b</em> c</strong> <em>a <strong>b</strong> c</em></p>");
        check("**open *crossed", "<p>**open *crossed</p>");
        check("`a *b* <c>` ``x`y`` `open", "<p><code>a *b* &lt;c&gt;</code> <code>x`y</code> `open</p>");
        check("\\*no\\* \\# 5 &lt; 6 &amp;&#33; &unknown;", "<p>*no* # 5 &lt; 6 &amp;! &amp;unknown;</p>");
        check(
            "[text](https://a.example/b?c=d) <https://e.example>",
            "<p><a href=\"https://a.example/b?c=d\">text</a> <a href=\"https://e.example/\">https://e.example</a></p>",
        );
        check(
            "see https://a.example/x_(y). (https://b.example)",
            "<p>see <a href=\"https://a.example/x_(y)\">https://a.example/x_(y)</a>. (<a href=\"https://b.example/\">https://b.example</a>)</p>",
        );
        check(
            "[*a* `b`](mailto:me@a.example \"title\") [no](relative) [x]",
            "<p><a href=\"mailto:me@a.example\"><em>a</em> <code>b</code></a> [no](relative) [x]</p>",
        );
        check("![alt](https://a.example/p.png)", "<p><a href=\"https://a.example/p.png\">alt</a></p>");
        check("---\n* * *\n--", "<hr><hr><p>--</p>");
        check(
            "> a\n> b\nlazy\n\n> > deep",
            "<blockquote><p>a<br>b<br>lazy</p></blockquote><blockquote><blockquote><p>deep</p></blockquote></blockquote>",
        );
        check(
            "```rust\nfn a() {}\n\n  b\n```\nafter",
            "<div><pre><code>fn a() {}\n\n  b</code></pre></div><p>after</p>",
        );
        check("~~~\n```\n~~~", "<div><pre><code>```</code></pre></div>");
        check(
            "- a\n- b\n  - c\n    1. d\n- e",
            "<ul><li>a</li><li>b<ul><li>c<ol><li>d</li></ol></li></ul></li><li>e</li></ul>",
        );
        check(
            "1. a\n  - b\n2. c\n\n   more",
            "<ol><li><p>a</p><ul><li>b</li></ul></li><li><p>c</p><p>more</p></li></ol>",
        );
        check("3) a\n4) b\n- c", "<ol start=\"3\"><li>a</li><li>b</li></ol><ul><li>c</li></ul>");
        check("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>");
        check(
            "- [x] a\n- [ ] b",
            "<ul><li><input type=\"checkbox\" disabled=\"\" checked=\"\">a</li><li><input type=\"checkbox\" disabled=\"\">b</li></ul>",
        );
        check("- a\n  ```\n  code\n  ```\n- b", "<ul><li>a<div><pre><code>code</code></pre></div></li><li>b</li></ul>");
        check("in 1990. Yes\n1990. no list", "<p>in 1990. Yes<br>1990. no list</p>");
        check("text\n- item", "<p>text</p><ul><li>item</li></ul>");
        check(
            "| a | b |\n|---|--:|\n| `x\\|y` | **1** |\n| only |\nafter",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td><code>x|y</code></td><td><strong>1</strong></td></tr><tr><td>only</td><td></td></tr></tbody></table></div><p>after</p>",
        );
        check(
            "a | b\n--|--\n1<br>2 | 3",
            "<div><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1<br>2</td><td>3</td></tr></tbody></table></div>",
        );
        check("a | b\nc", "<p>a | b<br>c</p>");
        check("<div>raw</div>", "<p>&lt;div&gt;raw&lt;/div&gt;</p>");
    });
}

#[test]
fn hostile_markup_stays_text() {
    on_page(|site, tab| {
        let attacks = [
            "<img src=x onerror=\"window.hacked=1\">",
            "<script>window.hacked=1</script>",
            "<svg onload=window.hacked=1>",
            "<iframe srcdoc=\"<script>parent.hacked=1</script>\"></iframe>",
            "[a](javascript:window.hacked=1)",
            "[b](JaVaScRiPt:window.hacked=1)",
            "[c](java\tscript:window.hacked=1)",
            "[d](<java&#115;cript:window.hacked=1>)",
            "[e](data:text/html,<script>window.hacked=1</script>)",
            "[f](vbscript:x) [g](file:///etc/passwd) [h](//evil.example)",
            "![i](javascript:window.hacked=1) ![j](https://evil.example/track.png)",
            "<javascript:window.hacked=1>",
            "[k](https://ok.example/\" onclick=\"window.hacked=1)",
            "[l](https://ok.example/'onmouseover='window.hacked=1)",
            "`</code><script>window.hacked=1</script>`",
            "```\"><script>window.hacked=1</script>\n</pre><script>window.hacked=1</script>\n```",
            "| <img src=x onerror=window.hacked=1> | b |\n|---|---|\n| <script>window.hacked=1</script> | &lt;img src=x onerror=window.hacked=1&gt; |",
            "# <img src=x onerror=window.hacked=1>",
            "[<img src=x onerror=window.hacked=1>](https://ok.example)",
        ];
        exchange(site, tab, "<img src=x onerror=\"window.hacked=1\">", &attacks.join("\n\n"));
        assert_eq!(tab.eval("window.hacked ?? null"), json!(null));
        let banned =
            "script, img, iframe, object, embed, style, link, form, svg:not(.icon), input:not([type=checkbox])";
        assert_eq!(tab.eval(&format!("document.querySelector('{BODY}').querySelectorAll('{banned}').length")), 0);
        let handlers = format!(
            "[...document.querySelectorAll('{BODY} *')].flatMap((e) => e.getAttributeNames()).filter((n) => n.startsWith('on') || n === 'style' || n === 'src').length"
        );
        assert_eq!(tab.eval(&handlers), 0);
        let schemes = format!(
            "[...new Set([...document.querySelectorAll('{BODY} a')].map((a) => a.protocol + a.rel + a.target))]"
        );
        assert_eq!(tab.eval(&schemes), json!(["https:noopener noreferrer nofollow_blank"]));
        assert!(tab.text(BODY).contains("<img src=x onerror=\"window.hacked=1\">"));
        assert_eq!(tab.text(".user .body"), "<img src=x onerror=\"window.hacked=1\">");
    });
}

#[test]
fn the_policy_refuses_to_make_markup_or_code_from_text() {
    on_page(|_, tab| {
        tab.expect_error("Trusted");
        for attack in [
            "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
            "document.body.innerHTML = '<b>x</b>'",
            "document.querySelector('#send').setAttribute('onclick', 'window.hacked = 1')",
            "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.hacked = 1' }))",
            "eval('window.hacked = 1')",
        ] {
            let refused =
                tab.eval(&format!("(() => {{ try {{ {attack}; return false; }} catch {{ return true; }} }})()"));
            assert_eq!(refused, true, "{attack}");
        }
        assert_eq!(tab.eval("window.hacked ?? null"), json!(null));
    });
}

#[test]
fn growing_text_ends_as_the_whole_text_does() {
    on_page(|_, tab| {
        // Fragments that affect each other, in random order, cut at random places, with a fixed seed.
        let script = r##"(async () => {
            const { modules } = await import(document.querySelector('script[type=module]').src);
            const { LiveMarkdown } = modules['app/markdown/live.js'];
            await modules['app/markdown/maths.js'].loadMaths();
            let seed = 7;
            const random = (n) => { seed = (Math.imul(seed, 1103515245) + 12345) >>> 0; return (seed >>> 8) % n; };
            const pieces = ['#', '# Title', '\n', '\n\n', '- item', '\n  - deeper', '1. one', '```', '```js\n', '| a | b |', '\n|---|---|\n', '|-', '> quote',
                '**', '*', '`', '_', '[a](https://a.example', ')', 'word ', 'two words', '---', '\n===\n', '    code', '~~', '&amp;', '<b>', '\t', '- [x] ', '\\', 'é😀', '$', '$x_1$', '$$', '\n$$\n', '\\(', '\\)', '\\[\na', '\\]\n'];
            let updates = 0;
            for (let round = 0; round < 400; round += 1) {
                const text = Array.from({ length: 1 + random(24) }, () => pieces[random(pieces.length)]).join('');
                const whole = document.createElement('div'), grown = document.createElement('div');
                new LiveMarkdown(whole).update(text, true);
                const settled = [];
                const live = new LiveMarkdown(grown, (element) => settled.push(element));
                for (let end = 0; end < text.length; end += 1 + random(5), updates += 1) live.update(text.slice(0, end));
                live.update(text, true);
                if (grown.innerHTML !== whole.innerHTML) return [text, grown.innerHTML, whole.innerHTML];
                if (settled.length !== grown.childElementCount || settled.some((element) => element.parentNode !== grown)) return [text, 'settled too early'];
            }
            return updates;
        })()"##;
        let result = tab.eval(script);
        assert!(result.as_u64().is_some_and(|updates| updates > 1000), "{result:#}");
    });
}

#[test]
fn what_is_settled_keeps_its_elements_while_the_answer_grows() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Write").answer();
        answer.write("First.\n\nSecond **bo");
        tab.wait_text(BODY, "Second");
        assert_eq!(tab.text(&format!("{BODY} strong")), "bo", "bold shows before it is closed");
        tab.eval(&format!("window.first = document.querySelector('{BODY} p')"));
        answer.write("ld**.\n\n```js\nlet a = 1;\n");
        tab.wait("document.querySelector('.code code').textContent.includes('a = 1')");
        tab.eval("window.code = document.querySelector('.code')");
        answer.write("let b = 2;\n");
        tab.wait_text(".code code", "b = 2");
        assert_eq!(tab.eval("window.code === document.querySelector('.code')"), true);
        answer.write("```\n\nEnd.");
        tab.wait_text(BODY, "End.");
        assert_eq!(tab.eval(&format!("window.first === document.querySelector('{BODY} p')")), true);
        assert_eq!(tab.text(".code code"), "let a = 1;\nlet b = 2;");
        assert_eq!(tab.count(".code .code-word"), 2, "complete code has colour");
        answer.finish("stop");
        tab.wait_text("#announcer", "Answer complete");
        let heard = tab.eval("[...document.querySelector('#announcer').children].map((p) => p.textContent)");
        assert_eq!(heard, json!(["tiny-model", "First.", "Second bold.", "Code, 2 lines", "End.", "Answer complete"]));
    });
}

#[test]
fn code_and_messages_can_be_copied() {
    on_page(|site, tab| {
        exchange(site, tab, "Code", "Here:\n\n```sh\necho hi\n```");
        tab.eval("navigator.clipboard.writeText = async (text) => { window.copied = text; }");
        tab.click("[aria-label='Copy code']");
        tab.wait("window.copied === 'echo hi'");
        tab.click(".assistant [aria-label='Copy message']");
        tab.wait("window.copied?.startsWith('Here:')");
    });
}

#[test]
fn folds_notes_and_small_letters_are_elements_and_other_html_is_text() {
    on_page(|_, tab| {
        let check = |source: &str, wanted: &str| assert_eq!(render(tab, source), wanted, "{source:?}");
        check(
            "H<sub>2</sub>O, x<SUP>**n**</SUP>, <kbd>Esc</kbd>",
            "<p>H<sub>2</sub>O, x<sup><strong>n</strong></sup>, <kbd>Esc</kbd></p>",
        );
        check(
            "<sub>open <sup></sup> <b>no</b>",
            "<p>&lt;sub&gt;open &lt;sup&gt;&lt;/sup&gt; &lt;b&gt;no&lt;/b&gt;</p>",
        );
        check("<sub><img src=x onerror=alert(1)></sub>", "<p><sub>&lt;img src=x onerror=alert(1)&gt;</sub></p>");
        check(
            "<details>\n<summary>More *here*</summary>\n\n- a\n- b\n\n</details>\n\nafter",
            "<details><summary><span>More <em>here</em></span></summary><div><ul><li>a</li><li>b</li></ul></div></details><p>after</p>",
        );
        check(
            "before\n<details open><summary>One</summary>two</details>",
            "<p>before</p><details open=\"\"><summary><span>One</span></summary><div><p>two</p></div></details>",
        );
        check(
            "<details>\n<details>\nin\n</details>\nout\n</details>",
            "<details><summary><span>Details</span></summary><div><details><summary><span>Details</span></summary><div><p>in</p></div></details><p>out</p></div></details>",
        );
        check("<details onclick=\"x\">\nno", "<p>&lt;details onclick=\"x\"&gt;<br>no</p>");
        let note = render(tab, "Said[^1] and [^0-9] and[^b].\n\n[^1]: The **first**\nline\n[^b]: second\n");
        assert_eq!(
            note,
            "<p>Said<sup><button type=\"button\" data-note=\"1\">1</button></sup> and [^0-9] and<sup><button type=\"button\" data-note=\"b\">b</button></sup>.</p>\
            <div data-label=\"1\"><sup><button type=\"button\">1</button></sup><div><p>The <strong>first</strong><br>line</p></div></div>\
            <div data-label=\"b\"><sup><button type=\"button\">b</button></sup><div><p>second</p></div></div>"
        );
    });
}

#[test]
fn a_note_that_comes_late_is_joined_to_its_reference() {
    on_page(|site, tab| {
        let answer = send(site, tab, "Cite").answer();
        answer.write("It is so[^1].\n\nAnd so on.\n\nMore.\n\nMore.\n\n");
        tab.wait("document.querySelectorAll('.assistant p').length >= 4");
        assert_eq!(tab.count(".assistant .note"), 0);
        answer.write("[^1]: A book");
        tab.wait("document.querySelectorAll('.assistant p .note').length === 1");
        answer.write(", page 4.\n\n<details>\n<summary>More</summary>\n\nhidden **text**");
        tab.wait("document.querySelector('.markdown details strong')");
        tab.click(".markdown details summary");
        answer.write("\n\nstill hidden");
        tab.wait_text(".markdown details", "still hidden");
        assert_eq!(
            tab.eval("document.querySelector('.markdown details').open"),
            true,
            "it stays as it is while it grows"
        );
        answer.finish("stop");
        tab.wait("!document.querySelector('.message.running')");
        tab.click(".assistant p .note");
        tab.wait("document.activeElement.matches('.footnote')");
        tab.click(".footnote .note");
        tab.wait("document.activeElement.dataset.note === '1'");
        assert!(tab.eval("location.hash").as_str().unwrap().starts_with("#chat/"), "the page stays where it is");
        crate::axe::assert_accessible(tab, "folds and footnotes");
        tab.picture("folds");
    });
}

#[test]
fn diffs_and_html_have_their_colours() {
    on_page(|site, tab| {
        let text = "```diff\n--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n```\n\n\
            ```html\n<!-- why -->\n<a href=\"#x\" class='b'>don't</a>\n```\n";
        exchange(site, tab, "Show", text);
        let spans = |number: u32, kind: &str| {
            tab.eval(&format!(
                "[...document.querySelectorAll('.code')[{number}].querySelectorAll('.code-{kind}')].map((span) => span.textContent)"
            ))
        };
        assert_eq!(spans(0, "added"), json!(["+new"]));
        assert_eq!(spans(0, "removed"), json!(["-old"]));
        assert_eq!(spans(0, "word"), json!(["@@ -1,2 +1,2 @@"]));
        assert_eq!(spans(0, "comment"), json!(["--- a/x", "+++ b/x"]));
        assert_eq!(spans(1, "comment"), json!(["<!-- why -->"]));
        assert_eq!(spans(1, "word"), json!(["<a", ">", "</a", ">"]));
        assert_eq!(spans(1, "string"), json!(["\"#x\"", "'b'"]));
        assert_eq!(spans(1, "number"), json!(["href", "class"]));
        for scheme in ["light", "dark"] {
            tab.prefer(scheme);
            crate::axe::assert_accessible(tab, scheme);
            tab.picture(&format!("diff-{scheme}"));
        }
    });
}
