//! `RecordReader`: finds the records in bytes as they come from a connection, and decrypts them.

use std::fmt;
use std::io;
use std::ops::Range;

use crate::noise::{Forged, LENGTH_BYTES, RECORD_BYTES_MAX, RecordDecryptor, split_record};

/// Bytes read from the connection at once: a few records.
const RAW_BYTES: usize = 4 * RECORD_BYTES_MAX;

pub struct RecordReader {
    opener: RecordDecryptor,
    raw: Box<[u8]>,
    /// The part of `raw` that has been read but not decrypted.
    unopened: Range<usize>,
}

/// Without the buffer.
impl fmt::Debug for RecordReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordReader").field("unopened", &self.unopened).finish_non_exhaustive()
    }
}

impl RecordReader {
    pub fn new(opener: RecordDecryptor) -> Self {
        Self { opener, raw: vec![0; RAW_BYTES].into(), unopened: 0..0 }
    }

    /// Calls `read` once, with room for the rest of the next record. To be called when no record is complete. Returns
    /// how many bytes were read; 0 is the end.
    pub fn fill(&mut self, read: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<usize> {
        if self.unopened.start > 0 {
            self.raw.copy_within(self.unopened.clone(), 0);
            self.unopened = 0..self.unopened.len();
        }
        let bytes = read(&mut self.raw[self.unopened.end..])?;
        self.unopened.end += bytes;
        Ok(bytes)
    }

    /// The length of the next record's Noise message, if all of the record has been read.
    pub fn next_bytes(&self) -> Option<usize> {
        self.next_message().map(<[u8]>::len)
    }

    /// Decrypts the next record to the start of `plain`, which has at least [`RecordReader::next_bytes`]. Returns the
    /// length of the plaintext; `None` if the record is not complete.
    pub fn open(&mut self, plain: &mut [u8]) -> Option<Result<usize, Forged>> {
        let message = split_record(&self.raw[self.unopened.clone()])?;
        let opened = self.opener.open(message, plain);
        if opened.is_ok() {
            self.unopened.start += LENGTH_BYTES + message.len();
        }
        Some(opened)
    }

    /// The same, but the record stays the next one.
    pub fn peek(&self, plain: &mut [u8]) -> Option<Result<usize, Forged>> {
        Some(self.opener.peek(self.next_message()?, plain))
    }

    fn next_message(&self) -> Option<&[u8]> {
        split_record(&self.raw[self.unopened.clone()])
    }
}
