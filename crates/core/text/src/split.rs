//! Splits text into words. Merges never cross a word boundary.
//!
//! A splitter is a list of regular expressions. Each one splits the pieces of the one before it: a match is a piece, and so
//! is the text between two matches. Nearly all tokenizers end their expression with `\s+(?!\S)|\s+` (a run of white space
//! leaves its last character to the next word). That is their only look-ahead, and it is implemented by hand here, so that
//! the rest runs on automata in linear time. Other expressions use a backtracking engine, which fails with an error if a
//! text takes too many steps.

use crate::tokenizer::EncodeError;
use regex_automata::{Anchored, Input, meta};

#[derive(Debug, thiserror::Error)]
pub(crate) enum PatternError {
    #[error(transparent)]
    Automaton(Box<meta::BuildError>),
    #[error(transparent)]
    Backtracking(Box<fancy_regex::Error>),
}

pub(crate) struct Splitter {
    stages: Vec<Stage>,
}

enum Stage {
    /// Pattern 0 is the expression; pattern 1, if present, stands for `\s+(?!\S)|\s+`.
    Automaton {
        regex: meta::Regex,
        trailing_space: bool,
    },
    Backtracking(Box<fancy_regex::Regex>),
}

impl Splitter {
    /// Does not split the text.
    pub fn whole() -> Self {
        Self { stages: Vec::new() }
    }

    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self, PatternError> {
        Ok(Self { stages: patterns.into_iter().map(Stage::new).collect::<Result<_, _>>()? })
    }

    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Calls `word` with each word of `text`, in order; concatenated they are the whole text.
    pub fn split<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) -> Result<(), EncodeError> {
        split(&self.stages, text, word)
    }
}

fn split<'t>(stages: &[Stage], text: &'t str, word: &mut dyn FnMut(&'t str)) -> Result<(), EncodeError> {
    let Some((stage, rest)) = stages.split_first() else {
        if !text.is_empty() {
            word(text);
        }
        return Ok(());
    };
    let (mut cut, mut at) = (0, 0); // `text[..cut]` is done; the next match is searched from `at`
    while let Some((start, end)) = stage.find(text, at)? {
        if start == end {
            // An empty match does not split.
            let Some(character) = text[end..].chars().next() else { break };
            at = end + character.len_utf8();
            continue;
        }
        if cut < start {
            split(rest, &text[cut..start], word)?;
        }
        split(rest, &text[start..end], word)?;
        (cut, at) = (end, end);
    }
    if cut < text.len() {
        split(rest, &text[cut..], word)?;
    }
    Ok(())
}

impl Stage {
    fn new(pattern: &str) -> Result<Self, PatternError> {
        let head = pattern.strip_suffix(r"|\s+(?!\S)|\s+").or_else(|| pattern.strip_suffix(r"|\s+(?!\S)"));
        if needs_backtracking(head.unwrap_or(pattern)) {
            let regex = fancy_regex::Regex::new(pattern).map_err(|error| PatternError::Backtracking(error.into()))?;
            return Ok(Self::Backtracking(Box::new(regex)));
        }
        let regex = match head {
            Some(head) => meta::Regex::new_many(&[head, r"\s+"]),
            None => meta::Regex::new(pattern),
        };
        let regex = regex.map_err(|error| PatternError::Automaton(error.into()))?;
        Ok(Self::Automaton { regex, trailing_space: head.is_some() })
    }

    /// The first match at or after `at`.
    fn find(&self, text: &str, at: usize) -> Result<Option<(usize, usize)>, EncodeError> {
        match self {
            Self::Backtracking(regex) => {
                let found = regex.find_from_pos(text, at).map_err(|_| EncodeError::Pattern)?;
                Ok(found.map(|found| (found.start(), found.end())))
            }
            Self::Automaton { regex, trailing_space } => {
                let input = Input::new(text).range(at..);
                // Expressions that end in white space match at every position, and an anchored search takes one pass.
                let anchored = trailing_space.then(|| regex.search(&input.clone().anchored(Anchored::Yes))).flatten();
                let Some(found) = anchored.or_else(|| regex.search(&input)) else { return Ok(None) };
                let (start, mut end) = (found.start(), found.end());
                if *trailing_space && found.pattern().as_usize() == 1 && end < text.len() {
                    let last = text[start..end].chars().next_back().map_or(0, char::len_utf8);
                    if end - last > start {
                        end -= last;
                    }
                }
                Ok(Some((start, end)))
            }
        }
    }
}

