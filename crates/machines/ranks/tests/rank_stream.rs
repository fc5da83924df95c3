//! Rank streams: the line protocol to a rank on another host, whose process ends with its supervisor's connection.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::io::{self, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use collectives::shared_memory::Epoch;
use collectives::tcp::{RankHello, RankPurpose};
use net::{ClusterKey, HandshakeError, RejectReason, SILENCE_MIN, WaitLimit, dial};
use ranks::protocol::{Lines, RankReply, RankRequest, Writer};
use ranks::remote::{
    RANKS_MAX, RankProcess, RankStream, RankStreamHandle, RankStreamReader, RankStreamWriter, serve_ranks,
};
use types::{Rank, WorldSize};

use testing::proxy::{TransitFault, proxy};
use testing::watchdog::watched;

/// Far longer than anything that is waited for.
const LONG: Duration = Duration::from_secs(120);
/// For waits that have to end by a deadline.
const SHORT: Duration = Duration::from_millis(700);

fn key() -> ClusterKey {
    ClusterKey::from_passphrase("the key of all tests").unwrap()
}

fn rank() -> Rank {
    WorldSize::new(3).unwrap().rank(2).unwrap()
}

/// Serves ranks, each a process of `command`, while `test` runs. The receiver gets a message when a process has ended.
fn served(command: impl Fn(Rank) -> Command + Sync, test: impl FnOnce(SocketAddr, Receiver<()>)) {
    served_by(|rank, ended| process(command(rank), ended), test);
}

fn served_by(start: impl Fn(Rank, Sender<()>) -> RankProcess + Sync, test: impl FnOnce(SocketAddr, Receiver<()>)) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let is_over = AtomicBool::new(false);
    let (ended, ends) = channel();
    let ended = Mutex::new(ended);
    thread::scope(|scope| {
        let server = scope.spawn(|| {
            let spawn = |rank| Ok(start(rank, ended.lock().unwrap().clone()));
            serve_ranks(&listener, &key(), spawn, || is_over.load(SeqCst)).unwrap();
        });
        // Also when the test fails.
        struct Over<'a>(&'a AtomicBool);
        impl Drop for Over<'_> {
            fn drop(&mut self) {
                self.0.store(true, SeqCst);
            }
        }
        let over = Over(&is_over);
        test(address, ends);
        drop(over);
        server.join().unwrap();
    });
}

fn process(mut command: Command, ended: Sender<()>) -> RankProcess {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let pid = child.id();
    let kill = move || {
        end(&mut child);
        let _ = ended.send(());
    };
    RankProcess { pid, stdin: Box::new(stdin), stdout: Box::new(stdout), kill: Box::new(kill) }
}

fn end(child: &mut Child) {
    let _ = child.kill();
    child.wait().unwrap();
}

fn cat(_: Rank) -> Command {
    Command::new("cat")
}

fn connect(address: SocketAddr) -> Result<RankStream, HandshakeError> {
    RankStream::connect(address, &key(), rank(), LONG, Instant::now() + LONG)
}

/// Checks that a rank echoes on this stream. Until the handshake is complete, other connections can displace it.
fn answers((reader, writer, _): &mut (RankStreamReader, RankStreamWriter, RankStreamHandle)) {
    writer.write_all(b"?").unwrap();
    reader.read_exact(&mut [0]).unwrap();
}

#[test]
fn lines_of_the_protocol_go_both_ways() {
    watched(|| {
        served(cat, |address, _| {
            let (reader, writer, end) = connect(address).unwrap().split();
            let (mut lines, mut writer) = (Lines::new(BufReader::new(reader)), Writer::new(writer));
            for _ in 0..100 {
                writer.write(&RankRequest::Ping {}).unwrap();
                assert_eq!(lines.read::<RankRequest>().unwrap().unwrap(), RankRequest::Ping {});
            }
            end.close();
            assert!(lines.read::<RankReply>().is_none_or(|line| line.is_err()));
        });
    });
}

#[test]
fn a_stream_that_ends_after_a_report_ends_as_any_other() {
    watched(|| {
        let line_then_silence = |_| {
            let mut command = Command::new("sh");
            // The host reports a few times before the end.
            command.args(["-c", "echo a line; sleep 1"]);
            command
        };
        served(line_then_silence, |address, _| {
            let (mut reader, ..) = connect(address).unwrap().split();
            let mut said = Vec::new();
            reader.read_to_end(&mut said).unwrap();
            assert_eq!(said, b"a line\n");
        });
    });
}

