//! Tokenizers from `tokenizer.json`.
//!
//! The file describes a pipeline of named components. Components that language models use are supported; any other is
//! refused by name, because skipping it would silently change the tokens.

use crate::merge_list::MergeList;
use crate::pre::GPT2_PATTERN;
use crate::read::read_bounded;
use crate::special::{SpecialToken, SpecialTokenIndex};
use crate::split::Splitter;
use crate::tokenizer::{BpeModel, NormalForm, SpacePrefix, TextLoadError, Tokenizer, TokenizerRules};
use crate::vocab::{TOKENS_MAX, TokenKind, Vocab, append_byte_level, append_spaced, byte_token};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use types::TokenId;

/// The maximum size of `tokenizer.json`.
pub(crate) const FILE_BYTES_MAX: u64 = 512 << 20;

impl Tokenizer {
    /// Reads a `tokenizer.json`. It does not name the end-of-sequence tokens: see `with_eos_ids`.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TextLoadError> {
        let path = path.as_ref();
        let text = read_bounded(path, FILE_BYTES_MAX)?;
        Self::from_json(&text).map_err(|error| match error {
            ParseError::Json(source) => TextLoadError::Json { path: path.to_owned(), source },
            ParseError::Load(error) => error,
        })
    }

    fn from_json(text: &str) -> Result<Self, ParseError> {
        let file: TokenizerFile = serde_json::from_str(text)?;
        let mut pipeline = Pipeline::default();
        pipeline.normalizer(&file.normalizer)?;
        pipeline.pre_tokenizer(&file.pre_tokenizer)?;
        pipeline.decoder(&file.decoder);
        pipeline.post_processor(&file.post_processor)?;
        Ok(Self { rules: Arc::new(rules(&file, pipeline)?) })
    }
}

enum ParseError {
    Json(serde_json::Error),
    Load(TextLoadError),
}

impl From<serde_json::Error> for ParseError {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(error)
    }
}

impl From<TextLoadError> for ParseError {
    fn from(error: TextLoadError) -> Self {
        Self::Load(error)
    }
}

#[derive(Deserialize)]
struct TokenizerFile<'a> {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: ModelFile<'a>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    special: bool,
}

/// Vocabulary and merges are parsed only after the model type is known to be supported.
#[derive(Deserialize)]
struct ModelFile<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    vocab: Option<&'a RawValue>,
    #[serde(borrow)]
    merges: Option<&'a RawValue>,
}

fn rules(file: &TokenizerFile<'_>, pipeline: Pipeline) -> Result<TokenizerRules, ParseError> {
    let model = &file.model;
    let (Some(vocab), Some(merges)) = (model.vocab, model.merges) else {
        let name = model.kind.clone().unwrap_or_default();
        return Err(unsupported("model", &name, "BPE").into());
    };
    if let Some(kind) = model.kind.as_deref().filter(|&kind| kind != "BPE") {
        return Err(unsupported("model", kind, "BPE").into());
    }
    for affix in [&model.continuing_subword_prefix, &model.end_of_word_suffix].into_iter().flatten() {
        if !affix.is_empty() {
            return Err(unsupported("subword affix", affix, "none").into());
        }
    }
    let VocabEntries(entries) = serde_json::from_str(vocab.get())?;
    let MergeEntries(merges) = serde_json::from_str(merges.get())?;
    let spelling: fn(&str, &mut Vec<u8>) = match (pipeline.byte_level, pipeline.sentencepiece_spaces) {
        (true, _) => append_byte_level,
        (false, true) => append_spaced,
        (false, false) => |token, bytes| bytes.extend_from_slice(token.as_bytes()),
    };
    let unknown = model.unk_token.as_ref().and_then(|token| entries.iter().find(|(text, _)| text == token));
    let unknown = unknown.map(|&(_, id)| id);
    let vocab = vocabulary(&entries, &file.added_tokens, spelling, model.byte_fallback)?;

    let mut list = MergeList::new(&vocab, spelling, merges.len());
    for merge in &merges {
        match merge {
            Merge::Joined(merge) => list.push_joined(merge)?,
            Merge::Pair(left, right) => list.push(left, right),
        }
    }
    let (merges, ignore_merges) = (list.finish(), model.ignore_merges);
    let model = if pipeline.byte_level {
        let byte_ids = Box::new(std::array::from_fn(|byte| vocab.find(&[byte as u8])));
        BpeModel::Bytes { merges, byte_ids, ignore_merges }
    } else {
        BpeModel::Characters { merges, ignore_merges }
    };
    let malformed = |what: &str, error: &dyn fmt::Display| TextLoadError::Malformed(format!("{what}: {error}"));
    let specials = file.added_tokens.iter().map(|token| SpecialToken {
        id: token.id,
        text: token.content.clone(),
        control: token.special,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        single_word: token.single_word,
    });
    let specials = SpecialTokenIndex::new(specials.collect()).map_err(|error| malformed("added tokens", &error))?;
    let splitter = Splitter::new(pipeline.patterns.iter().map(|pattern| &**pattern))
        .map_err(|error| malformed("pre-tokenizer", &error))?;
    Ok(TokenizerRules {
        vocab: Arc::new(vocab),
        specials: Arc::new(specials),
        normal_form: pipeline.normal_form,
        sentencepiece_spaces: pipeline.sentencepiece_spaces,
        space_prefix: pipeline.space_prefix,
        splitter: Arc::new(splitter),
        model: Arc::new(model),
        unknown,
        prefix: pipeline.prefix,
        suffix: pipeline.suffix,
        eos: Vec::new(),
        strip_first_space: pipeline.strip_first_space,
    })
}

