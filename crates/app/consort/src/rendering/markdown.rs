//! `Markdown`: renders a streamed answer for a terminal.
//!
//! Only the beginning of a line is held back, until it is known what the line is; text that may be emphasised
//! ([`Inline`]); and the first lines of a table. What was printed is never taken back.

use super::inline::Inline;
use super::line_start::{CodeStart, Fence, LineKind, LineStart};
use super::style::Style;
use super::table::Table;
use super::word_wrap::WordWrap;

const QUOTE: &str = "│ ";
const BULLET: &str = "• ";
/// The longest rule between two sections.
const RULE_COLUMNS_MAX: usize = 60;

pub struct Markdown {
    wrap: WordWrap,
    inline: Inline,
    state: State,
    /// What has come of a line that is not known yet, or of one that is rendered as a whole.
    line: String,
    code: Option<CodeBlock>,
    table: TableState,
    out: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It is not known what the line is.
    Start,
    Text,
    Code,
}

struct CodeBlock {
    fence: Fence,
    quotes: usize,
    indent: usize,
}

enum TableState {
    None,
    /// A line that may be the header of a table, and its prefix.
    Header(String, Prefix),
    Rows(Box<Table>, Prefix),
}

/// The quotes and the indentation of a line.
#[derive(Clone, Copy)]
struct Prefix {
    quotes: usize,
    indent: usize,
}

impl Prefix {
    fn columns(self) -> usize {
        self.quotes * 2 + self.indent
    }

    fn text(self) -> String {
        Style::DIM.paint(&QUOTE.repeat(self.quotes)) + &" ".repeat(self.indent)
    }
}

impl Markdown {
    pub fn new(width: usize) -> Self {
        Self {
            wrap: WordWrap::new(width),
            inline: Inline::new(Style::PLAIN),
            state: State::Start,
            line: String::new(),
            code: None,
            table: TableState::None,
            out: String::new(),
        }
    }

    /// The next text of the stream, without control characters but line breaks and tabs. Returns what to print now.
    pub fn push(&mut self, text: &str) -> String {
        text.chars().for_each(|c| self.take(c));
        std::mem::take(&mut self.out)
    }

    /// What was held back.
    pub fn finish(&mut self) -> String {
        if self.state == State::Start && !self.line.is_empty() {
            self.begin_line(true);
        }
        self.end_table();
        self.finish_text();
        self.wrap.finish(&mut self.out);
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, c: char) {
        match (self.state, c) {
            (State::Start, '\n') => {
                let is_begun = self.begin_line(true);
                if is_begun {
                    self.end_line();
                }
            }
            (State::Start, c) => {
                self.line.push(c);
                self.begin_line(false);
            }
            (_, '\n') => self.end_line(),
            (State::Text, c) => {
                let (wrap, out) = (&mut self.wrap, &mut self.out);
                self.inline.push(c.encode_utf8(&mut [0; 4]), &mut |text, style| wrap.push(text, style, out));
            }
            (State::Code, c) => self.wrap.push(c.encode_utf8(&mut [0; 4]), Style::CODE, &mut self.out),
        }
    }

    /// Begins the line if it is known what it is. Returns whether there is one to be ended: some lines are printed as a
    /// whole, or not at all.
    fn begin_line(&mut self, is_line: bool) -> bool {
        let line = std::mem::take(&mut self.line);
        let is_begun = match &self.code {
            Some(block) => {
                let start = block.fence.code_start(&line, block.quotes, block.indent, is_line);
                start.map(|start| self.begin_code(&line, start))
            }
            None => LineStart::parse(&line, is_line).map(|start| self.begin_text(&line, start)),
        };
        if is_begun.is_none() {
            self.line = line;
        }
        is_begun.unwrap_or_default()
    }

    fn begin_code(&mut self, line: &str, start: CodeStart) -> bool {
        match start {
            CodeStart::Close => {
                self.code = None;
                self.wrap.set_verbatim(false);
                false
            }
            CodeStart::Code(at) => {
                let quotes = self.code.as_ref().map_or(0, |block| block.quotes);
                self.begin(Prefix { quotes, indent: 0 }, "");
                self.wrap.push(&line[at..], Style::CODE, &mut self.out);
                self.state = State::Code;
                true
            }
        }
    }

