//! What a line of Markdown begins with: quotes, indentation, and the mark of a heading, a list, code, a rule or a table.

/// Lines with a longer beginning are paragraphs.
const START_BYTES_MAX: usize = 1000;
const HEADING_LEVEL_MAX: usize = 6;
const NUMBER_DIGITS_MAX: usize = 9;
const FENCE_MIN: usize = 3;
const RULE_MIN: usize = 3;
const TAB_COLUMNS: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineStart {
    /// How many quotes it is in.
    pub quotes: usize,
    /// Columns of white space.
    pub indent: usize,
    pub kind: LineKind,
    /// Where its text begins, in bytes.
    pub text: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LineKind {
    Paragraph,
    Heading,
    Bullet,
    /// With its number and what follows that: `1.`
    Numbered(String),
    Fence(Fence),
    Rule,
    /// A line of a table, or of what may be one.
    Row,
}

/// The fence that opened a block of code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    mark: char,
    marks: usize,
    /// What follows the marks: the language, and perhaps more.
    pub language: String,
}

/// The beginning of a line in a block of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeStart {
    /// The code begins at this byte.
    Code(usize),
    /// The line closes the block.
    Close,
}

impl LineStart {
    /// `None` if that depends on what comes. `is_line`: this is the whole line.
    pub fn parse(line: &str, is_line: bool) -> Option<Self> {
        let is_whole = is_line || line.len() > START_BYTES_MAX;
        let (mut quotes, mut rest, mut indent) = (0, line, 0);
        loop {
            let (text, columns) = indented(rest);
            (rest, indent) = (text, indent + columns);
            let Some(quoted) = rest.strip_prefix('>') else { break };
            if quoted.is_empty() && !is_whole {
                return None;
            }
            (quotes, indent) = (quotes + 1, 0);
            rest = quoted.strip_prefix(' ').unwrap_or(quoted);
        }
        if rest.is_empty() && !is_whole {
            return None;
        }
        let (kind, mark) = kind(rest, is_line).or(is_whole.then_some((LineKind::Paragraph, 0)))?;
        Some(Self { quotes, indent, kind, text: line.len() - rest.len() + mark })
    }
}

impl Fence {
    /// What a line in the block begins with, which was opened in so many quotes, after so much white space. `None` if that
    /// depends on what comes.
    pub fn code_start(&self, line: &str, quotes: usize, indent: usize, is_line: bool) -> Option<CodeStart> {
        let mut rest = line;
        for _ in 0..quotes {
            let Some(quoted) = rest.trim_start().strip_prefix('>') else { break };
            rest = quoted.strip_prefix(' ').unwrap_or(quoted);
        }
        let spaces = rest.len() - rest.trim_start_matches(' ').len();
        let code = &rest[spaces.min(indent)..];
        let marks = code.trim();
        let is_close = marks.len() >= self.marks && marks.chars().all(|c| c == self.mark);
        let may_become_close = marks.chars().all(|c| c == self.mark) || (quotes > 0 && marks.is_empty());
        match is_line {
            true if is_close => Some(CodeStart::Close),
            false if may_become_close && line.len() <= START_BYTES_MAX => None,
            _ => Some(CodeStart::Code(line.len() - code.len())),
        }
    }
}

/// The kind of a line without its indentation, and the bytes of its mark.
fn kind(line: &str, is_line: bool) -> Option<(LineKind, usize)> {
    let paragraph = (LineKind::Paragraph, 0);
    let Some(first) = line.chars().next() else { return Some(paragraph) };
    let run = line.len() - line.trim_start_matches(first).len();
    let after = line[run..].chars().next();
    match first {
        '#' => match after {
            None if !is_line => None,
            Some(' ' | '\t') if run <= HEADING_LEVEL_MAX => marked(LineKind::Heading, line, run, is_line),
            _ => Some(paragraph),
        },
        '`' | '~' => {
            if run < FENCE_MIN && (after.is_some() || is_line) {
                return Some(paragraph);
            }
            let language = line[run..].trim();
            match is_line {
                _ if language.contains(first) => Some(paragraph),
                true => {
                    let fence = Fence { mark: first, marks: run, language: language.to_owned() };
                    Some((LineKind::Fence(fence), line.len()))
                }
                false => None,
            }
        }
        '-' | '*' | '_' | '+' => {
            let marks = line.chars().filter(|&c| c == first).count();
            if line.chars().all(|c| c == first || c == ' ') {
                let is_rule = marks >= RULE_MIN && first != '+';
                return match is_line {
                    true if is_rule => Some((LineKind::Rule, line.len())),
                    true if marks == 1 && first != '_' => Some((LineKind::Bullet, line.len())),
                    true => Some(paragraph),
                    false => None,
                };
            }
            match after {
                Some(' ' | '\t') if run == 1 && first != '_' => marked(LineKind::Bullet, line, run, is_line),
                _ => Some(paragraph),
            }
        }
        '0'..='9' => {
            let digits = line.len() - line.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let mut rest = line[digits..].chars();
            match (rest.next(), rest.next()) {
                _ if digits > NUMBER_DIGITS_MAX => Some(paragraph),
                (None, _) | (Some('.' | ')'), None) if !is_line => None,
                (Some('.' | ')'), Some(' ' | '\t')) => {
                    marked(LineKind::Numbered(line[..digits + 1].to_owned()), line, digits + 1, is_line)
                }
                _ => Some(paragraph),
            }
        }
        '|' => is_line.then_some((LineKind::Row, 0)),
        _ => Some(paragraph),
    }
}

