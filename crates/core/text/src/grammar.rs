//! Structured output: grammars for the output, and for each step the tokens that may come next.
//!
//! llguidance does the work. Grammars come from clients, so everything is bounded: their length and depth before they are
//! parsed, the cost of compiling, and the cost of each step. They are compiled on a thread with a large stack, because the
//! compiler recurses. Compiling ends early when nobody waits for it any more.

mod closed_objects;
mod formats;
mod limits;
mod schema_work;

pub use limits::{
    GRAMMAR_BYTES_MAX, GRAMMAR_CLASSES_MAX, GRAMMAR_LINES_MAX, SCHEMA_DEPTH_MAX, SCHEMA_PARTS_MAX, SCHEMA_PATTERNS_MAX,
};
pub use schema_work::{MULTIPLE_MAX, SCHEMA_PATTERN_WORK_MAX};

pub(crate) use limits::{check_lark, check_length};

use crate::token_trie::token_trie;
use crate::tokenizer::Tokenizer;
use llguidance::api::{GrammarInit, GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{ParserFactory, regex_to_lark};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use types::TokenId;

/// Maximum white space between two JSON tokens: enough to indent, but the model cannot write white space for ever.
const WHITE_SPACE_MAX: usize = 16;

/// The stack that [`GrammarCompiler::compile_here`] needs. Only what is used of it takes memory.
pub const COMPILER_STACK_BYTES: usize = 256 << 20;
/// How long a compilation may take. The limits below are meant to end it much earlier, whatever the grammar.
pub const COMPILE_TIME_MAX: Duration = Duration::from_secs(10);
/// The cost limits of compiling and of one mask, in llguidance's units. A mask is computed between two steps of the engine.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 4_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 20_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};

/// A constraint on the output.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that the schema accepts, with properties in the schema's order, and no others unless it says so. Unsupported keywords are refused, unknown formats
    /// ignored; `oneOf` is treated as `anyOf`.
    JsonSchema(Value),
    /// Text that the whole expression matches, in Rust's regex syntax.
    Regex(String),
    /// llguidance's dialect of Lark, where `%json {…}` is a schema and `<[7]>` the token 7.
    Lark(String),
    /// Free reasoning first, then an answer that follows the grammar.
    Reasoned { reasoning: ReasoningTags, answer: Box<Grammar> },
}

/// The tags around a model's reasoning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReasoningTags {
    /// The tag before the reasoning; `None` if the prompt already ends with it.
    pub open: Option<String>,
    pub close: String,
}

/// Why a grammar cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    #[error("grammar of {bytes} bytes is longer than {GRAMMAR_BYTES_MAX}")]
    TooLong { bytes: usize },
    #[error("grammar of {lines} lines is longer than {GRAMMAR_LINES_MAX}")]
    TooManyLines { lines: usize },
    #[error("grammar contains more than {GRAMMAR_CLASSES_MAX} classes such as \\w")]
    TooManyClasses,
    #[error("schema is nested deeper than {SCHEMA_DEPTH_MAX}")]
    TooDeep,
    #[error("schema contains more than {SCHEMA_PARTS_MAX} schemas")]
    TooManyParts,
    #[error("schema contains more than {SCHEMA_PATTERNS_MAX} patternProperties")]
    TooManyPatterns,
    #[error(
        "multipleOf {number} cannot be checked: it may be at most {MULTIPLE_MAX}, or a power of ten up to 100000000, with at \
         most 8 decimals"
    )]
    Multiple { number: String },
    #[error(
        "schema has too many patterns, or combines them with too many alternatives: at most {SCHEMA_PATTERN_WORK_MAX} \
         combinations are compiled"
    )]
    TooManyCombinations,
    #[error("grammar takes too much time and memory to compile: simplify its patterns, ranges and repetitions")]
    TooExpensive,
    #[error("grammar takes too long to compile: simplify its patterns, ranges and repetitions")]
    OutOfTime,
    #[error("nobody waits for the grammar any more")]
    Cancelled,
    #[error("a JSON schema is an object")]
    NoObject,
    #[error("grammar is refused: {0}")]
    Refused(String),
    #[error("cannot start the grammar compiler")]
    Compiler(#[source] std::io::Error),
}

/// Why the output can no longer follow its grammar.
#[derive(Debug, thiserror::Error)]
#[error("the answer cannot follow its grammar: {0}")]
pub struct MatchError(String);

/// Compiles grammars for one vocabulary.
pub struct GrammarCompiler {
    factory: ParserFactory,
    tokenizer: Tokenizer,
}

