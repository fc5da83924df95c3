//! Parses what a peer can send, without a socket: whatever the bytes are, each parser ends with a value or an error.
//! Only builds for tests and fuzzing have this module; `fuzz/fuzz_targets/message_stream.rs` drives it.

use std::sync::{LazyLock, Mutex, PoisonError};

use crate::hello::{HELLO_BYTES, Hello, RejectReason};
use crate::key::ClusterKey;
use crate::message::{Event, Header, MessageDecoder, MessageError, WHOLE_BYTES_MAX};
use crate::noise::{Forged, HANDSHAKE_BYTES, Handshake, RECORD_BYTES_MAX, RecordDecryptor, RecordEncryptor, pair};
use crate::record_reader::RecordReader;

/// Limits of the bodies: kinds from 200 on are not expected.
const BODY_BYTES_MAX: usize = 1 << 17;
/// Limit of the raw bytes that one input may become.
const RAW_BYTES_MAX: usize = 1 << 19;

/// Parses `input` as the start of a connection or as messages; the first byte selects which.
pub fn read_any(input: &[u8]) {
    let Some((&reader, input)) = input.split_first() else { return };
    match reader % 2 {
        0 => read_call(input),
        _ => drop(read_messages(input)),
    }
}

/// The start of a connection: a hello, a handshake message, and the responder's verdict.
fn read_call(input: &[u8]) {
    let Some((hello, rest)) = input.split_first_chunk::<HELLO_BYTES>() else { return };
    if let Ok(parsed) = Hello::parse(hello) {
        assert_eq!(parsed.bytes(), *hello, "a hello reads back");
    }
    let Some((message, rest)) = rest.split_first_chunk::<HANDSHAKE_BYTES>() else { return };
    let key = ClusterKey::from_bytes([7; 32]);
    let (mut initiator, mut responder) = (Handshake::initiator(&key, hello), Handshake::responder(&key, hello));
    initiator.write();
    for side in [&mut initiator, &mut responder] {
        assert_eq!(side.read(message), Err(Forged), "nobody speaks without the key");
    }
    if let Some((&byte, reason)) = rest.first().and_then(|byte| Some((byte, RejectReason::parse(*byte)?))) {
        assert_eq!(reason.byte(), byte, "a reason reads back");
    }
}

fn limit(kind: u8) -> Option<usize> {
    (kind < 200).then_some(BODY_BYTES_MAX >> (kind % 8))
}

/// How a stream of messages ended.
#[derive(Debug, PartialEq, Eq)]
enum Ending {
    /// There were no more bytes.
    Cut,
    Declared,
    Failed,
}

/// Messages in records, from a peer that has the key and sends arbitrary bytes. Returns the messages and the ending.
fn read_messages(input: &[u8]) -> (Vec<(u8, Vec<u8>)>, Ending) {
    let mut script = Script(input);
    let chunk = usize::from(script.number()).max(1);
    let mut cipher = Cipher::get();
    let mut decoder = MessageDecoder::new(RecordReader::new(cipher.opener.clone()));
    let sent = cipher.seal_all(script);
    let (mut unread, mut messages, mut body) = (&sent.raw[..], Vec::new(), Vec::new());
    let ending = loop {
        match decoder.next(limit, &mut body) {
            Ok(Some(Event::Heartbeat)) => {}
            Ok(Some(Event::End)) => break Ending::Declared,
            Ok(Some(Event::Message(kind))) => {
                assert!(limit(kind).is_some_and(|bytes_max| body.len() <= bytes_max), "a body is within its limit");
                messages.push((kind, body.clone()));
            }
            Ok(None) if unread.is_empty() => break Ending::Cut,
            Ok(None) => {
                let read = decoder.fill(|bytes| {
                    let count = chunk.min(bytes.len()).min(unread.len());
                    bytes[..count].copy_from_slice(&unread[..count]);
                    unread = &unread[count..];
                    Ok(count)
                });
                assert!(matches!(read, Ok(1..)), "there is room for the next bytes");
            }
            Err(MessageError::Timeout | MessageError::Silent(_) | MessageError::Stalled(_) | MessageError::Closed) => {
                panic!("without I/O there is no waiting")
            }
            Err(_) => break Ending::Failed,
        }
    };
    let received: usize = messages.iter().map(|(_, body)| body.len()).sum();
    assert!(received <= sent.plain_bytes, "bodies are what the peer sealed");
    (messages, ending)
}

