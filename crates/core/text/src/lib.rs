//! Tokenizers, chat templates, stop strings, grammars for structured output, and the parser that splits replies into text,
//! reasoning and tool calls. Knows tokens but no tensors.
#![forbid(unsafe_code)]

mod capabilities;
mod config;
mod detokenizer;
mod generation;
mod gguf;
mod grammar;
mod hermes;
mod json;
mod merge;
mod merge_list;
mod message;
mod pre;
mod read;
mod reply;
mod special;
mod split;
mod stop;
mod template;
mod token_trie;
mod tokenizer;
mod vocab;

pub use config::TokenizerConfig;
pub use detokenizer::Detokenizer;
pub use generation::{GenerationDefaults, SamplingDefaults};
pub use gguf::GgufVocab;
pub use grammar::{
    COMPILE_TIME_MAX, COMPILER_STACK_BYTES, GRAMMAR_BYTES_MAX, GRAMMAR_CLASSES_MAX, GRAMMAR_LINES_MAX, Grammar,
    GrammarCompiler, GrammarError, MULTIPLE_MAX, MatchError, Matcher, ReasoningTags, SCHEMA_DEPTH_MAX,
    SCHEMA_PARTS_MAX, SCHEMA_PATTERN_WORK_MAX, SCHEMA_PATTERNS_MAX,
};
pub use message::{Content, Message};
pub use reply::{
    Delta, InputGrammar, RepeatedCalls, ReplyFormat, ReplyParser, TEXT_INPUT, Tool, ToolChoice, ToolGrammarError,
};
pub use stop::{STOP_BYTES_MAX, STOPS_MAX, StopError, StopMatch, StopStrings};
pub use template::{ChatTemplate, RENDERED_BYTES_MAX, RenderOptions, TEMPLATE_BYTES_MAX, TemplateError};
pub use tokenizer::{EncodeError, SpecialTokens, TEXT_BYTES_MAX, TextLoadError, Tokenizer};
