//! `WordWrap`: breaks streamed text into lines of a terminal, between words.
//!
//! A word is held back until its end has come, so nothing that was printed has to be taken back; but no more of it than a
//! line holds: some languages have no spaces. Lines in fences (```) are left to the terminal, which keeps code in one piece
//! when it is copied.

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

const TAB_COLUMNS: usize = 8;
const FENCE: &str = "```";

pub struct WordWrap {
    width: usize,
    /// Columns of the current line that are printed.
    column: usize,
    /// White space after the last printed word. It is dropped if the line is broken there.
    gap: String,
    /// The word whose end has not come yet.
    word: String,
    /// The beginning of the word is printed, so the rest follows it as it comes.
    is_word_begun: bool,
    /// The first characters of the line that are no white space, as many as a fence has.
    line_start: String,
    is_fenced: bool,
}

impl WordWrap {
    pub fn new(width: usize) -> Self {
        Self {
            width,
            column: 0,
            gap: String::new(),
            word: String::new(),
            is_word_begun: false,
            line_start: String::new(),
            is_fenced: false,
        }
    }

    /// The next text of the stream, without control characters but line breaks and tabs. Returns what to print now.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => self.end_line(&mut out),
                ' ' | '\t' => {
                    self.end_word(&mut out);
                    self.gap.push(c);
                }
                _ => self.push_char(c, &mut out),
            }
        }
        out
    }

    /// The word that was held back.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.end_word(&mut out);
        out
    }

    fn push_char(&mut self, c: char, out: &mut String) {
        // A line may be broken before and after a wide character: Chinese and Japanese have no spaces.
        let is_wide = c.width() == Some(2);
        if is_wide {
            self.end_word(out);
        }
        self.word.push(c);
        if is_wide {
            self.end_word(out);
        } else if self.is_word_begun || self.is_fenced || self.word.width() > self.width {
            self.print_word(out);
            self.is_word_begun = true;
        }
        if self.line_start.len() < FENCE.len() {
            self.line_start.push(c);
        }
    }

    fn end_word(&mut self, out: &mut String) {
        if !self.word.is_empty() {
            self.print_word(out);
        }
        self.is_word_begun = false;
    }

    fn print_word(&mut self, out: &mut String) {
        let (gap, word) = (self.gap_columns(), self.word.width());
        let may_break = !self.is_fenced && !self.is_word_begun && self.column > 0;
        if may_break && self.column + gap + word > self.width {
            out.push('\n');
            self.column = 0;
        } else {
            out.push_str(&self.gap);
            self.column += gap;
        }
        out.push_str(&self.word);
        self.column += word;
        if self.column > self.width {
            // The terminal has broken the line. It does so when the character after the last column comes.
            self.column = (self.column - 1) % self.width + 1;
        }
        self.gap.clear();
        self.word.clear();
    }

    fn end_line(&mut self, out: &mut String) {
        self.end_word(out);
        out.push('\n');
        self.is_fenced ^= self.line_start == FENCE;
        self.line_start.clear();
        self.gap.clear();
        self.column = 0;
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

    /// The result must be the same for any pieces of the text.
    fn check(width: usize, text: &str, expected: &str) {
        for piece_chars in [1, 2, 3, 1000] {
            let chars: Vec<char> = text.chars().collect();
            let mut wrap = WordWrap::new(width);
            let mut out: String =
                chars.chunks(piece_chars).map(|piece| wrap.push(&piece.iter().collect::<String>())).collect();
            out += &wrap.finish();
            assert_eq!(out, expected, "{text:?} in pieces of {piece_chars}");
        }
    }

    #[test]
    fn lines_are_broken_between_words() {
        check(10, "one two three four", "one two\nthree four");
        check(10, "one two  three", "one two\nthree");
        check(7, "one two three", "one two\nthree");
        check(10, "short\n\n  indented", "short\n\n  indented");
    }

    #[test]
    fn a_word_that_is_longer_than_a_line_stays_whole() {
        check(5, "a https://example.org b", "a\nhttps://example.org\nb");
        check(4, "abcdefgh ij", "abcdefgh\nij");
        check(6, "abcdefgh ij", "abcdefgh ij");
    }

    #[test]
    fn no_more_than_a_line_is_held_back() {
        let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).count();
        for text in ["ไ".repeat(50), format!("ab {}", "x".repeat(50))] {
            let (mut wrap, mut printed) = (WordWrap::new(10), 0);
            for (end, c) in text.char_indices() {
                let held = letters(&text[..end]) - printed;
                assert!(held <= 10, "{held} of {text}");
                printed += letters(&wrap.push(&c.to_string()));
            }
        }
        let mut wrap = WordWrap::new(10);
        wrap.push("```\n");
        assert_eq!([wrap.push("a"), wrap.push("b ")], ["a", "b"], "code is not held back");
    }

    #[test]
    fn wide_characters_count_twice_and_need_no_spaces() {
        check(6, "日本語日本語", "日本語\n日本語");
        check(5, "a日本語", "a日本\n語");
    }

    #[test]
    fn code_in_fences_is_left_alone() {
        let code = "```rust\nfn main() { println!(); }\n```\n";
        check(10, &format!("{code}one two three"), &format!("{code}one two\nthree"));
    }

    #[test]
    fn a_tab_reaches_the_next_tab_stop() {
        check(20, "a\tb", "a\tb");
        check(9, "a\tbc", "a\nbc");
    }
}
