//! One file out of a ZIP archive, such as a Python wheel: stored or deflated, of the size and the checksum that the archive
//! states. Archives of more than 4 GB (ZIP64), in parts or with passwords are refused.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use anyhow::{Context, Result, bail, ensure};
use flate2::read::DeflateDecoder;

/// The fixed parts of the archive's records, each of which begins with four bytes of its own.
const END: (usize, &[u8; 4]) = (22, b"PK\x05\x06");
const ENTRY: (usize, &[u8; 4]) = (46, b"PK\x01\x02");
const LOCAL: (usize, &[u8; 4]) = (30, b"PK\x03\x04");
/// A comment may follow the last record.
const COMMENT_BYTES_MAX: u64 = u16::MAX as u64;
const DIRECTORY_BYTES_MAX: u64 = 16 << 20;
const ENCRYPTED: u16 = 1;

/// The bytes of a file in an archive. Reading its end fails if its size or its checksum is another than the archive states.
pub struct ZipMember {
    bytes: Box<dyn Read>,
    left: u64,
    crc: crc32fast::Hasher,
    crc_stated: u32,
}

impl ZipMember {
    pub fn open(mut archive: File, name: &str) -> Result<Self> {
        let directory = directory(&mut archive)?;
        let mut rest = directory.as_slice();
        loop {
            let entry = record(rest, ENTRY).with_context(|| format!("{name} is not in the archive"))?;
            let [name_bytes, extra, comment] = [28, 30, 32].map(|at| usize::from(u16_at(entry, at)));
            let names = &rest[ENTRY.0..];
            if names.get(..name_bytes) == Some(name.as_bytes()) {
                return Self::of_entry(archive, entry);
            }
            rest = names.get(name_bytes + extra + comment..).context("the directory of the archive is truncated")?;
        }
    }

    fn of_entry(mut archive: File, entry: &[u8]) -> Result<Self> {
        let (flags, method, crc_stated) = (u16_at(entry, 8), u16_at(entry, 10), u32_at(entry, 16));
        let [packed, left, start] = [20, 24, 42].map(|at| u64::from(u32_at(entry, at)));
        ensure!(flags & ENCRYPTED == 0, "the file in the archive is encrypted");
        archive.seek(SeekFrom::Start(start))?;
        let mut local = [0; LOCAL.0];
        archive.read_exact(&mut local)?;
        let local = record(&local, LOCAL).context("the archive has no file where its directory says")?;
        archive.seek_relative(i64::from(u16_at(local, 26)) + i64::from(u16_at(local, 28)))?;
        let packed = archive.take(packed);
        let bytes: Box<dyn Read> = match method {
            0 => Box::new(packed),
            8 => Box::new(DeflateDecoder::new(packed)),
            method => bail!("the archive uses compression {method}: only deflate is known"),
        };
        Ok(Self { bytes, left, crc: crc32fast::Hasher::new(), crc_stated })
    }
}

impl Read for ZipMember {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.bytes.read(buffer)?;
        self.crc.update(&buffer[..count]);
        let left = self.left.checked_sub(count as u64);
        self.left = left.ok_or_else(|| invalid("the file in the archive is longer than stated"))?;
        if count == 0 && !buffer.is_empty() {
            if self.left > 0 {
                return Err(invalid("the file in the archive is shorter than stated"));
            }
            if self.crc.clone().finalize() != self.crc_stated {
                return Err(invalid("the file in the archive does not match its checksum"));
            }
        }
        Ok(count)
    }
}

/// The entries of all files, which are near the end of the archive.
fn directory(archive: &mut File) -> Result<Vec<u8>> {
    let length = archive.seek(SeekFrom::End(0))?;
    let tail_start = length.saturating_sub(END.0 as u64 + COMMENT_BYTES_MAX);
    archive.seek(SeekFrom::Start(tail_start))?;
    let mut tail = Vec::new();
    archive.take(length - tail_start).read_to_end(&mut tail)?;
    let end = (0..tail.len()).rev().find_map(|at| record(&tail[at..], END)).context("it is no ZIP archive")?;
    let (bytes, start) = (u64::from(u32_at(end, 12)), u64::from(u32_at(end, 16)));
    ensure!(bytes <= DIRECTORY_BYTES_MAX, "the directory of the archive is longer than {DIRECTORY_BYTES_MAX} bytes");
    archive.seek(SeekFrom::Start(start))?;
    let mut directory = Vec::new();
    archive.take(bytes).read_to_end(&mut directory)?;
    Ok(directory)
}

/// The fixed part of the record that `bytes` begin with, if it is of this kind.
fn record<'b>(bytes: &'b [u8], (length, signature): (usize, &[u8; 4])) -> Option<&'b [u8]> {
    bytes.get(..length).filter(|record| record.starts_with(signature))
}