/// Places every token at its id.
fn vocabulary(
    entries: &[(Cow<'_, str>, u32)],
    added: &[AddedToken],
    spelling: fn(&str, &mut Vec<u8>),
    byte_fallback: bool,
) -> Result<Vocab, TextLoadError> {
    let ids = entries.iter().map(|&(_, id)| id).chain(added.iter().map(|token| token.id));
    let size = ids.max().map_or(0, |id| id as usize + 1);
    if size == 0 || size > TOKENS_MAX {
        return Err(TextLoadError::Malformed(format!("{size} tokens, expected 1 to {TOKENS_MAX}")));
    }
    let mut slots: Vec<(&str, TokenKind)> = vec![("", TokenKind::Unused); size];
    for (text, id) in entries {
        let is_byte = byte_fallback && byte_token(text).is_some();
        slots[*id as usize] = (text, if is_byte { TokenKind::Byte } else { TokenKind::Normal });
    }
    for token in added {
        let kind = if token.special { TokenKind::Control } else { TokenKind::UserDefined };
        slots[token.id as usize] = (&token.content, kind);
    }
    let mut vocab = Vocab::with_capacity(size);
    for (text, kind) in slots {
        vocab.push(kind, |bytes| match (kind, byte_token(text)) {
            (TokenKind::Byte, Some(byte)) => bytes.push(byte),
            (TokenKind::Normal, _) => spelling(text, bytes),
            _ => bytes.extend_from_slice(text.as_bytes()),
        });
    }
    Ok(vocab)
}

/// The components around the model.
struct Pipeline {
    normal_form: Option<NormalForm>,
    byte_level: bool,
    sentencepiece_spaces: bool,
    space_prefix: SpacePrefix,
    strip_first_space: bool,
    patterns: Vec<Cow<'static, str>>,
    prefix: Vec<TokenId>,
    suffix: Vec<TokenId>,
}

impl Default for Pipeline {
    fn default() -> Self {
        Self {
            normal_form: None,
            byte_level: false,
            sentencepiece_spaces: false,
            space_prefix: SpacePrefix::Never,
            strip_first_space: false,
            patterns: Vec::new(),
            prefix: Vec::new(),
            suffix: Vec::new(),
        }
    }
}

impl Pipeline {
    fn normalizer(&mut self, part: &Value) -> Result<(), TextLoadError> {
        match kind(part) {
            "" => {}
            "Sequence" => list(part, "normalizers").try_for_each(|part| self.normalizer(part))?,
            "NFC" => self.normal_form = Some(NormalForm::Nfc),
            "NFKC" => self.normal_form = Some(NormalForm::Nfkc),
            "NFD" => self.normal_form = Some(NormalForm::Nfd),
            "NFKD" => self.normal_form = Some(NormalForm::Nfkd),
            "Replace" if part["pattern"]["String"] == " " && part["content"] == "▁" => {
                self.sentencepiece_spaces = true
            }
            "Prepend" if part["prepend"] == "▁" => self.space_prefix = SpacePrefix::Always,
            other => return Err(unsupported("normalizer", other, "NFC, NFD, NFKC, NFKD and ▁ for spaces")),
        }
        Ok(())
    }

    fn pre_tokenizer(&mut self, part: &Value) -> Result<(), TextLoadError> {
        let flag = |name: &str, default| part[name].as_bool().unwrap_or(default);
        match kind(part) {
            "" => {}
            "Sequence" => list(part, "pretokenizers").try_for_each(|part| self.pre_tokenizer(part))?,
            "ByteLevel" => {
                self.byte_level = true;
                if flag("add_prefix_space", true) {
                    self.space_prefix = SpacePrefix::EachSegment;
                }
                if flag("use_regex", true) {
                    self.patterns.push(GPT2_PATTERN.into());
                }
            }
            "Metaspace" => {
                self.sentencepiece_spaces = true;
                self.space_prefix = match part["prepend_scheme"].as_str() {
                    Some("never") => SpacePrefix::Never,
                    Some("first") => SpacePrefix::First,
                    None if !flag("add_prefix_space", true) => SpacePrefix::Never,
                    _ => SpacePrefix::EachSegment,
                };
                if flag("split", true) {
                    self.patterns.push(" [^ ]*|[^ ]+".into());
                }
            }
            "Digits" if flag("individual_digits", false) => self.patterns.push(r"\p{N}".into()),
            "Digits" => self.patterns.push(r"\p{N}+".into()),
            "Split" => self.split(part)?,
            other => return Err(unsupported("pre-tokenizer", other, "ByteLevel, Metaspace, Digits and Split")),
        }
        Ok(())
    }

    fn split(&mut self, part: &Value) -> Result<(), TextLoadError> {
        let (regex, literal) = (part["pattern"]["Regex"].as_str(), part["pattern"]["String"].as_str());
        if self.sentencepiece_spaces && literal == Some(" ") {
            return Ok(()); // spaces are ▁ at this point, so there is nothing to split
        }
        let behavior = part["behavior"].as_str().unwrap_or_default();
        let keeps_matches = behavior.eq_ignore_ascii_case("isolated")
            || (behavior.eq_ignore_ascii_case("removed") && part["invert"] == true);
        if !keeps_matches {
            return Err(unsupported("split behavior", behavior, "Isolated"));
        }
        let pattern = regex.map(str::to_owned).or_else(|| Some(fancy_regex::escape(literal?).into_owned()));
        let pattern = pattern.ok_or_else(|| TextLoadError::Malformed("a Split without a pattern".to_owned()))?;
        self.patterns.push(pattern.into());
        Ok(())
    }

    fn decoder(&mut self, part: &Value) {
        match kind(part) {
            "Sequence" => list(part, "decoders").for_each(|part| self.decoder(part)),
            "Strip" => self.strip_first_space |= part["content"] == " " && part["start"].as_u64() > Some(0),
            "Metaspace" => self.strip_first_space = self.space_prefix != SpacePrefix::Never,
            _ => {}
        }
    }

    fn post_processor(&mut self, part: &Value) -> Result<(), TextLoadError> {
        match kind(part) {
            "Sequence" => list(part, "processors").try_for_each(|part| self.post_processor(part))?,
            "TemplateProcessing" => {
                let mut before = true;
                for piece in list(part, "single") {
                    if piece.get("Sequence").is_some() {
                        before = false;
                        continue;
                    }
                    let name = piece["SpecialToken"]["id"].as_str().unwrap_or_default();
                    let ids = list(&part["special_tokens"][name], "ids").filter_map(Value::as_u64);
                    let ids = ids.filter_map(|id| u32::try_from(id).ok()).map(TokenId);
                    if before { self.prefix.extend(ids) } else { self.suffix.extend(ids) }
                }
            }
            "" | "ByteLevel" => {}
            other => return Err(unsupported("post-processor", other, "TemplateProcessing and ByteLevel")),
        }
        Ok(())
    }
}

fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or_default()
}

fn list<'v>(part: &'v Value, name: &str) -> impl Iterator<Item = &'v Value> {
    part[name].as_array().into_iter().flatten()
}

