//! RoPE parameters: reads them from a file and computes the rotation angle per position of each pair of a head's elements.

use std::f64::consts::TAU;

use serde_json::{Map, Value as Json};

use crate::description::DescriptionError;
use crate::metadata::{GgufSource, Key, ModelMetadata, member};

#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub base: f64,
    pub scaling: Scaling,
}

/// How frequencies are scaled down to extend the context beyond the original training length.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// All frequencies divided by the same factor.
    Linear {
        factor: f64,
    },
    /// Llama 3: frequencies with wavelengths above `original / low` are divided by `factor`, those below `original / high`
    /// are kept, with a smooth transition between them.
    Llama3 {
        factor: f64,
        low: f64,
        high: f64,
        original: f64,
    },
    /// A divisor for each frequency, as stored in GGUF files.
    Divisors(Vec<f32>),
}

impl Rope {
    /// The angle per position of each of the `head_dim / 2` pairs.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let freq = self.base.powf(2.0 * i as f64 / head_dim as f64).recip();
                let scaled = match &self.scaling {
                    Scaling::None => freq,
                    Scaling::Linear { factor } => freq / factor,
                    Scaling::Llama3 { factor, low, high, original } => {
                        let turns = original * freq / TAU; // within the original length
                        let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                        freq * (keep + (1.0 - keep) / factor)
                    }
                    Scaling::Divisors(divisors) => freq / f64::from(divisors[i]),
                };
                scaled as f32
            })
            .collect()
    }

    /// Reads `rope_parameters` of transformers 5 (for all layers, or an entry per kind of layer), or `rope_theta` and
    /// `rope_scaling` of the hub's files.
    pub(crate) fn from_config(
        config: &Map<String, Json>,
        kind: &str,
        base_key: &str,
        default_base: f64,
    ) -> Result<Self, DescriptionError> {
        let object = |key| match member(config, key) {
            None => Ok(None),
            Some(value) => value.as_object().map(Some).ok_or_else(|| wrong(key, value)),
        };
        let parameters = object("rope_parameters")?;
        let parameters = parameters.map(|all| all.get(kind).and_then(Json::as_object).unwrap_or(all));
        let scaling = match parameters {
            Some(parameters) => Some(parameters),
            None => object("rope_scaling")?,
        };

        let stated = parameters.and_then(|p| member(p, "rope_theta")).or_else(|| member(config, base_key));
        let base = match stated {
            Some(value) => value.as_f64().ok_or_else(|| wrong(base_key, value))?,
            None => default_base,
        };
        for section in [Some(config), scaling].into_iter().flatten() {
            let partial = number(section, "partial_rotary_factor")?;
            if partial.is_some_and(|factor| factor != 1.0) {
                return Err(DescriptionError::Unsupported("partial_rotary_factor other than 1".into()));
            }
        }
        Self { base, scaling: scaling.map_or(Ok(Scaling::None), Scaling::from_config)? }.checked()
    }

    pub(crate) fn from_gguf(
        metadata: &ModelMetadata<'_>,
        file: &dyn GgufSource,
        base: f64,
        head_dim: usize,
    ) -> Result<Self, DescriptionError> {
        if let Some(turned) = metadata.count_if(Key::gguf("rope.dimension_count"))?.filter(|dim| *dim != head_dim) {
            return Err(DescriptionError::Unsupported(format!("rotation of {turned} of a head's {head_dim} elements")));
        }
        let factor = match metadata.number_if(Key::gguf("rope.scaling.factor"))? {
            Some(factor) => Some(factor),
            None => metadata.number_if(Key::gguf("rope.scale_linear"))?,
        };
        let scaling = match metadata.text_if(Key::gguf("rope.scaling.type"))? {
            None | Some("linear") => match factor {
                Some(factor) if factor != 0.0 && factor != 1.0 => Scaling::Linear { factor },
                _ => Scaling::None,
            },
            Some("none") => Scaling::None,
            Some(other) => return Err(unsupported(other)),
        };
        let scaling = match (divisors(file, head_dim)?, scaling) {
            (None, scaling) => scaling,
            (Some(divisors), Scaling::None) => Scaling::Divisors(divisors),
            (Some(_), _) => {
                return Err(DescriptionError::Unsupported("rope_freqs.weight together with rope.scaling".into()));
            }
        };
        Self { base, scaling }.checked()
    }

    /// Checks that all parameters are finite and positive, so that no frequency is infinite or NaN.
    fn checked(self) -> Result<Self, DescriptionError> {
        let good = |x: f64| x.is_finite() && x > 0.0;
        let sane = good(self.base)
            && match &self.scaling {
                Scaling::None => true,
                Scaling::Linear { factor } => good(*factor),
                Scaling::Llama3 { factor, low, high, original } => {
                    good(*factor) && good(*low) && good(*original) && good(*high) && high > low
                }
                Scaling::Divisors(divisors) => divisors.iter().all(|d| good(f64::from(*d))),
            };
        match sane {
            true => Ok(self),
            false => Err(DescriptionError::value("rope", format!("{self:?}"))),
        }
    }
}