/// Both ends of the direction that is read. One handshake serves all inputs, because it is by far the slowest part.
struct Cipher {
    sealer: RecordEncryptor,
    /// Opens each record that `sealer` sealed, so that a clone of it is ready for the next one.
    opener: RecordDecryptor,
}

/// What a peer sends.
struct Sent {
    raw: Vec<u8>,
    plain_bytes: usize,
}

impl Cipher {
    fn get() -> std::sync::MutexGuard<'static, Self> {
        static CIPHER: LazyLock<Mutex<Cipher>> = LazyLock::new(|| {
            let ((sealer, _), (_, opener)) = pair();
            Mutex::new(Cipher { sealer, opener })
        });
        CIPHER.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the script: messages, records with other bytes, bytes that are no records.
    fn seal_all(&mut self, mut script: Script<'_>) -> Sent {
        let mut sent = Sent { raw: Vec::new(), plain_bytes: 0 };
        while let Some(step) = script.byte().filter(|_| sent.raw.len() < RAW_BYTES_MAX) {
            match step % 5 {
                // A message whose body is cut into records of some length.
                0 => {
                    let (kind, bytes) = (script.byte().unwrap_or(1).clamp(1, 253), usize::from(script.number()) * 2);
                    let piece = usize::from(script.number()).clamp(bytes / 64 + 1, crate::PLAIN_BYTES_MAX);
                    let header = Header::new(kind, bytes).expect("the body is short");
                    self.seal(&mut sent, &header.bytes());
                    for record in vec![kind; bytes].chunks(piece) {
                        if bytes > WHOLE_BYTES_MAX {
                            self.seal(&mut sent, &Header::piece(record.len()).bytes());
                        }
                        self.seal(&mut sent, record);
                    }
                }
                1 => self.seal(&mut sent, &Header::HEARTBEAT.bytes()),
                2 => self.seal(&mut sent, &Header::END.bytes()),
                // A record with other bytes.
                3 => {
                    let count = usize::from(script.byte().unwrap_or(0));
                    self.seal(&mut sent, script.bytes(count));
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

    fn seal(&mut self, sent: &mut Sent, plain: &[u8]) {
        let start = sent.raw.len();
        sent.raw.resize(start + plain.len() + RECORD_BYTES_MAX - crate::PLAIN_BYTES_MAX, 0);
        self.sealer.seal(plain, &mut sent.raw[start..]);
        let mut opened = vec![0; sent.raw.len() - start];
        let record = crate::noise::split_record(&sent.raw[start..]).expect("the record is whole");
        assert_eq!(self.opener.open(record, &mut opened), Ok(plain.len()));
        sent.plain_bytes += plain.len();
    }
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One step of a script: a message of `kind` with `2 * half` bytes, in records of `piece`.
    fn message(kind: u8, half: u16, piece: u16) -> Vec<u8> {
        [&[0, kind][..], &half.to_le_bytes(), &piece.to_le_bytes()].concat()
    }

    /// Reads a script in pieces of 1,000 bytes.
    fn read(steps: &[&[u8]]) -> (Vec<(u8, usize)>, Ending) {
        let (messages, ending) = read_messages(&[&1000_u16.to_le_bytes()[..], &steps.concat()].concat());
        let check = |(kind, body): (u8, Vec<u8>)| {
            assert!(body.iter().all(|&byte| byte == kind));
            (kind, body.len())
        };
        (messages.into_iter().map(check).collect(), ending)
    }

    #[test]
    fn messages_are_read_up_to_the_first_fault() {
        let (first, second) = (&message(1, 4, 3)[..], &message(8, 65535, 65535)[..]);
        let (one, both) = (vec![(1, 8)], vec![(1, 8), (8, 131_070)]);
        let (beat, end): (&[u8], &[u8]) = (&[1], &[2]);
        assert_eq!(read(&[first, beat, second, beat]), (both.clone(), Ending::Cut));
        assert_eq!(read(&[first, second, end, first]), (both, Ending::Declared));
        assert_eq!(read(&[beat, &message(3, 0, 0), end]), (vec![(3, 0)], Ending::Declared));
        // A kind that is not expected; a body beyond its limit; bytes that are no record; a record that is no header.
        for fault in [&message(200, 4, 3)[..], &message(1, 65535, 9), &[4, 2, 0, 0], &[3, 1, 1]] {
            assert_eq!(read(&[first, fault, first]), (one.clone(), Ending::Failed));
        }
        // Within a message: a heartbeat where 4 bytes are due, an empty record, and a record that is too long.
        let begun = [3, 5, 7, 4, 0, 0, 0];
        for fault in [&[1][..], &[3, 0], &[3, 5, 1, 2, 3, 4, 5]] {
            assert_eq!(read(&[first, &begun, fault]), (one.clone(), Ending::Failed));
        }
        assert_eq!(read(&[&begun, &[3, 3, 7, 7, 7], &[3, 1, 7]]), (vec![(7, 4)], Ending::Cut));
        // Between the pieces of a long message: a heartbeat and a short message, but no end and no other long one.
        let long = [3, 5, 8, 2, 0, 1, 0];
        let last = [3, 5, 254, 1, 0, 0, 0, 3, 1, 8];
        assert_eq!(read(&[&long, &last, beat, first, &last]), (one.clone(), Ending::Cut));
        for fault in [end, &long, &[3, 5, 254, 0, 0, 0, 0], &[3, 5, 254, 3, 0, 1, 0], &[3, 5, 254, 4, 0, 0, 0, 1]] {
            assert_eq!(read(&[first, &long, fault]), (one.clone(), Ending::Failed), "{fault:?}");
        }
        assert_eq!(read(&[first, &[3, 5, 254, 1, 0, 0, 0]]), (one.clone(), Ending::Failed), "a piece of nothing");
        // A heartbeat and an end that state a body.
        for kind in [0, 255] {
            assert_eq!(read(&[first, &[3, 5, kind, 1, 0, 0, 0], first]), (one.clone(), Ending::Failed));
        }
    }

    #[test]
    fn a_length_alone_takes_no_memory() {
        let mut cipher = Cipher::get();
        let mut decoder = MessageDecoder::new(RecordReader::new(cipher.opener.clone()));
        let mut sent = Sent { raw: Vec::new(), plain_bytes: 0 };
        cipher.seal(&mut sent, &Header::new(9, crate::BODY_BYTES_MAX).unwrap().bytes());
        let filled = decoder.fill(|bytes| {
            bytes[..sent.raw.len()].copy_from_slice(&sent.raw);
            Ok(sent.raw.len())
        });
        assert_eq!(filled.unwrap(), sent.raw.len());
        assert_eq!(decoder.next(|_| Some(usize::MAX), &mut Vec::new()).unwrap(), None);
        assert!(decoder.body_capacity() <= 1 << 17);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(input in prop::collection::vec(any::<u8>(), 0..300)) {
            read_any(&input);
        }

        #[test]
        fn messages_are_read_as_they_were_sent(
            messages in prop::collection::vec((1..200_u8, any::<u16>(), any::<u16>()), 0..4), chunk in 1_u16..,
        ) {
            // Halved until they are within their limits.
            let fit = |(kind, half, piece): (u8, u16, u16)| (kind, half >> (kind % 8), piece);
            let messages: Vec<_> = messages.into_iter().map(fit).collect();
            let steps = messages.iter().flat_map(|&(kind, half, piece)| [message(kind, half, piece), vec![1]].concat());
            let script: Vec<_> = chunk.to_le_bytes().into_iter().chain(steps).collect();
            let sent: Vec<_> = messages.iter().map(|&(kind, half, _)| (kind, vec![kind; usize::from(half) * 2])).collect();
            let (read, ending) = read_messages(&script);
            prop_assert_eq!(ending, Ending::Cut);
            prop_assert!(read == sent);
        }
    }
}
