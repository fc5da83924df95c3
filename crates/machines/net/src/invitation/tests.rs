//! Exchanges on loopback: with the code, without it, broken off, garbled and replayed.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use testing::watchdog::watched;

use super::frame::ExchangeFrame;
use super::pake::CodeExchange;
use super::*;
use crate::handshake::{HandshakeError, SecureStream, initiate};
use crate::key::ClusterKey;

/// Far longer than anything that is waited for.
const LONG: Duration = Duration::from_secs(60);
const KEY: &str = "the key of a cluster that only tests have";

fn code(text: &str) -> InvitationCode {
    text.parse().unwrap()
}

fn far() -> WaitLimit<'static> {
    WaitLimit::until(Instant::now() + LONG)
}

/// Serves an invitation with the code 123456 while `act` runs. Returns the failed tries and the ending.
fn invited(act: impl FnOnce(SocketAddr) + Send) -> (Vec<(TryFailure, u8)>, InvitationEnd) {
    invited_until(&far(), act)
}

fn invited_until(limit: &WaitLimit<'_>, act: impl FnOnce(SocketAddr) + Send) -> (Vec<(TryFailure, u8)>, InvitationEnd) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut failures = Vec::new();
    thread::scope(|scope| {
        let acting = scope.spawn(move || act(address));
        let invitation = Invitation::new(code("123456"), KEY, "kitchen").unwrap();
        let end = invitation.serve(&listener, limit, |failed| {
            assert_eq!(failed.name, "attic");
            failures.push((failed.failure, failed.tries_left));
        });
        // Whoever still waits for a connection finds that none is accepted.
        drop(listener);
        acting.join().unwrap();
        (failures, end.unwrap())
    })
}

fn join(address: SocketAddr, digits: &str) -> Result<ReceivedKey, JoinError> {
    accept_invitation(address, &code(digits), "attic", &far())
}

fn join_and_confirm(address: SocketAddr) {
    let received = join(address, "123456").unwrap();
    assert_eq!((received.text.as_str(), received.inviter.as_str()), (KEY, "kitchen"));
    received.confirm(&far()).unwrap();
}

fn check_joined(end: &InvitationEnd, expected: bool) {
    let InvitationEnd::Joined { address, name, is_confirmed } = end else { panic!("{end:?}") };
    assert!(address.ip().is_loopback());
    assert_eq!((name.as_str(), *is_confirmed), ("attic", expected));
}

/// Begins an exchange with a code, as far as the inviter's frame.
fn begin(address: SocketAddr, digits: &str) -> (TcpStream, ClusterKey) {
    let mut stream = TcpStream::connect(address).unwrap();
    let exchange = CodeExchange::joiner(&code(digits));
    let own = ExchangeFrame { nonce: [1; 16], tries_left: 0, element: exchange.element, name: "attic".to_owned() };
    stream.write_all(&own.bytes()).unwrap();
    let (theirs, their_bytes) = ExchangeFrame::read(&stream, &far()).unwrap();
    let key = exchange.finish(&theirs.element).unwrap().session_key(&own.bytes(), &their_bytes);
    (stream, key)
}

#[test]
fn a_machine_with_the_code_gets_the_key_and_ends_the_invitation() {
    watched(|| {
        let (failures, end) = invited(join_and_confirm);
        assert_eq!(failures, []);
        check_joined(&end, true);
        // One that is gone before it has kept the key is told from it.
        let (_, end) = invited(|address| drop(join(address, "123456").unwrap()));
        check_joined(&end, false);
    });
}

#[test]
fn the_third_wrong_code_ends_the_invitation() {
    watched(|| {
        let wrong = |address, digits, expected: u8| match join(address, digits) {
            Err(JoinError::WrongCode { tries_left }) => assert_eq!(tries_left, expected),
            other => panic!("{other:?}"),
        };
        let (failures, end) = invited(|address| {
            wrong(address, "000000", 2);
            wrong(address, "123465", 1);
            wrong(address, "654321", 0);
            // The right one comes too late.
            assert!(join(address, "123456").is_err());
        });
        assert_eq!(failures, [2, 1, 0].map(|left| (TryFailure::WrongCode, left)));
        assert_eq!(end, InvitationEnd::TooManyTries);
        let (failures, end) = invited(|address| {
            wrong(address, "000000", 2);
            wrong(address, "123465", 1);
            join_and_confirm(address);
        });
        assert_eq!(failures.len(), 2);
        check_joined(&end, true);
    });
}

