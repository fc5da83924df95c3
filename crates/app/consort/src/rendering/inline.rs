//! `Inline`: the Markdown within one line, as it streams: emphasis, code, links.
//!
//! Text that may begin a pair of marks is held back until the second one has come, so nothing that was printed has to be
//! taken back; but no more than [`HELD_BYTES_MAX`] of it. Marks without a partner are text.

use super::style::{Span, Style};

/// The longest text between two marks.
const HELD_BYTES_MAX: usize = 1000;

/// Characters that a backslash makes text. The others keep it, as `\(` in a formula.
const ESCAPABLE: &str = "\\`*_#+-.!|~<>";

pub struct Inline {
    /// The style around the text.
    style: Style,
    held: String,
    previous: Option<char>,
    /// The last characters are part of an address, in which no mark has a meaning.
    is_address: bool,
}

/// What a text that begins with a mark is.
enum Found {
    /// So many bytes are this.
    Spans(usize, Vec<Span>),
    /// So many bytes are text.
    Text(usize),
    /// More has to come.
    Unknown,
}

impl Inline {
    pub fn new(style: Style) -> Self {
        Self { style, held: String::new(), previous: None, is_address: false }
    }

    /// The next text of the line. Gives `print` what is final.
    pub fn push(&mut self, text: &str, print: &mut impl FnMut(&str, Style)) {
        for c in text.chars() {
            self.held.push(c);
            self.parse(false, print);
        }
    }

    /// The end of the line.
    pub fn finish(&mut self, print: &mut impl FnMut(&str, Style)) {
        self.parse(true, print);
        self.previous = None;
        self.is_address = false;
    }

    fn parse(&mut self, is_end: bool, print: &mut impl FnMut(&str, Style)) {
        while !self.held.is_empty() {
            let is_whole = is_end || self.held.len() > HELD_BYTES_MAX;
            match self.find(is_whole) {
                Found::Unknown => return,
                Found::Spans(bytes, spans) => {
                    self.note(bytes);
                    spans.iter().for_each(|span| print(&span.text, span.style));
                }
                Found::Text(bytes) => {
                    let text = self.note(bytes);
                    print(&text, self.style);
                }
            }
        }
    }

    /// Takes so many bytes.
    fn note(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        let taken = std::mem::replace(&mut self.held, rest);
        for c in taken.chars() {
            self.is_address = match c {
                '/' if self.previous == Some('/') => true,
                ')' | ']' | '>' | '"' => false,
                c => self.is_address && !c.is_whitespace(),
            };
            self.previous = Some(c);
        }
        taken
    }

    /// What the held text begins with. `is_whole`: nothing that comes can change it.
    fn find(&self, is_whole: bool) -> Found {
        let text = self.held.as_str();
        let Some(first) = text.chars().next() else { return Found::Unknown };
        let found = match first {
            '\\' => escape(text, self.style),
            '`' => code(text, self.style),
            '*' | '_' | '~' if !self.is_address => self.emphasis(text, first, is_whole),
            '[' => link(text, self.style),
            '!' => image(text, self.style),
            '<' => tag(text, self.style),
            _ => return Found::Text(first.len_utf8()),
        };
        match found {
            Found::Unknown if is_whole && first == '`' => Found::Text(run(text, '`')),
            Found::Unknown if is_whole => Found::Text(first.len_utf8()),
            found => found,
        }
    }

    fn emphasis(&self, text: &str, mark: char, is_whole: bool) -> Found {
        let run = run(text, mark);
        let Some(next) = text[run..].chars().next() else {
            return if is_whole { Found::Text(run) } else { Found::Unknown };
        };
        let is_within_word = match mark {
            '_' => self.previous.is_some_and(char::is_alphanumeric),
            // Languages without spaces have it within words.
            _ => self.previous.is_some_and(|c| c.is_ascii_alphanumeric()),
        };
        let style = match (mark, run) {
            ('~', 2) => Style::STRIKE,
            ('~', _) => return Found::Text(run),
            (_, 1) => Style::ITALIC,
            (_, 2) => Style::BOLD,
            (_, 3) => Style::BOLD.and(Style::ITALIC),
            _ => return Found::Text(run),
        };
        if next.is_whitespace() || is_within_word {
            return Found::Text(run);
        }
        match closing(&text[run..], mark, run, is_whole) {
            Some(end) => {
                let inner = spans(&text[run..run + end], self.style.and(style));
                Found::Spans(run + end + run, inner)
            }
            None if is_whole => Found::Text(run),
            None => Found::Unknown,
        }
    }
}

/// The spans of a whole text.
pub fn spans(text: &str, style: Style) -> Vec<Span> {
    let (mut inline, mut spans) = (Inline::new(style), Vec::<Span>::new());
    let mut print = |text: &str, style| match spans.last_mut() {
        Some(last) if last.style == style => last.text.push_str(text),
        _ => spans.push(Span { text: text.to_owned(), style }),
    };
    inline.held.push_str(text);
    // No mark of a text this long is without its partner because of the limit.
    inline.parse(true, &mut print);
    spans
}