fn unsupported(part: &'static str, name: &str, supported: &str) -> TextLoadError {
    TextLoadError::Unsupported { part, name: name.to_owned(), supported: supported.to_owned() }
}

/// `{"token": id}`, in the order of the file. Tokens without escapes are borrowed.
struct VocabEntries<'a>(Vec<(Cow<'a, str>, u32)>);

impl<'de> Deserialize<'de> for VocabEntries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabVisitor;
        impl<'de> Visitor<'de> for VocabVisitor {
            type Value = VocabEntries<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tokens and their ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some((TokenText(token), id)) = map.next_entry()? {
                    entries.push((token, id));
                }
                Ok(VocabEntries(entries))
            }
        }
        deserializer.deserialize_map(VocabVisitor)
    }
}

struct MergeEntries<'a>(Vec<Merge<'a>>);

/// Written as `"a b"`, or as `["a", "b"]`, which allows spaces in tokens.
enum Merge<'a> {
    Joined(Cow<'a, str>),
    Pair(Cow<'a, str>, Cow<'a, str>),
}

impl<'de> Deserialize<'de> for MergeEntries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self)
    }
}

impl<'de> Deserialize<'de> for Merge<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;
        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens, as a list or with a space between")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Merge::Joined(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Merge::Joined(Cow::Owned(text.to_owned())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                match (list.next_element()?, list.next_element()?, list.next_element::<TokenText<'de>>()?) {
                    (Some(TokenText(left)), Some(TokenText(right)), None) => Ok(Merge::Pair(left, right)),
                    _ => Err(serde::de::Error::custom("a merge is two tokens")),
                }
            }
        }
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct TokenText<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for TokenText<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TokenVisitor;
        impl<'de> Visitor<'de> for TokenVisitor {
            type Value = TokenText<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(TokenText(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(TokenText(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TokenVisitor)
    }
}
