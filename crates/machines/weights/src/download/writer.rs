//! The writer of a connection: hashes what has come and writes it, so that the receiving thread only decrypts.

use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender};

use super::Download;
use super::incoming::RangeWork;
use crate::error::TransferError;
use crate::tree_hash::RangeHasher;
use crate::wire::DATA_HEADER_BYTES;

/// A file's count is brought up to date after so many bytes: as many are received again after a crash.
const COUNT_STEP_BYTES: u64 = 1 << 20;

/// Bytes of a range, in the order of the range.
pub struct Chunk {
    pub work: RangeWork,
    /// Where they belong in the tensor.
    pub offset: u64,
    /// The bytes follow a header of [`DATA_HEADER_BYTES`].
    pub body: Vec<u8>,
}

/// The range that is being received.
struct Current {
    work: RangeWork,
    hasher: RangeHasher,
}

/// Writes all chunks. A failure is the download's.
pub fn write_chunks(download: &Download, chunks: &Receiver<Chunk>, emptied: &Sender<Vec<u8>>) {
    let mut writer = Writer { download, current: None, buffer: Vec::new() };
    for chunk in chunks {
        if let Err(error) = writer.write(&chunk) {
            download.fail(error);
            break;
        }
        // The connection may be gone, and then needs no buffer.
        let _ = emptied.send(chunk.body);
    }
    writer.record();
}

struct Writer<'a> {
    download: &'a Download,
    current: Option<Current>,
    buffer: Vec<u8>,
}

impl Writer<'_> {
    fn write(&mut self, chunk: &Chunk) -> Result<(), TransferError> {
        let Chunk { work, offset, body } = chunk;
        let bytes = &body[DATA_HEADER_BYTES..];
        let Range { start, end } = work.range();
        let store = self.download.pinned.store();
        let unusable = |source| store.error(source);
        let mut current = match self.current.take() {
            Some(current) if current.work.index == work.index && current.work.tensor.id == work.tensor.id => current,
            _ => Current { work: work.clone(), hasher: self.resume(work, start..*offset)? },
        };
        current.hasher.update(bytes);
        work.tensor.part.write(bytes, *offset).map_err(unusable)?;
        let (before, written) = (offset - start, offset - start + bytes.len() as u64);
        work.set_written(written);
        self.download.add_progress(bytes.len() as u64);
        if written < end - start {
            if before / COUNT_STEP_BYTES != written / COUNT_STEP_BYTES {
                work.tensor.part.set_count(work.index, written).map_err(unusable)?;
            }
            self.current = Some(current);
            return Ok(());
        }
        match work.set_hash(current.hasher.finish()) {
            true => self.download.finish(&work.tensor),
            false => Ok(work.tensor.part.set_count(work.index, written).map_err(unusable)?),
        }
    }

    /// A hasher of a range of which `before` has been written already.
    fn resume(&mut self, work: &RangeWork, before: Range<u64>) -> Result<RangeHasher, TransferError> {
        let mut hasher = RangeHasher::new(work.tensor.id.bytes, work.index);
        let hashed = hasher.update_from(work.tensor.part.file(), before, &mut self.buffer);
        hashed.map_err(|source| self.download.pinned.store().error(source))?;
        Ok(hasher)
    }

    /// Records how far the last range has come.
    fn record(&mut self) {
        if let Some(Current { work, .. }) = self.current.take() {
            // What is not recorded is only received again.
            let _ = work.tensor.part.set_count(work.index, work.written());
        }
    }
}
