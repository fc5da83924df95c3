//! Text in, tokens out, and back: tokenizers, chat templates, stop strings. Knows tokens but no tensors.
#![forbid(unsafe_code)]

mod config;
mod detokenizer;
mod generation;
mod gguf;
mod json;
mod merge;
mod merge_list;
mod message;
mod pre;
mod python_json;
mod read;
mod special;
mod split;
mod stop;
mod template;
mod tokenizer;
mod vocab;

pub use config::TokenizerConfig;
pub use detokenizer::Detokenizer;
pub use generation::GenerationDefaults;
pub use gguf::GgufVocab;
pub use message::{Content, Message};
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopError, StopStrings, Stopped};
pub use template::{ChatTemplate, RENDERED_BYTES_MAX, RenderOptions, TEMPLATE_BYTES_MAX, TemplateError};
pub use tokenizer::{EncodeError, LoadError, SpecialTokens, TEXT_BYTES_MAX, Tokenizer};
