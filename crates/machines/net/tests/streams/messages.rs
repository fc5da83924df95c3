//! Messages: whole and in order, or a typed error; and every wait ends.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use net::{MessageError, MessageStream, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, SILENCE_MIN, SecureStream};

use crate::{LONG, secured, watched};
use testing::proxy::{TransitFault, proxy};

/// The bytes of the handshake that the initiator and the responder send.
const INITIATOR_BYTES: usize = 25 + 48 + 18;
const RESPONDER_BYTES: usize = 1 + 48;
/// A record with a header.
const HEADER_RECORD_BYTES: usize = 2 + 5 + 16;

const DATA: u8 = 7;

fn streams(silence: Duration) -> (MessageStream, MessageStream) {
    let (near, far) = secured(silence, |address| address);
    (MessageStream::new(near).unwrap(), MessageStream::new(far).unwrap())
}

/// The next message, of any kind and length.
fn receive(stream: &mut MessageStream) -> Result<Option<(u8, Vec<u8>)>, MessageError> {
    let mut body = vec![0; 3];
    let kind = stream.receiver.receive(Some(Instant::now() + LONG), |_| Some(usize::MAX), &mut body)?;
    Ok(kind.map(|kind| (kind, body)))
}

fn bytes(count: usize, seed: u32) -> Vec<u8> {
    (0..count as u32).map(|index| ((index ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[test]
fn messages_of_all_lengths_go_both_ways_at_once() {
    watched(|| {
        // In all more than the buffers of both sides hold.
        const LENGTHS: [usize; 8] =
            [0, 1, 1000, PLAIN_BYTES_MAX - 1, PLAIN_BYTES_MAX, PLAIN_BYTES_MAX + 1, 4 * RECORD_BYTES_MAX, 20_000_000];
        let (near, far) = streams(LONG);
        let run = |mut stream: MessageStream, own: u32, theirs: u32| {
            let sender = stream.sender.clone();
            thread::scope(|scope| {
                scope.spawn(move || {
                    for (index, length) in LENGTHS.into_iter().enumerate() {
                        let body = bytes(length, own);
                        let (head, tail) = body.split_at(length / 3);
                        sender.send(1 + index as u8, &[head, &[], tail]).unwrap();
                    }
                    sender.finish().unwrap();
                });
                for (index, length) in LENGTHS.into_iter().enumerate() {
                    let (kind, body) = receive(&mut stream).unwrap().unwrap();
                    assert_eq!((kind, body.len()), (1 + index as u8, length));
                    assert!(body == bytes(length, theirs));
                }
                assert_eq!(receive(&mut stream).unwrap(), None);
            });
        };
        thread::scope(|scope| {
            scope.spawn(move || run(near, 1, 2));
            run(far, 2, 1);
        });
    });
}

#[test]
fn messages_of_several_threads_stay_whole() {
    watched(|| {
        const MESSAGES: usize = 50;
        let (near, mut far) = streams(LONG);
        thread::scope(|scope| {
            for kind in 1..=4 {
                let sender = near.sender.clone();
                scope.spawn(move || {
                    (0..MESSAGES).for_each(|index| sender.send(kind, &[&vec![kind; 3000 * index]]).unwrap());
                });
            }
            let mut counts = [0; 5];
            for _ in 0..4 * MESSAGES {
                let (kind, body) = receive(&mut far).unwrap().unwrap();
                assert_eq!(body, vec![kind; 3000 * counts[usize::from(kind)]]);
                counts[usize::from(kind)] += 1;
            }
        });
    });
}

#[test]
fn a_declared_end_is_told_from_a_broken_connection() {
    watched(|| {
        let (mut near, mut far) = streams(LONG);
        near.sender.send(DATA, &[b"last"]).unwrap();
        near.sender.finish().unwrap();
        assert!(matches!(near.sender.send(DATA, &[b"more"]), Err(MessageError::Closed)));
        assert_eq!(receive(&mut far).unwrap(), Some((DATA, b"last".to_vec())));
        assert_eq!((receive(&mut far).unwrap(), receive(&mut far).unwrap()), (None, None));
        assert!(far.sender.wait_for_hangup(LONG));
        // The other direction is still open.
        far.sender.send(DATA, &[b"answer"]).unwrap();
        assert_eq!(receive(&mut near).unwrap(), Some((DATA, b"answer".to_vec())));
        assert!(!near.sender.wait_for_hangup(Duration::ZERO));
        drop(far);
        assert!(matches!(receive(&mut near), Err(MessageError::Broken(_))));
        assert!(matches!(receive(&mut near), Err(MessageError::Closed)), "an error is final");
    });
}

#[test]
fn a_silent_side_is_reported_and_one_that_has_nothing_to_say_is_not() {
    watched(|| {
        let held = |address| proxy(address, TransitFault::None, TransitFault::Hold(RESPONDER_BYTES));
        let (near, far) = secured(SILENCE_MIN, held);
        let (mut near, far) = (MessageStream::new(near).unwrap(), MessageStream::new(far).unwrap());
        far.sender.send(DATA, &[b"held"]).unwrap();
        let error = receive(&mut near).unwrap_err();
        assert!(matches!(error, MessageError::Silent(SILENCE_MIN)), "{error}");
        assert_eq!(io::Error::from(error).kind(), io::ErrorKind::TimedOut);

        // A busy machine may delay heartbeats by a second.
        let silence = 4 * SILENCE_MIN;
        let (mut near, far) = streams(silence);
        let speaks = thread::spawn(move || {
            // The time in which nothing but heartbeats is sent.
            thread::sleep(2 * silence);
            far.sender.send(DATA, &[]).unwrap();
            far
        });
        assert_eq!(receive(&mut near).unwrap(), Some((DATA, Vec::new())));
        drop(speaks.join().unwrap());
    });
}

/// Forwards bytes to `target` at this many per second, and answers at once. Its own buffers are small.
fn slow_line(target: SocketAddr, bytes_per_s: usize) -> SocketAddr {
    const TICK: Duration = Duration::from_millis(20);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 32 << 10).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let (mut caller, mut called) = (listener.accept().unwrap().0, TcpStream::connect(target).unwrap());
        let (mut back, mut there) = (called.try_clone().unwrap(), caller.try_clone().unwrap());
        thread::spawn(move || io::copy(&mut back, &mut there));
        let mut bytes = vec![0; bytes_per_s * 20 / 1000];
        while let Ok(count @ 1..) = caller.read(&mut bytes) {
            if called.write_all(&bytes[..count]).is_err() {
                return;
            }
            // This is what a slow line does.
            thread::sleep(TICK * count as u32 / bytes.len() as u32);
        }
        let _ = called.shutdown(Shutdown::Both);
    });
    address
}

#[test]
fn a_long_message_on_a_slow_line_holds_up_neither_heartbeats_nor_short_messages() {
    watched(|| {
        const LONG_BYTES: usize = 3 << 20;
        const LONG_KIND: u8 = 200;
        let (near, far) = secured(SILENCE_MIN, |address| slow_line(address, 600_000));
        let (near, mut far) = (MessageStream::new(near).unwrap(), MessageStream::new(far).unwrap());
        let (long, short) = (near.sender.clone(), near.sender.clone());
        let (body, go) = (bytes(LONG_BYTES, 5), Barrier::new(2));
        thread::scope(|scope| {
            scope.spawn(|| {
                // In all about 5 times the silence deadline, and more than buffers of the operating system may hold.
                go.wait();
                long.send(LONG_KIND, &[&body]).unwrap();
            });
            scope.spawn(|| {
                go.wait();
                // Each has to wait for a piece at most, or one would have to wait for all of them.
                (0..8).for_each(|index| short.send(1 + index, &[&[index; 100]]).unwrap());
            });
            let mut kinds = Vec::new();
            while kinds.len() < 9 {
                let (kind, received) = receive(&mut far).unwrap().unwrap();
                assert!(kind != LONG_KIND || received == body);
                kinds.push(kind);
            }
            assert_eq!(kinds.last(), Some(&LONG_KIND), "the long one is the last: {kinds:?}");
        });
    });
}

#[test]
fn a_machine_that_moves_bytes_over_one_connection_is_not_silent_on_another() {
    watched(|| {
        let held = |address| proxy(address, TransitFault::None, TransitFault::Hold(RESPONDER_BYTES));
        let (quiet, far) = secured(SILENCE_MIN, held);
        let (mut quiet, _far) = (MessageStream::new(quiet).unwrap(), MessageStream::new(far).unwrap());
        let (mut busy, talker) = streams(LONG);
        busy.receiver.share_last_heard(quiet.receiver.last_heard());
        let (over, is_over) = channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                while is_over.try_recv().is_err() {
                    talker.sender.send(DATA, &[]).unwrap();
                    receive(&mut busy).unwrap();
                }
            });
            // Nothing but the other connection tells that the machine is there.
            let deadline = Instant::now() + 2 * SILENCE_MIN;
            let received = quiet.receiver.receive(Some(deadline), |_| Some(9), &mut Vec::new());
            assert!(matches!(received, Err(MessageError::Timeout)), "{received:?}");
            over.send(()).unwrap();
        });
        let error = receive(&mut quiet).unwrap_err();
        assert!(matches!(error, MessageError::Silent(SILENCE_MIN)), "{error}");
    });
}

