//! `ModelReport`: what `show` prints, as text or JSON.

use std::fmt::{self, Display};
use std::path::PathBuf;

use indicatif::HumanBytes;
use model::{Footprint, StoredFormat};
use serde::{Serialize, Serializer};
use text::GenerationDefaults;

/// Names and texts from a model file are shown up to this length.
const CHARS_SHOWN_MAX: usize = 200;

#[derive(Debug, Serialize)]
pub struct ModelReport {
    pub name: String,
    pub path: PathBuf,
    pub architecture: &'static str,
    pub parameters: u64,
    /// Parameters that a token uses, if not all.
    pub active_parameters: Option<u64>,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Inner width of the feed-forward network, or of one expert.
    pub feed_forward: usize,
    pub experts: Option<usize>,
    pub experts_used: Option<usize>,
    pub vocabulary: usize,
    pub context: usize,
    /// Of those layers that have one.
    pub sliding_window: Option<usize>,
    pub tied_embeddings: bool,
    pub weights: Vec<WeightFormat>,
    pub chat_template: bool,
    pub bos_tokens: Vec<NamedToken>,
    pub eos_tokens: Vec<NamedToken>,
    #[serde(serialize_with = "generation_defaults")]
    pub generation_defaults: GenerationDefaults,
    #[serde(serialize_with = "string_map")]
    pub metadata: Vec<(&'static str, String)>,
    /// Why the tokenizer or the chat template cannot be used.
    pub text_problem: Option<String>,
    /// Why the model cannot be loaded with these options.
    pub load_problem: Option<String>,
    pub need: Option<MemoryNeed>,
    /// The numbers of ranks that the model can be split over.
    pub ranks: Vec<u16>,
}

/// The tensors of one storage format.
#[derive(Debug, Serialize)]
pub struct WeightFormat {
    format: &'static str,
    tensors: usize,
    bytes: u64,
}

impl From<StoredFormat> for WeightFormat {
    fn from(stored: StoredFormat) -> Self {
        Self { format: stored.dtype.name(), tensors: stored.tensors, bytes: stored.bytes }
    }
}

#[derive(Debug, Serialize)]
pub struct NamedToken {
    pub id: u32,
    pub text: String,
}

/// The memory that all ranks on this machine would take for one sequence.
#[derive(Debug, Serialize)]
pub struct MemoryNeed {
    context: usize,
    ranks: usize,
    weights_bytes: u64,
    kv_bytes: u64,
    working_bytes: u64,
    total_bytes: u64,
    /// `None` if the system does not report it.
    available_bytes: Option<u64>,
    fits: bool,
}

impl MemoryNeed {
    pub fn new(shares: &[Footprint], context: usize, ranks: usize, available: Option<u64>) -> Self {
        let sum = |part: fn(&Footprint) -> u64| shares.iter().map(part).fold(0, u64::saturating_add);
        let total_bytes = sum(Footprint::total);
        Self {
            context,
            ranks,
            weights_bytes: sum(|share| share.weights),
            kv_bytes: sum(|share| share.kv),
            working_bytes: sum(|share| share.working),
            total_bytes,
            available_bytes: available,
            fits: available.is_none_or(|available| total_bytes <= available),
        }
    }
}

impl Display for ModelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", shown(&self.name))?;
        self.write_model(f)?;
        self.write_weights(f)?;
        self.write_text(f)?;
        if !self.metadata.is_empty() {
            writeln!(f, "\nMetadata")?;
            for (key, value) in &self.metadata {
                row(f, key.trim_start_matches("general."), shown(value))?;
            }
        }
        self.write_need(f)
    }
}

impl ModelReport {
    fn write_model(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nModel")?;
        row(f, "path", self.path.display())?;
        row(f, "architecture", self.architecture)?;
        match self.active_parameters {
            Some(active) => {
                row(f, "parameters", format_args!("{} ({} active)", short(self.parameters), short(active)))?
            }
            None => row(f, "parameters", short(self.parameters))?,
        }
        row(f, "layers", self.layers)?;
        row(f, "hidden size", self.hidden)?;
        row(
            f,
            "heads",
            format_args!("{} ({} for keys and values), {} wide", self.heads, self.kv_heads, self.head_dim),
        )?;
        match (self.experts, self.experts_used) {
            (Some(all), Some(used)) => {
                row(f, "experts", format_args!("{all}, {used} for a token, {} wide", self.feed_forward))?;
            }
            _ => row(f, "feed-forward size", self.feed_forward)?,
        }
        row(f, "vocabulary", self.vocabulary)?;
        row(f, "context", format_args!("{} tokens", self.context))?;
        if let Some(window) = self.sliding_window {
            row(f, "sliding window", format_args!("{window} tokens"))?;
        }
        row(f, "tied embeddings", yes_or_no(self.tied_embeddings))
    }

