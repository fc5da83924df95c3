//! Size limits of grammars. llguidance's own limits apply only after it has started to compile.

use super::{GrammarError, schema_work};
use serde_json::{Map, Value};

/// The maximum bytes and lines of a grammar; the compiler may recurse for each line.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
pub const GRAMMAR_LINES_MAX: usize = 5_000;
/// The maximum of classes such as `\w` in a grammar. Each may be hundreds of ranges of characters.
pub const GRAMMAR_CLASSES_MAX: usize = 4_000;
/// The maximum nesting depth, subschemas and `patternProperties` of a schema: the cost of some combinations is quadratic in
/// these.
pub const SCHEMA_DEPTH_MAX: usize = 100;
pub const SCHEMA_PARTS_MAX: usize = 2_000;
pub const SCHEMA_PATTERNS_MAX: usize = 32;

/// Call it with a large stack.
pub(super) fn check_schema(schema: &Value) -> Result<(), GrammarError> {
    check_text(&schema.to_string())?;
    SchemaSize::default().add(schema, SCHEMA_DEPTH_MAX)?;
    schema_work::check(schema)
}

/// All schemas in a grammar count together.
pub(crate) fn check_lark(source: &str) -> Result<(), GrammarError> {
    check_text(source)?;
    let mut size = SchemaSize::default();
    schemas_of(source).try_for_each(|schema| size.add(&schema, SCHEMA_DEPTH_MAX))
}

/// Whether the schemas of a grammar that [`check_lark`] accepts can be compiled. Call it with a large stack.
pub(super) fn check_lark_work(source: &str) -> Result<(), GrammarError> {
    schemas_of(source).try_for_each(|schema| schema_work::check(&schema))
}

/// Invalid JSON is refused by the compiler later.
fn schemas_of(source: &str) -> impl Iterator<Item = Value> {
    let schema = |rest| serde_json::Deserializer::from_str(rest).into_iter().next()?.ok();
    source.split("%json").skip(1).filter_map(schema)
}

pub(super) fn check_text(text: &str) -> Result<(), GrammarError> {
    let lines = text.lines().count();
    let is_class = |pair: &&[u8]| matches!(pair, [b'\\', b'w' | b'W' | b'd' | b'D' | b'p' | b'P']);
    check_length(text)?;
    if lines > GRAMMAR_LINES_MAX {
        return Err(GrammarError::TooManyLines { lines });
    }
    if text.as_bytes().windows(2).filter(is_class).count() > GRAMMAR_CLASSES_MAX {
        return Err(GrammarError::TooManyClasses);
    }
    Ok(())
}

/// For a grammar that is built step by step.
pub(crate) fn check_length(text: &str) -> Result<(), GrammarError> {
    match text.len() {
        bytes if bytes > GRAMMAR_BYTES_MAX => Err(GrammarError::TooLong { bytes }),
        _ => Ok(()),
    }
}

/// The counts that determine the cost of compiling a schema.
#[derive(Default)]
struct SchemaSize {
    parts: usize,
    patterns: usize,
}

impl SchemaSize {
    fn add(&mut self, value: &Value, depth_max: usize) -> Result<(), GrammarError> {
        let depth_max = depth_max.checked_sub(1).ok_or(GrammarError::TooDeep)?;
        self.parts += usize::from(matches!(value, Value::Object(_) | Value::Bool(_)));
        self.patterns += value.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
        if self.parts > SCHEMA_PARTS_MAX {
            return Err(GrammarError::TooManyParts);
        }
        if self.patterns > SCHEMA_PATTERNS_MAX {
            return Err(GrammarError::TooManyPatterns);
        }
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.add(item, depth_max)),
            Value::Object(items) => items.values().try_for_each(|item| self.add(item, depth_max)),
            _ => Ok(()),
        }
    }
}
