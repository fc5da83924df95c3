//! `ExchangeFrame`: what each side of an exchange sends in clear. A header (magic, version, length of the body) and a body
//! (nonce, tries, element, name).

use std::io;
use std::net::TcpStream;

use crate::wait_limit::WaitLimit;

/// The longest name of a machine.
pub const MACHINE_NAME_BYTES_MAX: usize = 63;

/// Increased with every change that an older build would misread.
pub(super) const VERSION: u16 = 1;
const MAGIC: [u8; 8] = *b"consinv\0";
const NONCE_BYTES: usize = 16;
/// A side and a point of the curve.
pub(super) const ELEMENT_BYTES: usize = 33;
/// The body before the name.
const FIXED_BYTES: usize = NONCE_BYTES + 1 + ELEMENT_BYTES;
const BODY_BYTES_MAX: usize = FIXED_BYTES + MACHINE_NAME_BYTES_MAX;
pub(super) const HEADER_BYTES: usize = MAGIC.len() + 2 + 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExchangeFrame {
    pub nonce: [u8; NONCE_BYTES],
    /// Of the inviter: tries that are left if this one fails. Of the joiner: 0.
    pub tries_left: u8,
    pub element: [u8; ELEMENT_BYTES],
    /// What the machine calls itself: not unique, and only authentic once the exchange is complete.
    pub name: String,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum FrameError {
    #[error("the other side does not speak this protocol")]
    UnknownProtocol,
    #[error("the other side speaks version {theirs} of this protocol, this build speaks {VERSION}")]
    Version { theirs: u16 },
    #[error("the other side sent something that is no part of this protocol")]
    Malformed,
    #[error("talk to the other side")]
    Io(#[from] io::Error),
}

const SPLIT: &str = "the bytes were split at these lengths";

impl ExchangeFrame {
    pub fn bytes(&self) -> Vec<u8> {
        assert!(is_name(&self.name), "the name was checked");
        let mut bytes = header(FIXED_BYTES + self.name.len());
        bytes.extend_from_slice(&self.nonce);
        bytes.push(self.tries_left);
        bytes.extend_from_slice(&self.element);
        bytes.extend_from_slice(self.name.as_bytes());
        bytes
    }

    /// Reads a frame, and nothing after it. Returns its bytes too.
    pub fn read(stream: &TcpStream, limit: &WaitLimit<'_>) -> Result<(Self, Vec<u8>), FrameError> {
        let mut bytes = vec![0; HEADER_BYTES];
        // Another protocol is refused before it has sent as many bytes as a header has.
        limit.read_exact(stream, &mut bytes[..MAGIC.len()])?;
        if bytes[..MAGIC.len()] != MAGIC {
            return Err(FrameError::UnknownProtocol);
        }
        limit.read_exact(stream, &mut bytes[MAGIC.len()..])?;
        let body = body_bytes(bytes.first_chunk().expect(SPLIT))?;
        bytes.resize(HEADER_BYTES + body, 0);
        limit.read_exact(stream, &mut bytes[HEADER_BYTES..])?;
        Ok((Self::parse(&bytes)?, bytes))
    }

    /// The frame that these bytes are, without more after it.
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let (header, body) = bytes.split_first_chunk().ok_or(FrameError::Malformed)?;
        if body.len() != body_bytes(header)? {
            return Err(FrameError::Malformed);
        }
        let (nonce, rest) = body.split_first_chunk().ok_or(FrameError::Malformed)?;
        let ([tries_left], rest) = rest.split_first_chunk().ok_or(FrameError::Malformed)?;
        let (element, name) = rest.split_first_chunk().ok_or(FrameError::Malformed)?;
        let name = str::from_utf8(name).ok().filter(|name| is_name(name)).ok_or(FrameError::Malformed)?;
        Ok(Self { nonce: *nonce, tries_left: *tries_left, element: *element, name: name.to_owned() })
    }
}

/// The header of a frame without a body: tells a joiner with another version why it gets no answer.
pub(super) fn version_notice() -> Vec<u8> {
    header(0)
}

fn header(body: usize) -> Vec<u8> {
    let body = u8::try_from(body).expect("a body is short");
    [&MAGIC[..], &VERSION.to_le_bytes(), &[body]].concat()
}

/// The length of the body, from the header before it.
fn body_bytes(header: &[u8; HEADER_BYTES]) -> Result<usize, FrameError> {
    let (magic, rest) = header.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(FrameError::UnknownProtocol);
    }
    let theirs = u16::from_le_bytes([rest[0], rest[1]]);
    if theirs != VERSION {
        return Err(FrameError::Version { theirs });
    }
    let body = usize::from(rest[2]);
    if (FIXED_BYTES + 1..=BODY_BYTES_MAX).contains(&body) { Ok(body) } else { Err(FrameError::Malformed) }
}

