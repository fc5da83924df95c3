//! `Packed`: many values of one size as one string, base64 of their little-endian bytes. Every bit is kept, in half the
//! space that digits would take.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::limits::LimitError;

/// The bytes of values. The reader knows the size of a value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed(Vec<u8>);

impl Packed {
    pub fn of_f32(values: &[f32]) -> Self {
        Self(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    pub fn of_u32(values: &[u32]) -> Self {
        Self(values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    pub fn of_arrays<const N: usize>(values: impl IntoIterator<Item = [u8; N]>) -> Self {
        Self(values.into_iter().flatten().collect())
    }

    pub fn f32s(&self, what: &'static str) -> Result<Vec<f32>, LimitError> {
        Ok(self.arrays(what)?.iter().copied().map(f32::from_le_bytes).collect())
    }

    pub fn u32s(&self, what: &'static str) -> Result<Vec<u32>, LimitError> {
        Ok(self.arrays(what)?.iter().copied().map(u32::from_le_bytes).collect())
    }

    /// The values, of `N` bytes each; `what` names them in the error for an incomplete one.
    pub fn arrays<const N: usize>(&self, what: &'static str) -> Result<&[[u8; N]], LimitError> {
        match self.0.as_chunks() {
            (arrays, []) => Ok(arrays),
            _ => Err(LimitError::IncompleteValue { what, bytes: self.0.len() }),
        }
    }
}

impl Serialize for Packed {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&base64::display::Base64Display::new(&self.0, &STANDARD))
    }
}

impl<'de> Deserialize<'de> for Packed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(PackedVisitor)
    }
}

struct PackedVisitor;

impl Visitor<'_> for PackedVisitor {
    type Value = Packed;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("base64")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Packed, E> {
        // The error does not contain the text, which may be megabytes.
        STANDARD.decode(text).map(Packed).map_err(|error| E::custom(format_args!("not base64: {error}")))
    }
}
