//! The text side of a model on disk: tokenizer, chat template and recommended sampling settings. Read from the JSON files of
//! a folder, or from the metadata of a GGUF.

use std::path::Path;

use anyhow::{Context, Result};
use model::Checkpoint;
use model::files::Gguf;
use serde_json::{Map, Value};
use text::{ChatTemplate, GenerationDefaults, GgufVocab, Message, RenderOptions, Tokenizer, TokenizerConfig};
use types::TokenId;

use crate::store::{ModelFiles, catalogue};

pub struct TextAssets {
    pub tokenizer: Tokenizer,
    pub defaults: GenerationDefaults,
    pub template: Option<ChatTemplate>,
}

/// A prompt as text and as tokens.
pub struct EncodedPrompt {
    pub text: String,
    pub tokens: Vec<TokenId>,
}

impl TextAssets {
    /// `path` is the path that `checkpoint` was opened from.
    pub fn open(path: &Path, checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.gguf() {
            Some(file) => Self::from_gguf(file),
            None => Self::from_folder(path),
        }
    }

    /// The same of a model with a name. What the files do not recommend, the catalogue may.
    pub fn of(files: &ModelFiles, checkpoint: &Checkpoint) -> Result<Self> {
        let mut text = Self::open(&files.path, checkpoint)?;
        if let Some(entry) = catalogue().named(&files.name).filter(|_| text.defaults == GenerationDefaults::default()) {
            text.defaults = entry.sampling.clone();
        }
        Ok(text)
    }

    /// The tokens of a conversation, with the generation prompt. Without a chat template the messages are joined by
    /// newlines.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<TokenId>> {
        Ok(self.prompt(messages, Map::new())?.tokens)
    }

    /// The same with its text. `variables` are further ones for the template.
    pub fn prompt(&self, messages: &[Message], variables: Map<String, Value>) -> Result<EncodedPrompt> {
        let Some(template) = &self.template else {
            let text = messages.iter().map(text_of).collect::<Vec<_>>().join("\n");
            return Ok(EncodedPrompt { tokens: self.raw(&text)?, text });
        };
        let options = RenderOptions { add_generation_prompt: true, extra: variables, ..RenderOptions::default() };
        let text = template.render(messages, &options)?;
        Ok(EncodedPrompt { tokens: self.tokenizer.encode(&text, false)?, text })
    }

    /// The tokens of a text for plain continuation.
    pub fn raw(&self, text: &str) -> Result<Vec<TokenId>> {
        Ok(self.tokenizer.encode(text, true)?)
    }

    fn from_folder(folder: &Path) -> Result<Self> {
        let defaults = folder.join("generation_config.json");
        let defaults = if defaults.exists() { GenerationDefaults::from_file(defaults)? } else { Default::default() };
        let config = TokenizerConfig::from_folder(folder)?;
        let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json"))?;
        let eos = config.eos_token.as_deref().and_then(|token| tokenizer.id_of(token));
        let tokenizer = tokenizer.with_eos_ids(defaults.eos_ids.iter().copied().chain(eos));
        let template = config.template().transpose()?;
        Ok(Self { tokenizer, defaults, template })
    }

    fn from_gguf(file: &Gguf) -> Result<Self> {
        let vocab = gguf_vocab(file)?;
        let token = |id: Option<u32>| id.and_then(|id| vocab.tokens.get(id as usize)).copied().unwrap_or_default();
        let template = gguf_template(file).map(|source| ChatTemplate::new(source, token(vocab.bos), token(vocab.eos)));
        Ok(Self {
            template: template.transpose()?,
            tokenizer: Tokenizer::from_gguf(&vocab)?,
            defaults: GenerationDefaults::default(),
        })
    }
}

/// The chat template as the model has it, not compiled. `path` is the path that `checkpoint` was opened from.
pub fn template_source(path: &Path, checkpoint: &Checkpoint) -> Result<Option<String>> {
    match checkpoint.gguf() {
        Some(file) => Ok(gguf_template(file).map(str::to_owned)),
        None => Ok(TokenizerConfig::from_folder(path)?.chat_template),
    }
}

fn gguf_template(file: &Gguf) -> Option<&str> {
    file.get("tokenizer.chat_template").and_then(|value| value.as_str())
}

/// Reads the keys `tokenizer.ggml.*`.
fn gguf_vocab(file: &Gguf) -> Result<GgufVocab<'_>> {
    let get = |key: &str| file.get(&format!("tokenizer.ggml.{key}"));
    let string = |key| get(key).and_then(|value| value.as_str());
    let strings = |key| get(key).and_then(|value| value.as_strings());
    let id = |key| get(key).and_then(|value| value.as_u64()).and_then(|id| u32::try_from(id).ok());
    let flag = |key| get(key).and_then(|value| value.as_bool());
    let types = get("token_type").and_then(|value| value.as_ints()).unwrap_or_default();
    Ok(GgufVocab {
        model: string("model").context("the GGUF has no tokenizer: tokenizer.ggml.model is missing")?,
        pre: string("pre"),
        tokens: strings("tokens").context("the GGUF has no tokenizer.ggml.tokens")?.iter().collect(),
        scores: get("scores").and_then(|value| value.as_floats()).unwrap_or_default().to_vec(),
        token_types: types.iter().map(|&kind| i32::try_from(kind).unwrap_or(i32::MAX)).collect(),
        merges: strings("merges").map(|merges| merges.iter().collect()).unwrap_or_default(),
        bos: id("bos_token_id"),
        eos: id("eos_token_id"),
        eot: id("eot_token_id"),
        unk: id("unknown_token_id"),
        add_bos: flag("add_bos_token"),
        add_eos: flag("add_eos_token"),
        add_space_prefix: flag("add_space_prefix"),
    })
}

fn text_of(message: &Message) -> &str {
    match &message.content {
        text::Content::Text(text) => text,
        _ => "",
    }
}
