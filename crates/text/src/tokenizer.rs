//! Text to tokens and back.
//!
//! One engine for every vocabulary, whether it came from `tokenizer.json` or from GGUF metadata; the loaders are in
//! `json` and `gguf`. Encoding goes: special tokens are found whole, the text between them is normalised, cut into
//! words, and each word is merged. Time is `n log n` in the length of the text at worst.

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

/// The longest text that is encoded at once.
pub const TEXT_BYTES_MAX: usize = 256 << 20;

/// A vocabulary and the rules to use it. Cheap to clone.
#[derive(Clone)]
pub struct Tokenizer {
    pub(crate) rules: Arc<Rules>,
}

/// Whether special tokens such as `<|im_end|>` appear in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    Hide,
    Show,
}

/// Why a vocabulary cannot be used.
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
    /// Encodes text in which special tokens may be written out: what a chat template gives.
    ///
    /// `add_special` adds the begin and end tokens that the model expects around a text. A chat template writes them
    /// itself: encode its text without.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, EncodeError> {
        self.rules.encode(text, add_special, true)
    }

    /// Encodes text that nobody may use to write control tokens: `<|im_end|>` becomes the characters it is made of.
    pub fn encode_plain(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, EncodeError> {
        self.rules.encode(text, add_special, false)
    }

    /// The text of the tokens. Bytes that are no UTF-8 become U+FFFD; an id outside the vocabulary is nothing.
    pub fn decode(&self, ids: &[TokenId], special: SpecialTokens) -> String {
        let mut detokenizer = self.detokenizer(special);
        let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
        text += &detokenizer.finish();
        text
    }

    /// Decodes tokens one at a time, as the beginning of a text.
    pub fn detokenizer(&self, special: SpecialTokens) -> Detokenizer {
        Detokenizer::new(self.clone(), special)
    }

    /// The id of a token by its text: `<|im_end|>`, or a word with its space.
    pub fn id_of(&self, token: &str) -> Option<TokenId> {
        let rules = &self.rules;
        rules.specials.id_of(token).or_else(|| rules.vocab.find(token.as_bytes())).map(TokenId)
    }

    /// One more than the largest id. A model may have more rows than this.
    pub fn vocab_size(&self) -> usize {
        self.rules.vocab.len()
    }

    /// True for a token that is structure, not text.
    pub fn is_special(&self, id: TokenId) -> bool {
        self.rules.vocab.kind(id.0) == TokenKind::Control
    }

    /// The bytes that a token adds to a text.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.rules.vocab.bytes(id.0)
    }

    /// The tokens that end a text, in order of their ids.
    pub fn eos_ids(&self) -> &[TokenId] {
        &self.rules.eos
    }

    /// Adds tokens that end a text: those of `generation_config.json`, or of the user.
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

/// Everything that a loader fills in.
#[derive(Clone)]
pub(crate) struct Rules {
    pub vocab: Arc<Vocab>,
    pub specials: Arc<SpecialTokenIndex>,
    pub normal_form: Option<NormalForm>,
    /// In SentencePiece texts `▁` is the same as a space.
    pub spaced: bool,
    pub space_prefix: SpacePrefix,
    pub splitter: Arc<Splitter>,
    pub model: Arc<BpeModel>,
    pub unknown: Option<u32>,
    pub prefix: Vec<TokenId>,
    pub suffix: Vec<TokenId>,
    pub eos: Vec<TokenId>,
    /// The first space of a decoded text was put there by the encoder.
    pub strip_first_space: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormalForm {
    Nfc,
    Nfkc,
    Nfd,
    Nfkd,
}

/// Where the encoder puts a space that is not in the text.
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

/// How words become tokens.
pub(crate) enum BpeModel {
    /// Words are bytes, and these pairs of tokens merge.
    Bytes { merges: Merges, byte_ids: Box<[Option<u32>; 256]>, ignore_merges: bool },
    /// Words are characters, and these pairs of tokens merge; what has no token is bytes.
    Characters { merges: Merges, ignore_merges: bool },
    /// Words are characters, and neighbours merge where their text is a token, the best score first.
    /// `ranks[id]` orders the scores.
    Scores { ranks: Vec<u32> },
}

/// `(left, right) -> (rank, token)`.
pub(crate) struct Merges(HashMap<u64, (u32, u32)>);

impl Merges {
    pub fn with_capacity(merges: usize) -> Self {
        Self(HashMap::with_capacity(merges))
    }

    /// Adds the next merge; the first of two equal ones counts.
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

impl Rules {
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

    fn normalise<'t>(&self, text: &'t str, first: bool) -> Cow<'t, str> {
        let mut text = match self.normal_form {
            None => Cow::Borrowed(text),
            Some(form) => form.apply(text),
        };
        if self.spaced && text.contains('▁') {
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
    rules: &'r Rules,
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
            // Words repeat: the tokens of one that was seen are copied from where they stand in `out`.
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
                None => self.rules.fall_back(&word.as_bytes()[symbol.start as usize..symbol.end as usize], out),
            }
        }
    }
}

impl Rules {
    /// Text without a token: its bytes, if each has one, else the unknown token, else nothing.
    fn fall_back(&self, bytes: &[u8], out: &mut Vec<TokenId>) {
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

/// Words of one text and where their tokens stand. Holds ranges, not strings.
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
