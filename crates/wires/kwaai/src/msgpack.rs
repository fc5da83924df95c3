//! MessagePack: `Reader` takes values off the front of bytes, and the functions that write them. Counts are bounded by the
//! bytes that are left, and what is skipped needs no stack.

use std::borrow::Cow;

use rmp::Marker;
use rmp::decode::{NumValueReadError, ValueReadError};
use rmp::encode;

use crate::KwaaiWireError;

/// Why writing cannot fail.
const TAKES_ALL: &str = "a Vec takes all bytes";

#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    fn marker(&self, what: &'static str) -> Result<Marker, KwaaiWireError> {
        self.rest.first().map(|&byte| Marker::from_u8(byte)).ok_or(KwaaiWireError::Truncated(what))
    }

    fn take(&mut self, bytes: usize, what: &'static str) -> Result<&'a [u8], KwaaiWireError> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or(KwaaiWireError::Truncated(what))?;
        self.rest = rest;
        Ok(taken)
    }

    /// Takes a nil, if that comes next.
    pub fn is_nil(&mut self) -> bool {
        let is_nil = self.rest.first() == Some(&Marker::Null.to_u8());
        self.rest = &self.rest[usize::from(is_nil)..];
        is_nil
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, KwaaiWireError> {
        rmp::decode::read_int(&mut self.rest).map_err(|error| number_error(&error, what))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, KwaaiWireError> {
        rmp::decode::read_int(&mut self.rest).map_err(|error| number_error(&error, what))
    }

    pub fn i64(&mut self, what: &'static str) -> Result<i64, KwaaiWireError> {
        rmp::decode::read_int(&mut self.rest).map_err(|error| number_error(&error, what))
    }

    pub fn bool(&mut self, what: &'static str) -> Result<bool, KwaaiWireError> {
        rmp::decode::read_bool(&mut self.rest).map_err(|error| value_error(&error, what))
    }

    /// A number of any kind but NaN.
    pub fn f64(&mut self, what: &'static str) -> Result<f64, KwaaiWireError> {
        let value = match self.marker(what)? {
            Marker::F64 => rmp::decode::read_f64(&mut self.rest).map_err(|error| value_error(&error, what))?,
            Marker::F32 => rmp::decode::read_f32(&mut self.rest).map_err(|error| value_error(&error, what))?.into(),
            _ => self.i64(what)? as f64,
        };
        if value.is_nan() { Err(KwaaiWireError::OutOfRange(what)) } else { Ok(value) }
    }

    pub fn text(&mut self, what: &'static str) -> Result<&'a str, KwaaiWireError> {
        let length = rmp::decode::read_str_len(&mut self.rest).map_err(|error| value_error(&error, what))?;
        std::str::from_utf8(self.take(length as usize, what)?).map_err(|_| KwaaiWireError::NotText(what))
    }

    pub fn bin(&mut self, what: &'static str) -> Result<&'a [u8], KwaaiWireError> {
        let length = rmp::decode::read_bin_len(&mut self.rest).map_err(|error| value_error(&error, what))?;
        self.take(length as usize, what)
    }

    /// A binary, or an array with an integer for each byte.
    pub fn bytes(&mut self, what: &'static str) -> Result<Cow<'a, [u8]>, KwaaiWireError> {
        if !self.is_array(what)? {
            return self.bin(what).map(Cow::Borrowed);
        }
        let count = self.array(what)?;
        let mut bytes = Vec::with_capacity(count);
        for _ in 0..count {
            // The two forms that are written; integers may have others.
            bytes.push(match *self.rest {
                [byte @ ..0x80, ref rest @ ..] | [0xcc, byte, ref rest @ ..] => {
                    self.rest = rest;
                    byte
                }
                _ => rmp::decode::read_int(&mut self.rest).map_err(|error| number_error(&error, what))?,
            });
        }
        Ok(Cow::Owned(bytes))
    }

    pub fn is_array(&self, what: &'static str) -> Result<bool, KwaaiWireError> {
        Ok(matches!(self.marker(what)?, Marker::FixArray(_) | Marker::Array16 | Marker::Array32))
    }

    /// The count of an array. The rest can hold as many elements.
    pub fn array(&mut self, what: &'static str) -> Result<usize, KwaaiWireError> {
        let count = rmp::decode::read_array_len(&mut self.rest).map_err(|error| value_error(&error, what))? as usize;
        if count > self.rest.len() { Err(KwaaiWireError::Truncated(what)) } else { Ok(count) }
    }

    /// The data of an extension of this type.
    pub fn extension(&mut self, kind: i8, what: &'static str) -> Result<Reader<'a>, KwaaiWireError> {
        let meta = rmp::decode::read_ext_meta(&mut self.rest).map_err(|error| value_error(&error, what))?;
        let data = self.take(meta.size as usize, what)?;
        if meta.typeid == kind { Ok(Reader::new(data)) } else { Err(KwaaiWireError::Type(what)) }
    }

    /// Calls `read` with the index of each known field of a struct: of a map from names, or of an array in the order of
    /// `names`. Ignores other fields.
    pub fn fields(
        &mut self,
        names: &[&'static str],
        what: &'static str,
        mut read: impl FnMut(usize, &mut Self) -> Result<(), KwaaiWireError>,
    ) -> Result<(), KwaaiWireError> {
        if self.is_array(what)? {
            for index in 0..self.array(what)? {
                if index < names.len() { read(index, self) } else { self.skip(what) }?;
            }
            return Ok(());
        }
        let count = rmp::decode::read_map_len(&mut self.rest).map_err(|error| value_error(&error, what))?;
        let mut is_read = vec![false; names.len()];
        for _ in 0..count {
            let key = *self;
            self.skip(what)?;
            let name = { key }.text(what).ok();
            match names.iter().position(|&known| Some(known) == name) {
                Some(index) if is_read[index] => return Err(KwaaiWireError::Repeated(names[index])),
                Some(index) => {
                    is_read[index] = true;
                    read(index, self)?;
                }
                None => self.skip(what)?,
            }
        }
        Ok(())
    }

    /// Passes over a value, whatever it is.
    pub fn skip(&mut self, what: &'static str) -> Result<(), KwaaiWireError> {
        // Of this value and of what it contains. Each is a byte at least, so this ends with the bytes.
        let mut values = 1_u64;
        while values > 0 {
            values -= 1;
            let marker = self.marker(what)?;
            self.take(1, what)?;
            let bytes = match marker {
                Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::True | Marker::False => 0,
                Marker::U8 | Marker::I8 => 1,
                Marker::U16 | Marker::I16 => 2,
                Marker::U32 | Marker::I32 | Marker::F32 => 4,
                Marker::U64 | Marker::I64 | Marker::F64 => 8,
                Marker::FixStr(length) => length.into(),
                Marker::Str8 | Marker::Bin8 => self.length::<1>(what)?,
                Marker::Str16 | Marker::Bin16 => self.length::<2>(what)?,
                Marker::Str32 | Marker::Bin32 => self.length::<4>(what)?,
                // An extension's type is a byte.
                Marker::FixExt1 => 1 + 1,
                Marker::FixExt2 => 1 + 2,
                Marker::FixExt4 => 1 + 4,
                Marker::FixExt8 => 1 + 8,
                Marker::FixExt16 => 1 + 16,
                Marker::Ext8 => 1 + self.length::<1>(what)?,
                Marker::Ext16 => 1 + self.length::<2>(what)?,
                Marker::Ext32 => 1 + self.length::<4>(what)?,
                Marker::FixArray(_)
                | Marker::Array16
                | Marker::Array32
                | Marker::FixMap(_)
                | Marker::Map16
                | Marker::Map32 => {
                    values += match marker {
                        Marker::FixArray(count) => count.into(),
                        Marker::FixMap(count) => 2 * u64::from(count),
                        Marker::Array16 => self.length::<2>(what)?,
                        Marker::Array32 => self.length::<4>(what)?,
                        Marker::Map16 => 2 * self.length::<2>(what)?,
                        _ => 2 * self.length::<4>(what)?,
                    };
                    0
                }
                Marker::Reserved => return Err(KwaaiWireError::Type(what)),
            };
            self.take(usize::try_from(bytes).unwrap_or(usize::MAX), what)?;
        }
        Ok(())
    }

    fn length<const N: usize>(&mut self, what: &'static str) -> Result<u64, KwaaiWireError> {
        Ok(self.take(N, what)?.iter().fold(0, |length, &byte| length << 8 | u64::from(byte)))
    }
}

fn value_error<E: rmp::decode::RmpReadErr>(error: &ValueReadError<E>, what: &'static str) -> KwaaiWireError {
    match error {
        ValueReadError::TypeMismatch(_) => KwaaiWireError::Type(what),
        ValueReadError::InvalidMarkerRead(_) | ValueReadError::InvalidDataRead(_) => KwaaiWireError::Truncated(what),
    }
}

fn number_error<E: rmp::decode::RmpReadErr>(error: &NumValueReadError<E>, what: &'static str) -> KwaaiWireError {
    match error {
        NumValueReadError::TypeMismatch(_) => KwaaiWireError::Type(what),
        NumValueReadError::OutOfRange => KwaaiWireError::OutOfRange(what),
        NumValueReadError::InvalidMarkerRead(_) | NumValueReadError::InvalidDataRead(_) => {
            KwaaiWireError::Truncated(what)
        }
    }
}

/// A count as the wire has it. Frames are limited far below this.
fn count_of(count: usize) -> u32 {
    u32::try_from(count).expect("what is sent has fewer than 2^32 elements")
}

pub(crate) fn put_map(out: &mut Vec<u8>, count: usize) {
    encode::write_map_len(out, count_of(count)).expect(TAKES_ALL);
}

pub(crate) fn put_array(out: &mut Vec<u8>, count: usize) {
    encode::write_array_len(out, count_of(count)).expect(TAKES_ALL);
}

pub(crate) fn put_uint(out: &mut Vec<u8>, value: u64) {
    encode::write_uint(out, value).expect(TAKES_ALL);
}

pub(crate) fn put_int(out: &mut Vec<u8>, value: i64) {
    encode::write_sint(out, value).expect(TAKES_ALL);
}

pub(crate) fn put_f64(out: &mut Vec<u8>, value: f64) {
    encode::write_f64(out, value).expect(TAKES_ALL);
}

pub(crate) fn put_bool(out: &mut Vec<u8>, value: bool) {
    encode::write_bool(out, value).expect(TAKES_ALL);
}

pub(crate) fn put_nil(out: &mut Vec<u8>) {
    encode::write_nil(out).expect(TAKES_ALL);
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    encode::write_str(out, text).expect(TAKES_ALL);
}

pub(crate) fn put_bin(out: &mut Vec<u8>, bytes: &[u8]) {
    encode::write_bin(out, bytes).expect(TAKES_ALL);
}

/// A value or nil.
pub(crate) fn put_optional<T>(out: &mut Vec<u8>, value: Option<T>, put: impl FnOnce(&mut Vec<u8>, T)) {
    match value {
        Some(value) => put(out, value),
        None => put_nil(out),
    }
}

pub(crate) fn put_extension(out: &mut Vec<u8>, kind: i8, data: &[u8]) {
    encode::write_ext_meta(out, count_of(data.len()), kind).expect(TAKES_ALL);
    out.extend_from_slice(data);
}
