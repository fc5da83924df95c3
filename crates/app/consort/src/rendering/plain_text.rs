//! `PlainText`: a streamed answer as the model writes it, wrapped between words. Lines in fences (```) are not wrapped.

use super::style::Style;
use super::word_wrap::WordWrap;

const FENCE: &str = "```";

pub struct PlainText {
    wrap: WordWrap,
    style: Style,
    /// The first characters of the line that are no white space, as many as a fence has.
    line_start: String,
    is_fenced: bool,
}

impl PlainText {
    pub fn new(width: usize, style: Style) -> Self {
        Self { wrap: WordWrap::new(width), style, line_start: String::new(), is_fenced: false }
    }

    /// The next text of the stream, without control characters but line breaks and tabs. Returns what to print now.
    pub fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c == '\n' {
                self.wrap.end_line(&mut out);
                self.is_fenced ^= self.line_start == FENCE;
                self.wrap.set_verbatim(self.is_fenced);
                self.line_start.clear();
                continue;
            }
            if self.line_start.len() < FENCE.len() && !c.is_whitespace() {
                self.line_start.push(c);
            }
            self.wrap.push(c.encode_utf8(&mut [0; 4]), self.style, &mut out);
        }
        out
    }

    /// What was held back.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        self.wrap.finish(&mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result must be the same for any pieces of the text.
    fn check(width: usize, text: &str, expected: &str) {
        for piece_chars in [1, 2, 3, 1000] {
            let chars: Vec<char> = text.chars().collect();
            let mut wrap = PlainText::new(width, Style::PLAIN);
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
            let (mut wrap, mut printed) = (PlainText::new(10, Style::PLAIN), 0);
            for (end, c) in text.char_indices() {
                let held = letters(&text[..end]) - printed;
                assert!(held <= 10, "{held} of {text}");
                printed += letters(&wrap.push(&c.to_string()));
            }
        }
        let mut wrap = PlainText::new(10, Style::PLAIN);
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
