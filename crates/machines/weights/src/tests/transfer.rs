//! Transfers over loopback, with connections that are cut.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use net::{ClusterKey, HandshakeError, Hello, MessageStream, PARAMETER_BYTES, Purpose, WaitLimit, respond};
use proptest::prelude::*;

use super::super::tree_hash::RANGE_BYTES;
use super::super::wire::{DATA_BYTES_MAX, FailReason};
use super::super::{Download, Hex, PinnedTensors, Progress, TransferError, Upload, serve_tensors, upload};
use super::{names, open_store, tensors};

const LONG: Duration = Duration::from_secs(120);

fn key() -> ClusterKey {
    ClusterKey::from_passphrase("a passphrase for tests").unwrap()
}

fn dial(address: SocketAddr) -> Result<MessageStream, HandshakeError> {
    let hello = Hello { purpose: Purpose(4), parameters: [0; PARAMETER_BYTES], silence: LONG };
    MessageStream::connect(address, &key(), &hello, &WaitLimit::until(Instant::now() + LONG))
}

/// Counts bytes.
fn adds_to(count: &AtomicU64) -> impl Fn(u64) + Sync + '_ {
    |bytes| {
        count.fetch_add(bytes, Relaxed);
    }
}

fn accept(listener: &TcpListener) -> MessageStream {
    let limit = WaitLimit::until(Instant::now() + LONG);
    let ((), secured) = respond(listener.accept().unwrap().0, &key(), &limit, |_| Ok(())).unwrap();
    MessageStream::new(secured).unwrap()
}

/// A connection over loopback: the sender's side and the receiver's.
pub(super) fn pair() -> (MessageStream, MessageStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let near = scope.spawn(|| dial(address).unwrap());
        let far = accept(&listener);
        (near.join().unwrap(), far)
    })
}

/// Receives what is missing over `connections` connections from an honest sender.
pub(super) fn transfer(pinned: &Arc<PinnedTensors>, source: &HashMap<[u8; 32], Vec<u8>>, connections: usize) -> u64 {
    let download = Download::new(Arc::clone(pinned), &pinned.verify(2, &|_| {}).unwrap(), |_| {});
    let sent = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..connections {
            let (near, far) = pair();
            scope.spawn(|| download.receive(far).unwrap());
            let count = adds_to(&sent);
            scope.spawn(move || serve_tensors(near, source, &count, &|| false).unwrap());
        }
    });
    download.wait(Duration::ZERO).unwrap().unwrap();
    sent.into_inner()
}

pub(super) fn check_all(pinned: &PinnedTensors, source: &HashMap<[u8; 32], Vec<u8>>) {
    for id in pinned.ids() {
        assert!(fs::read(pinned.path(&id.hash).unwrap()).unwrap() == source[&id.hash], "{id:?}");
    }
}

#[test]
fn tensors_of_all_sizes_arrive_once() {
    let range = RANGE_BYTES as usize;
    let lengths = [0, 1, 1000, DATA_BYTES_MAX, DATA_BYTES_MAX + 1, range, 2 * range + 12_345, 77, 0, 5000];
    let (ids, source) = tensors(&lengths);
    for connections in [1, 3] {
        let folder = tempfile::tempdir().unwrap();
        let store = open_store(folder.path(), 1 << 30);
        let pinned = Arc::new(store.pin(&ids).unwrap());
        assert_eq!(transfer(&pinned, &source, connections), lengths.iter().sum::<usize>() as u64);
        check_all(&pinned, &source);
        assert_eq!(transfer(&pinned, &source, 1), 0, "a second start sends nothing");
        // The two empty ones are one.
        assert_eq!(names(&store).len(), lengths.len() - 1 + 1);
    }
}

#[test]
fn many_small_tensors_arrive() {
    let (ids, source) = tensors(&(0..300).map(|index| index * 37).collect::<Vec<_>>());
    let folder = tempfile::tempdir().unwrap();
    let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    transfer(&pinned, &source, 2);
    check_all(&pinned, &source);
}

#[test]
fn progress_ends_with_all_bytes() {
    let (ids, source) = tensors(&[3_000_000, 500]);
    let folder = tempfile::tempdir().unwrap();
    let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&seen);
    let download = Download::new(pinned, &ids, move |progress| sink.lock().unwrap().push(progress));
    assert!(download.wait(Duration::ZERO).is_none());
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(|| serve_tensors(near, &source, &|_| {}, &|| false).unwrap());
        download.receive(far).unwrap();
    });
    let seen = seen.lock().unwrap();
    assert!(seen.is_sorted_by_key(|progress| progress.received) && seen.len() > 3_000_000 / DATA_BYTES_MAX);
    assert_eq!(*seen.last().unwrap(), Progress { received: 3_000_500, total: 3_000_500 });
}