/// The number of marks that a text begins with.
fn run(text: &str, mark: char) -> usize {
    text.len() - text.trim_start_matches(mark).len()
}

/// Where in `text` so many marks end an emphasis. It does not matter what comes later, except that a run of marks may
/// become longer.
fn closing(text: &str, mark: char, marks: usize, is_whole: bool) -> Option<usize> {
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        match c {
            '\\' => at += 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            '`' => {
                let ticks = run(rest, '`');
                at += match code_end(&rest[ticks..], ticks) {
                    Some(end) => ticks + end + ticks,
                    None if is_whole => ticks,
                    None => return None,
                };
            }
            c if c == mark => {
                let run = run(rest, mark);
                let next = rest[run..].chars().next();
                if next.is_none() && !is_whole {
                    return None;
                }
                let follows_text = text[..at].chars().next_back().is_some_and(|c| !c.is_whitespace());
                let is_within_word = mark == '_' && next.is_some_and(char::is_alphanumeric);
                // Of three marks, the last ones may belong to the outer of two emphases.
                let fits = run == marks || (run == 3 && marks < 3);
                if follows_text && !is_within_word && fits {
                    return Some(at + run - marks);
                }
                at += run;
            }
            c => at += c.len_utf8(),
        }
    }
    None
}

/// Where in `text` so many backticks are.
fn code_end(text: &str, ticks: usize) -> Option<usize> {
    let mut at = 0;
    while let Some(start) = text[at..].find('`') {
        let run = run(&text[at + start..], '`');
        if run == ticks {
            return Some(at + start);
        }
        at += start + run;
    }
    None
}

fn escape(text: &str, style: Style) -> Found {
    match text[1..].chars().next() {
        None => Found::Unknown,
        Some(c) if ESCAPABLE.contains(c) => Found::Spans(2, vec![Span { text: c.to_string(), style }]),
        Some(_) => Found::Text(1),
    }
}

fn code(text: &str, style: Style) -> Found {
    let ticks = run(text, '`');
    let Some(end) = code_end(&text[ticks..], ticks) else { return Found::Unknown };
    // A run at the end may become longer, and is then another mark.
    let bytes = ticks + end + ticks;
    let code = &text[ticks..ticks + end];
    let padded = code.strip_prefix(' ').and_then(|code| code.strip_suffix(' '));
    let code = padded.filter(|code| !code.trim().is_empty()).unwrap_or(code);
    Found::Spans(bytes, vec![Span { text: code.to_owned(), style: style.and(Style::CODE) }])
}

/// `[text](address)`, as the text with the address after it.
fn link(text: &str, style: Style) -> Found {
    let Some((words, rest)) = bracketed(text, '[', ']') else { return Found::Unknown };
    if rest.is_empty() {
        return Found::Unknown;
    }
    if !rest.starts_with('(') {
        return Found::Text(1);
    }
    let Some((target, rest)) = bracketed(rest, '(', ')') else { return Found::Unknown };
    let (address, title) = target.trim().split_once(char::is_whitespace).unwrap_or((target.trim(), ""));
    if !title.is_empty() && !title.trim_start().starts_with(['"', '\'', '(']) {
        return Found::Text(1);
    }
    let address = address.trim_matches(['<', '>']);
    let mut linked = spans(words, style.and(Style::UNDERLINE));
    if !address.is_empty() && address != words {
        linked.push(Span { text: format!(" ({address})"), style: style.and(Style::DIM) });
    }
    Found::Spans(text.len() - rest.len(), linked)
}

fn image(text: &str, style: Style) -> Found {
    match &text[1..] {
        "" => Found::Unknown,
        rest if rest.starts_with('[') => match link(rest, style) {
            Found::Spans(bytes, spans) => Found::Spans(1 + bytes, spans),
            found => found,
        },
        _ => Found::Text(1),
    }
}

/// `<https://…>` and `<br>`; other tags are text.
fn tag(text: &str, style: Style) -> Found {
    let Some(end) = text.find('>') else {
        let is_address = |begin: &&str| text.starts_with(begin) && !text.contains(char::is_whitespace);
        let is_begun = ["<http://", "<https://", "<br />", "<br/"].iter().any(|tag| tag.starts_with(text));
        let is_possible = is_begun || ["<http://", "<https://"].iter().any(is_address);
        return if is_possible { Found::Unknown } else { Found::Text(1) };
    };
    let inner = &text[1..end];
    if matches!(inner.trim_end_matches(['/', ' ']), "br") {
        return Found::Spans(end + 1, vec![Span { text: "\n".to_owned(), style }]);
    }
    let is_address = inner.starts_with("http://") || inner.starts_with("https://");
    if is_address && !inner.contains(char::is_whitespace) {
        return Found::Spans(end + 1, vec![Span { text: inner.to_owned(), style: style.and(Style::UNDERLINE) }]);
    }
    Found::Text(1)
}

