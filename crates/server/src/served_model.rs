//! `ServedModel`: a loaded model with its tokenizer, chat template, grammars and engine.

use engine::Service;
use text::{ChatTemplate, GenerationDefaults, GrammarCompiler, GrammarError, ReplyFormat, Tokenizer};
use types::TokenId;

/// Created once, when the model is loaded.
pub struct ServedModel {
    pub tokenizer: Tokenizer,
    /// `None`: the model supports completions, but no chat.
    pub template: Option<ChatTemplate>,
    /// How the model marks reasoning and tool calls.
    pub format: ReplyFormat,
    /// The special tokens of `format`.
    pub(crate) markers: Vec<TokenId>,
    pub defaults: GenerationDefaults,
    pub grammars: GrammarCompiler,
    pub service: Service,
    /// Context size: maximum tokens of prompt and output together.
    pub context: usize,
    /// Memory of the weights and the KV cache.
    pub memory_bytes: u64,
    /// A digest of the weights, if it was computed.
    pub digest: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ServedModelError {
    #[error("prepare structured output")]
    Grammars(#[from] GrammarError),
}

impl ServedModel {
    /// Takes a moment for a large vocabulary.
    pub fn new(
        service: Service,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        defaults: GenerationDefaults,
    ) -> Result<Self, ServedModelError> {
        let grammars = GrammarCompiler::new(&tokenizer)?;
        let format = template.as_ref().map_or_else(|| ReplyFormat::detect("", false), |t| t.reply_format().clone());
        let markers = format.marker_ids(&tokenizer);
        let context = service.capacity().tokens_max();
        let (memory_bytes, digest) = (0, None);
        Ok(Self { tokenizer, template, format, markers, defaults, grammars, service, context, memory_bytes, digest })
    }
}
