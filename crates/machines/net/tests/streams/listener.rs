//! One port for several purposes: who is let in, how many, and what remains when the listener ends.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use net::{
    AcceptedStream, ClusterKey, HANDSHAKES_MAX, HandshakeError, Hello, MessageError, MessageStream, Purpose,
    PurposeLimit, RejectReason, SecureListener, WaitLimit,
};

use crate::{LONG, hello, key, watched};

const ECHO: u8 = 40;
const COUNT: u8 = 41;
/// Purposes that are refused: by `admit`, and because they have no limit.
const REFUSED: u8 = 42;
const UNKNOWN: u8 = 43;

const LIMITS: [PurposeLimit; 3] = [
    PurposeLimit { purpose: Purpose(ECHO), in_all: 2, per_address: 2 },
    PurposeLimit { purpose: Purpose(COUNT), in_all: 2, per_address: 1 },
    PurposeLimit { purpose: Purpose(REFUSED), in_all: 2, per_address: 2 },
];

/// Serves while `test` runs. The receiver gets the purpose of each connection that ended.
fn served(test: impl FnOnce(SocketAddr, &Receiver<u8>)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (ended, ends) = channel();
    let is_over = AtomicBool::new(false);
    /// Also when the test fails.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let admit = |hello: &Hello| match hello.purpose {
        Purpose(REFUSED) => Err(RejectReason::Epoch),
        Purpose(purpose) => Ok(purpose),
    };
    let run = |purpose: u8, accepted: AcceptedStream| {
        let AcceptedStream { hello, secured, slot, .. } = accepted;
        assert_eq!(hello.parameters, [purpose; 10]);
        let mut stream = MessageStream::new(secured).unwrap();
        let mut body = Vec::new();
        while let Ok(Some(kind)) = stream.receiver.receive(None, |_| Some(100), &mut body) {
            let answer = if purpose == ECHO { body.clone() } else { body.len().to_string().into_bytes() };
            stream.sender.send(kind, &[&answer]).unwrap();
        }
        drop(slot);
        ended.send(purpose).unwrap();
    };
    thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let listener = SecureListener { listener: &listener, key: &key(), limits: &LIMITS };
            listener.serve(admit, run, || is_over.load(SeqCst)).unwrap();
        });
        let over = Over(&is_over);
        test(address, &ends);
        drop(over);
        serving.join().unwrap();
    });
}

fn connect(address: SocketAddr, purpose: u8) -> Result<MessageStream, HandshakeError> {
    connect_with(address, purpose, &key())
}

fn connect_with(address: SocketAddr, purpose: u8, key: &ClusterKey) -> Result<MessageStream, HandshakeError> {
    MessageStream::connect(address, key, &hello(purpose, LONG), &WaitLimit::until(Instant::now() + LONG))
}

fn ask(stream: &mut MessageStream, question: &str) -> String {
    stream.sender.send(1, &[question.as_bytes()]).unwrap();
    let mut body = Vec::new();
    assert_eq!(stream.receiver.receive(None, |_| Some(100), &mut body).unwrap(), Some(1));
    String::from_utf8(body).unwrap()
}

fn refused(connected: Result<MessageStream, HandshakeError>) -> RejectReason {
    match connected.unwrap_err() {
        HandshakeError::RejectedByPeer(reason) => reason,
        error => panic!("{error}"),
    }
}

#[test]
fn purposes_share_a_port_and_have_their_own_limits() {
    watched(|| {
        served(|address, ends| {
            let (mut echo, mut count) = (connect(address, ECHO).unwrap(), connect(address, COUNT).unwrap());
            assert_eq!((ask(&mut echo, "words"), ask(&mut count, "words")), ("words".to_owned(), "5".to_owned()));
            assert_eq!(refused(connect(address, REFUSED)), RejectReason::Epoch);
            assert_eq!(refused(connect(address, UNKNOWN)), RejectReason::Purpose);
            assert_eq!(refused(connect(address, COUNT)), RejectReason::Busy, "one for each address");
            let mut second = connect(address, ECHO).unwrap();
            assert_eq!(ask(&mut second, "here"), "here", "it has its slot");
            assert_eq!(refused(connect(address, ECHO)), RejectReason::Busy);
            drop(echo);
            assert_eq!(ends.recv_timeout(LONG).unwrap(), ECHO);
            let mut third = connect(address, ECHO).unwrap();
            assert_eq!((ask(&mut second, "a"), ask(&mut third, "b")), ("a".to_owned(), "b".to_owned()));
        });
    });
}

#[test]
fn strangers_are_refused_and_keep_nobody_out() {
    watched(|| {
        served(|address, _| {
            let silent: Vec<_> = (0..HANDSHAKES_MAX + 8).map(|_| TcpStream::connect(address).unwrap()).collect();
            let other = ClusterKey::from_passphrase("another passphrase").unwrap();
            assert_eq!(refused(connect_with(address, ECHO, &other)), RejectReason::Key);
            // Another protocol is refused before it has sent as many bytes as a hello has.
            let mut web = TcpStream::connect(address).unwrap();
            web.set_read_timeout(Some(LONG)).unwrap();
            web.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let mut said = Vec::new();
            // The connection is closed or reset, and nothing was sent on it.
            let _ = web.read_to_end(&mut said);
            assert_eq!(said, Vec::<u8>::new());
            assert_eq!(ask(&mut connect(address, ECHO).unwrap(), "in"), "in");
            drop(silent);
        });
    });
}

/// What an initiator with the key sends first: a hello and the first message of the handshake.
fn overheard() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        scope.spawn(move || connect(address, ECHO).unwrap_err());
        let mut said = vec![0; 25 + 48];
        listener.accept().unwrap().0.read_exact(&mut said).unwrap();
        said
    })
}

#[test]
fn who_repeats_what_it_has_heard_takes_no_slot() {
    watched(|| {
        served(|address, _| {
            let said = overheard();
            // More than the purpose has slots.
            let repeated = [(); 4].map(|()| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(&said).unwrap();
                let mut verdict = [9];
                stream.read_exact(&mut verdict).unwrap();
                assert_eq!(verdict, [0], "it waits for the confirmation");
                stream
            });
            assert_eq!(ask(&mut connect(address, ECHO).unwrap(), "in"), "in");
            drop(repeated);
        });
    });
}

#[test]
fn the_end_of_the_listener_closes_its_connections() {
    watched(|| {
        let mut kept = None;
        served(|address, _| {
            let mut stream = connect(address, ECHO).unwrap();
            ask(&mut stream, "open");
            kept = Some(stream);
        });
        let received = kept.unwrap().receiver.receive(None, |_| None, &mut Vec::new());
        assert!(matches!(received, Err(MessageError::Broken(_))), "{received:?}");
    });
}