    fn begin_text(&mut self, line: &str, start: LineStart) -> bool {
        let (prefix, text) = (Prefix { quotes: start.quotes, indent: start.indent }, &line[start.text..]);
        if start.kind == LineKind::Row {
            self.row(text, prefix);
            return false;
        }
        self.end_table();
        match start.kind {
            LineKind::Paragraph | LineKind::Row => self.begin_inline(prefix, "", Style::PLAIN, text),
            LineKind::Heading => self.begin_inline(prefix, "", Style::BOLD, text),
            LineKind::Bullet => self.begin_inline(prefix, BULLET, Style::PLAIN, text),
            LineKind::Numbered(number) => self.begin_inline(prefix, &format!("{number} "), Style::PLAIN, text),
            LineKind::Rule => {
                self.begin(prefix, "");
                let columns = self.wrap.width().saturating_sub(prefix.columns()).min(RULE_COLUMNS_MAX);
                self.wrap.push(&"─".repeat(columns), Style::DIM, &mut self.out);
            }
            LineKind::Fence(fence) => {
                let language = fence.language.clone();
                self.code = Some(CodeBlock { fence, quotes: prefix.quotes, indent: prefix.indent });
                if !language.is_empty() {
                    self.begin(Prefix { indent: 0, ..prefix }, "");
                    self.wrap.push(&language, Style::DIM, &mut self.out);
                    self.wrap.end_line(&mut self.out);
                }
                self.wrap.set_verbatim(true);
                return false;
            }
        }
        true
    }

    fn begin_inline(&mut self, prefix: Prefix, mark: &str, style: Style, text: &str) {
        self.begin(prefix, mark);
        self.inline = Inline::new(style);
        let (wrap, out) = (&mut self.wrap, &mut self.out);
        self.inline.push(text, &mut |text, style| wrap.push(text, style, out));
        self.state = State::Text;
    }

    /// Begins a line with its prefix and the mark of a list.
    fn begin(&mut self, prefix: Prefix, mark: &str) {
        let (text, mark_columns) = (prefix.text(), mark.chars().count());
        let hang = format!("{text}{}", " ".repeat(mark_columns));
        self.wrap.begin_line(&format!("{text}{mark}"), &hang, prefix.columns() + mark_columns, &mut self.out);
    }

    fn end_line(&mut self) {
        self.finish_text();
        self.wrap.end_line(&mut self.out);
        self.state = State::Start;
    }

    fn finish_text(&mut self) {
        let (wrap, out) = (&mut self.wrap, &mut self.out);
        self.inline.finish(&mut |text, style| wrap.push(text, style, out));
    }

    /// A line that begins with `|`.
    fn row(&mut self, line: &str, prefix: Prefix) {
        match std::mem::replace(&mut self.table, TableState::None) {
            TableState::None => self.table = TableState::Header(line.to_owned(), prefix),
            TableState::Header(header, prefix) => {
                let room = self.wrap.width().saturating_sub(prefix.columns());
                match Table::new(&header, line, room) {
                    Some(table) => self.table = TableState::Rows(Box::new(table), prefix),
                    None => {
                        self.print_paragraph(&header, prefix);
                        self.table = TableState::Header(line.to_owned(), prefix);
                    }
                }
            }
            TableState::Rows(mut table, prefix) => {
                self.print_lines(&table.row(line), prefix);
                self.table = TableState::Rows(table, prefix);
            }
        }
    }

    fn end_table(&mut self) {
        match std::mem::replace(&mut self.table, TableState::None) {
            TableState::None => {}
            TableState::Header(line, prefix) => self.print_paragraph(&line, prefix),
            TableState::Rows(table, prefix) => self.print_lines(&table.finish(), prefix),
        }
    }

    fn print_paragraph(&mut self, line: &str, prefix: Prefix) {
        self.begin_inline(prefix, "", Style::PLAIN, line);
        self.end_line();
    }

