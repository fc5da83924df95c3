//! `Attached`: values that follow the line of their message as bytes. The line has their number.

use std::io::{self, Read};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::limits::LimitError;

/// As many as the longest line.
pub const ATTACHED_BYTES_MAX: usize = super::lines::LINE_BYTES_MAX;

/// `f32` values, little-endian.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attached {
    bytes: Vec<u8>,
    /// Announced by a line, and not read yet.
    missing: usize,
}

impl Attached {
    pub fn of_f32(values: &[f32]) -> Self {
        let mut bytes = vec![0; size_of_val(values)];
        let (places, _) = bytes.as_chunks_mut();
        for (place, value) in places.iter_mut().zip(values) {
            *place = value.to_le_bytes();
        }
        Self { bytes, missing: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.missing == 0
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How many bytes follow the line.
    pub fn missing(&self) -> usize {
        self.missing
    }

    /// Reads the bytes after the line.
    pub fn read(&mut self, from: impl Read) -> io::Result<()> {
        // Memory grows with what comes, not with what was announced.
        let read = from.take(self.missing as u64).read_to_end(&mut self.bytes)?;
        if read < self.missing {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.missing = 0;
        Ok(())
    }

    pub fn f32s(&self, what: &'static str) -> Result<Vec<f32>, LimitError> {
        match self.bytes.as_chunks() {
            (values, []) => Ok(values.iter().copied().map(f32::from_le_bytes).collect()),
            _ => Err(LimitError::IncompleteValue { what, bytes: self.bytes.len() }),
        }
    }
}

impl Serialize for Attached {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.bytes.len() as u64)
    }
}

impl<'de> Deserialize<'de> for Attached {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let announced = u64::deserialize(deserializer)?;
        match usize::try_from(announced) {
            Ok(missing) if missing <= ATTACHED_BYTES_MAX => Ok(Self { bytes: Vec::new(), missing }),
            _ => Err(D::Error::custom(format_args!("{announced} bytes follow, the limit is {ATTACHED_BYTES_MAX}"))),
        }
    }
}
