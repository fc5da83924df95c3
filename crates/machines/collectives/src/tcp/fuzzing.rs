//! Parses what a peer can send, without a socket: whatever the bytes are, each parser ends with a value or an error.
//! Only builds for tests and fuzzing have this module; `fuzz/fuzz_targets/tcp_wire.rs` drives it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpListener;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use net::{
    ClusterKey, Hello, PARAMETER_BYTES, PLAIN_BYTES_MAX, Purpose, RECORD_BYTES_MAX, RecordDecryptor, RecordEncryptor,
    SecureStream, WaitLimit, dial, respond,
};
use types::WorldSize;

use super::connection::{Connection, ConnectionError};
use super::encoding::Encoding;
use super::message::{HEAD_BYTES, MessageHeader, TcpOp};
use super::rank_hello::RankHello;

/// Messages that one input may hold.
const MESSAGES_MAX: usize = 3;
/// Limit of the raw bytes that one input may become.
const RAW_BYTES_MAX: usize = 1 << 19;
/// Approximate limit of the reads per message.
const READS_MAX: usize = 100;

/// Parses `input` as one kind of data that a connection carries; the first byte selects the kind.
pub fn read_any(input: &[u8]) {
    let Some((&reader, input)) = input.split_first() else { return };
    match reader % 3 {
        0 => read_hello(input),
        1 => drop(read_messages(input)),
        _ => [Encoding::F32, Encoding::Q8].into_iter().for_each(|encoding| read_values(encoding, input)),
    }
}

/// The parameters of a hello.
fn read_hello(input: &[u8]) {
    let Some((&[purpose], rest)) = input.split_first_chunk() else { return };
    let Some(&parameters) = rest.first_chunk::<PARAMETER_BYTES>() else { return };
    let hello = Hello { purpose: Purpose(purpose), parameters, silence: Duration::ZERO };
    if let Ok(parsed) = RankHello::parse(&hello) {
        assert_eq!(parsed.hello(Duration::ZERO), hello, "a hello reads back");
    }
}

/// Messages in records, from a peer that has the key and sends arbitrary bytes. Returns how many were accepted.
fn read_messages(input: &[u8]) -> usize {
    let mut ciphers = Ciphers::get();
    let mut script = Script(input);
    // Most messages are short; the longest ones take two records.
    let payload = usize::from(script.byte().unwrap_or(0)).pow(2) * 2;
    let chunk = usize::from(script.number()).max(payload / READS_MAX + 1);
    let opener = ciphers.opener.clone();
    let sent = Sent::new(script, &mut ciphers, payload);
    let stream = Chunks { bytes: &sent.raw, chunk, is_ready: false };
    let peer = WorldSize::new(2).and_then(|world| world.rank(1)).expect("a world of two has a rank 1");
    let own_sealer = ciphers.own_sealer.take().expect("the input before has given it back");
    let mut connection = Connection::over(stream, peer, own_sealer, opener);
    let accepted = receive_all(&mut connection, &sent, payload);
    ciphers.own_sealer = Some(connection.into_sealer());
    accepted
}

fn receive_all(connection: &mut Connection<Chunks<'_>>, sent: &Sent, payload: usize) -> usize {
    let (mut plain, mut reads_max) = (&sent.plain[..], 2 * sent.raw.len() + 2);
    for sequence in 0..MESSAGES_MAX {
        connection.begin(0..0, Some((head(sequence), payload)));
        while !connection.is_received() {
            reads_max = reads_max.checked_sub(1).expect("every other read gives bytes, or the end");
            if connection.pull().is_err() {
                return sequence;
            }
        }
        assert_eq!(connection.payload(), &plain[HEAD_BYTES..][..payload], "a message is what the peer sealed");
        plain = &plain[HEAD_BYTES + payload..];
    }
    assert!(
        matches!(connection.reason(), ConnectionError::Gone | ConnectionError::Goodbye(_)),
        "a message that came is not taken back"
    );
    MESSAGES_MAX
}

/// The encryption of a connection. One handshake serves all inputs, because it is by far the slowest part.
struct Ciphers {
    /// Of the peer.
    sealer: RecordEncryptor,
    /// Opens each record that `sealer` sealed, so that a clone of it is ready for the next one.
    opener: RecordDecryptor,
    /// Of the side that reads. `None` while it is in use.
    own_sealer: Option<RecordEncryptor>,
}

impl Ciphers {
    fn get() -> std::sync::MutexGuard<'static, Self> {
        static CIPHERS: LazyLock<Mutex<Ciphers>> = LazyLock::new(|| Mutex::new(Ciphers::new()));
        CIPHERS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new() -> Self {
        const HANDSHAKE: &str = "a handshake on loopback";
        let key = ClusterKey::from_bytes([7; 32]);
        let hello = Hello { purpose: Purpose(1), parameters: [0; PARAMETER_BYTES], silence: Duration::ZERO };
        let limit = WaitLimit::until(Instant::now() + Duration::from_secs(60));
        let listener = TcpListener::bind("127.0.0.1:0").expect(HANDSHAKE);
        let address = listener.local_addr().expect(HANDSHAKE);
        thread::scope(|scope| {
            let peer = scope.spawn(|| dial(address, &key, &hello, &limit).expect(HANDSHAKE));
            let (stream, _) = listener.accept().expect(HANDSHAKE);
            let ((), SecureStream { opener, sealer: own_sealer, .. }) =
                respond(stream, &key, &limit, |_| Ok(())).expect(HANDSHAKE);
            let sealer = peer.join().expect(HANDSHAKE).sealer;
            Self { sealer, opener, own_sealer: Some(own_sealer) }
        })
    }