    fn print_lines(&mut self, lines: &[String], prefix: Prefix) {
        for line in lines {
            self.out.push_str(&prefix.text());
            self.out.push_str(line);
            self.out.push('\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result must be the same for any pieces of the text. Styles are written as `<b>`.
    #[track_caller]
    fn check(width: usize, text: &str, expected: &str) {
        let chars: Vec<char> = text.chars().collect();
        for piece_chars in 1..=chars.len().max(1) {
            let mut markdown = Markdown::new(width);
            let mut out: String =
                chars.chunks(piece_chars).map(|piece| markdown.push(&piece.iter().collect::<String>())).collect();
            out += &markdown.finish();
            assert_eq!(tagged(&out), expected, "{text:?} in pieces of {piece_chars}");
        }
    }

    fn tagged(out: &str) -> String {
        let names = [("0", ""), ("1", "b"), ("2", "d"), ("3", "i"), ("4", "u"), ("9", "s"), ("36", "c")];
        let mut parts = out.split("\u{1b}[");
        let first = parts.next().unwrap().to_owned();
        parts.fold(first, |text, part| {
            let (codes, rest) = part.split_once('m').unwrap();
            let codes: String =
                codes.split(';').map(|code| names.iter().find(|(n, _)| *n == code).unwrap().1).collect();
            format!("{text}<{codes}>{rest}")
        })
    }

    #[test]
    fn lines_get_what_their_marks_mean() {
        check(40, "# Title\n\ntext", "<b>Title<>\n\ntext");
        check(40, "## A *b*\ntext\n", "<b>A <bi>b<>\ntext\n");
        check(40, "- one\n- **two**\n  more\n    - three", "• one\n• <b>two<>\n  more\n    • three");
        check(40, "1. one\n10) two\n", "1. one\n10) two\n");
        check(40, "> quoted\n>> *twice*\nnot", "<d>│ <>quoted\n<d>│ │ <><i>twice<>\nnot");
        check(40, "a\n\n---\n\nb", &format!("a\n\n<d>{}<>\n\nb", "─".repeat(40)));
        check(10, "***", "<d>──────────<>");
        check(40, "#hash -dash 1.5\n+5", "#hash -dash 1.5\n+5");
    }

    #[test]
    fn text_is_wrapped_below_its_mark() {
        check(12, "- one two three four", "• one two\n  three four");
        check(12, "> one two three", "<d>│ <>one two\n<d>│ <>three");
        check(12, "10. one two three", "10. one two\n    three");
        check(10, "a **one two** b c", "a <b>one two<>\nb c");
        check(9, "一二三四五六", "一二三四\n五六");
    }

    #[test]
    fn code_is_left_as_it_is() {
        check(
            12,
            "```rust\nfn *main*() { x }\n\n  `y`\n```\nafter",
            "<d>rust<>\n<c>fn *main*() { x }<>\n\n<c>  `y`<>\nafter",
        );
        check(40, "~~~\n```\n~~~", "<c>```<>\n");
        check(40, "- a\n  ```\n  x\n    y\n  ```\n- b", "• a\n<c>x<>\n<c>  y<>\n• b");
        check(40, "> ```\n> x\n> ```\n> y", "<d>│ <><c>x<>\n<d>│ <>y");
        check(40, "```\nno end", "<c>no end<>");
        check(40, "```\na\n", "<c>a<>\n");
        check(40, "```\n", "");
        check(40, "``` a ``` b", "<c>a<> b");
    }

    #[test]
    fn a_table_is_aligned() {
        check(
            30,
            "| a | b |\n|---|---|\n| **x** | `y` |\n| long text | z |\n\nafter",
            "<b>a<>   <d> │ <><b>b<>\n<d>─────┼────<>\n<b>x<>   <d> │ <><c>y<>\nlong<d> │ <>z\ntext<d> │ <>\n\nafter",
        );
    }

    #[test]
    fn lines_that_look_like_a_table_are_text() {
        check(40, "| a |\n| b |\ntext", "| a |\n| b |\ntext");
        check(40, "| a *b*", "| a <i>b<>\n");
        check(40, "|x| is it\n", "|x| is it\n");
    }

    #[test]
    fn what_is_not_complete_is_printed_at_the_end() {
        for text in ["-", "#", "1", "1.", "**a", "`a", "[a](", "``", "a\\"] {
            let expected = if text == "-" { "• " } else { text };
            check(40, text, expected);
        }
    }

    #[test]
    fn text_is_printed_as_it_comes() {
        let mut markdown = Markdown::new(40);
        let printed = ["Hel", "lo ", "wor", "ld", " a", "gain ", "now "].map(|piece| markdown.push(piece));
        assert_eq!(printed, ["", "Hello", "", "", " world", " again", " now"]);
        let mut code = Markdown::new(40);
        code.push("```\n");
        assert_eq!(tagged(&code.push("x = 1")), "<c>x = 1");
    }

    /// Texts of random marks: nothing panics, the size of the pieces has no influence, and every word is printed.
    #[test]
    fn any_marks_in_any_order_are_rendered() {
        let marks = [
            "**", "*", "_", "`", "``", "~~", "\n", "\n\n", "|", "|-|-|", "---", "- ", "> ", "# ", "1. ", " ", "  ",
            "w", "w", "日", "[", "](", ")", "\\", "<", ">", "!", "http://", "<br>", "\t",
        ];
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..3000 {
            let text: String = (0..random(40)).map(|_| marks[random(marks.len())]).collect();
            let render = |piece_chars: usize| {
                let chars: Vec<char> = text.chars().collect();
                let mut markdown = Markdown::new(20);
                let mut out: String =
                    chars.chunks(piece_chars).map(|piece| markdown.push(&piece.iter().collect::<String>())).collect();
                out += &markdown.finish();
                out
            };
            let whole = render(usize::MAX);
            assert_eq!(whole, render(1 + random(3)), "{text:?}");
            // A table has only as many cells as its header.
            if !text.contains('|') {
                assert_eq!(whole.matches('w').count(), text.matches('w').count(), "{text:?}: {whole:?}");
            }
            tagged(&whole);
        }
    }
}
