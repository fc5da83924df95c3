//! Tests the memory use of the file readers. It runs in its own process, because it measures the whole process.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::alloc::System;
use std::fs::{self, File};
use std::io::Write;
use std::sync::Mutex;

use cap::Cap;
use model::files::{Gguf, SafeTensors};
use testing::model_files::{GgufWriter, array, safetensors};

#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, usize::MAX);

/// Held by the test that is measuring, so that tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_small_hostile_file_takes_little_memory() {
    let _alone = ALONE.lock().unwrap();
    const ALLOWED_BYTES: usize = 1 << 20;
    let before = MEMORY.max_allocated().max(MEMORY.allocated());
    for count in [1 << 10, 1 << 16, 1 << 18, 1 << 24, 1 << 31, 1 << 32, u64::MAX / 8, u64::MAX] {
        let mut files = vec![
            GgufWriter { tensor_count: Some(count), ..GgufWriter::default() },
            GgufWriter { key_count: Some(count), ..GgufWriter::default() },
            GgufWriter::default().key(b"k", 8, &count.to_le_bytes()),
            GgufWriter::default().key(&[b'k'; 4000], 8, &count.to_le_bytes()),
            GgufWriter::default().entry(b"t", &[count], 0, 0),
        ];
        files.extend((0..13).map(|code| GgufWriter::default().key(b"k", 9, &array(code, count, &[0; 16]))));
        for file in files {
            assert!(Gguf::parse(file.bytes()).is_err());
        }
        let mut header = count.to_le_bytes().to_vec();
        header.extend(b"{}");
        assert!(SafeTensors::parse(header).is_err());
        let entry = format!(r#"{{"t":{{"dtype":"F32","shape":[{count}],"data_offsets":[0,{count}]}}}}"#);
        assert!(SafeTensors::parse(safetensors(&entry, b"")).is_err());
    }
    let taken = MEMORY.max_allocated() - before;
    assert!(taken < ALLOWED_BYTES, "took {taken} bytes");
}

#[cfg(target_os = "linux")]
#[test]
fn releasing_gives_the_pages_back_and_keeps_the_views() {
    let _alone = ALONE.lock().unwrap();
    const DATA_BYTES: usize = 64 << 20;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = format!(r#"{{"t":{{"dtype":"F32","shape":[{}],"data_offsets":[0,{DATA_BYTES}]}}}}"#, DATA_BYTES / 4);
    let mut file = File::create(&path).unwrap();
    file.write_all(&safetensors(&header, b"")).unwrap();
    (0..DATA_BYTES >> 20).for_each(|_| file.write_all(&[7; 1 << 20]).unwrap());

    let model = SafeTensors::open(&path).unwrap();
    let sum = || model.tensor("t").unwrap().unwrap().bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    let expected = 7 * DATA_BYTES as u64;
    assert_eq!(sum(), expected);
    let full = resident_bytes();
    model.release();
    let released = resident_bytes();
    assert!(released + DATA_BYTES / 2 < full, "{full} bytes resident before, {released} after");
    assert_eq!(sum(), expected);
}

/// This process's resident memory.
#[cfg(target_os = "linux")]
fn resident_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: usize = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}