    /// A record of `plain`.
    fn seal(&mut self, plain: &[u8]) -> Vec<u8> {
        let mut record = vec![0; plain.len() + RECORD_BYTES_MAX - PLAIN_BYTES_MAX];
        let bytes = self.sealer.seal(plain, &mut record);
        assert_eq!(bytes, record.len());
        let mut opened = vec![0; bytes];
        assert_eq!(self.opener.open(&record[2..], &mut opened), Ok(plain.len()));
        record
    }
}

/// The values of a sum, as a peer encodes them.
fn read_values(encoding: Encoding, input: &[u8]) {
    let is_same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
    let fits = |&elements: &usize| encoding.bytes(elements) <= input.len();
    let elements = (0..=input.len()).rev().find(fits).expect("no elements take no bytes");
    let input = &input[..encoding.bytes(elements)];
    let (mut values, mut sums) = (vec![0.0; elements], vec![0.0; elements]);
    encoding.read(input, &mut values);
    encoding.add(input, &mut sums);
    assert!(values.iter().zip(&sums).all(is_same), "{encoding:?}: {values:?} are added as {sums:?}");
    let (mut bytes, mut read) = (Vec::new(), vec![0.0; elements]);
    encoding.append(&values, &mut bytes);
    encoding.read(&bytes, &mut read);
    encoding.round(&mut values);
    assert!(values.iter().zip(&read).all(is_same), "{encoding:?}: {values:?} are read as {read:?}");
}

fn head(sequence: usize) -> MessageHeader {
    MessageHeader::new(sequence as u64, TcpOp::Sum, 7)
}

/// The rest of an input, from which numbers and bytes are taken.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn bytes(&mut self, count: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes(1).first().copied()
    }

    fn number(&mut self) -> u16 {
        u16::from(self.byte().unwrap_or(0)) | u16::from(self.byte().unwrap_or(0)) << 8
    }
}

/// What a peer sends: the raw bytes, and the plaintext of its records.
struct Sent {
    raw: Vec<u8>,
    plain: Vec<u8>,
}

impl Sent {
    fn new(mut script: Script<'_>, ciphers: &mut Ciphers, payload: usize) -> Self {
        let right: Vec<u8> = (0..MESSAGES_MAX).flat_map(|sequence| message(sequence, payload)).collect();
        let mut right = &right[..];
        let mut sent = Self { raw: Vec::new(), plain: Vec::new() };
        while let Some(kind) = script.byte().filter(|_| sent.raw.len() < RAW_BYTES_MAX) {
            match kind % 4 {
                // The next record of the expected messages.
                0 => {
                    let left = match right.len() % (HEAD_BYTES + payload) {
                        0 => HEAD_BYTES + payload,
                        left => left,
                    };
                    sent.part(ciphers, &mut right, left.min(PLAIN_BYTES_MAX));
                }
                // A record with fewer or more of the expected bytes.
                1 => sent.part(ciphers, &mut right, usize::from(script.number()).min(PLAIN_BYTES_MAX)),
                // A record with other bytes.
                2 => {
                    let count = usize::from(script.byte().unwrap_or(0));
                    sent.record(ciphers, script.bytes(count));
                }
                // Bytes that are not a record.
                _ => {
                    let count = usize::from(script.byte().unwrap_or(0));
                    sent.raw.extend_from_slice(script.bytes(count));
                }
            }
        }
        sent
    }

    fn part(&mut self, ciphers: &mut Ciphers, right: &mut &[u8], bytes: usize) {
        let (part, rest) = right.split_at(bytes.min(right.len()));
        self.record(ciphers, part);
        *right = rest;
    }

    fn record(&mut self, ciphers: &mut Ciphers, plain: &[u8]) {
        self.raw.extend_from_slice(&ciphers.seal(plain));
        self.plain.extend_from_slice(plain);
    }
}

fn message(sequence: usize, payload: usize) -> impl Iterator<Item = u8> {
    head(sequence).bytes().into_iter().chain((0..payload).map(move |index| (index + sequence) as u8))
}

/// A stream that is ready every other time, and then has `chunk` bytes at most.
struct Chunks<'a> {
    bytes: &'a [u8],
    chunk: usize,
    is_ready: bool,
}

impl Read for Chunks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.is_ready = !self.is_ready;
        if !self.is_ready {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.chunk.min(buffer.len());
        (&mut self.bytes).take(count as u64).read(buffer)
    }
}

impl Write for Chunks<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn right_messages_are_accepted_up_to_the_first_wrong_record() {
        // Payloads of 8 bytes, in one record each, and of 130,050, in two.
        for (payload, records) in [(2, 1), (255, 2)] {
            let script = |kinds: &[u8]| [&[payload, 0xff, 0x1f], kinds].concat();
            assert_eq!(read_messages(&script(&vec![0; 3 * records])), 3);
            assert_eq!(read_messages(&script(&vec![0; 2 * records])), 2);
            assert_eq!(read_messages(&script(&[vec![0; records], vec![2, 0]].concat())), 1);
            assert_eq!(read_messages(&script(&[1, 15, 0])), 0);
            assert_eq!(read_messages(&script(&[&[3, 5, 3, 0, 1, 2, 3][..], &[0; 9]].concat())), 0);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(input in prop::collection::vec(any::<u8>(), 0..300)) {
            read_any(&input);
        }
    }
}