/// A sender whose connection is cut after so many bytes of tensors.
fn serve_until(stream: MessageStream, source: &HashMap<[u8; 32], Vec<u8>>, bytes_max: u64) {
    let sender = stream.sender.clone();
    let sent = AtomicU64::new(0);
    let count = |bytes| {
        if sent.fetch_add(bytes, Relaxed) + bytes >= bytes_max {
            sender.close();
        }
    };
    let error = serve_tensors(stream, source, &count, &|| false).unwrap_err();
    assert!(error.is_retryable(), "{error}");
}

#[test]
fn what_a_lost_connection_had_goes_over_another_one_and_nothing_comes_twice() {
    let (ids, source) = tensors(&[RANGE_BYTES as usize + 5_000_000, 700_000, 3_000_000]);
    let total: u64 = ids.iter().map(|id| id.bytes).sum();
    let folder = tempfile::tempdir().unwrap();
    let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    let download = Download::new(Arc::clone(&pinned), &ids, |_| {});
    let mut received = 0;
    for bytes_max in [0, 1, 1_000_000, 15_000_000] {
        let (near, far) = pair();
        let before = download.progress().received;
        thread::scope(|scope| {
            scope.spawn(|| serve_until(near, &source, bytes_max.max(1)));
            let error = download.receive(far).unwrap_err();
            assert!(matches!(error, TransferError::Lost(_)), "{error}");
        });
        received = download.progress().received;
        assert!(received >= before);
        assert!(download.wait(Duration::ZERO).is_none());
    }
    let sent = AtomicU64::new(0);
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(|| serve_tensors(near, &source, &adds_to(&sent), &|| false).unwrap());
        download.receive(far).unwrap();
    });
    assert_eq!(sent.into_inner(), total - received);
    check_all(&pinned, &source);
}

#[test]
fn a_part_with_damage_is_received_again_as_a_whole() {
    let (ids, source) = tensors(&[2_000_000]);
    let folder = tempfile::tempdir().unwrap();
    let store = open_store(folder.path(), 1 << 30);
    let path = folder.path().join(format!("{}.part", Hex(&ids[0].hash)));
    // All bytes are recorded as received, but they are others.
    fs::write(&path, [&vec![7; 2_000_000][..], &2_000_000_u64.to_le_bytes()].concat()).unwrap();
    let pinned = Arc::new(store.pin(&ids).unwrap());
    assert_eq!(transfer(&pinned, &source, 2), 2_000_000);
    check_all(&pinned, &source);
}

#[test]
fn two_downloads_into_one_store_share_the_work() {
    let (ids, source) = tensors(&[3_000_000, 2_000_000, 1_000_000, 500_000]);
    let total: u64 = ids.iter().map(|id| id.bytes).sum();
    let folder = tempfile::tempdir().unwrap();
    let sent = AtomicU64::new(0);
    let pinned = || Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    let both = [pinned(), pinned()];
    thread::scope(|scope| {
        for pinned in &both {
            let ((near, far), source, count) = (pair(), &source, adds_to(&sent));
            scope.spawn(move || serve_tensors(near, source, &count, &|| false).unwrap());
            scope.spawn(|| {
                let download = Download::new(Arc::clone(pinned), &pinned.verify(1, &|_| {}).unwrap(), |_| {});
                download.receive(far).unwrap();
                download.wait(Duration::ZERO).unwrap().unwrap();
            });
        }
    });
    assert_eq!(sent.into_inner(), total);
    both.iter().for_each(|pinned| check_all(pinned, &source));
}

#[test]
fn a_tensor_that_another_process_gave_up_is_received() {
    let (ids, source) = tensors(&[300_000]);
    let folder = tempfile::tempdir().unwrap();
    let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    let part = fs::File::create(folder.path().join(format!("{}.part", Hex(&ids[0].hash)))).unwrap();
    part.lock().unwrap();
    let download = Download::new(Arc::clone(&pinned), &ids, |_| {});
    let (near, far) = pair();
    thread::scope(|scope| {
        scope.spawn(|| serve_tensors(near, &source, &|_| {}, &|| false).unwrap());
        let receiving = scope.spawn(|| download.receive(far).unwrap());
        while download.tensors_elsewhere() == 0 {
            thread::yield_now();
        }
        assert!(download.wait(Duration::ZERO).is_none());
        drop(part);
        receiving.join().unwrap();
    });
    check_all(&pinned, &source);
}

#[test]
fn a_download_that_is_cancelled_ends_on_both_sides_and_goes_on_later() {
    let (ids, source) = tensors(&[40_000_000]);
    let folder = tempfile::tempdir().unwrap();
    let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
    let download = Download::new(Arc::clone(&pinned), &ids, |_| {});
    let (near, far) = pair();
    thread::scope(|scope| {
        let cancel = |_| download.cancel();
        let serving = scope.spawn(move || serve_tensors(near, &source, &cancel, &|| false).unwrap_err());
        download.receive(far).unwrap();
        let error = serving.join().unwrap();
        let is_told = matches!(error, TransferError::ReceiverFailed(FailReason::Cancelled));
        assert!(is_told || matches!(error, TransferError::Lost(_)), "{error}");
    });
    assert!(matches!(*download.wait(Duration::ZERO).unwrap().unwrap_err(), TransferError::Cancelled));
    let written = download.progress().received;
    drop(download);
    let (_, source) = tensors(&[40_000_000]);
    assert_eq!(transfer(&pinned, &source, 2), 40_000_000 - written);
    check_all(&pinned, &source);
}