impl Scaling {
    fn from_config(section: &Map<String, Json>) -> Result<Self, DescriptionError> {
        let kind = match member(section, "rope_type").or_else(|| member(section, "type")) {
            None => "default",
            Some(kind) => kind.as_str().ok_or_else(|| wrong("rope_type", kind))?,
        };
        let need = |key: &str| {
            number(section, key)?
                .ok_or_else(|| DescriptionError::Missing { key: format!("{key} of {kind} rope scaling") })
        };
        match kind {
            "default" => Ok(Self::None),
            "linear" => Ok(Self::Linear { factor: need("factor")? }),
            "llama3" => Ok(Self::Llama3 {
                factor: need("factor")?,
                low: need("low_freq_factor")?,
                high: need("high_freq_factor")?,
                original: need("original_max_position_embeddings")?,
            }),
            other => Err(unsupported(other)),
        }
    }
}

/// One divisor for each pair of a head's elements, if the file has them.
fn divisors(file: &dyn GgufSource, head_dim: usize) -> Result<Option<Vec<f32>>, DescriptionError> {
    let Some(values) = file.rope_divisors()? else { return Ok(None) };
    match values.len() == head_dim / 2 {
        true => Ok(Some(values)),
        false => {
            let found = format!("{} elements, expected {}", values.len(), head_dim / 2);
            Err(DescriptionError::value("rope_freqs.weight", found))
        }
    }
}

fn unsupported(kind: &str) -> DescriptionError {
    DescriptionError::Unsupported(format!("rope scaling {kind:?} (supported: default, linear, llama3)"))
}

fn number(section: &Map<String, Json>, key: &str) -> Result<Option<f64>, DescriptionError> {
    member(section, key).map(|value| value.as_f64().ok_or_else(|| wrong(key, value))).transpose()
}

fn wrong(key: &str, found: &Json) -> DescriptionError {
    DescriptionError::value(key, found.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(config: Json) -> Result<Rope, DescriptionError> {
        Rope::from_config(config.as_object().unwrap(), "full_attention", "rope_theta", 10_000.0)
    }

    #[test]
    fn both_forms_of_a_config_give_the_same_rotation() {
        let hub = rope(serde_json::json!({ "rope_theta": 500000, "rope_scaling": { "type": "linear", "factor": 4 } }));
        let five = rope(serde_json::json!({
            "rope_parameters": { "rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0 }
        }));
        assert_eq!(hub.unwrap(), five.unwrap());
    }

    #[test]
    fn a_scaling_we_do_not_know_is_refused_by_name() {
        let refused = rope(serde_json::json!({ "rope_scaling": { "rope_type": "yarn", "factor": 4 } })).unwrap_err();
        assert!(refused.to_string().contains("yarn"), "{refused}");
    }

    #[test]
    fn a_factor_of_zero_or_a_missing_one_is_refused() {
        for scaling in [r#"{"type":"linear","factor":0}"#, r#"{"type":"linear"}"#, r#"{"type":7}"#, r#"[1]"#] {
            let scaling: Json = serde_json::from_str(scaling).unwrap();
            assert!(rope(serde_json::json!({ "rope_scaling": scaling })).is_err(), "{scaling}");
        }
        assert!(rope(serde_json::json!({ "rope_theta": -1 })).is_err());
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let plain = Rope { base: 500_000.0, scaling: Scaling::None };
        let scaling = Scaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192.0 };
        let (plain, scaled) = (plain.inv_freq(128), Rope { base: 500_000.0, scaling }.inv_freq(128));
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[63] / 8.0, scaled[63]);
        assert!(scaled.windows(2).all(|pair| pair[0] > pair[1]));
    }
}
