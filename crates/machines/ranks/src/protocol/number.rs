//! `Number`: an `f32` that keeps all its bits in JSON.
//!
//! It is written with the digits of an `f64`. A parser may be off by a few units in the last place of the `f64`, which
//! is far less than half a unit of the `f32`, so the `f32` is recovered exactly. JSON has no infinities and no NaN:
//! they are the strings `"inf"`, `"-inf"` and `"nan"`. The payload of a NaN is lost.

use std::fmt;

use serde::de::{self, Deserializer, Unexpected, Visitor};
use serde::{Deserialize, Serialize, Serializer};

#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Number(pub f32);

impl Number {
    pub fn is_zero(&self) -> bool {
        self.0 == 0.0
    }

    pub fn is_one(&self) -> bool {
        self.0 == 1.0
    }
}

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            value if value.is_finite() => serializer.serialize_f64(f64::from(value)),
            f32::INFINITY => serializer.serialize_str("inf"),
            f32::NEG_INFINITY => serializer.serialize_str("-inf"),
            _ => serializer.serialize_str("nan"),
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor)
    }
}

struct NumberVisitor;

impl Visitor<'_> for NumberVisitor {
    type Value = Number;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number in the range of f32, \"inf\", \"-inf\" or \"nan\"")
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Number, E> {
        let narrow = value as f32;
        narrow.is_finite().then_some(Number(narrow)).ok_or_else(|| E::invalid_value(Unexpected::Float(value), &self))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Number, E> {
        Ok(Number(value as f32))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Number, E> {
        Ok(Number(value as f32))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Number, E> {
        match value {
            "inf" => Ok(Number(f32::INFINITY)),
            "-inf" => Ok(Number(f32::NEG_INFINITY)),
            "nan" => Ok(Number(f32::NAN)),
            _ => Err(E::invalid_value(Unexpected::Str(value), &self)),
        }
    }
}
