//! The header of one safetensors file: its length in eight bytes, then JSON, then the tensors' data without gaps.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use types::DType;

use super::Stored;
use crate::files::FormatError;
use crate::files::error::shown;
use crate::files::tensors::{RANK_MAX, Shape, TENSORS_MAX, Tensor, check_disjoint};

/// The most bytes of the JSON header; the format's own limit.
const HEADER_BYTES_MAX: usize = 100_000_000;

/// The tensors of `bytes`, the whole file number `file` of its model. They are in bounds and do not overlap; their names may
/// repeat.
pub fn read(bytes: &[u8], file: u32) -> Result<Vec<Tensor<Stored>>, FormatError> {
    let (length, rest) = bytes.split_first_chunk().ok_or(FormatError::Truncated("the length of the header"))?;
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX as u64 {
        return Err(FormatError::Limit { what: "bytes of header", found: length, max: HEADER_BYTES_MAX as u64 });
    }
    // The length is within the limit, so it fits in usize.
    let (json, data) = rest.split_at_checked(length as usize).ok_or(FormatError::Truncated("the header"))?;
    let entries: Entries = serde_json::from_slice(json).map_err(FormatError::Header)?;
    let data_start = bytes.len() - data.len();

    let mut tensors = Vec::with_capacity(entries.0.len());
    for (name, entry) in entries.0 {
        tensors.push(tensor(name, entry, data_start, data.len(), file)?);
    }
    check_disjoint(&mut tensors)?;
    let covered = tensors.iter().map(|tensor| tensor.range.len()).sum();
    match covered == data.len() {
        true => Ok(tensors),
        false => Err(FormatError::Gap { covered, present: data.len() }),
    }
}

/// Checks one entry against the data, `data_bytes` long.
fn tensor(
    name: String,
    entry: Entry,
    data_start: usize,
    data_bytes: usize,
    file: u32,
) -> Result<Tensor<Stored>, FormatError> {
    let Entry { dtype, shape: Dims(shape), data_offsets: (start, end) } = entry;
    if start > end || end > data_bytes as u64 {
        return Err(FormatError::OutOfBounds { tensor: shown(&name) });
    }
    let (start, end) = (start as usize, end as usize); // both within the data
    if let Ok(dtype) = &dtype.0 {
        let expected = shape
            .elements()
            .and_then(|elements| dtype.row_bytes(elements))
            .ok_or_else(|| FormatError::Shape { tensor: shown(&name), shape: shape.dims().to_vec() })?;
        if end - start != expected {
            return Err(FormatError::Length { tensor: shown(&name), found: end - start, expected });
        }
    }
    Ok(Tensor { name: name.into(), dtype: dtype.0, shape, file, range: data_start + start..data_start + end })
}

/// The header's members in the order of the file, without `__metadata__`.
struct Entries(Vec<(String, Entry)>);

#[derive(serde::Deserialize)]
struct Entry {
    dtype: Format,
    shape: Dims,
    data_offsets: (u64, u64),
}

struct Format(Stored);
struct Dims(Shape);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with a member for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else if entries.len() == TENSORS_MAX {
                        return Err(A::Error::custom(format_args!("more than {TENSORS_MAX} tensors")));
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Format;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a number format")
            }

            fn visit_str<E: Error>(self, name: &str) -> Result<Format, E> {
                Ok(Format(match name {
                    "F32" => Ok(DType::F32),
                    "F16" => Ok(DType::F16),
                    "BF16" => Ok(DType::BF16),
                    other => Err(shown(other).into()),
                }))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sequence;
        impl<'de> Visitor<'de> for Sequence {
            type Value = Dims;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {RANK_MAX} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Dims, A::Error> {
                let mut shape = Shape::default();
                while let Some(dim) = sequence.next_element()? {
                    shape.push(dim).ok_or_else(|| A::Error::invalid_length(RANK_MAX + 1, &self))?;
                }
                Ok(Dims(shape))
            }
        }
        deserializer.deserialize_seq(Sequence)
    }
}
