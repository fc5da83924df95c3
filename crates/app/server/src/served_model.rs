//! `ServedModel`: a loaded model with its tokenizer, chat template, grammars and engine.

use std::time::SystemTime;

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
    /// Of that, the KV cache.
    pub kv_bytes: u64,
    /// How it computes, if that is known.
    pub cpu: Option<CpuDescription>,
    /// A digest of the weights, if it was computed.
    pub digest: Option<String>,
    pub description: ModelDescription,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuDescription {
    /// The CPU instructions, such as `avx2`.
    pub level: String,
    /// Compute threads of each process.
    pub threads: usize,
}

/// What is known of a model's files, for APIs that describe the model. Empty or zero where it is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelDescription {
    /// Such as `llama` or `qwen3`.
    pub architecture: String,
    /// `gguf` or `safetensors`.
    pub file_format: String,
    /// The number format of the weights, such as `BF16` or `Q4_K_M`.
    pub weight_format: String,
    pub parameters: u64,
    /// Size of the weights in the files.
    pub file_bytes: u64,
    pub modified: Option<SystemTime>,
    /// The context that the model was trained for. The served one may be shorter.
    pub context_trained: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
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
        Ok(Self {
            tokenizer,
            template,
            format,
            markers,
            defaults,
            grammars,
            service,
            context,
            memory_bytes: 0,
            kv_bytes: 0,
            cpu: None,
            digest: None,
            description: ModelDescription::default(),
        })
    }
}