/// A number within the fixed part of a record.
fn u16_at(record: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([record[at], record[at + 1]])
}

fn u32_at(record: &[u8], at: usize) -> u32 {
    u32::from(u16_at(record, at)) | u32::from(u16_at(record, at + 2)) << 16
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{Compression, write::DeflateEncoder};
    use std::io::Write;

    /// What an archive of two files says of the second one.
    #[derive(Clone, Copy)]
    struct Stated {
        method: u16,
        flags: u16,
        packed: u32,
        bytes: u32,
        crc: u32,
        start: Option<u32>,
        directory_bytes: Option<u32>,
    }

    const TEXT: &[u8] = b"one file of an archive, one file of an archive";

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn stated(method: u16, packed: &[u8]) -> Stated {
        let (packed, bytes, crc) = (packed.len() as u32, TEXT.len() as u32, crc32fast::hash(TEXT));
        Stated { method, flags: 0, packed, bytes, crc, start: None, directory_bytes: None }
    }

    fn archive(stated: &Stated, packed: &[u8]) -> Vec<u8> {
        let mut archive = b"before".to_vec();
        let mut entries = Vec::new();
        for (name, packed) in [("first", &b"other"[..]), ("folder/second", packed)] {
            let start = stated.start.unwrap_or(archive.len() as u32);
            archive.extend(
                [&LOCAL.1[..], &[0; 22], &[name.len() as u8, 0, 3, 0], name.as_bytes(), b"ext", packed].concat(),
            );
            let sizes = [stated.crc, stated.packed, stated.bytes].map(u32::to_le_bytes).concat();
            let kind = [stated.flags, stated.method].map(u16::to_le_bytes).concat();
            let lengths = [name.len() as u8, 0, 2, 0, 1, 0];
            entries.extend([&ENTRY.1[..], &[0; 4], &kind, &[0; 4], &sizes, &lengths, &[0; 8]].concat());
            entries.extend([&start.to_le_bytes()[..], name.as_bytes(), b"exc"].concat());
        }
        let start = archive.len() as u32;
        let bytes = stated.directory_bytes.unwrap_or(entries.len() as u32);
        archive.extend(entries);
        archive.extend([&END.1[..], &[0; 8], &bytes.to_le_bytes(), &start.to_le_bytes(), &[7, 0], b"comment"].concat());
        archive
    }

    fn read(archive: &[u8], name: &str) -> Result<Vec<u8>> {
        let mut file = tempfile::tempfile()?;
        file.write_all(archive)?;
        let mut bytes = Vec::new();
        ZipMember::open(file, name)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    #[test]
    fn a_stored_and_a_deflated_file_are_read() {
        assert_eq!(read(&archive(&stated(0, TEXT), TEXT), "folder/second").unwrap(), TEXT);
        let packed = deflated(TEXT);
        let archive = archive(&stated(8, &packed), &packed);
        assert_eq!(read(&archive, "folder/second").unwrap(), TEXT);
        let error = read(&archive, "second").unwrap_err().to_string();
        assert_eq!(error, "second is not in the archive");
    }

    #[test]
    fn what_the_archive_states_wrongly_is_an_error() {
        let packed = deflated(TEXT);
        let right = stated(8, &packed);
        for (wrong, expected) in [
            (Stated { bytes: right.bytes + 1, ..right }, "shorter than stated"),
            (Stated { bytes: right.bytes - 1, ..right }, "longer than stated"),
            (Stated { crc: right.crc ^ 1, ..right }, "checksum"),
            (Stated { packed: right.packed - 3, ..right }, ""),
            (Stated { method: 14, ..right }, "compression 14"),
            (Stated { flags: 1, ..right }, "encrypted"),
            (Stated { start: Some(1), ..right }, "where its directory says"),
            (Stated { start: Some(u32::MAX), ..right }, ""),
            (Stated { directory_bytes: Some(u32::MAX), ..right }, "longer than"),
            (Stated { directory_bytes: Some(60), ..right }, "not in the archive"),
        ] {
            let error = format!("{:#}", read(&archive(&wrong, &packed), "folder/second").unwrap_err());
            assert!(error.contains(expected), "{error}: {expected}");
        }
    }

    #[test]
    fn a_truncated_archive_is_an_error_and_never_a_panic() {
        let packed = deflated(TEXT);
        let whole = archive(&stated(8, &packed), &packed);
        // Without a part of its comment, an archive is whole.
        for length in 0..whole.len() - b"comment".len() {
            assert!(read(&whole[..length], "folder/second").is_err(), "{length}");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0xff;
            if let Ok(bytes) = read(&changed, "folder/second") {
                assert_eq!(bytes, TEXT);
            }
        }
    }
}
