//! Senders that lie, and disks that are full.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use net::MessageStream;
use testing::needs;

use super::super::wire::{
    DATA, DATA_BYTES_MAX, FailReason, REFUSED, RefuseReason, TensorRequest, ToSender, WireError, data_header, refused,
    to_sender_bytes_max,
};
use super::super::{Download, StoreError, TensorId, TensorStore, TransferError, serve_tensors};
use super::transfer::{check_all, pair, transfer};
use super::{id_of, names, open_store, tensor, tensors};

type Lie<'a> = dyn Fn(&MessageStream, &TensorRequest) + Sync + 'a;

/// Answers the first request as `answer` says, and returns what the receiver says and its error.
fn lie(
    id: TensorId,
    answer: impl Fn(&MessageStream, &TensorRequest) + Sync,
) -> (tempfile::TempDir, TensorStore, Option<ToSender>, Arc<TransferError>) {
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1 << 30);
    let pinned = Arc::new(store.pin(&[id]).unwrap());
    let download = Download::new(pinned, &[id], |_| {});
    let (mut near, far) = pair();
    let told = thread::scope(|scope| {
        let receiving = scope.spawn(|| drop(download.receive(far)));
        let mut body = Vec::new();
        let mut receive = |near: &mut MessageStream| match near.receiver.receive(None, to_sender_bytes_max, &mut body) {
            Ok(Some(kind)) => Some(ToSender::decode(kind, &body).unwrap()),
            _ => None,
        };
        let Some(ToSender::Request(request)) = receive(&mut near) else { panic!("no request") };
        answer(&near, &request);
        let told = receive(&mut near);
        near.sender.close();
        receiving.join().unwrap();
        told
    });
    let failure = download.wait(Duration::ZERO).unwrap().unwrap_err();
    (folder, store, told, failure)
}

#[test]
fn other_bytes_are_refused_and_removed() {
    let bytes = tensor(1, 600_000);
    let id = id_of(&bytes);
    let (_folder, store, told, failure) = lie(id, |near, request| {
        let mut offset = 0;
        for (index, data) in bytes.chunks(DATA_BYTES_MAX).enumerate() {
            let mut data = data.to_vec();
            data[5] ^= u8::from(index == 1);
            near.sender.send(DATA, &[&data_header(request.number, offset), &data]).unwrap();
            offset += data.len() as u64;
        }
    });
    assert!(matches!(*failure, TransferError::WrongBytes(hash) if hash == id.hash), "{failure}");
    assert_eq!(told, Some(ToSender::Failed(FailReason::WrongBytes(id.hash))));
    assert_eq!(names(&store), Vec::<String>::new());
}

#[test]
fn what_was_not_asked_for_is_refused() {
    let bytes = tensor(1, 300_000);
    let id = id_of(&bytes);
    let (first, rest) = bytes.split_at(DATA_BYTES_MAX);
    let send = |near: &MessageStream, number: u32, offset: u64, data: &[u8]| {
        // The receiver may have closed the connection already.
        drop(near.sender.send(DATA, &[&data_header(number, offset), data]));
    };
    let endless = |near: &MessageStream, request: &TensorRequest| {
        send(near, request.number, 0, first);
        send(near, request.number, first.len() as u64, &[rest, &[0]].concat());
    };
    let lies: [&Lie<'_>; 5] = [
        &endless,
        &|near, request| send(near, request.number + 1, 0, first),
        &|near, request| send(near, request.number, 1, first),
        &|near, request| send(near, request.number, 0, &first[1..]),
        &|near, request| drop(near.sender.send(REFUSED, &[&refused(request.number + 1, RefuseReason::Absent)])),
    ];
    for answer in lies {
        let (_folder, _, told, failure) = lie(id, answer);
        assert!(matches!(*failure, TransferError::Protocol(WireError::Unasked)), "{failure}");
        assert_eq!(told, Some(ToSender::Failed(FailReason::Protocol)));
    }
    let (_folder, _, _, failure) = lie(id, |near, _| drop(near.sender.send(DATA, &[&vec![0; DATA_BYTES_MAX + 13]])));
    assert!(matches!(*failure, TransferError::Message(_)), "{failure}");
    let (_folder, _, _, failure) = lie(id, |near, _| drop(near.sender.send(77, &[])));
    assert!(matches!(*failure, TransferError::Message(_)), "{failure}");
}

#[test]
fn a_tensor_that_the_sender_does_not_have_is_named() {
    let bytes = tensor(1, 1000);
    let id = id_of(&bytes);
    for (id, source) in
        [(id, HashMap::new()), (TensorId { bytes: 1001, ..id }, HashMap::from([(id.hash, bytes.clone())]))]
    {
        let folder = tempfile::tempdir().unwrap();
        let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&[id]).unwrap());
        let download = Download::new(pinned, &[id], |_| {});
        let (near, far) = pair();
        thread::scope(|scope| {
            let serving = scope.spawn(|| serve_tensors(near, &source, &|_| {}, &|| false));
            download.receive(far).unwrap_err();
            let error = serving.join().unwrap().unwrap_err();
            assert!(
                matches!(error, TransferError::ReceiverFailed(FailReason::Refused(hash)) if hash == id.hash),
                "{error}"
            );
        });
        let failure = download.wait(Duration::ZERO).unwrap().unwrap_err();
        assert!(matches!(*failure, TransferError::Refused { hash, .. } if hash == id.hash), "{failure}");
    }
}

/// Runs `body` on a disk of a few megabytes, if this user may mount one.
fn with_small_disk(megabytes: u64, body: impl FnOnce(&std::path::Path)) {
    let folder = tempfile::tempdir().unwrap();
    let options = format!("size={megabytes}m");
    let mount = ["-t", "tmpfs", "-o", &options, "consort-test"];
    let mounted = std::process::Command::new("mount").args(mount).arg(folder.path()).output();
    if !needs::mount(needs::ran("mount", mounted)) {
        return;
    }
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(folder.path())));
    assert!(std::process::Command::new("umount").arg("-l").arg(folder.path()).status().unwrap().success());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn a_full_disk_is_one_clear_error() {
    with_small_disk(4, |disk| {
        let (ids, source) = tensors(&[3_000_000, 2_000_000]);
        let store = open_store(&disk.join("store"), 1 << 30);
        let error = store.pin(&ids).unwrap_err();
        assert!(matches!(error, StoreError::NoSpace { needed: 5_000_000, .. }), "{error}");
        // Something else fills the disk after the tensor was pinned.
        let pinned = Arc::new(store.pin(&ids[..1]).unwrap());
        fs::write(disk.join("other"), vec![0; 2_000_000]).unwrap();
        let download = Download::new(Arc::clone(&pinned), &ids[..1], |_| {});
        let (near, far) = pair();
        thread::scope(|scope| {
            let serving = scope.spawn(|| serve_tensors(near, &source, &|_| {}, &|| false).unwrap_err());
            download.receive(far).unwrap();
            drop(serving.join().unwrap());
        });
        let failure = download.wait(Duration::ZERO).unwrap().unwrap_err();
        assert!(matches!(&*failure, TransferError::Store(StoreError::DiskFull { .. })), "{failure}");
        drop(download);
        fs::remove_file(disk.join("other")).unwrap();
        transfer(&pinned, &source, 2);
        check_all(&pinned, &source);
    });
}
