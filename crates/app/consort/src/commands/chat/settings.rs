//! `/set`: the sampling parameters of a chat.

use engine::SamplingParams;

use crate::sampling::SamplingOptions;
use crate::sampling::value as parsed;

pub const NAMES: [&str; 6] = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"];

/// Sets a parameter. The value `default` takes it back to the model's own.
pub fn set(options: &mut SamplingOptions, name: &str, text: &str) -> Result<(), String> {
    let set = match name.replace('-', "_").as_str() {
        "temperature" => parse(text, parsed::temperature).map(|value| options.temperature = value),
        "top_p" => parse(text, parsed::top_p).map(|value| options.top_p = value),
        "top_k" => parse(text, parsed::whole).map(|value| options.top_k = value),
        "min_p" => parse(text, parsed::min_p).map(|value| options.min_p = value),
        "seed" => parse(text, parsed::whole).map(|value| options.seed = value),
        "max_tokens" => parse(text, parsed::whole).map(|value| options.max_tokens = value),
        _ => return Err(format!("there is no parameter {name}, but {}", NAMES.join(", "))),
    };
    set.map_err(|why| format!("{name} {text}: {why}"))
}

/// The parameters with the values that apply to the next answer. `model` has those that are not set, if they are known.
pub fn list(options: &SamplingOptions, model: Option<SamplingParams>) -> String {
    let model = model.as_ref();
    [
        ("temperature", value(options.temperature, model.map(|model| model.temperature.to_string()))),
        ("top_p", value(options.top_p, model.map(|model| model.top_p.to_string()))),
        ("top_k", value(options.top_k, model.map(|model| model.top_k.to_string()))),
        ("min_p", value(options.min_p, model.map(|model| model.min_p.to_string()))),
        ("seed", value(options.seed, Some("random".to_owned()))),
        ("max_tokens", value(options.max_tokens, model.map(|_| "what the context holds".to_owned()))),
    ]
    .map(|(name, value)| format!("{name:<12} {value}"))
    .join("\n")
}

fn value(set: Option<impl ToString>, model: Option<String>) -> String {
    set.map(|value| value.to_string()).or(model).unwrap_or_else(|| "as the server has it".to_owned())
}

fn parse<T>(text: &str, parse: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
    if text == "default" { Ok(None) } else { parse(text).map(Some) }
}

#[cfg(test)]
mod tests {
    use text::GenerationDefaults;

    use super::*;

    #[test]
    fn a_parameter_is_set_listed_and_taken_back() {
        let mut options = SamplingOptions::default();
        let list = |options: &SamplingOptions| list(options, Some(options.params(&GenerationDefaults::default())));
        let before = list(&options);
        set(&mut options, "top-k", "7").unwrap();
        set(&mut options, "seed", "5").unwrap();
        let after = list(&options);
        assert!(after.contains("top_k        7") && after.contains("seed         5"), "{after}");
        set(&mut options, "top_k", "default").unwrap();
        set(&mut options, "seed", "default").unwrap();
        assert_eq!(list(&options), before);
    }

    #[test]
    fn what_a_server_decides_is_not_known() {
        let listed = list(&SamplingOptions { top_k: Some(3), ..Default::default() }, None);
        assert!(listed.contains("top_k        3") && listed.contains("temperature  as the server has it"), "{listed}");
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