/// A line of this kind, whose text follows a mark of so many bytes, and white space.
fn marked(kind: LineKind, line: &str, mark: usize, is_line: bool) -> Option<(LineKind, usize)> {
    let text = line[mark..].trim_start_matches([' ', '\t']);
    (is_line || !text.is_empty()).then_some((kind, line.len() - text.len()))
}

/// A line without the white space at its start, and the columns of that.
fn indented(line: &str) -> (&str, usize) {
    let rest = line.trim_start_matches([' ', '\t']);
    let columns = line[..line.len() - rest.len()].chars().map(|c| if c == '\t' { TAB_COLUMNS } else { 1 }).sum();
    (rest, columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind and the text of a line; it must not change when more of the line comes.
    fn check(line: &str, expected: LineKind, text: &str) {
        let whole = LineStart::parse(line, true).unwrap();
        assert_eq!((&whole.kind, &line[whole.text..]), (&expected, text), "{line:?}");
        for (end, _) in line.char_indices() {
            if let Some(early) = LineStart::parse(&line[..end], false) {
                assert_eq!(
                    (early.kind, early.text),
                    (whole.kind.clone(), whole.text),
                    "{:?} of {line:?}",
                    &line[..end]
                );
            }
        }
    }

    #[test]
    fn a_mark_decides_what_a_line_is() {
        check("text", LineKind::Paragraph, "text");
        check("", LineKind::Paragraph, "");
        check("## Title", LineKind::Heading, "Title");
        check("#tag", LineKind::Paragraph, "#tag");
        check("####### x", LineKind::Paragraph, "####### x");
        check("- item", LineKind::Bullet, "item");
        check("*   item", LineKind::Bullet, "item");
        check("-", LineKind::Bullet, "");
        check("**bold**", LineKind::Paragraph, "**bold**");
        check("*italic*", LineKind::Paragraph, "*italic*");
        check("-5 degrees", LineKind::Paragraph, "-5 degrees");
        check("---", LineKind::Rule, "");
        check("* * *", LineKind::Rule, "");
        check("___", LineKind::Rule, "");
        check("--", LineKind::Paragraph, "--");
        check("+++", LineKind::Paragraph, "+++");
        check("2.   item", LineKind::Numbered("2.".to_owned()), "item");
        check("12. item", LineKind::Numbered("12.".to_owned()), "item");
        check("3) item", LineKind::Numbered("3)".to_owned()), "item");
        check("3.14", LineKind::Paragraph, "3.14");
        check("1999", LineKind::Paragraph, "1999");
        check("1234567890. x", LineKind::Paragraph, "1234567890. x");
        check("| a | b |", LineKind::Row, "| a | b |");
        check("`code`", LineKind::Paragraph, "`code`");
        check("```a``` b", LineKind::Paragraph, "```a``` b");
        let fence = |mark, marks, language: &str| LineKind::Fence(Fence { mark, marks, language: language.to_owned() });
        check("```rust ignore", fence('`', 3, "rust ignore"), "");
        check("~~~~", fence('~', 4, ""), "");
    }

    #[test]
    fn quotes_and_indentation_come_before_the_mark() {
        let start = |line| {
            let LineStart { quotes, indent, kind, text } = LineStart::parse(line, true).unwrap();
            (quotes, indent, kind, &line[text..])
        };
        assert_eq!(start("> a"), (1, 0, LineKind::Paragraph, "a"));
        assert_eq!(start(">> - a"), (2, 0, LineKind::Bullet, "a"));
        assert_eq!(start("> >   a"), (2, 2, LineKind::Paragraph, "a"));
        assert_eq!(start("    - a"), (0, 4, LineKind::Bullet, "a"));
        assert_eq!(start("\ta"), (0, 4, LineKind::Paragraph, "a"));
        assert_eq!(start(">"), (1, 0, LineKind::Paragraph, ""));
    }

    #[test]
    fn a_fence_is_closed_by_one_of_its_kind() {
        let Some(LineStart { kind: LineKind::Fence(fence), .. }) = LineStart::parse("```` x", true) else { panic!() };
        let check = |line: &str, expected| assert_eq!(fence.code_start(line, 0, 2, true), Some(expected), "{line:?}");
        check("````", CodeStart::Close);
        check("  `````  ", CodeStart::Close);
        check("```", CodeStart::Code(0));
        check("~~~~", CodeStart::Code(0));
        check("    code", CodeStart::Code(2));
        check(" code", CodeStart::Code(1));
        check("", CodeStart::Code(0));
        assert_eq!(fence.code_start("  ```", 0, 2, false), None);
        assert_eq!(fence.code_start("  x", 0, 2, false), Some(CodeStart::Code(2)));
        assert_eq!(fence.code_start("> > x", 2, 0, true), Some(CodeStart::Code(4)));
        assert_eq!(fence.code_start("> ````", 1, 0, true), Some(CodeStart::Close));
    }

    #[test]
    fn a_beginning_without_an_end_is_a_paragraph() {
        let line = "-".repeat(START_BYTES_MAX + 1);
        assert_eq!(LineStart::parse(&line, false).unwrap().kind, LineKind::Paragraph);
        let row = format!("|{}", "x".repeat(START_BYTES_MAX));
        assert_eq!(LineStart::parse(&row, false).unwrap().kind, LineKind::Paragraph);
    }
}
