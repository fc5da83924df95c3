use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::time::{Duration, SystemTime};

use super::super::part_file::{Opened, PartFile};
use super::super::{Hex, StoreError, StoreLimits, TensorId, TensorStore};
use super::{id_of, names, open_store, tensor};

/// Puts a tensor into the store as a transfer does.
fn put(store: &TensorStore, bytes: &[u8]) -> TensorId {
    let id = id_of(bytes);
    let Opened::Part(part, _) = PartFile::open(store, id).unwrap() else { panic!("{id:?} is there") };
    part.write(bytes, 0).unwrap();
    part.finish().unwrap();
    id
}

fn at(seconds: u64) -> SystemTime {
    // Later than the files are written.
    SystemTime::now() + Duration::from_secs(1000 + seconds)
}

#[test]
fn a_store_that_is_made_is_for_its_owner_alone_and_one_that_is_there_keeps_its_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("some/store");
    let store = open_store(&path, 1000);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
    let chmod = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    for mode in [0o755, 0o750, 0o775] {
        chmod(mode);
        open_store(&path, 1000);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, mode);
    }
    let refused = |path: &std::path::Path| {
        TensorStore::open(path, StoreLimits { bytes_max: 1, free_bytes_min: 0 }).unwrap_err().to_string()
    };
    chmod(0o777);
    assert!(refused(&path).contains("everybody may write"));
    chmod(0o755);
    // Neither the link nor what it leads to is changed.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path().join("dead")).unwrap();
    for link in [link.clone(), folder.path().join("link/"), folder.path().join("dead")] {
        assert!(refused(&link).contains("symbolic link"), "{}", link.display());
    }
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o755);
    assert!(!folder.path().join("nowhere").exists());
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
        assert!(refused(&path).contains("another user"));
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
    }
    let id = put(&store, b"weights");
    let file = fs::metadata(path.join(Hex(&id.hash).to_string())).unwrap();
    assert_eq!((file.mode() & 0o777, file.len()), (0o400, 7));
}

#[test]
fn a_folder_that_cannot_be_used_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let limits = StoreLimits { bytes_max: 1, free_bytes_min: 0 };
    for path in [&file, &file.join("below")] {
        let error = TensorStore::open(path, limits).unwrap_err();
        assert!(matches!(&error, StoreError::Unusable { folder, .. } if folder == path), "{error}");
    }
}

#[test]
fn tensors_used_least_recently_are_evicted_and_pinned_ones_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 40_000);
    let ids: Vec<_> = (0..4).map(|seed| put(&store, &tensor(seed, 10_000))).collect();
    // 2 is the oldest, then 0 and 3.
    for (second, used) in [2, 0, 3].into_iter().enumerate() {
        store.pin_at(&[ids[used]], at(second as u64)).unwrap();
    }
    let pinned = store.pin_at(&[ids[1]], at(0)).unwrap();
    let expect = |left: &[usize]| {
        let mut expected: Vec<_> = left.iter().map(|&index| Hex(&ids[index].hash).to_string()).collect();
        expected.sort();
        let found: Vec<_> = names(&store).into_iter().filter(|name| !name.ends_with("pins")).collect();
        assert_eq!(found, expected);
    };
    expect(&[0, 1, 2, 3]);
    let new = |seed, bytes| TensorId { hash: [seed; 32], bytes };
    let first = store.pin_at(&[new(1, 1)], at(9)).unwrap();
    expect(&[0, 1, 3]);
    assert_eq!(store.used_bytes().unwrap(), 30_001);
    let second = store.pin_at(&[new(2, 10_000), new(3, 9_999)], at(9)).unwrap();
    expect(&[1, 3]);
    let error = store.pin_at(&[new(4, 20_000)], at(9)).unwrap_err();
    assert!(matches!(error, StoreError::Limit { needed: 50_000, bytes_max: 40_000, .. }), "{error}");
    expect(&[1, 3]);
    drop((first, second, pinned));
    store.pin_at(&[new(4, 40_000)], at(9)).unwrap();
    expect(&[]);
    assert_eq!((store.used_bytes().unwrap(), names(&store).len()), (0, 0));
}

