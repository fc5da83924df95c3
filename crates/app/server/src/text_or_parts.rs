//! `TextOrParts<T>`: a text, or a list of typed parts. Most text fields of the APIs accept both.

use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use utoipa::ToSchema;

/// A text, or a list of parts
// Not a derived untagged enum, because its errors would not name the wrong part.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum TextOrParts<T> {
    Text(String),
    Parts(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOrParts<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TextOrPartsVisitor(PhantomData))
    }
}

struct TextOrPartsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for TextOrPartsVisitor<T> {
    type Value = TextOrParts<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a string or a list of parts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(TextOrParts::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
        Ok(TextOrParts::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(TextOrParts::Parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_at_fault_is_named() {
        let mut json = serde_json::Deserializer::from_str("[1, 2, -3]");
        let error = serde_path_to_error::deserialize::<_, TextOrParts<u32>>(&mut json).unwrap_err();
        assert_eq!(error.path().to_string(), "[2]");
        let error = serde_json::from_str::<TextOrParts<u32>>("{}").unwrap_err();
        assert!(error.to_string().contains("a string or a list of parts"), "{error}");
    }

    #[test]
    fn a_text_and_a_list_are_both_read() {
        assert_eq!(serde_json::from_str::<TextOrParts<u32>>("\"a\"").unwrap(), TextOrParts::Text("a".to_owned()));
        assert_eq!(serde_json::from_str::<TextOrParts<u32>>("[1]").unwrap(), TextOrParts::Parts(vec![1]));
    }
}
