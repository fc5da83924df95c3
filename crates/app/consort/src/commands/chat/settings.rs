//! `/set`: the sampling parameters of a chat.

use text::GenerationDefaults;

use crate::sampling::{SamplingOptions, value};

const NAMES: &str = "temperature, top_p, top_k, min_p, seed and max_tokens";

/// Sets a parameter. The value `default` takes it back to the model's own.
pub fn set(options: &mut SamplingOptions, name: &str, text: &str) -> Result<(), String> {
    let set = match name.replace('-', "_").as_str() {
        "temperature" => parse(text, value::temperature).map(|value| options.temperature = value),
        "top_p" => parse(text, value::top_p).map(|value| options.top_p = value),
        "top_k" => parse(text, value::whole).map(|value| options.top_k = value),
        "min_p" => parse(text, value::min_p).map(|value| options.min_p = value),
        "seed" => parse(text, value::whole).map(|value| options.seed = value),
        "max_tokens" => parse(text, value::whole).map(|value| options.max_tokens = value),
        _ => return Err(format!("there is no parameter {name}, but {NAMES}")),
    };
    set.map_err(|why| format!("{name} {text}: {why}"))
}

/// The parameters with the values that apply to the next answer.
pub fn list(options: &SamplingOptions, model: &GenerationDefaults) -> String {
    let params = options.params(model);
    let or = |value: Option<String>, otherwise: &str| value.unwrap_or_else(|| otherwise.to_owned());
    let seed = or(options.seed.map(|seed| seed.to_string()), "random");
    let max = or(options.max_tokens.map(|max| max.to_string()), "what the context holds");
    [
        ("temperature", params.temperature.to_string()),
        ("top_p", params.top_p.to_string()),
        ("top_k", params.top_k.to_string()),
        ("min_p", params.min_p.to_string()),
        ("seed", seed),
        ("max_tokens", max),
    ]
    .map(|(name, value)| format!("{name:<12} {value}"))
    .join("\n")
}

fn parse<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if text == "default" { Ok(None) } else { parse(text).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parameter_is_set_listed_and_taken_back() {
        let (mut options, model) = (SamplingOptions::default(), GenerationDefaults::default());
        let before = list(&options, &model);
        set(&mut options, "top-k", "7").unwrap();
        set(&mut options, "seed", "5").unwrap();
        let after = list(&options, &model);
        assert!(after.contains("top_k        7") && after.contains("seed         5"), "{after}");
        set(&mut options, "top_k", "default").unwrap();
        set(&mut options, "seed", "default").unwrap();
        assert_eq!(list(&options, &model), before);
    }

    #[test]
    fn impossible_values_are_refused_in_words() {
        let mut options = SamplingOptions::default();
        for (name, text, why) in [
            ("temperature", "-1", "from 0 to 1000"),
            ("temperature", "NaN", "from 0 to 1000"),
            ("top_p", "7", "above 0 and at most 1"),
            ("min_p", "x", "a number"),
            ("top_k", "-1", "from 0 on"),
            ("colour", "1", "no parameter colour"),
        ] {
            let refused = set(&mut options, name, text).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