#[test]
fn the_pins_of_another_process_count_and_those_of_a_dead_one_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 20_000);
    let id = put(&store, &tensor(1, 15_000));
    let list = folder.path().join("1.1.pins");
    fs::write(&list, [&id.hash[..], &id.bytes.to_le_bytes()].concat()).unwrap();
    let other = fs::File::open(&list).unwrap();
    other.lock().unwrap();
    let new = TensorId { hash: [7; 32], bytes: 10_000 };
    assert!(matches!(store.pin(&[new]), Err(StoreError::Limit { needed: 25_000, .. })));
    drop(other);
    let pinned = store.pin(&[new]).unwrap();
    assert_eq!(names(&store).len(), 1);
    drop(pinned);
    assert_eq!(names(&store), Vec::<String>::new());
}

#[test]
fn files_of_others_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 10);
    let upper = "A".repeat(64);
    for name in ["notes", &upper, &"a".repeat(63), &format!("{}.bak", "a".repeat(64))] {
        fs::write(folder.path().join(name), [0; 100]).unwrap();
    }
    store.pin(&[TensorId { hash: [7; 32], bytes: 10 }]).unwrap();
    assert_eq!((names(&store).len(), store.used_bytes().unwrap()), (4, 0));
}

#[test]
fn damage_on_the_disk_is_found_before_use() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1 << 30);
    let bytes = tensor(1, 100_000);
    let id = put(&store, &bytes);
    let pinned = store.pin(&[id]).unwrap();
    let path = pinned.path(&id.hash).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
    assert_eq!(pinned.verify(2, &|_| panic!("it was verified already")).unwrap(), []);

    let mut other = bytes;
    other[77_777] ^= 1;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, &other).unwrap();
    assert!(matches!(pinned.path(&id.hash), Err(StoreError::Damaged(hash)) if hash == id.hash));
    assert!(!path.exists());
    assert!(matches!(pinned.path(&id.hash), Err(StoreError::Absent(hash)) if hash == id.hash));
    assert_eq!((pinned.verify(2, &|_| {}).unwrap(), pinned.missing().unwrap()), (vec![id], vec![id]));

    // A file that was cut, as by a loss of power, and one that a new process finds damaged.
    fs::write(&path, &other[..50_000]).unwrap();
    assert_eq!(pinned.missing().unwrap(), [id]);
    fs::write(&path, &other).unwrap();
    assert_eq!(pinned.missing().unwrap(), []);
    let again = open_store(folder.path(), 1 << 30);
    let pinned = again.pin(&[id]).unwrap();
    assert_eq!(pinned.verify(2, &|_| {}).unwrap(), [id]);
    assert!(!path.exists());
}

#[test]
fn what_is_not_pinned_has_no_path() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1000);
    let (first, second) = (put(&store, b"first"), put(&store, b"second"));
    let pinned = store.pin(&[first, first]).unwrap();
    assert_eq!(pinned.ids(), [first]);
    assert!(matches!(pinned.path(&second.hash), Err(StoreError::Absent(_))));
    let other = TensorId { bytes: first.bytes + 1, ..first };
    assert!(matches!(store.pin(&[first, other]), Err(StoreError::TwoLengths(hash)) if hash == first.hash));
    // A length that is not that of the file does not remove the file.
    assert_eq!(store.pin(&[other]).unwrap().verify(1, &|_| {}).unwrap(), [other]);
    assert!(pinned.path(&first.hash).is_ok());
}

#[test]
fn a_tensor_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1000);
    let id = id_of(b"weights");
    let Opened::Part(part, counts) = PartFile::open(&store, id).unwrap() else { panic!("it is new") };
    assert_eq!(counts, [0]);
    assert!(matches!(PartFile::open(&store, id).unwrap(), Opened::Busy));
    part.write(b"wei", 0).unwrap();
    part.set_count(0, 3).unwrap();
    drop(part);
    let Opened::Part(part, counts) = PartFile::open(&store, id).unwrap() else { panic!("it is not complete") };
    assert_eq!(counts, [3]);
    part.write(b"ghts", 3).unwrap();
    part.finish().unwrap();
    assert!(matches!(PartFile::open(&store, id).unwrap(), Opened::Present));
    assert_eq!(names(&store), [Hex(&id.hash).to_string()]);
}

#[test]
fn a_part_that_is_not_as_it_was_left_is_begun_again() {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1000);
    let id = id_of(b"weights");
    let path = folder.path().join(format!("{}.part", Hex(&id.hash)));
    for left in [&b""[..], b"weigh", &[0xff; 15], &[0xff; 16], &[0; 100]] {
        fs::write(&path, left).unwrap();
        let Opened::Part(part, counts) = PartFile::open(&store, id).unwrap() else { panic!("it is not complete") };
        assert_eq!((counts, part.file().metadata().unwrap().len()), (vec![0], 15));
    }
}