#[test]
fn breaking_off_after_the_inviters_frame_costs_a_try_each_time() {
    watched(|| {
        let (failures, end) = invited(|address| {
            drop(begin(address, "000001"));
            // Half of a handshake, and with the right code too: nobody learns more for less.
            let (mut stream, _) = begin(address, "123456");
            stream.write_all(b"consort\0").unwrap();
            drop(stream);
            let (mut stream, _) = begin(address, "000002");
            stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let mut said = Vec::new();
            // Closed or reset, and nothing more was said.
            let _ = stream.read_to_end(&mut said);
            assert!(said.is_empty(), "{said:?}");
        });
        assert_eq!(failures, [2, 1, 0].map(|left| (TryFailure::BrokenOff, left)));
        assert_eq!(end, InvitationEnd::TooManyTries);
    });
}

#[test]
fn what_begins_no_exchange_costs_nothing() {
    watched(|| {
        let (failures, end) = invited(|address| {
            let said = |bytes: &[u8]| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(bytes).unwrap();
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let mut said = Vec::new();
                let _ = stream.read_to_end(&mut said);
                said
            };
            let frame = |element| ExchangeFrame { nonce: [1; 16], tries_left: 0, element, name: "attic".to_owned() };
            let whole = frame(CodeExchange::joiner(&code("123456")).element).bytes();
            for _ in 0..2 * TRIES_MAX {
                assert_eq!(said(b""), b"");
                assert_eq!(said(b"GET / HTTP/1.1\r\n\r\n"), b"");
                assert_eq!(said(&whole[..whole.len() - 1]), b"");
                // An element of the wrong side, and none of the group.
                assert_eq!(said(&frame(CodeExchange::inviter(&code("123456")).element).bytes()), b"");
                assert_eq!(said(&frame([b'A'; 33]).bytes()), b"");
            }
            // Another version is told ours.
            let mut newer = whole.clone();
            newer[8] = 9;
            assert_eq!(said(&newer)[..10], *b"consinv\0\x01\0");
            join_and_confirm(address);
        });
        assert_eq!(failures, []);
        check_joined(&end, true);
    });
}

#[test]
fn a_joiner_tells_what_is_not_an_invitation() {
    watched(|| {
        let answered = |bytes: &'static [u8]| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            thread::scope(|scope| {
                scope.spawn(move || {
                    let mut stream = listener.accept().unwrap().0;
                    let mut frame = [0; 64];
                    stream.read_exact(&mut frame).unwrap();
                    stream.write_all(bytes).unwrap();
                    // Until the joiner has read it.
                    let _ = stream.read_to_end(&mut Vec::new());
                });
                join(address, "123456").unwrap_err()
            })
        };
        assert!(matches!(answered(b"HTTP/1.1 400 Bad Request\r\n\r\n"), JoinError::UnknownProtocol));
        assert!(matches!(answered(b"consinv\0\x07\0\0"), JoinError::Version { theirs: 7 }));
        assert!(matches!(answered(b"consinv\0\x01\0\0"), JoinError::Malformed));
        let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        assert!(matches!(join(unused, "123456"), Err(JoinError::NotOpen)));
        assert!(matches!(accept_invitation(unused, &code("123456"), "a\nb", &far()), Err(JoinError::Name)));
    });
}

/// Passes one connection on to `address`, and keeps what the joiner sent.
fn recorded(address: SocketAddr, sent: &Mutex<Vec<u8>>, act: impl FnOnce(SocketAddr)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut joiner, mut inviter) = (listener.accept().unwrap().0, TcpStream::connect(address).unwrap());
            let (mut back_from, mut back_to) = (inviter.try_clone().unwrap(), joiner.try_clone().unwrap());
            thread::scope(|scope| {
                scope.spawn(move || {
                    let _ = std::io::copy(&mut back_from, &mut back_to);
                    let _ = back_to.shutdown(std::net::Shutdown::Write);
                });
                let mut piece = [0; 1024];
                while let Ok(bytes @ 1..) = joiner.read(&mut piece) {
                    sent.lock().unwrap().extend_from_slice(&piece[..bytes]);
                    inviter.write_all(&piece[..bytes]).unwrap();
                }
                let _ = inviter.shutdown(std::net::Shutdown::Write);
            });
        });
        act(near);
    });
}

