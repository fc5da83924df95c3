//! Byte-pair merging: adjacent symbols are merged, lowest rank first and leftmost among equals, until no pair is left.
//!
//! With a heap of candidates the time is `n log n` in the length of the word, for any word: a hundred kilobytes of one
//! letter are one word.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A run of bytes of the word that is one token so far, or has no token (`id` is `None`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Symbol {
    pub id: Option<u32>,
    pub start: u32,
    pub end: u32,
    prev: u32,
    next: u32,
}

const END: u32 = u32::MAX;

/// Working memory of merging, reused between words.
#[derive(Default)]
pub(crate) struct Merger {
    symbols: Vec<Symbol>,
    /// `(rank, left symbol, end of the right symbol, token of both)`
    candidates: BinaryHeap<Reverse<(u32, u32, u32, u32)>>,
}

impl Merger {
    /// Removes the symbols of the last word.
    pub fn clear(&mut self) {
        self.symbols.clear();
        self.candidates.clear();
    }

    /// Appends a symbol of `length` bytes.
    pub fn push(&mut self, id: Option<u32>, length: usize) {
        let index = self.symbols.len() as u32;
        let start = self.symbols.last().map_or(0, |last| last.end);
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        self.symbols.push(Symbol { id, start, end: start + length as u32, prev: index.wrapping_sub(1), next: END });
    }

    /// Merges all symbols. `pair` returns the rank and the token of two adjacent symbols.
    pub fn merge(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<(u32, u32)>) {
        let candidate = |symbols: &[Symbol], left: u32| {
            let first = symbols.get(left as usize)?;
            let second = symbols.get(first.next as usize)?;
            let (rank, id) = pair(first, second)?;
            Some(Reverse((rank, left, second.end, id)))
        };
        let mut initial = std::mem::take(&mut self.candidates).into_vec();
        initial.extend((0..self.symbols.len() as u32).filter_map(|left| candidate(&self.symbols, left)));
        self.candidates = BinaryHeap::from(initial);

        while let Some(Reverse((_, left, end, id))) = self.candidates.pop() {
            let first = self.symbols[left as usize];
            let Some(&second) = self.symbols.get(first.next as usize) else { continue };
            // Skips stale candidates: a symbol that was merged away is empty, and one that grew has another end.
            if first.start == first.end || second.end != end {
                continue;
            }
            self.symbols[first.next as usize].end = second.start;
            self.symbols[left as usize] = Symbol { id: Some(id), end, next: second.next, ..first };
            if let Some(after) = self.symbols.get_mut(second.next as usize) {
                after.prev = left;
            }
            let (symbols, candidates) = (&self.symbols, &mut self.candidates);
            candidates.extend([first.prev, left].into_iter().filter_map(|left| candidate(symbols, left)));
        }
    }

    /// The remaining symbols, in order.
    pub fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        std::iter::successors(self.symbols.first(), |symbol| self.symbols.get(symbol.next as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merged(word: &str, rules: &[&str]) -> Vec<String> {
        let mut merger = Merger::default();
        word.chars().for_each(|c| merger.push(None, c.len_utf8()));
        merger.merge(|l, r| {
            let rank = rules.iter().position(|rule| *rule == &word[l.start as usize..r.end as usize])?;
            Some((rank as u32, rank as u32))
        });
        merger.symbols().map(|s| word[s.start as usize..s.end as usize].to_owned()).collect()
    }

    #[test]
    fn the_lowest_rank_goes_first_and_the_leftmost_of_equals() {
        assert_eq!(merged("abcd", &["bc", "abc", "cd"]), ["abc", "d"]);
        assert_eq!(merged("aaa", &["aa"]), ["aa", "a"]);
        assert_eq!(merged("aaaaa", &["aa", "aaaa"]), ["aaaa", "a"]);
        assert_eq!(merged("", &["aa"]), Vec::<String>::new());
    }

    #[test]
    fn a_candidate_whose_parts_have_changed_is_dropped() {
        assert_eq!(merged("abcab", &["bc", "ab", "ca"]), ["a", "bc", "ab"]);
    }
}