impl GrammarCompiler {
    /// Takes a moment for a large vocabulary: call it once.
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let trie = token_trie(tokenizer);
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&trie, InferenceCapabilities::default(), &slices)
            .map_err(|error| GrammarError::Refused(describe(error)))?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(Self { factory, tokenizer: tokenizer.clone() })
    }

    /// A matcher at the start of an output. May take some milliseconds, and a hostile grammar a second.
    pub fn compile(&self, grammar: &Grammar) -> Result<Matcher, GrammarError> {
        let never = AtomicBool::new(false);
        thread::scope(|scope| {
            let compiler = thread::Builder::new().name("grammar".to_owned()).stack_size(COMPILER_STACK_BYTES);
            let compile = || self.compile_here(grammar, &never, COMPILE_TIME_MAX);
            let compiled = compiler.spawn_scoped(scope, compile).map_err(GrammarError::Compiler)?;
            compiled.join().unwrap_or_else(|_| Err(failed()))
        })
    }

    /// The same on this thread, which must have a stack of [`COMPILER_STACK_BYTES`]. Ends soon after `cancelled` is set, or
    /// after this time.
    pub fn compile_here(
        &self,
        grammar: &Grammar,
        cancelled: &AtomicBool,
        time_max: Duration,
    ) -> Result<Matcher, GrammarError> {
        let effort = Effort { cancelled, ends: Instant::now() + time_max };
        // The compiler has assertions that some grammars violate.
        catch_unwind(AssertUnwindSafe(|| self.compile_within(grammar, &effort))).unwrap_or_else(|_| Err(failed()))
    }

    fn compile_within(&self, grammar: &Grammar, effort: &Effort<'_>) -> Result<Matcher, GrammarError> {
        if let Grammar::Reasoned { answer, .. } = grammar {
            // After the reasoning it would be too late to refuse an answer that contradicts itself.
            self.compile_within(answer, effort)?;
        }
        effort.check()?;
        let refused = |error| GrammarError::Refused(describe(error));
        let grammars = grammar.lower("answer", &self.tokenizer)?;
        let serialized = GrammarInit::Serialized(TopLevelGrammar { grammars, max_tokens: None });
        let (grammar, lexer) = serialized.to_internal(Some(self.factory.tok_env().clone()), LIMITS).map_err(refused)?;
        check_first_bytes(&lexer, effort)?;
        let parser = self.factory.create_parser_from_init_default(GrammarInit::Internal(grammar, lexer));
        effort.check()?;
        let mut matcher = llguidance::Matcher::new(parser);
        let first = matcher.compute_mask_or_eos().map_err(refused)?;
        // A grammar that contradicts itself is often found only by its first mask.
        match first.num_set() {
            0 => Err(GrammarError::Refused("no answer can follow it".to_owned())),
            _ => Ok(Matcher(matcher)),
        }
    }
}

/// When compiling has to end.
struct Effort<'a> {
    cancelled: &'a AtomicBool,
    ends: Instant,
}

impl Effort<'_> {
    fn check(&self) -> Result<(), GrammarError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(GrammarError::Cancelled),
            false if Instant::now() > self.ends => Err(GrammarError::OutOfTime),
            false => Ok(()),
        }
    }
}

/// Refuses a lexer whose first byte alone takes too much. When llguidance makes a lexer it does the same steps without a limit:
/// after each byte it searches for a text that completes the lexeme, which for a multiple of 1,000,003 takes most of a minute.
fn check_first_bytes(lexer: &LexerSpec, effort: &Effort<'_>) -> Result<(), GrammarError> {
    let mut limits = LIMITS;
    let mut states = lexer.to_regex_vec(&mut limits).map_err(|_| GrammarError::TooExpensive)?;
    states.set_fuel(LIMITS.initial_lexer_fuel);
    states.set_max_states(LIMITS.max_lexer_states);
    let start = states.initial_state(&lexer.all_lexemes());
    for byte in 0..=u8::MAX {
        effort.check()?;
        states.transition(start, byte);
        if states.has_error() {
            return Err(GrammarError::TooExpensive);
        }
    }
    Ok(())
}

fn failed() -> GrammarError {
    GrammarError::Refused("the compiler failed".to_owned())
}

