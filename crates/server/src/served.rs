//! `Served`: a model that can answer, seen from the text side: tokenizer, template, grammars, and the engine behind them.

use engine::Service;
use text::{ChatTemplate, GenerationDefaults, GrammarCompiler, GrammarError, ReplyFormat, Tokenizer};
use types::TokenId;

/// A model and what is needed to talk to it. Made once, when the model is loaded.
pub struct Served {
    pub tokenizer: Tokenizer,
    /// None: there are no turns, and only prompts are taken.
    pub template: Option<ChatTemplate>,
    /// How the model marks reasoning and calls.
    pub format: ReplyFormat,
    /// The control tokens with which it does.
    pub(crate) markers: Vec<TokenId>,
    pub defaults: GenerationDefaults,
    pub grammars: GrammarCompiler,
    pub service: Service,
    /// Tokens that a prompt and its answer may have together.
    pub context: usize,
    /// Memory that weights and K/V take, as far as we know it.
    pub memory_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ServedError {
    #[error("prepare structured output")]
    Grammars(#[from] GrammarError),
}

impl Served {
    /// Takes a moment for a large vocabulary.
    pub fn new(
        service: Service,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        defaults: GenerationDefaults,
    ) -> Result<Self, ServedError> {
        let grammars = GrammarCompiler::new(&tokenizer)?;
        let format = template.as_ref().map_or_else(|| ReplyFormat::detect("", false), |t| t.reply_format().clone());
        let markers = format.marker_ids(&tokenizer);
        let context = service.capacity().tokens_max();
        Ok(Self { tokenizer, template, format, markers, defaults, grammars, service, context, memory_bytes: 0 })
    }
}