/// A side that writes its records itself.
struct RawSide(SecureStream);

impl RawSide {
    fn record(&mut self, plain: &[u8]) {
        let mut record = vec![0; RECORD_BYTES_MAX];
        let bytes = self.0.sealer.seal(plain, &mut record);
        self.0.stream.write_all(&record[..bytes]).unwrap();
    }
}

#[test]
fn a_deadline_takes_nothing_from_the_message_that_comes_after_it() {
    watched(|| {
        let (near, far) = secured(LONG, |address| address);
        let (mut near, mut far) = (MessageStream::new(near).unwrap(), RawSide(far));
        let mut wait_briefly = || {
            let (deadline, mut body) = (Instant::now() + Duration::from_millis(30), Vec::new());
            let received = near.receiver.receive(Some(deadline), |_| Some(9), &mut body);
            assert!(matches!(received, Err(MessageError::Timeout)));
        };
        wait_briefly();
        far.record(&[DATA, 4, 0, 0, 0]);
        wait_briefly();
        far.record(b"he");
        wait_briefly();
        far.record(b"re");
        assert_eq!(receive(&mut near).unwrap(), Some((DATA, b"here".to_vec())));
    });
}

#[test]
fn a_message_that_is_not_expected_or_too_long_ends_the_stream() {
    watched(|| {
        let check = |kind: u8, length: usize, is_expected: fn(&MessageError) -> bool| {
            let (mut near, mut far) = streams(LONG);
            let sender = far.sender.clone();
            // The other side may have closed the connection before all is sent.
            thread::spawn(move || drop(sender.send(kind, &[&vec![0; length]])));
            let limit = |kind| (kind == DATA).then_some(100);
            let error = near.receiver.receive(None, limit, &mut Vec::new()).unwrap_err();
            assert!(is_expected(&error), "{error}");
            assert!(matches!(receive(&mut far), Err(MessageError::Broken(_))));
            assert!(matches!(near.sender.send(DATA, &[]), Err(MessageError::Closed)));
        };
        check(8, 1, |error| matches!(error, MessageError::Kind(8)));
        check(DATA, 101, |error| matches!(error, MessageError::TooLong { kind: DATA, bytes: 101, bytes_max: 100 }));
        check(DATA, 1 << 20, |error| matches!(error, MessageError::TooLong { .. }));
    });
}

