use std::fs;

use ruzstd::encoding::{CompressionLevel, compress_to_vec};

use super::super::super::wire::CakeChunkCheck;
use super::*;

const ROOM: u64 = 1 << 20;

fn chunk<'a>(file: &'a str, offset: usize, total: usize, data: &'a [u8]) -> CakeChunk<'a> {
    CakeChunk { file, offset: offset as u64, total_bytes: total as u64, check: None, data }
}

fn checked<'a>(file: &'a str, total: usize, is_compressed: bool, data: &'a [u8]) -> CakeChunk<'a> {
    let check = Some(CakeChunkCheck { is_compressed, crc: crc32fast::hash(data) });
    CakeChunk { check, ..chunk(file, 0, total, data) }
}

/// Sends the chunks into a new folder, and then all is done.
fn send(chunks: &[CakeChunk<'_>]) -> (tempfile::TempDir, Result<PathBuf, CakeTransferError>) {
    let folder = tempfile::tempdir().unwrap();
    let mut transfer = Transfer::new(folder.path().to_owned(), ROOM, Box::new(|_| Ok(true)));
    let received = chunks.iter().try_for_each(|chunk| transfer.receive(chunk));
    let finished = received.and_then(|()| transfer.finish());
    (folder, finished)
}

fn check_refused(chunks: &[CakeChunk<'_>], expected: &str) {
    let (folder, finished) = send(chunks);
    let error = finished.unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not say {expected:?}");
    let beside = folder.path().parent().unwrap();
    assert!(!beside.join("x.safetensors").exists() && !folder.path().join("x.safetensors").exists());
}

#[test]
fn files_arrive_whole_under_names_of_our_own() {
    let text = b"{}".repeat(3000);
    let compressed = compress_to_vec(&text[..], CompressionLevel::Fastest);
    assert!(compressed.len() < text.len());
    let (folder, finished) = send(&[
        checked("config.json", text.len(), true, &compressed),
        checked("tokenizer.json", 3, false, b"tok"),
        checked("model.safetensors.index.json", 3, false, b"idx"),
        chunk("model-00001-of-00002.safetensors", 0, 6, b"abc"),
        chunk("model-00001-of-00002.safetensors", 3, 6, b"def"),
        chunk("model.safetensors-00002-of-00002.safetensors", 0, 3, b"ghi"),
    ]);
    let found = finished.unwrap();
    assert_eq!(found, folder.path());
    assert_eq!(fs::read(config_path(&found)).unwrap(), text);
    assert_eq!(fs::read(weights_path(&found, 0)).unwrap(), b"abcdef");
    assert_eq!(fs::read(weights_path(&found, 1)).unwrap(), b"ghi");
    assert_eq!(fs::read_dir(&found).unwrap().count(), 3);
}

#[test]
fn names_that_are_paths_or_other_files_are_refused() {
    let long = format!("{}.safetensors", "x".repeat(NAME_BYTES_MAX));
    for name in [
        "../x.safetensors",
        "/tmp/x.safetensors",
        "a/x.safetensors",
        "a\\x.safetensors",
        "..",
        ".safetensors",
        "x.safetensors\0",
        "x.safetensors\n",
        "c\u{f6}nfig.safetensors",
        "x.sh",
        "authorized_keys",
        "",
        &long,
    ] {
        check_refused(&[chunk(name, 0, 1, b"a")], "is not the name of a model's file");
    }
}

#[test]
fn files_that_are_cut_off_or_out_of_order_are_refused() {
    let config = chunk("config.json", 0, 2, b"{}");
    check_refused(&[chunk("config.json", 0, 3, b"{}")], "is cut off after 2 of 3 bytes");
    check_refused(&[chunk("config.json", 0, 3, b"{}"), chunk("x.safetensors", 0, 1, b"a")], "is cut off");
    check_refused(&[chunk("x.safetensors", 1, 2, b"a")], "begins at byte 1, byte 0 of 2 was due");
    check_refused(&[chunk("x.safetensors", 0, 3, b"a"), chunk("x.safetensors", 0, 3, b"a")], "begins at byte 0");
    check_refused(&[chunk("x.safetensors", 0, 3, b"a"), chunk("x.safetensors", 1, 2, b"a")], "begins at byte 1");
    check_refused(&[config.clone(), chunk("config.json", 2, 2, b"a")], "begins at byte 2");
    check_refused(&[config.clone(), chunk("a.safetensors", 0, 1, b"a"), config.clone()], "was sent twice");
    check_refused(&[chunk("config.json", 0, 1, b"{}")], "more than the rest of the file");
    check_refused(&[chunk("config.json", 0, 1, b"")], "is empty");
    check_refused(&[config], "no weights was sent");
    check_refused(&[chunk("x.safetensors", 0, 1, b"a")], "no config.json was sent");
    check_refused(&[], "no config.json was sent");
}

#[test]
fn files_that_are_too_large_are_refused_before_they_come() {
    check_refused(&[chunk("x.safetensors", 0, ROOM as usize + 1, b"a")], "too large, the limit is 1048576");
    let half = ROOM as usize / 2 + 1;
    let data = vec![0; half];
    check_refused(&[chunk("x.safetensors", 0, half, &data), chunk("y.safetensors", 0, half, b"a")], "too large");
    let endless = CakeChunk { total_bytes: u64::MAX, ..chunk("x.safetensors", 0, 0, b"a") };
    check_refused(&[endless], "too large");
}

#[test]
fn damaged_chunks_are_refused() {
    let good = checked("config.json", 2, false, b"{}");
    let bad = CakeChunk { data: b"{]", ..good.clone() };
    check_refused(&[bad], "its checksum differs");
    check_refused(
        &[CakeChunk { check: Some(CakeChunkCheck { is_compressed: true, ..good.check.unwrap() }), ..good }],
        "cannot be decompressed",
    );
    let compressed = compress_to_vec(&b"abcd"[..], CompressionLevel::Fastest);
    check_refused(&[checked("config.json", 4, true, &compressed[..compressed.len() - 1])], "cannot be decompressed");
    let longer = [&compressed[..], b"x"].concat();
    check_refused(&[checked("config.json", 4, true, &longer)], "bytes follow the compressed ones");
    check_refused(&[checked("config.json", 5, true, &compressed)], "is cut off after 4 of 5 bytes");
    let empty = compress_to_vec(&b""[..], CompressionLevel::Fastest);
    check_refused(&[checked("config.json", 4, true, &empty)], "is empty");
}

#[test]
fn a_decompression_bomb_ends_with_the_size_of_its_file() {
    // A zstd frame by hand: a window of 128 KiB, no size, and thousands of blocks of 128 KiB of one repeated byte, which
    // is a gigabyte from a few kilobytes.
    let mut bomb = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    let block = |is_last: u32| (128 << 10) << 3 | 1 << 1 | is_last;
    for _ in 0..8192 {
        bomb.extend_from_slice(&block(0).to_le_bytes()[..3]);
        bomb.push(b'a');
    }
    bomb.extend_from_slice(&block(1).to_le_bytes()[..3]);
    bomb.push(b'a');
    let folder = tempfile::tempdir().unwrap();
    let mut transfer = Transfer::new(folder.path().to_owned(), ROOM, Box::new(|_| Ok(true)));
    let total = 200_000;
    let error = transfer.receive(&checked("x.safetensors", total, true, &bomb)).unwrap_err();
    assert!(matches!(error, CakeTransferError::TooLong(_)), "{error}");
    assert!(fs::metadata(weights_path(folder.path(), 0)).unwrap().len() <= total as u64);
    // A window that would take a gigabyte.
    let window = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 20 << 3, 1, 0, 0];
    check_refused(&[checked("x.safetensors", total, true, &window)], "cannot be decompressed");
}
