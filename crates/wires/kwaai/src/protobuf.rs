//! Protocol buffers, as far as the messages need them: fields in, fields out. All field numbers that are written are below
//! 16, so a tag is one byte.

use crate::KwaaiWireError;

/// A varint of 64 bits.
pub(crate) const VARINT_BYTES_MAX: usize = 10;

/// The varint at the front of `bytes`, and what follows it. `None` if more bytes are needed to tell.
pub(crate) fn varint(bytes: &[u8]) -> Result<Option<(u64, &[u8])>, KwaaiWireError> {
    let mut value = 0;
    for (index, &byte) in bytes.iter().take(VARINT_BYTES_MAX).enumerate() {
        // The last byte holds the highest of 64 bits.
        if index + 1 == VARINT_BYTES_MAX && byte > 1 {
            return Err(KwaaiWireError::Varint);
        }
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            return Ok(Some((value, &bytes[index + 1..])));
        }
    }
    Ok(None)
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Value<'a> {
    Varint(u64),
    Fixed64([u8; 8]),
    Bytes(&'a [u8]),
    Fixed32,
}

impl<'a> Value<'a> {
    pub fn bytes(self, what: &'static str) -> Result<&'a [u8], KwaaiWireError> {
        if let Self::Bytes(bytes) = self { Ok(bytes) } else { Err(KwaaiWireError::Type(what)) }
    }

    pub fn text(self, what: &'static str) -> Result<&'a str, KwaaiWireError> {
        std::str::from_utf8(self.bytes(what)?).map_err(|_| KwaaiWireError::NotText(what))
    }

    pub fn varint(self, what: &'static str) -> Result<u64, KwaaiWireError> {
        if let Self::Varint(value) = self { Ok(value) } else { Err(KwaaiWireError::Type(what)) }
    }

    pub fn double(self, what: &'static str) -> Result<f64, KwaaiWireError> {
        if let Self::Fixed64(bytes) = self { not_nan(bytes, what) } else { Err(KwaaiWireError::Type(what)) }
    }

    /// Appends an element of a repeated field, or all of a packed one, to a list that holds at most `max`.
    pub fn append_doubles(self, list: &mut Vec<f64>, what: &'static str, max: usize) -> Result<(), KwaaiWireError> {
        let Self::Bytes(packed) = self else { return push(list, self.double(what)?, what, max) };
        let (doubles, []) = packed.as_chunks::<8>() else { return Err(KwaaiWireError::Truncated(what)) };
        doubles.iter().try_for_each(|&bytes| push(list, not_nan(bytes, what)?, what, max))
    }

    /// As [`append_doubles`](Self::append_doubles).
    pub fn append_bools(self, list: &mut Vec<bool>, what: &'static str, max: usize) -> Result<(), KwaaiWireError> {
        let Self::Bytes(mut packed) = self else { return push(list, self.varint(what)? != 0, what, max) };
        while !packed.is_empty() {
            let (value, rest) = varint(packed)?.ok_or(KwaaiWireError::Truncated(what))?;
            push(list, value != 0, what, max)?;
            packed = rest;
        }
        Ok(())
    }
}

/// Appends to a list that holds at most `max`.
pub(crate) fn push<T>(list: &mut Vec<T>, element: T, what: &'static str, max: usize) -> Result<(), KwaaiWireError> {
    if list.len() == max {
        return Err(KwaaiWireError::TooMany { what, found: max + 1, max });
    }
    list.push(element);
    Ok(())
}

fn not_nan(bytes: [u8; 8], what: &'static str) -> Result<f64, KwaaiWireError> {
    let value = f64::from_le_bytes(bytes);
    if value.is_nan() { Err(KwaaiWireError::OutOfRange(what)) } else { Ok(value) }
}

/// Calls `read` with the number and the value of each field of a message.
pub(crate) fn read_fields<'a>(
    mut message: &'a [u8],
    what: &'static str,
    mut read: impl FnMut(u32, Value<'a>) -> Result<(), KwaaiWireError>,
) -> Result<(), KwaaiWireError> {
    let truncated = KwaaiWireError::Truncated(what);
    while !message.is_empty() {
        let (tag, rest) = varint(message)?.ok_or(truncated.clone())?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| (1..1 << 29).contains(number));
        let number = number.ok_or(KwaaiWireError::OutOfRange("field number"))?;
        let (value, rest) = match tag & 7 {
            0 => {
                let (value, rest) = varint(rest)?.ok_or(truncated.clone())?;
                (Value::Varint(value), rest)
            }
            1 => {
                let (bytes, rest) = rest.split_first_chunk().ok_or(truncated.clone())?;
                (Value::Fixed64(*bytes), rest)
            }
            2 => {
                let (length, rest) = varint(rest)?.ok_or(truncated.clone())?;
                let length = usize::try_from(length).map_err(|_| truncated.clone())?;
                let (bytes, rest) = rest.split_at_checked(length).ok_or(truncated.clone())?;
                (Value::Bytes(bytes), rest)
            }
            5 => {
                let (_, rest) = rest.split_first_chunk::<4>().ok_or(truncated.clone())?;
                (Value::Fixed32, rest)
            }
            _ => return Err(KwaaiWireError::Type(what)),
        };
        read(number, value)?;
        message = rest;
    }
    Ok(())
}

pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The size of [`put_bytes`].
pub(crate) fn bytes_field_bytes(length: usize) -> usize {
    let varint_bytes = (length | 1).ilog2() as usize / 7 + 1;
    1 + varint_bytes + length
}

/// The tag and the length of a field of this many bytes, which the caller appends.
pub(crate) fn put_length(out: &mut Vec<u8>, field: u32, length: usize) {
    put_varint(out, (field << 3 | 2).into());
    put_varint(out, length as u64);
}

pub(crate) fn put_bytes(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    put_length(out, field, bytes.len());
    out.extend_from_slice(bytes);
}

pub(crate) fn put_uint(out: &mut Vec<u8>, field: u32, value: u64) {
    put_varint(out, (field << 3).into());
    put_varint(out, value);
}

pub(crate) fn put_double(out: &mut Vec<u8>, field: u32, value: f64) {
    put_varint(out, (field << 3 | 1).into());
    out.extend_from_slice(&value.to_le_bytes());
}
