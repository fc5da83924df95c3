//! `Reasoning`: how much a model reasons before it answers, and how its template is told.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

/// How much the model reasons.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reasoning {
    /// As much as its template has it do.
    #[default]
    Default,
    Off,
    /// `None`: as much as the model does by default.
    On(Option<ReasoningLevel>),
}

/// The levels that models are trained for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningLevel {
    Low,
    Medium,
    High,
}

/// The words of the APIs. Templates know three levels: `minimal` is as `low`, `xhigh` and `max` are as `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = ReasoningEffort)]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl Effort {
    pub fn from_word(word: &str) -> Option<Self> {
        serde_json::from_value(json!(word)).ok()
    }
}

impl From<Effort> for Reasoning {
    fn from(effort: Effort) -> Self {
        match effort {
            Effort::None => Self::Off,
            Effort::Minimal | Effort::Low => Self::On(Some(ReasoningLevel::Low)),
            Effort::Medium => Self::On(Some(ReasoningLevel::Medium)),
            Effort::High | Effort::Xhigh | Effort::Max => Self::On(Some(ReasoningLevel::High)),
        }
    }
}

impl Reasoning {
    /// The template's variables. Some templates have a switch, some a level, some both.
    pub fn template_args(self) -> Map<String, Value> {
        let (thinks, effort) = match self {
            Self::Default => return Map::new(),
            Self::Off => (false, Some("none")),
            Self::On(level) => (true, level.map(ReasoningLevel::name)),
        };
        let thinks = ("enable_thinking".to_owned(), Value::from(thinks));
        let effort = effort.map(|effort| ("reasoning_effort".to_owned(), Value::from(effort)));
        std::iter::once(thinks).chain(effort).collect()
    }
}

impl ReasoningLevel {
    fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_effort_is_a_switch_and_a_level() {
        let check = |word: &str, thinks: bool, level: &str| {
            let args = Reasoning::from(Effort::from_word(word).unwrap()).template_args();
            assert_eq!(Value::Object(args), json!({"enable_thinking": thinks, "reasoning_effort": level}), "{word}");
        };
        check("none", false, "none");
        check("minimal", true, "low");
        check("low", true, "low");
        check("medium", true, "medium");
        check("high", true, "high");
        check("xhigh", true, "high");
        check("max", true, "high");
        assert_eq!(Effort::from_word("High"), None);
        assert_eq!(Value::Object(Reasoning::Default.template_args()), json!({}));
        assert_eq!(Value::Object(Reasoning::On(None).template_args()), json!({"enable_thinking": true}));
    }
}
