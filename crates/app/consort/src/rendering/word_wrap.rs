//! `WordWrap`: breaks streamed text into lines of a terminal, between words.
//!
//! A word is held back until its end has come, so nothing that was printed has to be taken back; but no more of it than a
//! line holds: some languages have no spaces. Verbatim text is left to the terminal, which keeps code in one piece when it
//! is copied. Styles change where text is printed, and end with the line.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::style::{Span, Style};

const TAB_COLUMNS: usize = 8;

pub struct WordWrap {
    width: usize,
    /// Columns of the current line that are printed.
    column: usize,
    /// White space after the last printed word. It is dropped if the line is broken there.
    gap: String,
    gap_style: Style,
    /// The word whose end has not come yet.
    word: Vec<Span>,
    /// The beginning of the word is printed, so the rest follows it as it comes.
    is_word_begun: bool,
    is_verbatim: bool,
    /// What a line begins with after a break, and its columns.
    hang: (String, usize),
    /// The column where the text of the current line begins.
    line_start: usize,
    /// The style of the terminal.
    printed: Style,
}

impl WordWrap {
    pub fn new(width: usize) -> Self {
        Self {
            width,
            column: 0,
            gap: String::new(),
            gap_style: Style::PLAIN,
            word: Vec::new(),
            is_word_begun: false,
            is_verbatim: false,
            hang: (String::new(), 0),
            line_start: 0,
            printed: Style::PLAIN,
        }
    }

    pub fn width(&self) -> usize {
        self.width
    }

    /// Whether the text from here on is never broken.
    pub fn set_verbatim(&mut self, is_verbatim: bool) {
        self.is_verbatim = is_verbatim;
    }

    /// Begins a line with `prefix`, and with `hang` wherever this line is broken. Both have so many columns, and no style at
    /// their ends.
    pub fn begin_line(&mut self, prefix: &str, hang: &str, columns: usize, out: &mut String) {
        out.push_str(prefix);
        self.column = columns;
        self.line_start = columns;
        // In a narrow terminal, lines are better used for text.
        self.hang = if columns * 2 <= self.width { (hang.to_owned(), columns) } else { (String::new(), 0) };
    }

    /// The next text of the stream, without control characters but line breaks and tabs. Appends to `out` what to print now.
    /// A line break is one within the line that was begun.
    pub fn push(&mut self, text: &str, style: Style, out: &mut String) {
        for c in text.chars() {
            match c {
                '\n' => {
                    self.end_word(out);
                    self.break_line(out);
                }
                ' ' | '\t' => {
                    self.end_word(out);
                    self.gap.push(c);
                    self.gap_style = style;
                }
                _ => self.push_char(c, style, out),
            }
        }
    }

    /// Ends the line that was begun.
    pub fn end_line(&mut self, out: &mut String) {
        self.finish(out);
        self.hang = (String::new(), 0);
        self.break_line(out);
    }

    /// The word that was held back.
    pub fn finish(&mut self, out: &mut String) {
        self.end_word(out);
        self.set_style(Style::PLAIN, out);
    }

    fn push_char(&mut self, c: char, style: Style, out: &mut String) {
        // A line may be broken before and after a wide character: Chinese and Japanese have no spaces.
        let is_wide = c.width() == Some(2);
        if is_wide {
            self.end_word(out);
        }
        match self.word.last_mut() {
            Some(span) if span.style == style => span.text.push(c),
            _ => self.word.push(Span { text: c.to_string(), style }),
        }
        if is_wide {
            self.end_word(out);
        } else if self.is_word_begun || self.is_verbatim || self.word_columns() > self.width {
            self.print_word(out);
            self.is_word_begun = true;
        }
    }

    fn end_word(&mut self, out: &mut String) {
        if !self.word.is_empty() {
            self.print_word(out);
        }
        self.is_word_begun = false;
    }

    fn print_word(&mut self, out: &mut String) {
        let (gap, word) = (self.gap_columns(), self.word_columns());
        let may_break = !self.is_verbatim && !self.is_word_begun && self.column > self.line_start;
        if may_break && self.column + gap + word > self.width {
            self.break_line(out);
        } else if gap > 0 {
            self.set_style(self.gap_style, out);
            out.push_str(&self.gap);
            self.column += gap;
        }
        for Span { text, style } in std::mem::take(&mut self.word) {
            self.set_style(style, out);
            out.push_str(&text);
        }
        self.column += word;
        if self.column > self.width {
            // The terminal has broken the line. It does so when the character after the last column comes.
            self.column = (self.column - 1) % self.width + 1;
        }
        self.gap.clear();
    }

    fn break_line(&mut self, out: &mut String) {
        self.set_style(Style::PLAIN, out);
        out.push('\n');
        out.push_str(&self.hang.0);
        self.column = self.hang.1;
        self.line_start = self.hang.1;
        self.gap.clear();
    }

    fn set_style(&mut self, style: Style, out: &mut String) {
        if style != self.printed {
            out.push_str(&style.sequence());
            self.printed = style;
        }
    }

    fn word_columns(&self) -> usize {
        self.word.iter().map(|span| span.text.width()).sum()
    }

    fn gap_columns(&self) -> usize {
        let end = self.gap.chars().fold(self.column, |column, c| match c {
            '\t' => (column / TAB_COLUMNS + 1) * TAB_COLUMNS,
            _ => column + 1,
        });
        end - self.column
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str, chars: usize) -> Vec<String> {
        let text: Vec<char> = text.chars().collect();
        text.chunks(chars).map(|piece| piece.iter().collect()).collect()
    }

    #[test]
    fn a_broken_line_goes_on_below_its_text() {
        for chars in [1, 3, 100] {
            let (mut wrap, mut out) = (WordWrap::new(10), String::new());
            wrap.begin_line("- ", "  ", 2, &mut out);
            pieces("one two three", chars).iter().for_each(|piece| wrap.push(piece, Style::PLAIN, &mut out));
            wrap.end_line(&mut out);
            wrap.push("one two three", Style::PLAIN, &mut out);
            wrap.finish(&mut out);
            assert_eq!(out, "- one two\n  three\none two\nthree", "{chars}");
        }
    }

    #[test]
    fn a_prefix_that_takes_half_of_the_line_is_not_repeated() {
        let (mut wrap, mut out) = (WordWrap::new(6), String::new());
        wrap.begin_line("    ", "    ", 4, &mut out);
        wrap.push("a bc", Style::PLAIN, &mut out);
        wrap.finish(&mut out);
        assert_eq!(out, "    a\nbc");
    }

    #[test]
    fn a_style_ends_with_its_text_and_with_its_line() {
        let (mut wrap, mut out) = (WordWrap::new(7), String::new());
        wrap.push("a ", Style::PLAIN, &mut out);
        wrap.push("one two", Style::BOLD, &mut out);
        wrap.push("s b", Style::PLAIN, &mut out);
        wrap.finish(&mut out);
        assert_eq!(out, "a \u{1b}[0;1mone\u{1b}[0m\n\u{1b}[0;1mtwo\u{1b}[0ms b");
    }

    #[test]
    fn verbatim_text_is_printed_as_it_comes() {
        let (mut wrap, mut out) = (WordWrap::new(4), String::new());
        wrap.set_verbatim(true);
        wrap.push("  a bcdef", Style::PLAIN, &mut out);
        assert_eq!(out, "  a bcdef");
    }
}
