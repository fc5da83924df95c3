//! Parses sampling parameters, for options and for `/set` in a chat. The ranges are the engine's.

use std::str::FromStr;

use engine::{SamplingParams, SamplingParamsError};

pub fn temperature(text: &str) -> Result<f32, String> {
    in_range(text, |params| &mut params.temperature)
}

pub fn top_p(text: &str) -> Result<f32, String> {
    in_range(text, |params| &mut params.top_p)
}

pub fn min_p(text: &str) -> Result<f32, String> {
    in_range(text, |params| &mut params.min_p)
}

pub fn whole<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| "it must be a whole number from 0 on".to_owned())
}

fn in_range(text: &str, parameter: fn(&mut SamplingParams) -> &mut f32) -> Result<f32, String> {
    let value = text.parse().map_err(|_| "it must be a number".to_owned())?;
    let mut params = SamplingParams::default();
    *parameter(&mut params) = value;
    match params.check(usize::MAX) {
        Err(SamplingParamsError::OutOfRange { range, .. }) => Err(format!("it must be {range}")),
        _ => Ok(value),
    }
}
