//! Names of decoder layers: `model.layers.7`, or `model.language_model.layers.7` where a model has other parts besides.

use types::LayerRange;

/// The prefixes of decoder layers that are known.
const PREFIXES: [&str; 2] = ["model.layers.", "model.language_model.layers."];

/// What precedes the number in the names of a model's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CakeLayerPrefix {
    #[default]
    Model,
    LanguageModel,
}

impl CakeLayerPrefix {
    pub fn name(self, layer: usize) -> String {
        format!("{}{layer}", PREFIXES[self as usize])
    }
}

/// The number of a named layer.
pub fn layer_number(name: &str) -> Option<u32> {
    let number = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix))?;
    let is_plain = number.bytes().all(|digit| digit.is_ascii_digit()) && (number == "0" || !number.starts_with('0'));
    number.parse().ok().filter(|&layer| is_plain && layer < u32::MAX)
}

/// The range that named layers form, which have to follow one another.
pub fn layer_range<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<LayerRange, CakeLayersError> {
    let ranges = layer_ranges(names)?;
    match *ranges {
        [range] => Ok(range),
        [] => Err(CakeLayersError::None),
        _ => Err(CakeLayersError::Gap),
    }
}

/// The ranges that named layers form: one ends where the next layer does not follow.
pub fn layer_ranges<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Vec<LayerRange>, CakeLayersError> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for name in names {
        let layer = layer_number(name).ok_or_else(|| CakeLayersError::Unknown(excerpt(name)))?;
        match ranges.last_mut() {
            Some((_, end)) if *end == layer => *end += 1,
            _ => ranges.push((layer, layer + 1)),
        }
    }
    Ok(ranges.into_iter().filter_map(|(start, end)| LayerRange::new(start, end)).collect())
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CakeLayersError {
    #[error("{0:?} is not the name of a decoder layer")]
    Unknown(String),
    #[error("no layer is named")]
    None,
    #[error("the layers do not follow one another")]
    Gap,
}

/// The beginning of a text from outside, for messages.
pub(super) fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    text.chars().take(CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_layers_have_one_form() {
        for prefix in [CakeLayerPrefix::Model, CakeLayerPrefix::LanguageModel] {
            assert_eq!(layer_number(&prefix.name(0)), Some(0));
            assert_eq!(layer_number(&prefix.name(31)), Some(31));
        }
        for name in ["model.layers.", "model.layers.01", "model.layers.+1", "model.layers.-1", "layers.1", "vae", ""] {
            assert_eq!(layer_number(name), None, "{name}");
        }
        assert_eq!(layer_number("model.layers.4294967294"), Some(u32::MAX - 1));
        assert_eq!(layer_number("model.layers.4294967295"), None);
        assert_eq!(layer_number("model.layers.4294967296"), None);
    }

    #[test]
    fn layers_form_ranges() {
        let names = |layers: &[u32]| layers.iter().map(|layer| format!("model.layers.{layer}")).collect::<Vec<_>>();
        let ranges = |layers| layer_ranges(names(layers).iter().map(String::as_str)).unwrap();
        let range = |start, end| LayerRange::new(start, end).unwrap();
        assert_eq!(ranges(&[3, 4, 5]), [range(3, 6)]);
        assert_eq!(ranges(&[0, 1, 7, 8]), [range(0, 2), range(7, 9)]);
        assert_eq!(ranges(&[1, 0]), [range(1, 2), range(0, 1)]);
        assert_eq!(layer_range(names(&[2, 4]).iter().map(String::as_str)), Err(CakeLayersError::Gap));
        assert_eq!(layer_range([]), Err(CakeLayersError::None));
        assert_eq!(layer_range(["unet"]), Err(CakeLayersError::Unknown("unet".to_owned())));
    }
}
