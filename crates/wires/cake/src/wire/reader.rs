//! `Reader`: takes values off the front of a payload, and the functions that write them.

use super::CakeWireError;

pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(payload: &'a [u8]) -> Self {
        Self { rest: payload }
    }

    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], CakeWireError> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(CakeWireError::Truncated(what))?;
        self.rest = rest;
        Ok(*array)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, CakeWireError> {
        self.array(what).map(|[byte]| byte)
    }

    pub fn bool(&mut self, what: &'static str) -> Result<bool, CakeWireError> {
        self.u8(what).map(|byte| byte != 0)
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, CakeWireError> {
        self.array(what).map(u32::from_be_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, CakeWireError> {
        self.array(what).map(u64::from_be_bytes)
    }

    pub fn u128(&mut self, what: &'static str) -> Result<u128, CakeWireError> {
        self.array(what).map(u128::from_be_bytes)
    }

    /// Bytes with their count before them.
    pub fn bytes(&mut self, what: &'static str) -> Result<&'a [u8], CakeWireError> {
        let count = self.u32(what)? as usize;
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or(CakeWireError::Truncated(what))?;
        self.rest = rest;
        Ok(bytes)
    }

    pub fn text(&mut self, what: &'static str) -> Result<&'a str, CakeWireError> {
        std::str::from_utf8(self.bytes(what)?).map_err(|_| CakeWireError::NotText(what))
    }

    /// The count of a list with at most `max` elements. Each takes at least `element_bytes`, so the rest of the payload
    /// can hold as many.
    pub fn count(&mut self, what: &'static str, element_bytes: usize, max: usize) -> Result<usize, CakeWireError> {
        let found = self.u32(what)? as usize;
        if found > max {
            return Err(CakeWireError::TooMany { what, found, max });
        }
        if found * element_bytes > self.rest.len() {
            return Err(CakeWireError::Truncated(what));
        }
        Ok(found)
    }
}

/// Appends the count of a list, or of the bytes of a text. A frame is far shorter than what a count can say, and its length
/// is checked when it is complete.
pub(super) fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_be_bytes());
}

pub(super) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_count(out, bytes.len());
    out.extend_from_slice(bytes);
}
