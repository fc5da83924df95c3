//! Converts text to tokens and back.
//!
//! One implementation for all vocabularies, whether from `tokenizer.json` or GGUF metadata; the loaders are in `json` and
//! `gguf`. Encoding: special tokens are found first, the text between them is normalised and split into words, and each word
//! is merged. The time is at most `n log n` in the length of the text.

use crate::detokenizer::Detokenizer;
use crate::merge::Merger;
use crate::special::{SpecialTokenIndex, TextSegment};
use crate::split::Splitter;
use crate::vocab::{TokenKind, Vocab};
use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use std::borrow::Cow;
use std::hash::BuildHasher;
use std::path::PathBuf;
use std::sync::Arc;
use types::TokenId;
use unicode_normalization::{UnicodeNormalization, is_nfc_quick, is_nfkc_quick};

/// The maximum length of a text.
pub const TEXT_BYTES_MAX: usize = 256 << 20;

/// No normal form makes characters outside ASCII more than this many times shorter, counted in bytes: a mathematical letter of
/// four bytes becomes a letter of one byte, three Hangul letters become one. `▁` becomes a space.
const NORMALISED_SHRINK_MAX: usize = 4;

/// A vocabulary and the rules to use it. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) rules: Arc<TokenizerRules>,
}

/// Whether special tokens such as `<|im_end|>` appear in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    Hide,
    Show,
}

/// Why a tokenizer cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TextLoadError {
    #[error("cannot read {path}")]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{path} is longer than {bytes_max} bytes")]
    TooLong { path: PathBuf, bytes_max: u64 },
    #[error("{path} is not the JSON we expect")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("tokenizer {part} {name:?} is not supported, only {supported}")]
    Unsupported { part: &'static str, name: String, supported: String },
    #[error("tokenizer is malformed: {0}")]
    Malformed(String),
}

/// Why a text cannot be encoded.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    #[error("text of {bytes} bytes is longer than {TEXT_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("the tokenizer's pattern took too many steps on this text")]
    Pattern,
}

impl Tokenizer {
    /// Encodes text that may contain special tokens, such as the output of a chat template.
    ///
    /// `add_special` adds the begin and end tokens that the model expects around a text. A chat template writes them itself,
    /// so its output is encoded without.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, EncodeError> {
        self.rules.encode(text, add_special, true)
    }

    /// Encodes untrusted text without parsing control tokens: `<|im_end|>` becomes its characters.
    pub fn encode_plain(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, EncodeError> {
        self.rules.encode(text, add_special, false)
    }

    /// A lower bound of the number of tokens of a text, however it is encoded. Takes one pass over the text, so a text that
    /// cannot fit is refused before it is encoded.
    pub fn tokens_min(&self, text: &str) -> usize {
        self.rules.tokens_min(text)
    }

    /// The text of the tokens. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are skipped.
    pub fn decode(&self, ids: &[TokenId], special: SpecialTokens) -> String {
        let mut detokenizer = self.detokenizer(special);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text += &detokenizer.finish();
        text
    }

    /// A decoder for one token at a time, at the start of a text.
    pub fn detokenizer(&self, special: SpecialTokens) -> Detokenizer {
        Detokenizer::new(self.clone(), special)
    }

    /// The id of a token by its text: `<|im_end|>`, or a word with its leading space.
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        let rules = &self.rules;
        rules.specials.id_of(token).or_else(|| rules.vocab.find(token.as_bytes())).map(TokenId)
    }

    /// One more than the largest id. The model's logits may be longer.
    pub fn vocab_size(&self) -> usize {
        self.rules.vocab.len()
    }

    /// True for a control token.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.rules.vocab.kind(id.0) == TokenKind::Control
    }

    /// The bytes that a token adds to a text.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.rules.vocab.bytes(id.0)
    }

    /// The end-of-sequence tokens, in order of their ids.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.rules.eos
    }

    /// Adds end-of-sequence tokens: those of `generation_config.json`, or of the user.
    pub fn with_eos_ids(mut self, ids: impl IntoIterator<Item = TokenId>) -> Self {
        let rules = Arc::make_mut(&mut self.rules);
        rules.eos.extend(ids);
        rules.eos.sort_unstable();
        rules.eos.dedup();
        self
    }

    /// The tokens that `add_special` puts before a text.
    pub fn prefix_ids(&self) -> &[TokenId] {
        &self.rules.prefix
    }
}