/// True for look-around, possessive quantifiers, atomic groups and back-references, which automata do not support.
fn needs_backtracking(pattern: &str) -> bool {
    let mut rest = pattern;
    let mut in_class = false;
    let mut after_quantifier = false;
    while let Some(character) = rest.chars().next() {
        let mut length = character.len_utf8();
        let mut quantifier = false;
        match character {
            '\\' => {
                let escaped = rest[1..].chars().next();
                if escaped.is_some_and(|c| matches!(c, '1'..='9' | 'k' | 'G' | 'K' | 'Z')) {
                    return true;
                }
                length += escaped.map_or(0, char::len_utf8);
                if rest[length..].starts_with('{') && matches!(escaped, Some('p' | 'P' | 'x' | 'u' | 'U')) {
                    length += rest[length..].find('}').map_or(0, |end| end + 1); // a name, not a quantifier
                }
            }
            '[' => in_class = true,
            ']' => in_class = false,
            '(' if !in_class && ["(?=", "(?!", "(?<=", "(?<!", "(?>", "(?("].iter().any(|s| rest.starts_with(s)) => {
                return true;
            }
            '+' if !in_class && after_quantifier => return true,
            '+' | '*' | '?' | '}' if !in_class => quantifier = true,
            _ => {}
        }
        after_quantifier = quantifier;
        rest = &rest[length..];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'a>(patterns: &[&str], text: &'a str) -> Vec<&'a str> {
        let mut words = Vec::new();
        Splitter::new(patterns.iter().copied()).unwrap().split(text, &mut |word| words.push(word)).unwrap();
        assert_eq!(words.concat(), text);
        words
    }

    const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

    #[test]
    fn white_space_leaves_its_last_character_to_the_next_word() {
        assert_eq!(words(&[GPT2], "a   b"), ["a", "  ", " b"]);
        assert_eq!(words(&[GPT2], "a \n\tb  "), ["a", " \n", "\t", "b", "  "]);
        assert_eq!(words(&[GPT2], "  "), ["  "]);
        assert_eq!(words(&[GPT2], "\u{3000}\u{3000}x"), ["\u{3000}", "\u{3000}", "x"]);
    }

    #[test]
    fn each_stage_cuts_the_pieces_of_the_one_before() {
        assert_eq!(words(&[r"\p{N}", GPT2], "a 12 b"), ["a", " ", "1", "2", " b"]);
        assert_eq!(words(&[], "left whole"), ["left whole"]);
        assert_eq!(words(&[r"x*"], "axxb"), ["a", "xx", "b"]);
    }

    #[test]
    fn both_engines_cut_alike() {
        for text in ["it's  12\n\n x", "  a", "\t\t\tb c\r\n", "'ll don't ", "é\u{a0}\u{a0}è"] {
            let mut slow = Vec::new();
            let stage = Stage::Backtracking(Box::new(fancy_regex::Regex::new(GPT2).unwrap()));
            Splitter { stages: vec![stage] }.split(text, &mut |word| slow.push(word)).unwrap();
            assert_eq!(words(&[GPT2], text), slow);
        }
    }

    #[test]
    fn only_what_automata_lack_goes_to_the_backtracking_engine() {
        assert!(!needs_backtracking(r"(?i:'s)|[^\r\n\p{L}+*(?=]?\p{L}+|\p{N}{1,3}|a+?\++"));
        for pattern in [r"[^\s]?+\p{L}", r"\p{L}++", r"a(?=b)", r"(?<!a)b", r"(a)\1", r"\p{N}{1,3}+"] {
            assert!(needs_backtracking(pattern), "{pattern}");
        }
    }
}
