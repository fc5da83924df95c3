//! Reads and writes the numbers of a message, little-endian.

/// Bytes that are not a message of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("the message ends within {what}")]
    Truncated { what: &'static str },
    #[error("{bytes} bytes follow the message")]
    Trailing { bytes: usize },
    #[error("{what} is {found}, the limit is {max}")]
    TooLarge { what: &'static str, found: u64, max: u64 },
    #[error("{what} is {found}, which has no meaning")]
    Unknown { what: &'static str, found: u64 },
    #[error("{found} values of activations, {expected} were expected")]
    Activations { found: usize, expected: usize },
    #[error("generated tokens do not come before those of prompts")]
    OutOfOrder,
    #[error("the message is not valid: {0}")]
    Json(String),
}

/// The bytes of a message that are not read yet.
pub struct ByteReader<'a>(&'a [u8]);

impl<'a> ByteReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, WireError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A number of at most `max`.
    pub fn count(&mut self, what: &'static str, max: usize) -> Result<usize, WireError> {
        let found = self.u64(what)?;
        let too_large = WireError::TooLarge { what, found, max: max as u64 };
        usize::try_from(found).ok().filter(|&count| count <= max).ok_or(too_large)
    }

    /// The number of items of `bytes_each` that follow: at most `max`, and no more than the message has.
    pub fn items(&mut self, what: &'static str, max: usize, bytes_each: usize) -> Result<usize, WireError> {
        let count = self.count(what, max)?;
        if count > self.0.len() / bytes_each {
            return Err(WireError::Truncated { what });
        }
        Ok(count)
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], WireError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(WireError::Truncated { what })?;
        self.0 = rest;
        Ok(*head)
    }

    /// All bytes that are left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    pub fn finish(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::Trailing { bytes: self.0.len() }) }
    }
}

/// Appends numbers to a message.
pub trait ByteWriter {
    fn put_u8(&mut self, value: u8);
    fn put_u32(&mut self, value: u32);
    fn put_u64(&mut self, value: u64);
    fn put_f32s(&mut self, values: &[f32]);
}

impl ByteWriter for Vec<u8> {
    fn put_u8(&mut self, value: u8) {
        self.push(value);
    }

    fn put_u32(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_f32s(&mut self, values: &[f32]) {
        let start = self.len();
        self.resize(start + size_of_val(values), 0);
        let (chunks, _) = self[start..].as_chunks_mut();
        chunks.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    }
}

/// Replaces `values` with the numbers in `bytes`, which must be `expected`.
pub fn read_f32s(bytes: &[u8], expected: usize, values: &mut Vec<f32>) -> Result<(), WireError> {
    let (chunks, rest) = bytes.as_chunks();
    if chunks.len() != expected || !rest.is_empty() {
        return Err(WireError::Activations { found: bytes.len().div_ceil(size_of::<f32>()), expected });
    }
    values.clear();
    values.extend(chunks.iter().map(|&bytes| f32::from_le_bytes(bytes)));
    Ok(())
}