#[test]
fn more_than_all_buffers_hold_goes_both_ways_at_once() {
    watched(|| {
        served(cat, |address, _| {
            let (mut reader, mut writer, end) = connect(address).unwrap().split();
            let sent: Vec<u8> =
                (0..20_000_000_u32).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
            thread::scope(|scope| {
                scope.spawn(|| writer.write_all(&sent).unwrap());
                let mut echoed = vec![0; sent.len()];
                reader.read_exact(&mut echoed).unwrap();
                assert!(echoed == sent);
            });
            end.close();
        });
    });
}

#[test]
fn the_rank_that_is_asked_for_is_started_and_its_end_ends_the_link() {
    watched(|| {
        let echo = |rank: Rank| {
            let mut command = Command::new("echo");
            command.arg(rank.to_string());
            command
        };
        served(echo, |address, ends| {
            let mut said = String::new();
            let (mut reader, _writer, _) = connect(address).unwrap().split();
            reader.read_to_string(&mut said).unwrap();
            assert_eq!(said, "2/3\n");
            ends.recv_timeout(LONG).unwrap();
        });
    });
}

#[test]
fn a_supervisor_that_goes_takes_its_rank_with_it() {
    watched(|| {
        // One process reads nothing, so the stream blocks; the other waits for lines.
        for command in ["sleep 1000", "cat"] {
            let shell = |_| {
                let mut shell = Command::new("sh");
                shell.args(["-c", &format!("exec {command}")]);
                shell
            };
            served(shell, |address, ends| {
                let (_, mut writer, end) = connect(address).unwrap().split();
                if command != "cat" {
                    let fills = thread::spawn(move || while writer.write_all(&[0; 1 << 16]).is_ok() {});
                    let wrote = Instant::now();
                    while wrote.elapsed() < SHORT {
                        thread::yield_now();
                    }
                    end.close();
                    fills.join().unwrap();
                }
                end.close();
                ends.recv_timeout(LONG).unwrap();
            });
        }
    });
}

#[test]
fn the_end_of_the_host_ends_its_ranks_and_links() {
    watched(|| {
        let (mut kept, mut all_ends) = (None, None);
        served(cat, |address, ends| {
            let mut link = connect(address).unwrap().split();
            answers(&mut link);
            (kept, all_ends) = (Some(link), Some(ends));
        });
        all_ends.unwrap().recv_timeout(LONG).unwrap();
        let (mut reader, ..) = kept.unwrap();
        let mut said = Vec::new();
        let _ = reader.read_to_end(&mut said);
        assert_eq!(said, Vec::<u8>::new());
    });
}

#[test]
fn only_so_many_ranks_run_at_once_and_a_place_becomes_free_again() {
    watched(|| {
        served(cat, |address, ends| {
            let mut links: Vec<_> = (0..RANKS_MAX).map(|_| connect(address).unwrap().split()).collect();
            links.iter_mut().for_each(answers);
            let strangers: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
            let refused = connect(address).unwrap_err();
            assert!(matches!(refused, HandshakeError::RejectedByPeer(RejectReason::Busy)), "{refused}");
            links.pop().unwrap().2.close();
            ends.recv_timeout(LONG).unwrap();
            let begun = Instant::now();
            let again = loop {
                assert!(begun.elapsed() < LONG, "the place of a rank that ended never becomes free");
                // The process has ended a moment before its slot is free.
                match connect(address) {
                    Err(HandshakeError::RejectedByPeer(RejectReason::Busy)) => thread::yield_now(),
                    connected => break connected.unwrap(),
                }
            };
            drop((again, links, strangers));
        });
    });
}

#[test]
fn another_key_and_another_purpose_are_refused() {
    watched(|| {
        served(cat, |address, _| {
            let other = ClusterKey::from_passphrase("another passphrase").unwrap();
            let refused = RankStream::connect(address, &other, rank(), LONG, Instant::now() + LONG).unwrap_err();
            assert!(matches!(refused, HandshakeError::RejectedByPeer(RejectReason::Key)), "{refused}");
            let hello = RankHello { purpose: RankPurpose::JoinComm, from: rank(), to: rank(), epoch: Epoch(1) };
            let limit = WaitLimit::until(Instant::now() + LONG);
            let refused = dial(address, &key(), &hello.hello(LONG), &limit).unwrap_err();
            assert!(matches!(refused, HandshakeError::RejectedByPeer(RejectReason::Purpose)), "{refused}");
        });
    });
}