/// The rules of a tokenizer, which a loader fills in.
#[derive(Clone)]
pub(crate) struct TokenizerRules {
    pub vocab: Arc<Vocab>,
    pub specials: Arc<SpecialTokenIndex>,
    pub normal_form: Option<NormalForm>,
    /// `▁` stands for a space, as in SentencePiece.
    pub sentencepiece_spaces: bool,
    pub space_prefix: SpacePrefix,
    pub splitter: Arc<Splitter>,
    pub model: Arc<BpeModel>,
    pub unknown: Option<u32>,
    pub prefix: Vec<TokenId>,
    pub suffix: Vec<TokenId>,
    pub eos: Vec<TokenId>,
    /// Whether decoding removes the first space, because the encoder added it.
    pub strip_first_space: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormalForm {
    Nfc,
    Nfkc,
    Nfd,
    Nfkd,
}

/// Where the encoder adds a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SpacePrefix {
    Never,
    /// Before the text, unless it begins with a space.
    First,
    /// Before the text and after each special token, unless there is a space.
    EachSegment,
    /// Before the text and after each special token.
    Always,
}

/// How words are converted to tokens.
pub(crate) enum BpeModel {
    /// Words are split into bytes, and these pairs of tokens merge.
    Bytes { merges: Merges, byte_ids: Box<[Option<u32>; 256]>, ignore_merges: bool },
    /// Words are split into characters, and these pairs of tokens merge; characters without a token become bytes.
    Characters { merges: Merges, ignore_merges: bool },
    /// Words are split into characters, and adjacent symbols merge if their text is a token, best score first. `ranks[id]`
    /// is the order of the scores.
    Scores { ranks: Vec<u32> },
}

/// `(left, right) -> (rank, token)`.
pub(crate) struct Merges(HashMap<u64, (u32, u32)>);

impl Merges {
    pub fn with_capacity(merges: usize) -> Self {
        Self(HashMap::with_capacity(merges))
    }

    /// Adds the next merge; of two equal ones the first is used.
    pub fn push(&mut self, rank: u32, left: u32, right: u32, token: u32) {
        self.0.entry(key(left, right)).or_insert((rank, token));
    }

    fn get(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        self.0.get(&key(left, right)).copied()
    }
}

fn key(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl TokenizerRules {
    fn encode(&self, text: &str, add_special: bool, parse_control: bool) -> Result<Vec<TokenId>, EncodeError> {
        if text.len() > TEXT_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        let mut out = Vec::with_capacity(text.len() / 3 + 2);
        if add_special {
            out.extend_from_slice(&self.prefix);
        }
        let mut words = WordEncoder { rules: self, merger: Merger::default(), cache: WordCache::default() };
        for (index, segment) in self.specials.split(text, parse_control).into_iter().enumerate() {
            match segment {
                TextSegment::Token(id) => out.push(TokenId(id)),
                TextSegment::Text(text) => words.encode(&self.normalise(text, index == 0), &mut out)?,
            }
        }
        if add_special {
            out.extend_from_slice(&self.suffix);
        }
        Ok(out)
    }

    /// The bytes that certainly remain after normalisation, divided by the longest token.
    fn tokens_min(&self, text: &str) -> usize {
        // Text without a token may be left out. One unknown token stands for one character at most.
        let encodes_all = self.unknown.is_some()
            || self.vocab.has_all_bytes()
            || matches!(&*self.model, BpeModel::Bytes { byte_ids, .. } if byte_ids.iter().all(Option::is_some));
        if !encodes_all {
            return 0;
        }
        let longest = self.vocab.token_bytes_max().max(self.specials.token_bytes_max()).max(char::MAX.len_utf8());
        let shrinks = self.normal_form.is_some() || self.sentencepiece_spaces;
        let strips = self.specials.strips_white_space();
        if !shrinks && !strips {
            return text.len().div_ceil(longest);
        }
        let (mut ascii, mut other) = (0, 0);
        for character in text.chars().filter(|character| !(strips && character.is_whitespace())) {
            let bytes = character.len_utf8();
            *(if character.is_ascii() { &mut ascii } else { &mut other }) += bytes;
        }
        let other = if shrinks { other / NORMALISED_SHRINK_MAX } else { other };
        (ascii + other).div_ceil(longest)
    }

    fn normalise<'t>(&self, text: &'t str, first: bool) -> Cow<'t, str> {
        let mut text = match self.normal_form {
            None => Cow::Borrowed(text),
            Some(form) => form.apply(text),
        };
        if self.sentencepiece_spaces && text.contains('▁') {
            text = Cow::Owned(text.replace('▁', " "));
        }
        let add_space = match self.space_prefix {
            SpacePrefix::Never => false,
            SpacePrefix::First => first && !text.starts_with(' '),
            SpacePrefix::EachSegment => !text.starts_with(' '),
            SpacePrefix::Always => true,
        };
        if add_space { Cow::Owned(format!(" {text}")) } else { text }
    }
}

impl NormalForm {
    fn apply(self, text: &str) -> Cow<'_, str> {
        use unicode_normalization::IsNormalized::Yes;
        match self {
            _ if text.is_ascii() => Cow::Borrowed(text),
            Self::Nfc if is_nfc_quick(text.chars()) == Yes => Cow::Borrowed(text),
            Self::Nfkc if is_nfkc_quick(text.chars()) == Yes => Cow::Borrowed(text),
            Self::Nfc => Cow::Owned(text.nfc().collect()),
            Self::Nfkc => Cow::Owned(text.nfkc().collect()),
            Self::Nfd => Cow::Owned(text.nfd().collect()),
            Self::Nfkd => Cow::Owned(text.nfkd().collect()),
        }
    }
}

