//! The JSON form of a manifest. Lists are bounded while they are read. Floats are written as their bits, so that every value
//! arrives as it was, NaN included.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::{METADATA_MAX, Manifest, ManifestError, Source, TensorEntry, VALUE_ENTRIES_MAX};
use crate::files::{TENSORS_MAX, Value};

#[derive(Serialize, Deserialize)]
pub(super) struct WireManifest {
    model: WireSource,
    #[serde(deserialize_with = "bounded::<_, _, TENSORS_MAX>")]
    tensors: Vec<TensorEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WireSource {
    Config(String),
    Gguf {
        #[serde(deserialize_with = "bounded::<_, _, METADATA_MAX>")]
        metadata: Vec<(String, WireValue)>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rope_divisors: Option<WireFloats>,
    },
}

#[derive(Serialize, Deserialize)]
struct WireFloats(#[serde(deserialize_with = "bounded::<_, _, VALUE_ENTRIES_MAX>")] Vec<u32>);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WireValue {
    U64(u64),
    I64(i64),
    F64(u64),
    Bool(bool),
    String(String),
    Ints(#[serde(deserialize_with = "bounded::<_, _, VALUE_ENTRIES_MAX>")] Vec<i64>),
    Floats(WireFloats),
    Bools(#[serde(deserialize_with = "bounded::<_, _, VALUE_ENTRIES_MAX>")] Vec<bool>),
}

impl TryFrom<WireManifest> for Manifest {
    type Error = ManifestError;

    fn try_from(WireManifest { model, tensors }: WireManifest) -> Result<Self, ManifestError> {
        let source = match model {
            WireSource::Config(text) => Source::Config(text),
            WireSource::Gguf { metadata, rope_divisors } => Source::Gguf {
                metadata: metadata.into_iter().map(|(key, value)| (key, value.into())).collect(),
                rope_divisors: rope_divisors.map(Vec::from),
            },
        };
        Self::new(source, tensors)
    }
}

impl From<Manifest> for WireManifest {
    fn from(Manifest { source, tensors, .. }: Manifest) -> Self {
        let model = match source {
            Source::Config(text) => WireSource::Config(text),
            Source::Gguf { metadata, rope_divisors } => WireSource::Gguf {
                metadata: metadata.into_iter().filter_map(|(key, value)| Some((key, WireValue::new(value)?))).collect(),
                rope_divisors: rope_divisors.map(WireFloats::from),
            },
        };
        Self { model, tensors }
    }
}

impl WireValue {
    /// `None` for lists of text: no description is read from them.
    fn new(value: Value) -> Option<Self> {
        Some(match value {
            Value::U64(value) => Self::U64(value),
            Value::I64(value) => Self::I64(value),
            Value::F64(value) => Self::F64(value.to_bits()),
            Value::Bool(value) => Self::Bool(value),
            Value::String(value) => Self::String(value),
            Value::Strings(_) => return None,
            Value::Ints(values) => Self::Ints(values),
            Value::Floats(values) => Self::Floats(values.into()),
            Value::Bools(values) => Self::Bools(values),
        })
    }
}

impl From<WireValue> for Value {
    fn from(value: WireValue) -> Self {
        match value {
            WireValue::U64(value) => Self::U64(value),
            WireValue::I64(value) => Self::I64(value),
            WireValue::F64(bits) => Self::F64(f64::from_bits(bits)),
            WireValue::Bool(value) => Self::Bool(value),
            WireValue::String(value) => Self::String(value),
            WireValue::Ints(values) => Self::Ints(values),
            WireValue::Floats(values) => Self::Floats(values.into()),
            WireValue::Bools(values) => Self::Bools(values),
        }
    }
}

impl From<Vec<f32>> for WireFloats {
    fn from(values: Vec<f32>) -> Self {
        Self(values.into_iter().map(f32::to_bits).collect())
    }
}

impl From<WireFloats> for Vec<f32> {
    fn from(WireFloats(bits): WireFloats) -> Self {
        bits.into_iter().map(f32::from_bits).collect()
    }
}

/// Reads a list of at most `MAX` entries.
pub(super) fn bounded<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MAX: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    struct Entries<T, const MAX: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Entries<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "a list of at most {MAX} entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<T>, A::Error> {
            let mut entries = Vec::new();
            while let Some(entry) = sequence.next_element()? {
                if entries.len() == MAX {
                    return Err(A::Error::invalid_length(MAX + 1, &self));
                }
                entries.push(entry);
            }
            Ok(entries)
        }
    }
    deserializer.deserialize_seq(Entries::<T, MAX>(PhantomData))
}

/// A hash as 64 hexadecimal digits.
pub(super) mod hex {
    use std::fmt;

    use serde::de::{Deserializer, Error, Unexpected, Visitor};
    use serde::ser::Serializer;

    #[allow(clippy::ref_option)] // serde's signature
    pub fn serialize<S: Serializer>(hash: &Option<[u8; 32]>, serializer: S) -> Result<S::Ok, S::Error> {
        match hash {
            Some(hash) => serializer.serialize_str(&blake3::Hash::from_bytes(*hash).to_hex()),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<[u8; 32]>, D::Error> {
        struct Digits;
        impl Visitor<'_> for Digits {
            type Value = Option<[u8; 32]>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("64 hexadecimal digits")
            }

            fn visit_str<E: Error>(self, digits: &str) -> Result<Self::Value, E> {
                let hash = blake3::Hash::from_hex(digits);
                hash.map(|hash| Some(hash.into())).map_err(|_| E::invalid_value(Unexpected::Str(digits), &self))
            }
        }
        deserializer.deserialize_str(Digits)
    }
}