#[test]
fn closing_from_another_thread_ends_both_halves() {
    watched(|| {
        // Keeps the connection open, and neither reads nor writes.
        let (near, _far) = secured(LONG, |address| address);
        let MessageStream { sender, mut receiver } = MessageStream::new(near).unwrap();
        let closer = sender.clone();
        thread::scope(|scope| {
            let sending = scope.spawn(move || while sender.send(DATA, &[&[0; 1 << 16]]).is_ok() {});
            let receiving = scope.spawn(move || receiver.receive(None, |_| None, &mut Vec::new()));
            thread::sleep(Duration::from_millis(100));
            assert!(!sending.is_finished() && !receiving.is_finished());
            closer.close();
            sending.join().unwrap();
            assert!(matches!(receiving.join().unwrap(), Err(MessageError::Closed)));
        });
        assert!(matches!(closer.send(DATA, &[]), Err(MessageError::Closed)));
    });
}

#[test]
fn a_side_that_reads_nothing_stalls_the_sender_for_the_silence_deadline_at_most() {
    watched(|| {
        let (near, _far) = secured(SILENCE_MIN, |address| address);
        let near = MessageStream::new(near).unwrap();
        let error = loop {
            if let Err(error) = near.sender.send(DATA, &[&[0; 1 << 20]]) {
                break error;
            }
        };
        assert!(matches!(error, MessageError::Stalled(SILENCE_MIN)), "{error}");
    });
}

#[test]
fn what_was_altered_or_cut_in_transit_is_an_error() {
    watched(|| {
        let send = |fault| {
            let (near, far) = secured(LONG, |address| proxy(address, fault, TransitFault::None));
            let (near, mut far) = (MessageStream::new(near).unwrap(), MessageStream::new(far).unwrap());
            // The proxy may have cut the connection already, so errors are ignored.
            let _ = near.sender.send(DATA, &[&bytes(100_000, 3)]).and_then(|()| near.sender.finish());
            let first = receive(&mut far);
            let second = if first.is_ok() { receive(&mut far) } else { Ok(None) };
            (first.map(|message| message.unwrap().1.len()), second)
        };
        let body = INITIATOR_BYTES + HEADER_RECORD_BYTES;
        // Two pieces, each a header and a record.
        let end = body + 100_000 + 2 * (HEADER_RECORD_BYTES + 2 + 16);
        assert!(matches!(send(TransitFault::Flip(end + HEADER_RECORD_BYTES)), (Ok(100_000), Ok(None))));
        for altered in [INITIATOR_BYTES + 5, body + 2, body + 50_000, end - 1] {
            let (first, _) = send(TransitFault::Flip(altered));
            assert!(matches!(first, Err(MessageError::Forged(_))), "at {altered}: {first:?}");
        }
        assert!(matches!(send(TransitFault::Flip(end + 3)), (Ok(100_000), Err(MessageError::Forged(_)))));
        for cut in [INITIATOR_BYTES, body, body + 70_000] {
            let (first, _) = send(TransitFault::Cut(cut));
            assert!(matches!(first, Err(MessageError::Broken(_))), "at {cut}: {first:?}");
        }
        assert!(matches!(send(TransitFault::Cut(end)), (Ok(100_000), Err(MessageError::Broken(_)))));
    });
}