/// Forwards connections to `to`, and cuts each after so many bytes; the last is not cut.
fn cutting_proxy(to: SocketAddr, cuts: Vec<u64>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let cuts = Arc::new(Mutex::new(cuts));
    thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(to).unwrap();
            let cut = cuts.lock().unwrap().pop();
            let (back_from, back_to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
            thread::spawn(move || drop(io::copy(&mut &back_from, &mut &back_to)));
            thread::spawn(move || {
                let mut near_limited = io::Read::take(&near, cut.unwrap_or(u64::MAX));
                let _ = io::copy(&mut near_limited, &mut &far);
                let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
            });
        }
    });
    address
}

/// Uploads through a proxy that cuts connections; returns the bytes that were sent.
fn upload_with_cuts(pinned: &Arc<PinnedTensors>, source: &HashMap<[u8; 32], Vec<u8>>, cuts: Vec<u64>) -> u64 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = cutting_proxy(listener.local_addr().unwrap(), cuts);
    let download = Download::new(Arc::clone(pinned), pinned.ids(), |_| {});
    let (sent, is_over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            listener.set_nonblocking(true).unwrap();
            while !is_over.load(Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                scope.spawn(|| {
                    let limit = WaitLimit::until(Instant::now() + LONG);
                    if let Ok(((), secured)) = respond(stream, &key(), &limit, |_| Ok(())) {
                        let _ = download.receive(MessageStream::new(secured).unwrap());
                    }
                });
            }
        });
        let result = upload(&Upload {
            dial: &|| dial(address),
            connections: 2,
            source,
            sent: &adds_to(&sent),
            is_over: &|| false,
        });
        is_over.store(true, Relaxed);
        result.unwrap();
    });
    download.wait(Duration::ZERO).unwrap().unwrap();
    sent.into_inner()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_transfer_survives_cuts_anywhere(cuts in prop::collection::vec(0_u64..3_000_000, 0..6)) {
        let (ids, source) = tensors(&[1_500_000, 10, 900_000, 300_000]);
        let folder = tempfile::tempdir().unwrap();
        let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
        upload_with_cuts(&pinned, &source, cuts);
        check_all(&pinned, &source);
    }

    #[test]
    fn a_new_process_goes_on_where_the_last_was_cut(cuts in prop::collection::vec(1_u64..4_000_000, 1..4)) {
        let (ids, source) = tensors(&[3_500_000, 2_000_000]);
        let total: u64 = ids.iter().map(|id| id.bytes).sum();
        let folder = tempfile::tempdir().unwrap();
        for bytes_max in cuts {
            // Nothing but the folder is left of each attempt.
            let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
            let download = Download::new(Arc::clone(&pinned), &pinned.verify(1, &|_| {}).unwrap(), |_| {});
            if download.wait(Duration::ZERO).is_some() {
                continue;
            }
            let (near, far) = pair();
            thread::scope(|scope| {
                let (source, sender) = (&source, near.sender.clone());
                let sent = AtomicU64::new(0);
                scope.spawn(move || {
                    let count = |bytes| if sent.fetch_add(bytes, Relaxed) + bytes >= bytes_max { sender.close() };
                    drop(serve_tensors(near, source, &count, &|| false));
                });
                drop(download.receive(far));
            });
        }
        let pinned = Arc::new(open_store(folder.path(), 1 << 30).pin(&ids).unwrap());
        prop_assert!(transfer(&pinned, &source, 1) <= total);
        check_all(&pinned, &source);
    }
}

#[test]
fn an_upload_that_nobody_accepts_ends() {
    let attempts = AtomicUsize::new(0);
    let dial = || {
        attempts.fetch_add(1, Relaxed);
        Err(HandshakeError::Key)
    };
    let source: HashMap<[u8; 32], Vec<u8>> = HashMap::new();
    let error = upload(&Upload { dial: &dial, connections: 2, source: &source, sent: &|_| {}, is_over: &|| false })
        .unwrap_err();
    assert!(matches!(error, TransferError::Connect(HandshakeError::Key)), "{error}");
    assert!(attempts.into_inner() <= 2);
    // One that could be accepted later is tried until it is over.
    let (attempts, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let dial = || {
        is_over.store(attempts.fetch_add(1, Relaxed) > 1, Relaxed);
        Err(HandshakeError::Io(io::ErrorKind::ConnectionRefused.into()))
    };
    let is_over = || is_over.load(Relaxed);
    let error = upload(&Upload { dial: &dial, connections: 1, source: &source, sent: &|_| {}, is_over: &is_over });
    assert!(matches!(error, Err(TransferError::Cancelled)));
}
