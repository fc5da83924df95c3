//! The tokens of a vocabulary: the bytes of each token, and the token of given bytes.
//!
//! Tokens are stored as the bytes of their text, whatever spelling the file uses (the GPT-2 byte alphabet, `▁` for a space,
//! `<0x0A>` for a byte), so that encoding and decoding need no conversion. All bytes are in one buffer: a vocabulary of 150
//! 000 tokens is three allocations.

use hashbrown::{DefaultHashBuilder, HashTable};
use std::hash::BuildHasher;

/// More tokens than any known vocabulary has; limits the memory that a file can make us allocate.
pub(crate) const TOKENS_MAX: usize = 1 << 22;

/// The kind of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// Ordinary text.
    Normal,
    /// Control tokens such as `<|im_end|>`: usually hidden in decoded text.
    Control,
    /// Found in any text, and shown: `<think>`.
    UserDefined,
    /// One raw byte, for text that has no other token.
    Byte,
    /// Never produced by encoding.
    Unused,
}

pub(crate) struct Vocab {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Ids of the normal tokens, by their bytes.
    index: HashTable<u32>,
    hash: DefaultHashBuilder,
    byte_ids: Box<[Option<u32>; 256]>,
    /// Bytes of the longest normal token, and of the longest token of any kind.
    longest: usize,
    longest_of_all: usize,
}

impl Vocab {
    pub fn with_capacity(tokens: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(tokens * 7),
            ends: Vec::with_capacity(tokens),
            kinds: Vec::with_capacity(tokens),
            index: HashTable::with_capacity(tokens),
            hash: DefaultHashBuilder::default(),
            byte_ids: Box::new([None; 256]),
            longest: 0,
            longest_of_all: 0,
        }
    }

    /// Appends a token with the next id; `append` writes its bytes. Of two normal tokens with the same bytes, encoding uses
    /// the first.
    pub fn push(&mut self, kind: TokenKind, append: impl FnOnce(&mut Vec<u8>)) {
        let id = self.kinds.len() as u32;
        let start = self.bytes.len();
        append(&mut self.bytes);
        self.ends.push(u32::try_from(self.bytes.len()).expect("loaders bound the size of a vocabulary file"));
        self.kinds.push(kind);
        let added = &self.bytes[start..];
        self.longest_of_all = self.longest_of_all.max(added.len());
        match (kind, added) {
            (TokenKind::Byte, &[byte]) => self.byte_ids[usize::from(byte)] = Some(id),
            (TokenKind::Normal, added) if !added.is_empty() => {
                self.longest = self.longest.max(added.len());
                let (bytes, ends, hash) = (&self.bytes, &self.ends, &self.hash);
                let text = |id: u32| slice(bytes, ends, id as usize);
                self.index
                    .entry(hash.hash_one(added), |&other| text(other) == added, |&other| hash.hash_one(text(other)))
                    .or_insert(id);
            }
            _ => {}
        }
    }

    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The bytes of a token; empty for an id outside the vocabulary.
    pub fn bytes(&self, id: u32) -> &[u8] {
        if (id as usize) < self.ends.len() { slice(&self.bytes, &self.ends, id as usize) } else { &[] }
    }

    pub fn kind(&self, id: u32) -> TokenKind {
        self.kinds.get(id as usize).copied().unwrap_or(TokenKind::Unused)
    }

    /// The normal token with exactly these bytes.
    pub fn find(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None; // keeps the cost of a lookup independent of the length of the text
        }
        self.index.find(self.hash.hash_one(bytes), |&id| self.bytes(id) == bytes).copied()
    }

    /// The bytes of the longest token.
    pub fn token_bytes_max(&self) -> usize {
        self.longest_of_all
    }

    /// True if every byte has a byte-fallback token.
    pub fn has_all_bytes(&self) -> bool {
        self.byte_ids.iter().all(Option::is_some)
    }

    /// The byte-fallback token of a byte.
    pub fn byte_id(&self, byte: u8) -> Option<u32> {
        self.byte_ids[usize::from(byte)]
    }
}

fn slice<'a>(bytes: &'a [u8], ends: &[u32], index: usize) -> &'a [u8] {
    let start = if index == 0 { 0 } else { ends[index - 1] as usize };
    &bytes[start..ends[index] as usize]
}

/// The byte of a `<0x0A>`-style token.
pub(crate) fn byte_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() == 2 { u8::from_str_radix(hex, 16).ok() } else { None }
}

/// Decodes GPT-2's spelling of bytes as printable characters. Text outside that alphabet is used as it is.
pub(crate) fn append_byte_level(text: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for character in text.chars() {
        match byte_of_character(character) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(text.as_bytes());
                return;
            }
        }
    }
}

/// Decodes SentencePiece's `▁` to a space.
pub(crate) fn append_spaced(text: &str, bytes: &mut Vec<u8>) {
    for (index, part) in text.split('▁').enumerate() {
        if index > 0 {
            bytes.push(b' ');
        }
        bytes.extend_from_slice(part.as_bytes());
    }
}

/// Printable Latin-1 characters represent themselves; the 68 other bytes, in order, are U+0100 and up.
fn byte_of_character(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_has_one_character_for_each_byte() {
        let mut seen: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of_character).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<u8>>());
        assert_eq!((byte_of_character('Ġ'), byte_of_character('Ċ')), (Some(b' '), Some(b'\n')));
    }

    #[test]
    fn tokens_are_found_by_their_bytes_and_the_first_of_two_wins() {
        let mut vocab = Vocab::with_capacity(4);
        vocab.push(TokenKind::Normal, |bytes| append_byte_level("Ġhi", bytes));
        vocab.push(TokenKind::Normal, |bytes| append_spaced("▁hi", bytes));
        vocab.push(TokenKind::Byte, |bytes| bytes.push(7));
        vocab.push(TokenKind::Control, |bytes| bytes.extend_from_slice(b"<s>"));
        assert_eq!(vocab.find(b" hi"), Some(0));
        assert_eq!(vocab.bytes(1), b" hi");
        assert_eq!(vocab.byte_id(7), Some(2));
        assert_eq!(vocab.find(b"<s>"), None);
        assert_eq!(vocab.bytes(99), b"");
    }

    #[test]
    fn only_two_hexadecimal_digits_name_a_byte() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0x0AB>"), None);
        assert_eq!(byte_token("<0xZZ>"), None);
    }
}