/// Encodes the words of one text.
struct WordEncoder<'r> {
    rules: &'r TokenizerRules,
    merger: Merger,
    cache: WordCache,
}

impl WordEncoder<'_> {
    fn encode(&mut self, text: &str, out: &mut Vec<TokenId>) -> Result<(), EncodeError> {
        let rules = self.rules;
        if rules.splitter.is_empty() {
            self.word(text, out);
            return Ok(());
        }
        self.cache.clear();
        let base = text.as_ptr() as usize;
        rules.splitter.split(text, &mut |word| {
            // Words repeat: the tokens of a word that occurred before are copied from `out`.
            let offset = word.as_ptr() as usize - base;
            match self.cache.find(text, word) {
                Some(tokens) => out.extend_from_within(tokens),
                None => {
                    let start = out.len();
                    self.word(word, out);
                    self.cache.insert(text, offset..offset + word.len(), start..out.len());
                }
            }
        })
    }

    fn word(&mut self, word: &str, out: &mut Vec<TokenId>) {
        let (vocab, merger) = (&*self.rules.vocab, &mut self.merger);
        merger.clear();
        match &*self.rules.model {
            BpeModel::Bytes { ignore_merges: true, .. } | BpeModel::Characters { ignore_merges: true, .. }
                if vocab.find(word.as_bytes()).is_some() =>
            {
                out.extend(vocab.find(word.as_bytes()).map(TokenId));
                return;
            }
            BpeModel::Bytes { merges, byte_ids, .. } => {
                word.bytes().for_each(|byte| merger.push(byte_ids[usize::from(byte)], 1));
                merger.merge(|left, right| merges.get(left.id?, right.id?));
            }
            BpeModel::Characters { merges, .. } => {
                for_each_character(word, |character| merger.push(vocab.find(character), character.len()));
                merger.merge(|left, right| merges.get(left.id?, right.id?));
            }
            BpeModel::Scores { ranks } => {
                let bytes = word.as_bytes();
                for_each_character(word, |character| merger.push(vocab.find(character), character.len()));
                merger.merge(|left, right| {
                    let id = vocab.find(&bytes[left.start as usize..right.end as usize])?;
                    Some((ranks[id as usize], id))
                });
            }
        }
        for symbol in merger.symbols() {
            match symbol.id {
                Some(id) => out.push(TokenId(id)),
                None => {
                    self.rules.push_byte_fallback(&word.as_bytes()[symbol.start as usize..symbol.end as usize], out)
                }
            }
        }
    }
}

impl TokenizerRules {
    /// Appends the byte tokens of text without a token; if a byte has none, the unknown token, if there is one.
    fn push_byte_fallback(&self, bytes: &[u8], out: &mut Vec<TokenId>) {
        let start = out.len();
        out.extend(bytes.iter().filter_map(|&byte| self.vocab.byte_id(byte)).map(TokenId));
        if out.len() - start != bytes.len() {
            out.truncate(start);
            out.extend(self.unknown.map(TokenId));
        }
    }
}

fn for_each_character<'w>(word: &'w str, mut visit: impl FnMut(&'w [u8])) {
    let mut rest = word;
    while let Some(character) = rest.chars().next() {
        let (head, tail) = rest.split_at(character.len_utf8());
        visit(head.as_bytes());
        rest = tail;
    }
}

/// The words of one text, with the position of their tokens. Stores ranges, not strings.
#[derive(Default)]
struct WordCache {
    ranges: HashTable<(std::ops::Range<u32>, std::ops::Range<u32>)>,
    hash: DefaultHashBuilder,
}

impl WordCache {
    fn clear(&mut self) {
        self.ranges.clear();
    }

    fn find(&self, text: &str, word: &str) -> Option<std::ops::Range<usize>> {
        let hash = self.hash.hash_one(word.as_bytes());
        let (_, tokens) = self.ranges.find(hash, |(range, _)| at(text, range) == word.as_bytes())?;
        Some(tokens.start as usize..tokens.end as usize)
    }

    fn insert(&mut self, text: &str, range: std::ops::Range<usize>, tokens: std::ops::Range<usize>) {
        let hash = self.hash.hash_one(&text.as_bytes()[range.clone()]);
        let entry = (range.start as u32..range.end as u32, tokens.start as u32..tokens.end as u32);
        self.ranges.insert_unique(hash, entry, |(range, _)| self.hash.hash_one(at(text, range)));
    }
}

fn at<'t>(text: &'t str, range: &std::ops::Range<u32>) -> &'t [u8] {
    &text.as_bytes()[range.start as usize..range.end as usize]
}
