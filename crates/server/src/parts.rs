//! `TextOr<T>`: a text, or a list of typed parts. Most texts of most APIs may be either.

use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, SeqAccess, Visitor};
use utoipa::ToSchema;

/// A text, or a list of parts
// Read by hand, because a derived untagged enum would not say what is wrong with the third part.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum TextOr<T> {
    Text(String),
    Parts(Vec<T>),
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for TextOr<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Either(PhantomData))
    }
}

struct Either<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
    type Value = TextOr<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a string or a list of parts")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(TextOr::Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Self::Value, E> {
        Ok(TextOr::Text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, parts: A) -> Result<Self::Value, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(parts)).map(TextOr::Parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_at_fault_is_named() {
        let mut json = serde_json::Deserializer::from_str("[1, 2, -3]");
        let error = serde_path_to_error::deserialize::<_, TextOr<u32>>(&mut json).unwrap_err();
        assert_eq!(error.path().to_string(), "[2]");
        let error = serde_json::from_str::<TextOr<u32>>("{}").unwrap_err();
        assert!(error.to_string().contains("a string or a list of parts"), "{error}");
    }

    #[test]
    fn a_text_and_a_list_are_both_read() {
        assert_eq!(serde_json::from_str::<TextOr<u32>>("\"a\"").unwrap(), TextOr::Text("a".to_owned()));
        assert_eq!(serde_json::from_str::<TextOr<u32>>("[1]").unwrap(), TextOr::Parts(vec![1]));
    }
}
