//! `--stats`: the speed of an answer, on standard error.

use std::io::{IsTerminal, stderr};

use clap::{Args, ValueEnum};
use engine::Timings;

use crate::terminal;

#[derive(Args, Clone, Copy, Debug)]
pub struct StatsOption {
    /// Print tokens/s and time to first token after an answer, on standard error; auto means in a terminal
    #[arg(long, value_name = "WHEN", value_enum, default_value_t, default_missing_value = "always")]
    #[arg(num_args = 0..=1, require_equals = true)]
    stats: StatsWhen,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum StatsWhen {
    #[default]
    Auto,
    Always,
    Never,
}

impl StatsOption {
    /// Prints the speed of an answer, unless there is no token of it or nobody wants to know.
    pub fn print(self, timings: &Timings) {
        let wanted = match self.stats {
            StatsWhen::Auto => stderr().is_terminal(),
            StatsWhen::Always => true,
            StatsWhen::Never => false,
        };
        if wanted && timings.generated_tokens > 0 {
            terminal::note(&line(timings));
        }
    }
}

fn line(timings: &Timings) -> String {
    let Timings { prompt_tokens, cached_tokens, generated_tokens, queued, prefill, .. } = *timings;
    let rate = match timings.decode_tokens_per_s() {
        // One token has no rate.
        0.0 => String::new(),
        rate => format!(", {rate:.1} tokens/s"),
    };
    let cached = if cached_tokens > 0 { format!(", {cached_tokens} of them cached") } else { String::new() };
    let first = (queued + prefill).as_secs_f64();
    let tokens = if generated_tokens == 1 { "token" } else { "tokens" };
    format!(
        "{generated_tokens} {tokens}{rate}, time to first token {first:.2} s ({prompt_tokens} prompt tokens{cached})"
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_line_has_the_rate_and_the_time_to_the_first_token() {
        let mut timings = Timings {
            prompt_tokens: 40,
            cached_tokens: 32,
            generated_tokens: 11,
            queued: Duration::from_millis(50),
            prefill: Duration::from_millis(200),
            decode: Duration::from_secs(4),
        };
        let full = "11 tokens, 2.5 tokens/s, time to first token 0.25 s (40 prompt tokens, 32 of them cached)";
        assert_eq!(line(&timings), full);
        timings = Timings { cached_tokens: 0, generated_tokens: 1, decode: Duration::ZERO, ..timings };
        assert_eq!(line(&timings), "1 token, time to first token 0.25 s (40 prompt tokens)");
    }
}
