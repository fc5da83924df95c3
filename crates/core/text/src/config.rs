//! `tokenizer_config.json` and `chat_template.jinja`: the chat template and the names of the special tokens.

use crate::read::read_bounded;
use crate::template::{ChatTemplate, TEMPLATE_BYTES_MAX, TemplateError};
use crate::tokenizer::TextLoadError;
use serde::Deserialize;
use std::path::Path;

const FILE_BYTES_MAX: u64 = 64 << 20;

/// The fields of `tokenizer_config.json` that are used.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(from = "ConfigFile")]
pub struct TokenizerConfig {
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub chat_template: Option<String>,
}

impl TokenizerConfig {
    /// Reads a model's folder. A missing file counts as empty. `chat_template.jinja` has precedence over a template in
    /// `tokenizer_config.json`.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, TextLoadError> {
        let path = folder.as_ref().join("tokenizer_config.json");
        let mut config: Self = match optional(read_bounded(&path, FILE_BYTES_MAX))? {
            Some(text) => serde_json::from_str(&text).map_err(|source| TextLoadError::Json { path, source })?,
            None => Self::default(),
        };
        let path = folder.as_ref().join("chat_template.jinja");
        if let Some(template) = optional(read_bounded(&path, TEMPLATE_BYTES_MAX as u64))? {
            config.chat_template = Some(template);
        }
        Ok(config)
    }

    /// The chat template, compiled; `None` if the model has none.
    pub fn template(&self) -> Option<Result<ChatTemplate, TemplateError>> {
        let token = |token: &Option<String>| token.clone().unwrap_or_default();
        self.chat_template.as_ref().map(|t| ChatTemplate::new(t, &token(&self.bos_token), &token(&self.eos_token)))
    }
}

fn optional(text: Result<String, TextLoadError>) -> Result<Option<String>, TextLoadError> {
    match text {
        Err(TextLoadError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ConfigFile {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    chat_template: Option<Templates>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Text(String),
    Object { content: String },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl From<ConfigFile> for TokenizerConfig {
    fn from(file: ConfigFile) -> Self {
        let text = |name: TokenName| match name {
            TokenName::Text(text) | TokenName::Object { content: text } => text,
        };
        Self {
            bos_token: file.bos_token.map(text),
            eos_token: file.eos_token.map(text),
            chat_template: file.chat_template.and_then(|templates| match templates {
                Templates::One(template) => Some(template),
                Templates::Named(all) => all.into_iter().find(|t| t.name == "default").map(|t| t.template),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> TokenizerConfig {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn tokens_may_be_text_or_objects() {
        let config = parse(r#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}}"#);
        assert_eq!((config.bos_token.as_deref(), config.eos_token.as_deref()), (Some("<s>"), Some("</s>")));
        assert_eq!(parse(r#"{"bos_token": null, "other": 1}"#), TokenizerConfig::default());
    }

    #[test]
    fn the_default_of_several_templates_is_taken() {
        let named =
            r#"{"chat_template": [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]}"#;
        assert_eq!(parse(named).chat_template.as_deref(), Some("b"));
        assert_eq!(parse(r#"{"chat_template": "c"}"#).chat_template.as_deref(), Some("c"));
    }

    #[test]
    fn a_template_in_its_own_file_comes_first() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(TokenizerConfig::from_folder(folder.path()).unwrap(), TokenizerConfig::default());
        std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"chat_template": "a"}"#).unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), "b").unwrap();
        let config = TokenizerConfig::from_folder(folder.path()).unwrap();
        assert_eq!(config.template().unwrap().unwrap().render(&[], &Default::default()).unwrap(), "b");
    }
}