#[test]
fn what_a_joiner_with_the_code_sent_gives_nobody_the_key_again() {
    watched(|| {
        let sent = Mutex::new(Vec::new());
        let (_, end) = invited(|address| recorded(address, &sent, join_and_confirm));
        check_joined(&end, true);
        let sent = sent.into_inner().unwrap();
        assert!(sent.len() > 150, "{} bytes", sent.len());
        let (failures, end) = invited(|address| {
            for _ in 0..TRIES_MAX {
                let mut stream = TcpStream::connect(address).unwrap();
                // The inviter may close the connection before all is sent.
                let _ = stream.write_all(&sent);
                let mut said = Vec::new();
                let _ = stream.read_to_end(&mut said);
                assert!(said.len() < 130, "its frame, and at most a refusal: {said:?}");
            }
        });
        assert_eq!(failures, [2, 1, 0].map(|left| (TryFailure::WrongCode, left)));
        assert_eq!(end, InvitationEnd::TooManyTries);
    });
}

#[test]
fn an_altered_frame_spoils_the_exchange_even_with_the_right_code() {
    watched(|| {
        let (failures, _) = invited(|address| {
            for at in [12, 64] {
                let mut stream = TcpStream::connect(address).unwrap();
                let exchange = CodeExchange::joiner(&code("123456"));
                let name = "attic".to_owned();
                let own = ExchangeFrame { nonce: [1; 16], tries_left: 0, element: exchange.element, name }.bytes();
                stream.write_all(&own).unwrap();
                let (theirs, mut their_bytes) = ExchangeFrame::read(&stream, &far()).unwrap();
                // Somebody on the way changed the nonce or the name.
                their_bytes[at] ^= 1;
                let key = exchange.finish(&theirs.element).unwrap().session_key(&own, &their_bytes);
                let refused: Result<SecureStream, _> = initiate(stream, &key, &HELLO, &far());
                assert!(matches!(refused, Err(HandshakeError::RejectedByPeer(_))), "{refused:?}");
            }
            join_and_confirm(address);
        });
        assert_eq!(failures, [2, 1].map(|left| (TryFailure::WrongCode, left)));
    });
}

#[test]
fn an_invitation_ends_with_its_time_and_when_it_is_cancelled() {
    watched(|| {
        let (failures, end) = invited_until(&WaitLimit::until(Instant::now()), |_| {});
        assert_eq!((failures, end), (Vec::new(), InvitationEnd::Expired));
        let is_over = AtomicBool::new(false);
        let check = || is_over.load(Ordering::Relaxed);
        let (_, end) = invited_until(&WaitLimit::new(None, &check), |address| {
            // Also while somebody keeps it busy.
            let _silent = TcpStream::connect(address).unwrap();
            is_over.store(true, Ordering::Relaxed);
        });
        assert_eq!(end, InvitationEnd::Cancelled);
    });
}

#[test]
fn a_silent_connection_keeps_a_joiner_out_for_a_moment_only() {
    watched(|| {
        let (failures, end) = invited(|address| {
            let _silent = TcpStream::connect(address).unwrap();
            join_and_confirm(address);
        });
        assert_eq!(failures, []);
        check_joined(&end, true);
    });
}

#[test]
fn keys_and_names_have_limits() {
    let invitation = |key: &str, name: &str| Invitation::new(code("123456"), key, name).map(drop);
    assert_eq!(invitation(&"k".repeat(KEY_TEXT_BYTES_MAX), "n"), Ok(()));
    assert_eq!(invitation(&"k".repeat(KEY_TEXT_BYTES_MAX + 1), "n"), Err(InvalidInvitation::LongKey));
    for name in ["", " a", "a\u{1b}", &"n".repeat(MACHINE_NAME_BYTES_MAX + 1)] {
        assert_eq!(invitation(KEY, name), Err(InvalidInvitation::Name), "{name:?}");
    }
}
