//! Tokenizers from GGUF metadata.
//!
//! The metadata is passed in as a plain struct; this crate does not read GGUF files.

use crate::merge_list::MergeList;
use crate::pre;
use crate::special::{SpecialToken, SpecialTokenIndex};
use crate::split::Splitter;
use crate::tokenizer::{BpeModel, NormalForm, SpacePrefix, TextLoadError, Tokenizer, TokenizerRules};
use crate::vocab::{TOKENS_MAX, TokenKind, Vocab, append_byte_level, append_spaced, byte_token};
use std::sync::Arc;
use types::TokenId;

/// The keys of `tokenizer.ggml.*`, with the same names. Absent arrays are empty.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab<'a> {
    /// `gpt2` (byte-level merges) or `llama` (SentencePiece scores).
    pub model: &'a str,
    pub pre: Option<&'a str>,
    pub tokens: Vec<&'a str>,
    pub scores: Vec<f32>,
    pub token_types: Vec<i32>,
    pub merges: Vec<&'a str>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub eot: Option<u32>,
    pub unk: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
}

/// More bytes than any known vocabulary has.
const TOKEN_BYTES_MAX: usize = 1 << 30;

/// Control tokens that end a turn in some model families. A file names only one or two of those that its model uses.
const END_NAMES: &[&str] = &[
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<｜end▁of▁sentence｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<|user|>",
    "<|observation|>",
    "<EOT>",
    "</s>",
];

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file describes.
    pub fn from_gguf(gguf: &GgufVocab<'_>) -> Result<Self, TextLoadError> {
        gguf.check()?;
        match gguf.model {
            "gpt2" => gguf.byte_level(),
            "llama" => gguf.sentence_piece(),
            other => Err(TextLoadError::Unsupported {
                part: "model",
                name: other.to_owned(),
                supported: "gpt2 and llama".to_owned(),
            }),
        }
    }
}

impl GgufVocab<'_> {
    fn check(&self) -> Result<(), TextLoadError> {
        let malformed = |what: String| Err(TextLoadError::Malformed(what));
        let tokens = self.tokens.len();
        if tokens == 0 || tokens > TOKENS_MAX {
            return malformed(format!("{tokens} tokens, expected 1 to {TOKENS_MAX}"));
        }
        if self.tokens.iter().map(|token| token.len()).sum::<usize>() > TOKEN_BYTES_MAX {
            return malformed(format!("tokens of more than {TOKEN_BYTES_MAX} bytes"));
        }
        for (name, length) in [("scores", self.scores.len()), ("token types", self.token_types.len())] {
            if length != 0 && length != tokens {
                return malformed(format!("{length} {name} for {tokens} tokens"));
            }
        }
        for (name, id) in [("bos", self.bos), ("eos", self.eos), ("eot", self.eot), ("unk", self.unk)] {
            if let Some(id) = id.filter(|&id| id as usize >= tokens) {
                return malformed(format!("{name} id {id} with {tokens} tokens"));
            }
        }
        Ok(())
    }

    fn byte_level(&self) -> Result<Tokenizer, TextLoadError> {
        let name = self.pre.unwrap_or_default();
        let pre = pre::by_name(name).ok_or_else(|| TextLoadError::Unsupported {
            part: "pre-tokenizer",
            name: name.to_owned(),
            supported: pre::names().filter(|name| !name.is_empty()).collect::<Vec<_>>().join(", "),
        })?;
        let splitter = Splitter::new(pre.patterns.iter().copied())
            .map_err(|error| TextLoadError::Malformed(format!("pre-tokenizer {name}: {error}")))?;
        let vocab = self.vocab(append_byte_level, false);
        let mut merges = MergeList::new(&vocab, append_byte_level, self.merges.len());
        self.merges.iter().try_for_each(|merge| merges.push_joined(merge))?;
        let model = BpeModel::Bytes {
            merges: merges.finish(),
            byte_ids: Box::new(std::array::from_fn(|byte| vocab.find(&[byte as u8]))),
            ignore_merges: pre.ignore_merges,
        };
        let prefix_space = self.add_space_prefix.unwrap_or(false);
        Ok(self.finish(TokenizerRules {
            normal_form: pre.nfc.then_some(NormalForm::Nfc),
            sentencepiece_spaces: false,
            space_prefix: if prefix_space { SpacePrefix::EachSegment } else { SpacePrefix::Never },
            splitter: Arc::new(splitter),
            strip_first_space: false,
            ..self.rules(vocab, model, pre.add_bos)?
        }))
    }

    fn sentence_piece(&self) -> Result<Tokenizer, TextLoadError> {
        let vocab = self.vocab(append_spaced, true);
        let model = if self.scores.is_empty() && !self.merges.is_empty() {
            let mut merges = MergeList::new(&vocab, append_spaced, self.merges.len());
            self.merges.iter().try_for_each(|merge| merges.push_joined(merge))?;
            BpeModel::Characters { merges: merges.finish(), ignore_merges: false }
        } else if self.scores.is_empty() {
            return Err(TextLoadError::Malformed("a llama vocabulary without scores".to_owned()));
        } else {
            BpeModel::Scores { ranks: ranks(&self.scores) }
        };
        let prefix_space = self.add_space_prefix.unwrap_or(true);
        Ok(self.finish(TokenizerRules {
            normal_form: None,
            sentencepiece_spaces: true,
            space_prefix: if prefix_space { SpacePrefix::Always } else { SpacePrefix::Never },
            strip_first_space: prefix_space,
            ..self.rules(vocab, model, true)?
        }))
    }

    fn vocab(&self, spelling: impl Fn(&str, &mut Vec<u8>), byte_fallback: bool) -> Vocab {
        let mut vocab = Vocab::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            let kind = self.kind(id, byte_fallback);
            vocab.push(kind, |bytes| match (kind, byte_token(token)) {
                (TokenKind::Byte, Some(byte)) => bytes.push(byte),
                // User-defined tokens are stored as plain text, except that SentencePiece writes their spaces as in all
                // tokens.
                (TokenKind::UserDefined, _) if byte_fallback => spelling(token, bytes),
                (TokenKind::Normal | TokenKind::Unused, _) => spelling(token, bytes),
                _ => bytes.extend_from_slice(token.as_bytes()),
            });
        }
        vocab
    }

    fn kind(&self, id: usize, byte_fallback: bool) -> TokenKind {
        let is_byte = byte_fallback && byte_token(self.tokens[id]).is_some();
        match self.token_types.get(id) {
            Some(2 | 3) => TokenKind::Control,
            Some(4) => TokenKind::UserDefined,
            Some(5) => TokenKind::Unused,
            Some(6) if is_byte => TokenKind::Byte,
            Some(_) => TokenKind::Normal,
            None if is_byte => TokenKind::Byte,
            None if [self.bos, self.eos, self.eot, self.unk].contains(&Some(id as u32)) => TokenKind::Control,
            None => TokenKind::Normal,
        }
    }

    /// The rules that both kinds of vocabularies share.
    fn rules(&self, vocab: Vocab, model: BpeModel, add_bos_default: bool) -> Result<TokenizerRules, TextLoadError> {
        let special = |id: u32| {
            let control = vocab.kind(id) == TokenKind::Control;
            let text = String::from_utf8_lossy(vocab.bytes(id)).into_owned();
            SpecialToken { id, text, control, ..SpecialToken::default() }
        };
        let is_special = |&id: &u32| matches!(vocab.kind(id), TokenKind::Control | TokenKind::UserDefined);
        let specials = SpecialTokenIndex::new((0..vocab.len() as u32).filter(is_special).map(special).collect())
            .map_err(|error| TextLoadError::Malformed(format!("special tokens: {error}")))?;
        let token = |wanted: bool, id: Option<u32>| id.filter(|_| wanted).map(TokenId).into_iter().collect();
        Ok(TokenizerRules {
            vocab: Arc::new(vocab),
            specials: Arc::new(specials),
            normal_form: None,
            sentencepiece_spaces: false,
            space_prefix: SpacePrefix::Never,
            splitter: Arc::new(Splitter::whole()),
            model: Arc::new(model),
            unknown: self.unk,
            prefix: token(self.add_bos.unwrap_or(add_bos_default), self.bos),
            suffix: token(self.add_eos.unwrap_or(false), self.eos),
            eos: Vec::new(),
            strip_first_space: false,
        })
    }

    fn finish(&self, rules: TokenizerRules) -> Tokenizer {
        let named = END_NAMES.iter().filter_map(|name| rules.specials.id_of(name));
        let named: Vec<u32> = named.filter(|&id| rules.vocab.kind(id) == TokenKind::Control).collect();
        let ends = [self.eos, self.eot].into_iter().flatten().chain(named);
        let ends: Vec<TokenId> = ends.map(TokenId).collect();
        Tokenizer { rules: Arc::new(rules) }.with_eos_ids(ends)
    }
}

