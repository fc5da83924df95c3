//! `Activations`: rows of hidden states in a message: as they are, or in half the bytes.

use half::f16;

use super::{HIDDEN_MAX, ROWS_MAX, WireError};
use chains::{ByteReader, ByteWriter, read_f32s};

/// How values travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Encoding {
    /// Without loss.
    #[default]
    F32 = 0,
    F16 = 1,
}

/// Rows of values.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Activations {
    pub encoding: Encoding,
    /// May be 0, for a reply without states.
    pub rows: usize,
    /// `[rows, hidden]`.
    pub values: Vec<f32>,
}

impl Activations {
    /// Bytes of the values as they travel.
    pub fn bytes(&self) -> usize {
        self.values.len()
            * match self.encoding {
                Encoding::F32 => size_of::<f32>(),
                Encoding::F16 => size_of::<f16>(),
            }
    }

    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        let hidden = self.values.len().checked_div(self.rows).unwrap_or_default();
        bytes.put_u8(self.encoding as u8);
        bytes.put_u32(self.rows as u32);
        bytes.put_u32(hidden as u32);
        match self.encoding {
            Encoding::F32 => bytes.put_f32s(&self.values),
            Encoding::F16 => {
                bytes.extend(self.values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()));
            }
        }
    }

    /// Reads the rest of a message.
    pub(super) fn decode(mut reader: ByteReader<'_>) -> Result<Self, WireError> {
        let encoding = match reader.u8("an encoding")? {
            0 => Encoding::F32,
            1 => Encoding::F16,
            other => return Err(WireError::Unknown { what: "an encoding", found: other.into() }),
        };
        let rows = bounded(&mut reader, "the number of rows", ROWS_MAX)?;
        let hidden = bounded(&mut reader, "the width of a row", HIDDEN_MAX)?;
        let (expected, bytes) = (rows * hidden, reader.rest());
        let mut values = Vec::new();
        match encoding {
            Encoding::F32 => read_f32s(bytes, expected, &mut values)?,
            Encoding::F16 => {
                let (halves, rest) = bytes.as_chunks();
                if halves.len() != expected || !rest.is_empty() {
                    return Err(WireError::Activations { found: bytes.len().div_ceil(2), expected });
                }
                values.extend(halves.iter().map(|&half| f16::from_le_bytes(half).to_f32()));
            }
        }
        Ok(Self { encoding, rows, values })
    }
}

pub(super) fn bounded(reader: &mut ByteReader<'_>, what: &'static str, max: usize) -> Result<usize, WireError> {
    let found = reader.u32(what)?;
    let too_large = WireError::TooLarge { what, found: found.into(), max: max as u64 };
    usize::try_from(found).ok().filter(|&count| count <= max).ok_or(too_large)
}