    fn write_weights(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.weights.iter().map(|format| format.bytes).sum();
        writeln!(f, "\nWeights")?;
        row(f, "stored", HumanBytes(bytes))?;
        for WeightFormat { format, tensors, bytes } in &self.weights {
            row(f, format, format_args!("{tensors} tensors, {}", HumanBytes(*bytes)))?;
        }
        Ok(())
    }

    fn write_text(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nText")?;
        if let Some(problem) = &self.text_problem {
            return row(f, "cannot be used", shown(problem));
        }
        row(f, "chat template", yes_or_no(self.chat_template))?;
        row(f, "before a prompt", tokens(&self.bos_tokens))?;
        row(f, "end of sequence", tokens(&self.eos_tokens))?;
        let recommended: Vec<_> =
            settings(&self.generation_defaults).into_iter().map(|(name, value)| format!("{name} {value}")).collect();
        let recommended = if recommended.is_empty() { "none".to_owned() } else { recommended.join(", ") };
        row(f, "own sampling", recommended)
    }

    fn write_need(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nOn this machine")?;
        if let Some(problem) = &self.load_problem {
            row(f, "cannot be loaded", shown(problem))?;
        }
        if let Some(need) = &self.need {
            let ranks = if need.ranks > 1 { format!(", {} ranks", need.ranks) } else { String::new() };
            row(
                f,
                "memory needed",
                format_args!("{} (context {}{ranks})", HumanBytes(need.total_bytes), need.context),
            )?;
            row(f, "  weights", HumanBytes(need.weights_bytes))?;
            row(f, "  KV cache", HumanBytes(need.kv_bytes))?;
            row(f, "  working memory", HumanBytes(need.working_bytes))?;
            if let Some(available) = need.available_bytes {
                let verdict = if need.fits { "it fits" } else { "it does not fit" };
                row(f, "memory free", format_args!("{}: {verdict}", HumanBytes(available)))?;
            }
        }
        let ranks: Vec<_> = self.ranks.iter().map(u16::to_string).collect();
        row(f, "possible ranks", if ranks.is_empty() { "none".to_owned() } else { ranks.join(", ") })
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, value: impl Display) -> fmt::Result {
    writeln!(f, "  {name:<18} {value}")
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

fn tokens(tokens: &[NamedToken]) -> String {
    if tokens.is_empty() {
        return "none".to_owned();
    }
    tokens.iter().map(|token| format!("{} ({})", shown(&token.text), token.id)).collect::<Vec<_>>().join(", ")
}

/// The settings that a model recommends, by name.
fn settings(defaults: &GenerationDefaults) -> Vec<(&'static str, serde_json::Value)> {
    // From the shortest text of an f32, so that 0.6 does not become 0.6000000238418579.
    let float = |value: Option<f32>| value.and_then(|value| serde_json::from_str(&value.to_string()).ok());
    let all: [(&'static str, Option<serde_json::Value>); 6] = [
        ("do_sample", defaults.do_sample.map(Into::into)),
        ("temperature", float(defaults.temperature)),
        ("top_p", float(defaults.top_p)),
        ("top_k", defaults.top_k.map(Into::into)),
        ("min_p", float(defaults.min_p)),
        ("repetition_penalty", float(defaults.repetition_penalty)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

fn generation_defaults<S: Serializer>(defaults: &GenerationDefaults, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(settings(defaults))
}

fn string_map<S: Serializer>(pairs: &[(&'static str, String)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(key, value)| (key, value)))
}

/// A number of parameters as people write it: 135M, 7.24B.
fn short(count: u64) -> String {
    let (divisor, unit) = match count {
        0..1_000_000 => (1e3, "K"),
        1_000_000..1_000_000_000 => (1e6, "M"),
        _ => (1e9, "B"),
    };
    let value = count as f64 / divisor;
    let decimals = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.decimals$}{unit}")
}

/// Text from a model file: escaped and cut.
fn shown(text: &str) -> String {
    let mut chars = text.chars();
    let cut: String = chars.by_ref().take(CHARS_SHOWN_MAX).collect();
    let end = if chars.next().is_some() { "…" } else { "" };
    let escaped: String =
        cut.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect();
    escaped + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_written_as_people_write_them() {
        for (count, text) in
            [(5_000, "5.00K"), (134_515_008, "135M"), (7_241_732_096, "7.24B"), (30_532_122_624, "30.5B")]
        {
            assert_eq!(short(count), text);
        }
    }

    #[test]
    fn text_of_a_file_is_escaped_and_cut() {
        assert_eq!(shown("a\u{1b}b\nc"), "a\\u{1b}b\\nc");
        assert_eq!(shown(&"x".repeat(300)).chars().count(), CHARS_SHOWN_MAX + 1);
    }
}
