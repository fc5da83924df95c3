//! How groups form or fail to form: a typed error before the deadline, whatever the other ranks do.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use collectives::Communicator as _;
use collectives::shared_memory::Epoch;
use collectives::tcp::{ConnectError, Encoding, TcpAbort, TcpComm, TcpCommOptions, TcpGroup};
use net::{ClusterKey, HANDSHAKES_MAX, HandshakeError, RejectReason};
use rustix::net::{AddressFamily, SocketType};

use crate::group::{ENOUGH, Group, LONG, OPTIONS, SHORT, each, key};
use testing::watchdog::watched;

#[test]
fn ranks_may_come_in_any_order_and_late() {
    watched(|| {
        let mut group = Group::new(3);
        // Connections are refused at first: the socket does not listen yet.
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let listener = TcpListener::from(socket);
        group.addresses[0] = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let others = [2, 1].map(|index| {
                let group = &group;
                scope.spawn(move || group.connect(index, OPTIONS, LONG).unwrap())
            });
            rustix::net::listen(&listener, 8).unwrap();
            let place = TcpGroup { listener: &listener, ..group.place(0) };
            let comm = TcpComm::connect(place, &key(), OPTIONS, &TcpAbort::default(), Instant::now() + LONG).unwrap();
            let comms = others.map(|other| other.join().unwrap()).into_iter().chain([comm]).collect();
            each(comms, |comm| comm.all_reduce(&mut [1.0; 4]).unwrap());
        });
    });
}

#[test]
fn ranks_that_do_not_come_are_named_at_the_deadline() {
    watched(|| {
        let mut group = Group::new(3);
        let error = group.connect(0, OPTIONS, SHORT).unwrap_err();
        assert!(matches!(error, ConnectError::NotConnected { rank, source: None } if rank.index() == 1), "{error}");
        // Bound but not accepting: the attempt times out.
        let error = group.connect(2, OPTIONS, SHORT).unwrap_err();
        let ConnectError::Unreachable { rank, source: HandshakeError::Io(_), .. } = error else { panic!("{error}") };
        assert!(rank.index() < 2);
        // Not bound: the connection is refused.
        group.listeners.clear();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let place =
            TcpGroup { rank: group.rank(2), listener: &listener, addresses: &group.addresses, epoch: group.epoch };
        let error = TcpComm::connect(place, &key(), OPTIONS, &TcpAbort::default(), Instant::now() + SHORT).unwrap_err();
        assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    });
}

/// Checks the errors of the initiator, rank 1, and the responder, rank 0, when their parameters differ.
fn check_refused(reason: RejectReason, called: &Group, caller: &Group, caller_key: &ClusterKey) {
    thread::scope(|scope| {
        // It is there until the caller gives up.
        let absent = scope.spawn(|| called.connect(0, OPTIONS, 2 * ENOUGH).unwrap_err());
        let mut place = caller.place(1);
        let mut addresses = called.addresses.clone();
        addresses.resize(caller.world.get(), called.addresses[0]);
        place.addresses = &addresses;
        let error =
            TcpComm::connect(place, caller_key, OPTIONS, &TcpAbort::default(), Instant::now() + ENOUGH).unwrap_err();
        let ConnectError::Unreachable { source: HandshakeError::RejectedByPeer(found), .. } = error else {
            panic!("{error}")
        };
        assert_eq!(found, reason);
        let ConnectError::NotConnected { source: Some(HandshakeError::Rejected(found)), .. } = absent.join().unwrap()
        else {
            panic!("who was called knows why too")
        };
        assert_eq!(found, reason);
    });
}

#[test]
fn another_key_size_place_or_generation_is_refused_with_the_reason() {
    watched(|| {
        let group = || Group::new(2);
        let other_key = ClusterKey::from_passphrase("another passphrase").unwrap();
        thread::scope(|scope| {
            scope.spawn(|| check_refused(RejectReason::Key, &group(), &group(), &other_key));
            scope.spawn(|| check_refused(RejectReason::World, &group(), &Group::new(3), &key()));
            scope.spawn(|| {
                check_refused(RejectReason::Epoch, &group(), &Group { epoch: Epoch(2), ..group() }, &key());
            });
        });
        // Rank 2 takes the address of rank 1 for that of rank 0.
        let called = Group::new(3);
        let error = thread::scope(|scope| {
            scope.spawn(|| called.connect(1, OPTIONS, 2 * ENOUGH).unwrap_err());
            let mut place = called.place(2);
            let addresses = [1, 0, 2].map(|index| called.addresses[index]);
            place.addresses = &addresses;
            TcpComm::connect(place, &key(), OPTIONS, &TcpAbort::default(), Instant::now() + ENOUGH).unwrap_err()
        });
        let ConnectError::Unreachable { source: HandshakeError::RejectedByPeer(RejectReason::Rank), .. } = error else {
            panic!("{error}")
        };
    });
}