impl Grammar {
    /// The grammar in llguidance's format; the first one is the start.
    fn lower(&self, name: &str, tokenizer: &Tokenizer) -> Result<Vec<GrammarWithLexer>, GrammarError> {
        let named = |grammar| GrammarWithLexer { name: Some(name.to_owned()), ..grammar };
        Ok(match self {
            Self::JsonObject => {
                vec![named(GrammarWithLexer::from_json_schema(prepare_schema(&json!({"type": "object"}), false)?))]
            }
            Self::JsonSchema(schema) => {
                limits::check_schema(schema)?;
                vec![named(GrammarWithLexer::from_json_schema(prepare_schema(schema, false)?))]
            }
            Self::Regex(pattern) => {
                limits::check_text(pattern)?;
                vec![named(GrammarWithLexer::from_lark(format!("start: /{}/", regex_to_lark(pattern, ""))))]
            }
            Self::Lark(source) => {
                limits::check_lark(source)?;
                limits::check_lark_work(source)?;
                vec![named(GrammarWithLexer::from_lark(source.clone()))]
            }
            Self::Reasoned { reasoning, answer } => {
                let mut grammars = vec![named(GrammarWithLexer::from_lark(reasoning.before("inner", tokenizer)))];
                grammars.extend(answer.lower("inner", tokenizer)?);
                grammars
            }
        })
    }
}

impl ReasoningTags {
    /// A grammar of reasoning, followed by the grammar `answer`.
    fn before(&self, answer: &str, tokenizer: &Tokenizer) -> String {
        let reasoning = match &self.open {
            Some(open) => format!("({} reasoning)?", lark_marker(open, tokenizer)),
            None => "reasoning".to_owned(),
        };
        let close = lark_marker(&self.close, tokenizer);
        let body = match close.starts_with('"') {
            true => format!("reasoning: body WS?\nbody[suffix={close}]: /(?s:.*)/\n"),
            false => format!("reasoning: /(?s:.*)/ {close} WS?\n"),
        };
        format!("start: {reasoning} @{answer}\n{body}WS: /[ \\n]{{1,8}}/\n")
    }
}

/// The schema with our settings, which replace its own. `lenient` ignores unsupported keywords instead of refusing them.
pub(crate) fn prepare_schema(schema: &Value, lenient: bool) -> Result<Value, GrammarError> {
    let mut prepared = schema.as_object().ok_or(GrammarError::NoObject)?.clone();
    formats::remove_unknown(&mut prepared);
    closed_objects::close(&mut prepared);
    let settings = json!({
        "whitespace_pattern": format!(r"[\x20\x0A\x09]{{1,{WHITE_SPACE_MAX}}}"),
        "coerce_one_of": true,
        "lenient": lenient,
    });
    prepared.insert("x-guidance".to_owned(), settings);
    Ok(Value::Object(prepared))
}

/// A text as a Lark string literal.
pub(crate) fn lark_literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A tag in Lark: a token id if it is a control token, else its text.
pub(crate) fn lark_marker(tag: &str, tokenizer: &Tokenizer) -> String {
    match tokenizer.id_of(tag).filter(|&id| tokenizer.is_special(id)) {
        Some(TokenId(id)) => format!("<[{id}]>"),
        None => lark_literal(tag),
    }
}

fn describe(error: impl std::fmt::Display) -> String {
    const CHARACTERS_MAX: usize = 500;
    let text = error.to_string();
    let text = text.split("\n<").next().unwrap_or_default().trim();
    text.chars().take(CHARACTERS_MAX).collect()
}

/// The state of a grammar for one output.
pub struct Matcher(llguidance::Matcher);

impl Matcher {
    /// Writes which tokens may come next: bit `i % 32` of word `i / 32` is token `i`. End-of-sequence tokens are included if
    /// the grammar allows the end; ids outside the vocabulary never are.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<(), MatchError> {
        let allowed = self.0.compute_mask_or_eos().map_err(|error| MatchError(describe(error)))?;
        let allowed = allowed.as_slice();
        let known = words.len().min(allowed.len());
        words[..known].copy_from_slice(&allowed[..known]);
        words[known..].fill(0);
        Ok(())
    }

    /// A matcher in the same state that shares nothing with this one.
    pub fn fork(&self) -> Self {
        Self(self.0.deep_clone())
    }

    /// Advances by one token of the mask.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        self.0.consume_token(token.0).map_err(|error| MatchError(describe(error)))
    }

    /// True if no token may follow.
    pub fn is_complete(&self) -> bool {
        matches!(self.0.stop_reason(), StopReason::NoExtension | StopReason::EndOfSentence)
    }
}

#[cfg(test)]
mod tests;
