//! Finds special tokens in text, before any other processing.

use aho_corasick::{AhoCorasick, AhoCorasickKind, Input, MatchKind};

/// A special token, and how it treats the text around it.
#[derive(Clone, Debug, Default)]
pub(crate) struct SpecialToken {
    pub id: u32,
    pub text: String,
    /// A control token: only found if the caller parses control tokens.
    pub control: bool,
    /// Removes the white space before it, or after it.
    pub lstrip: bool,
    pub rstrip: bool,
    /// Not found within a longer word.
    pub single_word: bool,
}

/// A part of a text.
#[derive(Debug, PartialEq)]
pub(crate) enum TextSegment<'t> {
    Text(&'t str),
    Token(u32),
}

pub(crate) struct SpecialTokenIndex {
    tokens: Vec<SpecialToken>,
    /// Finds all special tokens; patterns are indices into `tokens`.
    all: Option<AhoCorasick>,
    /// Finds those that are not control tokens; patterns are indices into `visible_tokens`.
    visible: Option<AhoCorasick>,
    visible_tokens: Vec<usize>,
}

impl SpecialTokenIndex {
    pub fn new(tokens: Vec<SpecialToken>) -> Result<Self, aho_corasick::BuildError> {
        let tokens: Vec<SpecialToken> = tokens.into_iter().filter(|token| !token.text.is_empty()).collect();
        let visible_tokens: Vec<usize> = (0..tokens.len()).filter(|&index| !tokens[index].control).collect();
        let all = automaton(tokens.iter().map(|token| token.text.as_str()))?;
        let visible = automaton(visible_tokens.iter().map(|&index| tokens[index].text.as_str()))?;
        Ok(Self { tokens, all, visible, visible_tokens })
    }

    /// The id of the token with this text.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        let found = self.all.as_ref()?.find(Input::new(text).anchored(aho_corasick::Anchored::Yes))?;
        (found.end() == text.len()).then(|| self.tokens[found.pattern().as_usize()].id)
    }

    /// The bytes of the longest special token.
    pub fn token_bytes_max(&self) -> usize {
        self.tokens.iter().map(|token| token.text.len()).max().unwrap_or(0)
    }

    /// True if a special token removes white space around it.
    pub fn strips_white_space(&self) -> bool {
        self.tokens.iter().any(|token| token.lstrip || token.rstrip)
    }

    /// Splits `text` at its special tokens. If several start at one place, the longest is taken.
    pub fn split<'t>(&self, text: &'t str, parse_control: bool) -> Vec<TextSegment<'t>> {
        let mut segments = Vec::new();
        let mut done = 0;
        let automaton = if parse_control { &self.all } else { &self.visible };
        for found in automaton.iter().flat_map(|automaton| automaton.find_iter(text)) {
            let index = found.pattern().as_usize();
            let token = &self.tokens[if parse_control { index } else { self.visible_tokens[index] }];
            if found.start() < done || (token.single_word && !stands_alone(text, found.start(), found.end())) {
                continue;
            }
            let before = &text[done..found.start()];
            let before = if token.lstrip { before.trim_end() } else { before };
            if !before.is_empty() {
                segments.push(TextSegment::Text(before));
            }
            segments.push(TextSegment::Token(token.id));
            let after = &text[found.end()..];
            done = if token.rstrip { text.len() - after.trim_start().len() } else { found.end() };
        }
        if done < text.len() {
            segments.push(TextSegment::Text(&text[done..]));
        }
        segments
    }
}

fn automaton<'a>(
    texts: impl ExactSizeIterator<Item = &'a str>,
) -> Result<Option<AhoCorasick>, aho_corasick::BuildError> {
    if texts.len() == 0 {
        return Ok(None);
    }
    let mut builder = AhoCorasick::builder();
    builder.kind(Some(AhoCorasickKind::ContiguousNFA)).match_kind(MatchKind::LeftmostLongest);
    builder.start_kind(aho_corasick::StartKind::Both).build(texts).map(Some)
}

fn stands_alone(text: &str, start: usize, end: usize) -> bool {
    let is_word = |character: Option<char>| character.is_some_and(|c| c.is_alphanumeric() || c == '_');
    !is_word(text[..start].chars().next_back()) && !is_word(text[end..].chars().next())
}

#[cfg(test)]
mod tests {
    use super::TextSegment::{Text, Token};
    use super::*;

    fn specials() -> SpecialTokenIndex {
        let token =
            |id, text: &str, control| SpecialToken { id, text: text.into(), control, ..SpecialToken::default() };
        let mut tokens = vec![token(0, "<s>", true), token(1, "<t>", false), token(2, "<s>>", true)];
        tokens.push(SpecialToken { lstrip: true, rstrip: true, ..token(3, "<m>", true) });
        tokens.push(SpecialToken { single_word: true, ..token(4, "solo", false) });
        SpecialTokenIndex::new(tokens).unwrap()
    }

    #[test]
    fn control_tokens_are_found_only_when_they_are_asked_for() {
        assert_eq!(specials().split("a<s>b<t>", true), [Text("a"), Token(0), Text("b"), Token(1)]);
        assert_eq!(specials().split("a<s>b<t>", false), [Text("a<s>b"), Token(1)]);
    }

    #[test]
    fn the_longest_token_counts() {
        assert_eq!(specials().split("<s>>", true), [Token(2)]);
        assert_eq!(specials().id_of("<s>"), Some(0));
        assert_eq!(specials().id_of("<s>x"), None);
    }

    #[test]
    fn a_token_may_take_the_white_space_around_it() {
        assert_eq!(specials().split("a  <m> \n<m> b", true), [Text("a"), Token(3), Token(3), Text("b")]);
    }

    #[test]
    fn a_word_is_not_found_inside_another() {
        assert_eq!(specials().split("solo solos", true), [Token(4), Text(" solos")]);
    }
}