#[test]
fn a_rank_that_is_stopped_is_known_to_be_until_it_goes_on() {
    watched(|| {
        let (started, pids) = channel();
        let started = Mutex::new(started);
        let start = |rank, ended| {
            let process = process(cat(rank), ended);
            started.lock().unwrap().send(process.pid).unwrap();
            process
        };
        served_by(start, |address, ends| {
            let (mut reader, mut writer, end) = connect(address).unwrap().split();
            let pid = pids.recv_timeout(LONG).unwrap();
            let reading = thread::spawn(move || {
                let mut said = [0; 4];
                reader.read_exact(&mut said).map(|()| said).unwrap()
            });
            for signal in ["STOP", "CONT", "STOP", "CONT"] {
                assert!(
                    Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success()
                );
                let begun = Instant::now();
                while end.is_stopped() != (signal == "STOP") {
                    assert!(begun.elapsed() < LONG, "nothing tells of {signal}");
                    thread::yield_now();
                }
            }
            writer.write_all(b"word").unwrap();
            assert_eq!(&reading.join().unwrap(), b"word", "what is told of it is not among what it says");
            end.close();
            ends.recv_timeout(LONG).unwrap();
        });
    });
}

#[test]
fn a_host_that_shows_no_sign_of_life_is_given_up_and_one_whose_rank_is_merely_silent_is_not() {
    watched(|| {
        served(cat, |address, _| {
            let connect = |address, silence| {
                RankStream::connect(address, &key(), rank(), silence, Instant::now() + LONG).unwrap()
            };
            // The handshake passes the proxy, and nothing after it.
            let held = proxy(address, TransitFault::None, TransitFault::Hold(49));
            let (mut reader, ..) = connect(held, SILENCE_MIN).split();
            let error = reader.read(&mut [0]).unwrap_err();
            assert_eq!(
                (error.kind(), error.to_string().as_str()),
                (io::ErrorKind::TimedOut, "nothing came from it for 1s")
            );

            // A busy machine may delay the signs of life by a second.
            let silence = 4 * SILENCE_MIN;
            let (mut reader, mut writer, end) = connect(address, silence).split();
            let reading = thread::spawn(move || reader.read(&mut [0]).unwrap());
            thread::sleep(2 * silence);
            writer.write_all(b"?").unwrap();
            assert_eq!(reading.join().unwrap(), 1);
            end.close();
        });
    });
}

#[test]
fn a_host_that_does_not_answer_is_given_up_at_the_deadline() {
    watched(|| {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let error = RankStream::connect(address, &key(), rank(), LONG, Instant::now() + SHORT).unwrap_err();
        assert!(matches!(error, HandshakeError::Io(ref error) if error.kind() == io::ErrorKind::TimedOut), "{error}");
    });
}

/// What arrives of a rank's line after a fault in transit.
fn said(back: TransitFault) -> (Vec<u8>, Option<io::ErrorKind>) {
    let found = Arc::new(Mutex::new((Vec::new(), None)));
    // No process: the line is sent before the host's first report.
    let line = |_, _| RankProcess {
        pid: std::process::id(),
        stdin: Box::new(io::sink()),
        stdout: Box::new(io::Cursor::new("a line\n")),
        kill: Box::new(|| {}),
    };
    served_by(line, |address, _| {
        let (mut reader, ..) = connect(proxy(address, TransitFault::None, back)).unwrap().split();
        let mut said = Vec::new();
        let error = reader.read_to_end(&mut said).err().map(|error| error.kind());
        *found.lock().unwrap() = (said, error);
    });
    Arc::into_inner(found).unwrap().into_inner().unwrap()
}

#[test]
fn a_line_that_was_altered_or_cut_is_an_error() {
    watched(|| {
        // Offsets after the handshake, after the line's header, and after the line, where the header of the end begins.
        let header = 49;
        let line = header + 2 + 5 + 16;
        let end = line + 2 + 7 + 16;
        assert_eq!(said(TransitFault::None), (b"a line\n".to_vec(), None));
        assert_eq!(said(TransitFault::Flip(header + 3)), (Vec::new(), Some(io::ErrorKind::InvalidData)));
        assert_eq!(said(TransitFault::Flip(line + 4)), (Vec::new(), Some(io::ErrorKind::InvalidData)));
        assert_eq!(said(TransitFault::Flip(line + 20)), (Vec::new(), Some(io::ErrorKind::InvalidData)));
        assert_eq!(said(TransitFault::Flip(line + 1)), (Vec::new(), Some(io::ErrorKind::UnexpectedEof)));
        assert_eq!(said(TransitFault::Cut(line + 4)), (Vec::new(), Some(io::ErrorKind::UnexpectedEof)));
        assert_eq!(said(TransitFault::Flip(end + 3)), (b"a line\n".to_vec(), Some(io::ErrorKind::InvalidData)));
    });
}
