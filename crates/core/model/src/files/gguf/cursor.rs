//! Reads the primitive values of a GGUF header in order.

use crate::files::FormatError;

/// The most bytes of a header: metadata and the list of tensors. The largest vocabularies need about 10 MB.
const HEADER_BYTES_MAX: usize = 128 << 20;

pub struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Whether the file continues after `bytes`.
    cut: bool,
}

impl<'a> Cursor<'a> {
    pub fn new(file: &'a [u8]) -> Self {
        let cut = file.len() > HEADER_BYTES_MAX;
        Self { bytes: &file[..file.len().min(HEADER_BYTES_MAX)], at: 0, cut }
    }

    pub fn at(&self) -> usize {
        self.at
    }

    pub fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], FormatError> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| self.ended(what))?;
        self.at += len;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], FormatError> {
        Ok(self.take(N, what)?.try_into().expect("take gave N bytes"))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, FormatError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, FormatError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items of at least `bytes_each` bytes. It is never more than fit in the rest of the file, so it is safe as
    /// the size of an allocation.
    pub fn count(&mut self, bytes_each: usize, max: usize, what: &'static str) -> Result<usize, FormatError> {
        let found = self.u64(what)?;
        if found > max as u64 {
            return Err(FormatError::Limit { what, found, max: max as u64 });
        }
        let room = (self.bytes.len() - self.at) / bytes_each;
        match usize::try_from(found) {
            Ok(count) if count <= room => Ok(count),
            _ => Err(self.ended(what)),
        }
    }

    pub fn string(&mut self, what: &'static str) -> Result<&'a str, FormatError> {
        let len = self.u64(what)?;
        let len = usize::try_from(len).map_err(|_| self.ended(what))?;
        str::from_utf8(self.take(len, what)?).map_err(|_| FormatError::Utf8(what))
    }

    /// A key or the name of a tensor.
    pub fn name(&mut self, what: &'static str) -> Result<&'a str, FormatError> {
        /// The format's limit for a key.
        const NAME_BYTES_MAX: usize = (1 << 16) - 1;
        let name = self.string(what)?;
        match name.len() > NAME_BYTES_MAX {
            true => Err(FormatError::Limit {
                what: "bytes of a name",
                found: name.len() as u64,
                max: NAME_BYTES_MAX as u64,
            }),
            false => Ok(name),
        }
    }

    fn ended(&self, what: &'static str) -> FormatError {
        match self.cut {
            true => FormatError::Limit {
                what: "bytes of header",
                found: self.bytes.len() as u64 + 1,
                max: HEADER_BYTES_MAX as u64,
            },
            false => FormatError::Truncated(what),
        }
    }
}
