//! Formulas in answers. KaTeX is fetched when the first one appears.

use serde_json::{Value, json};

use crate::tab::Tab;
use crate::{complete, exchange, on_page, send};

const BODY: &str = ".assistant:last-child .body";

/// The sources of the formulas that were drawn, as KaTeX keeps them for screen readers.
fn formulas(tab: &Tab) -> Value {
    tab.eval(&format!("[...document.querySelectorAll('{BODY} annotation')].map((a) => a.textContent)"))
}

/// How many files were fetched whose path matches a regular expression.
fn fetched(tab: &Tab, path: &str) -> u64 {
    let count = format!(
        "performance.getEntriesByType('resource').filter((entry) => /{path}/.test(new URL(entry.name).pathname)).length"
    );
    tab.eval(&count).as_u64().unwrap()
}

#[test]
fn the_page_is_one_script_and_one_style_until_there_is_a_formula() {
    on_page(|site, tab| {
        exchange(site, tab, "How much?", "Between $5 and $6, so *about* $5.50 or $HOME/x:$PATH. And `$x$` is code.");
        assert_eq!(fetched(tab, "page.app-"), 2, "app.js and app.css");
        assert_eq!(fetched(tab, "page.(?!app-|icon-)"), 0, "nothing else but the icon");
        assert_eq!(tab.count(".maths"), 0);
        assert!(tab.text(BODY).contains("Between $5 and $6, so about $5.50 or $HOME/x:$PATH."));
        exchange(site, tab, "And now?", "$x^2$");
        tab.wait("document.querySelector('.maths .katex')");
        assert_eq!((fetched(tab, "page.katex-"), fetched(tab, "page.app-")), (2, 2), "katex.js and katex.css");
    });
}

#[test]
fn variables_and_amounts_are_no_formulas() {
    on_page(|site, tab| {
        let texts =
            ["copy $src/$dst now", "set $name=$value", "$5-per-unit and 6$ off", "from $5/month or 6$", "$a:$b.$c"];
        exchange(site, tab, "Text", &texts.join("\n\n"));
        for text in texts {
            tab.wait_text(BODY, text);
        }
        assert_eq!(tab.count(".maths"), 0);
        exchange(site, tab, "Maths", "the $n$th, $x$-axis, $2x + ab + c$ and $a+$.");
        tab.wait(&format!("document.querySelectorAll('{BODY} .katex').length === 4"));
        assert_eq!(formulas(tab), json!(["n", "x", "2x + ab + c", "a+"]));
    });
}

#[test]
fn formulas_are_drawn_in_all_their_notations() {
    on_page(|site, tab| {
        let text = "Let $a_1 * b_1 * c$ and \\(\\vec{d}\\) be **bold $e$**.\n\nThen:\n$$\n\\boxed{\\frac{f}{g}} =\n\\sqrt{h}\n$$\nand\n\n\
            \\[ \\left(\\begin{matrix} i \\\\ j \\\\ k \\end{matrix}\\right) \\]\n\n- in a list: $$l$$ goes on\n\n| $m$ |\n|---|\n| $n$ |\n";
        exchange(site, tab, "Maths", text);
        tab.wait(&format!("document.querySelectorAll('{BODY} .katex').length === 8"));
        let wanted = json!([
            "a_1 * b_1 * c",
            "\\vec{d}",
            "e",
            "\\boxed{\\frac{f}{g}} =\n\\sqrt{h}",
            "\\left(\\begin{matrix} i \\\\ j \\\\ k \\end{matrix}\\right)",
            "l",
            "m",
            "n",
        ]);
        let drawn = formulas(tab);
        assert_eq!(drawn.as_array().unwrap().len(), 8, "{drawn}");
        assert_eq!(drawn, wanted);
        assert_eq!(tab.count(".maths.display"), 3);
        // KaTeX's fonts and its styles are in use, although the policy refuses style attributes.
        tab.wait("document.fonts.check('16px KaTeX_Main')");
        let width = "getComputedStyle(document.querySelector('.katex svg[style]')).width !== 'auto'";
        assert_eq!(tab.eval(width), true);
        tab.picture("maths");
        tab.resize(320, 568, true);
        let wide = "document.querySelector('#scroll').scrollWidth > document.querySelector('#scroll').clientWidth";
        assert_eq!(tab.eval(wide), false);
        tab.picture("maths-320");
    });
}

#[test]
fn a_formula_that_is_being_written_is_shown_as_it_is() {
    on_page(|site, tab| {
        exchange(site, tab, "First", "$x$");
        tab.wait("document.querySelector('.maths .katex')");
        let answer = send(site, tab, "Second").answer();
        answer.write("$$\n\\frac{a}{");
        tab.wait_text(BODY, "\\frac{a}{");
        assert_eq!(tab.eval(&format!("document.querySelectorAll('{BODY} .katex').length")), 0);
        answer.write("b}\n$$\n\nand \\(c_1");
        tab.wait_text(BODY, "c_1");
        assert_eq!(formulas(tab), json!(["\\frac{a}{b}"]));
        answer.write(" * d_2\\) done");
        tab.wait_text(BODY, "done");
        assert_eq!(formulas(tab), json!(["\\frac{a}{b}", "c_1 * d_2"]));
        complete(tab, answer, ".");
        let heard = "[...document.querySelector('#announcer').children].map((p) => p.textContent).slice(-3)";
        tab.wait_text("#announcer", "and c_1 * d_2 done.");
        assert_eq!(tab.eval(heard), json!(["\\frac{a}{b}", "and c_1 * d_2 done.", "Answer complete"]));
    });
}

#[test]
fn hostile_and_broken_formulas_stay_text() {
    on_page(|site, tab| {
        let attacks = [
            "$\\href{javascript:window.hacked=1}{x}$",
            "$\\htmlStyle{color:red}{x}$",
            "$\\includegraphics{https://evil.example/track.png}$",
            "$\\def\\a{\\a\\a}\\a$",
            "$\\frac{a$",
            "$\\unknowncommand$",
            "$\\rule{1000000em}{1000000em}$",
        ];
        exchange(site, tab, "Attack", &format!("{}\n\n$ok$", attacks.join("\n\n")));
        tab.wait("document.querySelector('.maths .katex')");
        assert_eq!(tab.eval("window.hacked ?? null"), json!(null));
        assert_eq!(tab.eval(&format!("document.querySelectorAll('{BODY} :is(a, img, script)').length")), 0);
        tab.wait_text(BODY, "\\frac{a");
        tab.wait_text(BODY, "\\def\\a{\\a\\a}\\a");
        let large = "[...document.querySelectorAll('.maths')].every((m) => m.getBoundingClientRect().height < 1000)";
        assert_eq!(tab.eval(large), true);
    });
}