/// Whether a machine may call itself so: 1 to 63 bytes without control characters, and without white space around it.
pub(super) fn is_name(name: &str) -> bool {
    let length = (1..=MACHINE_NAME_BYTES_MAX).contains(&name.len());
    length && name.trim() == name && !name.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    fn frame(name: &str) -> ExchangeFrame {
        ExchangeFrame { nonce: [7; NONCE_BYTES], tries_left: 2, element: [9; ELEMENT_BYTES], name: name.to_owned() }
    }

    /// Reads from a connection on which these bytes were sent, and then nothing more.
    fn read(bytes: &[u8]) -> Result<ExchangeFrame, FrameError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sender.write_all(bytes).unwrap();
        drop(sender);
        let limit = WaitLimit::until(Instant::now() + Duration::from_secs(60));
        ExchangeFrame::read(&listener.accept().unwrap().0, &limit).map(|(frame, _)| frame)
    }

    #[test]
    fn what_is_no_frame_is_refused_with_the_reason() {
        let whole = frame("kitchen").bytes();
        assert_eq!(read(&whole).unwrap(), frame("kitchen"));
        // What follows a frame is not read.
        assert_eq!(read(&[&whole[..], b"more"].concat()).unwrap(), frame("kitchen"));
        assert!(matches!(read(b"GET / HTTP/1.1\r\n\r\n"), Err(FrameError::UnknownProtocol)));
        assert!(matches!(read(&whole[..whole.len() - 1]), Err(FrameError::Io(_))));
        assert!(matches!(read(b"cons"), Err(FrameError::Io(_))));
        let altered = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            read(&bytes)
        };
        assert!(matches!(altered(8, 2), Err(FrameError::Version { theirs: 2 })));
        for length in [0, FIXED_BYTES as u8, BODY_BYTES_MAX as u8 + 1, 255] {
            assert!(matches!(altered(10, length), Err(FrameError::Malformed)), "{length}");
        }
        for byte in [b'\n', 0xff, b' '] {
            assert!(matches!(altered(whole.len() - 1, byte), Err(FrameError::Malformed)), "{byte}");
        }
        assert!(matches!(read(&version_notice()), Err(FrameError::Malformed)));
    }

    proptest! {
        #[test]
        fn a_frame_is_read_as_it_was_written(
            nonce: [u8; NONCE_BYTES], tries_left: u8, start: [u8; 32], side: u8, name in "[a-z][ -~]{0,60}[a-z]",
        ) {
            let mut element = [side; ELEMENT_BYTES];
            element[1..].copy_from_slice(&start);
            let frame = ExchangeFrame { nonce, tries_left, element, name };
            prop_assert_eq!(ExchangeFrame::parse(&frame.bytes()).unwrap(), frame);
        }

        #[test]
        fn any_bytes_are_a_frame_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..300), has_header: bool, length: u8,
        ) {
            let bytes = if has_header { [&header(usize::from(length))[..], &bytes].concat() } else { bytes };
            if let Ok(frame) = ExchangeFrame::parse(&bytes) {
                prop_assert_eq!(frame.bytes(), bytes);
            }
        }

        #[test]
        fn an_altered_frame_is_another_one_or_an_error(at: usize, flip in 1_u8..) {
            let mut bytes = frame("kitchen").bytes();
            let at = at % bytes.len();
            bytes[at] ^= flip;
            if let Ok(parsed) = ExchangeFrame::parse(&bytes) {
                prop_assert_ne!(parsed, frame("kitchen"));
            }
        }
    }
}
