//! What a schema costs beyond its size: multiples, which become automata with a state for each remainder, and patterns, which
//! are compiled once for each combination of alternatives that describe the same value. llguidance limits neither.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};

use super::GrammarError;

/// The maximum of `multipleOf`, without its decimal point. Powers of ten may be larger: a number's last digits decide.
pub const MULTIPLE_MAX: u64 = 10_000;
const MULTIPLE_POWER_MAX: u64 = 100_000_000;
/// Digits of `multipleOf` after the decimal point.
const MULTIPLE_DECIMALS_MAX: u32 = 8;
/// The maximum patterns and formats, each counted once for each combination of alternatives in which it takes part, and again
/// for each 64 bytes of it.
pub const SCHEMA_PATTERN_WORK_MAX: u64 = 1_000;
const PATTERN_BYTES: u64 = 64;

/// Keywords that say nothing of a value, or nothing that is compiled for each combination.
const WITHOUT_WORK: [&str; 15] = [
    "type",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
];
/// Values, not schemas.
const VALUES: [&str; 5] = ["const", "default", "enum", "example", "examples"];
/// Schemas by names of the client's choice.
const NAMED: [&str; 3] = ["properties", "patternProperties", "dependentSchemas"];

/// Recurses for each `$ref`: call it with a large stack.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let mut parts = Parts { root: schema, referred: HashMap::new() };
    let part = parts.visit(schema)?;
    match part.work > SCHEMA_PATTERN_WORK_MAX {
        true => Err(GrammarError::TooManyCombinations),
        false => Ok(()),
    }
}

/// A schema, or some of its keywords.
#[derive(Clone, Copy)]
struct Part {
    /// Alternatives of the value itself.
    count: u64,
    /// The most alternatives of the value or of a value within it.
    width: u64,
    /// Patterns to compile.
    work: u64,
    /// Patterns of schemas that are named by `$ref`. They are compiled once, where they are defined, unless they are combined
    /// with others.
    referred: u64,
}

impl Part {
    const ONE: Self = Self { count: 1, width: 1, work: 0, referred: 0 };

    /// With a schema of a value within.
    fn with_inner(self, inner: Self) -> Self {
        let work = self.work.saturating_add(inner.work);
        let referred = self.referred.saturating_add(inner.referred);
        Self { width: self.width.max(inner.width), work, referred, ..self }
    }

    /// One of these.
    fn any(parts: &[Self]) -> Self {
        let all = parts.iter().fold(Self::ONE, |all, part| all.with_inner(*part));
        let count = parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.count));
        Self { count, width: all.width.max(count), ..all }
    }

    /// All of these: each is compiled with all combinations of the others.
    fn all(parts: &[Self]) -> Self {
        let product =
            |of: fn(&Self) -> u64| parts.iter().fold(1, |product: u64, part| product.saturating_mul(of(part)));
        let width = product(|part| part.width);
        let work = parts.iter().fold(0, |sum: u64, part| {
            let times = width / part.width.max(1);
            let again = part.referred.saturating_mul(times.saturating_sub(1));
            sum.saturating_add(part.work.saturating_mul(times)).saturating_add(again)
        });
        let referred = parts.iter().fold(0, |sum: u64, part| sum.saturating_add(part.referred));
        Self { count: product(|part| part.count), width, work, referred }
    }
}

struct Parts<'a> {
    root: &'a Value,
    /// Schemas that `$ref` names. One that refers to itself counts as one alternative.
    referred: HashMap<&'a str, Part>,
}

impl<'a> Parts<'a> {
    fn visit(&mut self, schema: &'a Value) -> Result<Part, GrammarError> {
        let Value::Object(schema) = schema else { return Ok(Part::ONE) };
        let (mut own, mut has_own, mut groups) = (Part::ONE, false, Vec::new());
        let mut definitions = 0_u64;
        for (keyword, value) in schema {
            match (keyword.as_str(), value) {
                ("multipleOf", Value::Number(number)) => check_multiple(number)?,
                ("$defs" | "definitions", Value::Object(schemas)) => {
                    definitions = definitions.saturating_add(self.inner(Part::ONE, schemas)?.work);
                }
                ("anyOf" | "oneOf", Value::Array(schemas)) => groups.push(Part::any(&self.visit_all(schemas)?)),
                ("allOf", Value::Array(schemas)) => groups.extend(self.visit_all(schemas)?),
                ("pattern", Value::String(pattern)) => own.work = own.work.saturating_add(pattern_work(pattern)),
                ("format", Value::String(_)) => own.work += 1,
                (keyword, _) if VALUES.contains(&keyword) => {}
                (keyword, Value::Object(schemas)) if NAMED.contains(&keyword) => {
                    if keyword == "patternProperties" {
                        own.work += schemas.keys().map(|pattern| pattern_work(pattern)).sum::<u64>();
                    }
                    own = self.inner(own, schemas)?;
                }
                (_, Value::Object(_)) => own = own.with_inner(self.visit(value)?),
                (_, Value::Array(schemas)) => {
                    own = self.visit_all(schemas)?.into_iter().fold(own, Part::with_inner);
                }
                _ => {}
            }
            let is_group = matches!(keyword.as_str(), "anyOf" | "oneOf" | "allOf" | "$ref");
            has_own |= !is_group && !WITHOUT_WORK.contains(&keyword.as_str());
        }
        if has_own {
            groups.push(own);
        }
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let part = self.refer(reference)?;
            groups.push(Part { work: 0, referred: part.work.saturating_add(part.referred), ..part });
        }
        let part = match groups[..] {
            [] => Part::ONE,
            [one] => one,
            _ => Part::all(&groups),
        };
        Ok(Part { work: part.work.saturating_add(definitions), ..part })
    }

    fn visit_all(&mut self, schemas: &'a [Value]) -> Result<Vec<Part>, GrammarError> {
        schemas.iter().map(|schema| self.visit(schema)).collect()
    }

    fn inner(&mut self, part: Part, schemas: &'a Map<String, Value>) -> Result<Part, GrammarError> {
        schemas.values().try_fold(part, |part, schema| Ok(part.with_inner(self.visit(schema)?)))
    }

    fn refer(&mut self, reference: &'a str) -> Result<Part, GrammarError> {
        if let Some(known) = self.referred.get(reference) {
            return Ok(*known);
        }
        self.referred.insert(reference, Part::ONE);
        let root = self.root;
        let named = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
        // The compiler refuses what refers to nothing.
        let part = named.map_or(Ok(Part::ONE), |schema| self.visit(schema))?;
        self.referred.insert(reference, part);
        Ok(part)
    }
}

fn pattern_work(pattern: &str) -> u64 {
    1 + pattern.len() as u64 / PATTERN_BYTES
}

/// Refuses a number that would become a large automaton, or overflow the compiler's numbers.
fn check_multiple(number: &Number) -> Result<(), GrammarError> {
    let (mut value, mut decimals) = (number.as_f64().unwrap_or(f64::NAN), 0);
    while value.fract() != 0.0 && decimals <= MULTIPLE_DECIMALS_MAX {
        value *= 10.0;
        decimals += 1;
    }
    let is_power = |value: u64| value <= MULTIPLE_POWER_MAX && 10_u64.pow(value.checked_ilog10().unwrap_or(0)) == value;
    // The cast saturates. The compiler refuses what is negative.
    let value = value as u64;
    match decimals <= MULTIPLE_DECIMALS_MAX && (value <= MULTIPLE_MAX || is_power(value)) {
        true => Ok(()),
        false => Err(GrammarError::Multiple { number: number.to_string() }),
    }
}
