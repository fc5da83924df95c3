//! Sampling options: from the command line, else from the model's generation config, else common defaults.

pub mod value;

use clap::Args;
use engine::{SamplingParams, fresh_seed};
use text::GenerationDefaults;

use crate::options::heading;

#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = heading::SAMPLING)]
pub struct SamplingOptions {
    /// Sampling temperature; 0 is greedy [default: the model's own, else 0.7]
    #[arg(long, allow_negative_numbers = true, value_parser = value::temperature, visible_alias = "temp")]
    pub temperature: Option<f32>,
    /// Sample from the most probable tokens that together have this probability; 1 is off [default: the model's own, else
    /// 0.95]
    #[arg(long, allow_negative_numbers = true, value_parser = value::top_p)]
    pub top_p: Option<f32>,
    /// Sample from this many of the most probable tokens; 0 is off [default: the model's own, else 40]
    #[arg(long, allow_negative_numbers = true, value_parser = value::whole::<u32>)]
    pub top_k: Option<u32>,
    /// Sample from tokens with at least this fraction of the highest probability; 0 is off [default: the model's own, else
    /// 0.05]
    #[arg(long, allow_negative_numbers = true, value_parser = value::min_p)]
    pub min_p: Option<f32>,
    /// Seed of the sampler; the same seed gives the same answer [default: random]
    #[arg(long, allow_negative_numbers = true, value_parser = value::whole::<u64>)]
    pub seed: Option<u64>,
    /// Maximum tokens of an answer [default: what the context holds]
    #[arg(short = 'n', long, value_name = "TOKENS", allow_negative_numbers = true, value_parser = value::whole::<usize>)]
    #[arg(alias = "n-predict", alias = "predict")]
    pub max_tokens: Option<usize>,
}

impl SamplingOptions {
    pub fn params(&self, model: &GenerationDefaults) -> SamplingParams {
        let default = model.sampling();
        SamplingParams {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k.unwrap_or(default.top_k) as usize,
            min_p: self.min_p.unwrap_or(default.min_p),
            repetition_penalty: default.repetition_penalty,
            seed: self.seed.unwrap_or_else(fresh_seed),
            ..SamplingParams::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(options: SamplingOptions, model: GenerationDefaults, expected: (f32, f32, usize, f32)) {
        let params = options.params(&model);
        assert_eq!((params.temperature, params.top_p, params.top_k, params.min_p), expected);
    }

    #[test]
    fn the_user_has_the_last_word() {
        check(SamplingOptions::default(), GenerationDefaults::default(), (0.7, 0.95, 40, 0.05));
        let model = GenerationDefaults { temperature: Some(0.6), top_k: Some(20), ..GenerationDefaults::default() };
        let options =
            SamplingOptions { temperature: Some(0.0), top_k: Some(0), min_p: Some(0.1), ..Default::default() };
        check(options, model, (0.0, 1.0, 0, 0.1));
    }
}
