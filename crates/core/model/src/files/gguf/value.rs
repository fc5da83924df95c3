//! Metadata values. Integers and floats are widened to 64 bits; an array of strings is one allocation.

use super::cursor::Cursor;
use crate::files::FormatError;
use crate::files::error::shown;

/// The most array entries of a file, in all its arrays. The largest vocabularies have about a million.
const ENTRIES_MAX: usize = 1 << 24;

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    U64(u64),
    I64(i64),
    F64(f64),
    Bool(bool),
    String(String),
    Strings(Strings),
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Bools(Vec<bool>),
}

impl Value {
    /// A non-negative integer of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U64(value) => Some(value),
            Self::I64(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Self::U64(value) => i64::try_from(value).ok(),
            Self::I64(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_f32(&self) -> Option<f32> {
        self.as_f64().map(|value| value as f32)
    }

    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Self::F64(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Self::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(value) => Some(value),
            _ => None,
        }
    }

    pub fn as_strings(&self) -> Option<&Strings> {
        match self {
            Self::Strings(values) => Some(values),
            _ => None,
        }
    }

    pub fn as_ints(&self) -> Option<&[i64]> {
        match self {
            Self::Ints(values) => Some(values),
            _ => None,
        }
    }

    pub fn as_floats(&self) -> Option<&[f32]> {
        match self {
            Self::Floats(values) => Some(values),
            _ => None,
        }
    }

    pub fn as_bools(&self) -> Option<&[bool]> {
        match self {
            Self::Bools(values) => Some(values),
            _ => None,
        }
    }
}

/// Strings, concatenated in one allocation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Strings {
    text: String,
    /// The end of each string in `text`, always at a character boundary.
    ends: Vec<u32>,
}

impl Strings {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    pub fn get(&self, index: usize) -> Option<&str> {
        let end = *self.ends.get(index)? as usize;
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before] as usize);
        Some(&self.text[start..end])
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        (0..self.len()).map(|index| self.get(index).expect("below the length"))
    }

    fn read(cursor: &mut Cursor<'_>, count: usize) -> Result<Self, FormatError> {
        let mut strings = Self { text: String::new(), ends: Vec::with_capacity(count) };
        for _ in 0..count {
            strings.text.push_str(cursor.string("a string of an array")?);
            strings.ends.push(u32::try_from(strings.text.len()).expect("a header is far shorter than 4 GiB"));
        }
        strings.text.shrink_to_fit();
        Ok(strings)
    }
}

/// Reads the values of one file.
pub struct ValueReader {
    entries_left: usize,
}

impl ValueReader {
    pub fn new() -> Self {
        Self { entries_left: ENTRIES_MAX }
    }

    /// Reads the value that follows `key`: its type, then its contents.
    pub fn read(&mut self, cursor: &mut Cursor<'_>, key: &str) -> Result<Value, FormatError> {
        const WHAT: &str = "a metadata value";
        let code = cursor.u32(WHAT)?;
        Ok(match code {
            0 => Value::U64(cursor.array(WHAT).map(u8::from_le_bytes)?.into()),
            1 => Value::I64(cursor.array(WHAT).map(i8::from_le_bytes)?.into()),
            2 => Value::U64(cursor.array(WHAT).map(u16::from_le_bytes)?.into()),
            3 => Value::I64(cursor.array(WHAT).map(i16::from_le_bytes)?.into()),
            4 => Value::U64(cursor.array(WHAT).map(u32::from_le_bytes)?.into()),
            5 => Value::I64(cursor.array(WHAT).map(i32::from_le_bytes)?.into()),
            6 => Value::F64(cursor.array(WHAT).map(f32::from_le_bytes)?.into()),
            7 => Value::Bool(boolean(cursor.array(WHAT)?, key)?),
            8 => Value::String(cursor.string(WHAT)?.to_owned()),
            9 => self.array(cursor, key)?,
            10 => Value::U64(cursor.u64(WHAT)?),
            11 => Value::I64(cursor.array(WHAT).map(i64::from_le_bytes)?),
            12 => Value::F64(cursor.array(WHAT).map(f64::from_le_bytes)?),
            _ => return Err(FormatError::ValueType { key: shown(key), code }),
        })
    }

    fn array(&mut self, cursor: &mut Cursor<'_>, key: &str) -> Result<Value, FormatError> {
        let code = cursor.u32("an array")?;
        Ok(match code {
            0 => Value::Ints(self.entries(cursor, |x| Ok(u8::from_le_bytes(x).into()))?),
            1 => Value::Ints(self.entries(cursor, |x| Ok(i8::from_le_bytes(x).into()))?),
            2 => Value::Ints(self.entries(cursor, |x| Ok(u16::from_le_bytes(x).into()))?),
            3 => Value::Ints(self.entries(cursor, |x| Ok(i16::from_le_bytes(x).into()))?),
            4 => Value::Ints(self.entries(cursor, |x| Ok(u32::from_le_bytes(x).into()))?),
            5 => Value::Ints(self.entries(cursor, |x| Ok(i32::from_le_bytes(x).into()))?),
            6 => Value::Floats(self.entries(cursor, |x| Ok(f32::from_le_bytes(x)))?),
            7 => Value::Bools(self.entries(cursor, |x| boolean(x, key))?),
            8 => {
                let count = self.count(cursor, size_of::<u64>())?;
                Value::Strings(Strings::read(cursor, count)?)
            }
            9 => return Err(FormatError::NestedArray { key: shown(key) }),
            10 => Value::Ints(self.entries(cursor, |x| {
                i64::try_from(u64::from_le_bytes(x)).map_err(|_| FormatError::ValueRange { key: shown(key) })
            })?),
            11 => Value::Ints(self.entries(cursor, |x| Ok(i64::from_le_bytes(x)))?),
            12 => Value::Floats(self.entries(cursor, |x| Ok(f64::from_le_bytes(x) as f32))?),
            _ => return Err(FormatError::ValueType { key: shown(key), code }),
        })
    }

    /// Reads an array's entries of `N` bytes each.
    fn entries<const N: usize, T>(
        &mut self,
        cursor: &mut Cursor<'_>,
        entry: impl Fn([u8; N]) -> Result<T, FormatError>,
    ) -> Result<Vec<T>, FormatError> {
        let count = self.count(cursor, N)?;
        let (entries, _) = cursor.take(count * N, "an array")?.as_chunks::<N>();
        entries.iter().map(|&bytes| entry(bytes)).collect()
    }

    fn count(&mut self, cursor: &mut Cursor<'_>, bytes_each: usize) -> Result<usize, FormatError> {
        let count = cursor.count(bytes_each, self.entries_left, "array entries")?;
        self.entries_left -= count;
        Ok(count)
    }
}

fn boolean([byte]: [u8; 1], key: &str) -> Result<bool, FormatError> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(FormatError::ValueRange { key: shown(key) }),
    }
}