/// The rank of each score, the highest first; equal scores have the same rank.
fn ranks(scores: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    order.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]));
    let mut ranks = vec![0; scores.len()];
    let mut rank = 0;
    for (index, &id) in order.iter().enumerate() {
        if index > 0 && scores[id as usize] != scores[order[index - 1] as usize] {
            rank = index as u32;
        }
        ranks[id as usize] = rank;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_pre_tokenizer_is_refused_with_the_names_that_are_known() {
        let vocab = GgufVocab { model: "gpt2", pre: Some("made-up"), tokens: vec!["a"], ..GgufVocab::default() };
        let error = Tokenizer::from_gguf(&vocab).err().unwrap().to_string();
        assert!(error.contains("\"made-up\"") && error.contains("qwen2") && error.contains("smollm"), "{error}");
    }

    #[test]
    fn an_unknown_model_is_refused_by_name() {
        let vocab = GgufVocab { model: "t5", tokens: vec!["a"], ..GgufVocab::default() };
        assert!(Tokenizer::from_gguf(&vocab).err().unwrap().to_string().contains("\"t5\""));
    }

    #[test]
    fn arrays_that_do_not_fit_together_are_refused() {
        let fine = GgufVocab { model: "llama", tokens: vec!["a"], scores: vec![0.0], ..GgufVocab::default() };
        assert!(Tokenizer::from_gguf(&fine).is_ok());
        for broken in [
            GgufVocab { tokens: vec![], ..fine.clone() },
            GgufVocab { scores: vec![], ..fine.clone() },
            GgufVocab { scores: vec![0.0; 2], ..fine.clone() },
            GgufVocab { token_types: vec![1; 2], ..fine.clone() },
            GgufVocab { bos: Some(1), ..fine.clone() },
        ] {
            assert!(matches!(Tokenizer::from_gguf(&broken), Err(TextLoadError::Malformed(_))));
        }
    }

    #[test]
    fn equal_scores_share_a_rank() {
        assert_eq!(ranks(&[-1.0, 0.0, -1.0, f32::NEG_INFINITY]), [1, 0, 1, 3]);
    }
}