/// The text in the brackets that `text` begins with, and what follows them.
fn bracketed(text: &str, open: char, close: char) -> Option<(&str, &str)> {
    let (mut depth, mut is_escaped) = (0, false);
    for (at, c) in text.char_indices() {
        if is_escaped {
            is_escaped = false;
        } else if c == '\\' {
            is_escaped = true;
        } else if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
            if depth == 0 {
                return Some((&text[open.len_utf8()..at], &text[at + close.len_utf8()..]));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is printed, with the styles as tags. It must be the same for pieces of any size.
    #[track_caller]
    fn check(text: &str, expected: &str) {
        for piece_chars in 1..=text.chars().count().max(1) {
            let (mut inline, mut out, mut open) = (Inline::new(Style::PLAIN), String::new(), Style::PLAIN);
            let mut print = |text: &str, style: Style| {
                if style != open {
                    out.push_str(&format!("<{}>", name(style)));
                    open = style;
                }
                out.push_str(text);
            };
            let chars: Vec<char> = text.chars().collect();
            chars.chunks(piece_chars).for_each(|piece| inline.push(&piece.iter().collect::<String>(), &mut print));
            inline.finish(&mut print);
            assert_eq!(out, expected, "{text:?} in pieces of {piece_chars}");
        }
    }

    fn name(style: Style) -> String {
        let names = [
            (style.bold, "b"),
            (style.dim, "d"),
            (style.italic, "i"),
            (style.underline, "u"),
            (style.strike, "s"),
            (style.code, "c"),
        ];
        names.into_iter().filter_map(|(is_set, name)| is_set.then_some(name)).collect()
    }

    #[test]
    fn emphasis_is_between_marks() {
        check("a **b c** d", "a <b>b c<> d");
        check("*a* _b_ __c__", "<i>a<> <i>b<> <b>c");
        check("***a*** b", "<bi>a<> b");
        check("**a *b* c** d", "<b>a <bi>b<b> c<> d");
        check("**a *b*** d", "<b>a <bi>b<> d");
        check("*a **b** c* d", "<i>a <bi>b<i> c<> d");
        check("~~old~~ new", "<s>old<> new");
        check("这是**重点**内容", "这是<b>重点<>内容");
        check("**日本**", "<b>日本");
    }

    #[test]
    fn marks_without_a_partner_are_text() {
        for text in [
            "2 * 3 * 4",
            "2*3*4",
            "snake_case_name",
            "f(**kwargs)",
            "a ** b",
            "*",
            "**",
            "`",
            "~",
            "~a~",
            "[",
            "a [b] c",
            "[ ] task",
            "[a](b",
            "!",
            "!a",
            "![a",
            "<",
            "a < b",
            "<b>",
            "Vec<T>",
            "\\",
            "**a",
            "`a",
            "``a`",
            "[^1]",
            "[a](b c)",
            "5 * x",
            "https://a.example/_b_/c_d",
            "\\(x\\) \\[y\\]",
            "a  b",
            "!!",
            "****",
            "x<y and y>z",
        ] {
            check(text, text);
        }
    }

    #[test]
    fn code_keeps_its_characters() {
        check("a `b*c*` d", "a <c>b*c*<> d");
        check("``a`b``", "<c>a`b");
        check("`` ` ``", "<c>`");
        check("**a `b**` c**", "<b>a <bc>b**<b> c");
        check("`a`b", "<c>a<>b");
    }

    #[test]
    fn links_are_text_with_an_address() {
        check(
            "see [the *page*](https://a.example/x_y_z) now",
            "see <u>the <iu>page<d> (https://a.example/x_y_z)<> now",
        );
        check("[https://a.example](https://a.example)", "<u>https://a.example");
        check("[a](b \"title\")", "<u>a<d> (b)");
        check("[a](b(c))", "<u>a<d> (b(c))");
        check("![chart](c.png)", "<u>chart<d> (c.png)");
        check("<https://a.example> <br>x<br/>y<br />z", "<u>https://a.example<> \nx\ny\nz");
    }

    #[test]
    fn a_backslash_makes_marks_text() {
        check("\\*a\\* \\\\ \\`b\\`", "*a* \\ `b`");
        check("C:\\dir\\new", "C:\\dir\\new");
    }

    #[test]
    fn no_more_than_the_limit_is_held_back() {
        let (mut inline, mut printed) = (Inline::new(Style::PLAIN), 0);
        let text = format!("**{}", "word ".repeat(1000));
        for (end, c) in text.char_indices() {
            assert!(end - printed <= HELD_BYTES_MAX + 2, "{} bytes are held", end - printed);
            inline.push(&c.to_string(), &mut |text, _| printed += text.len());
        }
    }
}