#[test]
fn ranks_with_other_options_form_no_group() {
    watched(|| {
        for other in
            [TcpCommOptions { encoding: Encoding::Q8, ..OPTIONS }, TcpCommOptions { elements_max: 7, ..OPTIONS }]
        {
            let group = Group::new(2);
            thread::scope(|scope| {
                let ranks = [(0, OPTIONS), (1, other)].map(|(index, options)| {
                    scope.spawn({
                        let group = &group;
                        move || group.connect(index, options, LONG)
                    })
                });
                let errors = ranks.map(|rank| rank.join().unwrap().unwrap_err());
                assert!(errors.iter().any(|error| matches!(error, ConnectError::Options(_))), "{errors:?}");
            });
        }
    });
}

#[test]
fn a_wrong_number_of_addresses_and_too_large_a_limit_are_refused() {
    let group = Group::new(2);
    let place = TcpGroup { addresses: &group.addresses[..1], ..group.place(0) };
    let error = TcpComm::connect(place, &key(), OPTIONS, &TcpAbort::default(), Instant::now() + LONG).unwrap_err();
    assert!(matches!(error, ConnectError::Addresses { addresses: 1, ranks: 2 }), "{error}");
    let error = group.connect(0, TcpCommOptions { elements_max: usize::MAX, ..OPTIONS }, LONG).unwrap_err();
    assert!(matches!(error, ConnectError::TooLarge { .. }), "{error}");
}

/// Connects, sends these bytes and keeps the connection.
fn stranger(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(bytes).unwrap();
    stream
}

#[test]
fn strangers_do_not_keep_a_group_from_forming() {
    watched(|| {
        let group = Group::new(2);
        let address = group.addresses[0];
        // More connections than [`HANDSHAKES_MAX`]: silent ones, another protocol, the start of a valid hello, garbage.
        let mut strangers: Vec<_> = (0..HANDSHAKES_MAX + 8).map(|_| stranger(address, b"")).collect();
        strangers.push(stranger(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
        strangers.push(stranger(address, b"consort\0\x04\x00\x01\x02\x00\x01\x00"));
        strangers.push(stranger(address, &[0xff; 5000]));
        each(group.comms(OPTIONS), |comm| comm.all_reduce(&mut [1.0; 4]).unwrap());
        for mut stranger in strangers {
            stranger.set_read_timeout(Some(LONG)).unwrap();
            let mut said = Vec::new();
            // The connection is closed or reset, and nothing was sent on it.
            let _ = stranger.read_to_end(&mut said);
            assert_eq!(said, Vec::<u8>::new());
        }
    });
}

#[test]
fn a_recorded_call_played_again_takes_no_place() {
    watched(|| {
        // A listener that is not the rank records the initiator's first bytes.
        let (group, ear) = (Group::new(2), TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [ear.local_addr().unwrap(), group.addresses[1]];
        let recorded = thread::scope(|scope| {
            scope.spawn(|| {
                let place = TcpGroup { addresses: &addresses, ..group.place(1) };
                TcpComm::connect(place, &key(), OPTIONS, &TcpAbort::default(), Instant::now() + ENOUGH).unwrap_err()
            });
            let mut recorded = [0; 73];
            ear.accept().unwrap().0.read_exact(&mut recorded).unwrap();
            recorded
        });
        thread::scope(|scope| {
            let called = scope.spawn(|| group.connect(0, OPTIONS, ENOUGH).unwrap_err());
            let mut again = stranger(group.addresses[0], &recorded);
            let mut answer = [0; 49];
            again.read_exact(&mut answer).unwrap();
            assert_eq!(answer[0], 0, "so far it cannot be told from the caller");
            again.write_all(&[0; 18]).unwrap();
            let error = called.join().unwrap();
            let ConnectError::NotConnected { source: Some(HandshakeError::Key), .. } = error else { panic!("{error}") };
        });
    });
}

#[test]
fn an_abort_ends_the_forming() {
    watched(|| {
        let group = Group::new(3);
        let abort = TcpAbort::default();
        thread::scope(|scope| {
            let forming = scope.spawn(|| {
                TcpComm::connect(group.place(1), &key(), OPTIONS, &abort, Instant::now() + LONG).unwrap_err()
            });
            // The connection to rank 0, which does no handshake, shows that connecting has begun.
            let _call = group.listeners[0].accept().unwrap();
            abort.stop();
            let error = forming.join().unwrap();
            assert!(matches!(error, ConnectError::Aborted), "{error}");
        });
    });
}

#[test]
fn a_group_forms_anew_on_the_same_listeners_and_knows_no_old_rank() {
    watched(|| {
        let mut group = Group::new(3);
        let old = group.comms(OPTIONS);
        drop(old);
        for epoch in 2..5 {
            group.epoch = Epoch(epoch);
            each(group.comms(OPTIONS), |comm| comm.all_reduce(&mut [1.0; 4]).unwrap());
        }
    });
}
