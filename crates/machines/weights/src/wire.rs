//! The messages of a connection for weights, without I/O.
//!
//! The receiver asks for bytes of tensors; the sender answers the requests one after the other, in their order, each with
//! as many `Data` messages as it takes: all of [`DATA_BYTES_MAX`] but the last. A request is for at most
//! [`REQUEST_BYTES_MAX`], and at most [`REQUESTS_MAX`] are unanswered.

use std::fmt;

use super::Hex;
use super::tree_hash::RANGE_BYTES;

pub(super) const REQUEST_BYTES_MAX: u64 = RANGE_BYTES;
/// The most requests of a connection that are not answered.
pub(super) const REQUESTS_MAX: usize = 32;
/// The bytes of a tensor in one message.
pub(super) const DATA_BYTES_MAX: usize = 256 << 10;
pub(super) const DATA_HEADER_BYTES: usize = 12;

pub(super) const REQUEST: u8 = 1;
pub(super) const DATA: u8 = 2;
pub(super) const REFUSED: u8 = 3;
pub(super) const DONE: u8 = 4;
pub(super) const FAILED: u8 = 5;

const REQUEST_MESSAGE_BYTES: usize = 48;

/// Bytes of a tensor that the receiver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorRequest {
    /// Counts up from 0 on each connection.
    pub number: u32,
    pub hash: [u8; 32],
    pub offset: u64,
    /// 1 to [`REQUEST_BYTES_MAX`].
    pub bytes: u32,
}

/// What the receiver sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToSender {
    Request(TensorRequest),
    /// Everything has come.
    Done,
    /// The receiver gave up.
    Failed(FailReason),
}

/// What the sender sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ToReceiver<'a> {
    /// The next bytes of the request; `offset` counts from the tensor's start.
    Data {
        number: u32,
        offset: u64,
        bytes: &'a [u8],
    },
    Refused {
        number: u32,
        reason: RefuseReason,
    },
}

/// Why the sender does not answer a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefuseReason {
    Absent,
    /// The tensor is shorter.
    Range,
}

impl fmt::Display for RefuseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Absent => "it does not have it",
            Self::Range => "it has fewer bytes",
        })
    }
}

/// Why the receiver gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailReason {
    /// Its store cannot take them.
    Store,
    /// It got bytes that do not have this tensor's hash.
    WrongBytes([u8; 32]),
    /// The sender refused this tensor.
    Refused([u8; 32]),
    Protocol,
    Cancelled,
}

impl fmt::Display for FailReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store => f.write_str("its store cannot take the tensors"),
            Self::WrongBytes(hash) => write!(f, "it got other bytes than those of tensor {}", Hex(hash)),
            Self::Refused(hash) => write!(f, "tensor {} was refused", Hex(hash)),
            Self::Protocol => f.write_str("the protocol was broken"),
            Self::Cancelled => f.write_str("it was told to stop"),
        }
    }
}

/// A message that is not one of ours, or not at this point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("a message of kind {0} of the wrong form")]
    Form(u8),
    #[error("bytes that were not asked for")]
    Unasked,
}

/// The limit of a message from the receiver.
pub(super) fn to_sender_bytes_max(kind: u8) -> Option<usize> {
    match kind {
        REQUEST => Some(REQUEST_MESSAGE_BYTES),
        DONE => Some(0),
        FAILED => Some(1 + 32),
        _ => None,
    }
}

/// The limit of a message from the sender.
pub(super) fn to_receiver_bytes_max(kind: u8) -> Option<usize> {
    match kind {
        DATA => Some(DATA_HEADER_BYTES + DATA_BYTES_MAX),
        REFUSED => Some(5),
        _ => None,
    }
}

impl ToSender {
    pub fn encode(&self) -> (u8, Vec<u8>) {
        match self {
            Self::Request(TensorRequest { number, hash, offset, bytes }) => {
                (REQUEST, [&number.to_le_bytes()[..], hash, &offset.to_le_bytes(), &bytes.to_le_bytes()].concat())
            }
            Self::Done => (DONE, Vec::new()),
            Self::Failed(reason) => (FAILED, reason.encode()),
        }
    }

    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, WireError> {
        let parsed = match kind {
            REQUEST => TensorRequest::decode(body).map(Self::Request),
            DONE => body.is_empty().then_some(Self::Done),
            FAILED => FailReason::decode(body).map(Self::Failed),
            _ => None,
        };
        parsed.ok_or(WireError::Form(kind))
    }
}

impl TensorRequest {
    fn decode(body: &[u8]) -> Option<Self> {
        let (number, body) = body.split_first_chunk()?;
        let (hash, body) = body.split_first_chunk()?;
        let (offset, body) = body.split_first_chunk()?;
        let bytes = u32::from_le_bytes(body.try_into().ok()?);
        let (number, offset) = (u32::from_le_bytes(*number), u64::from_le_bytes(*offset));
        let is_valid = (1..=REQUEST_BYTES_MAX).contains(&bytes.into()) && offset.checked_add(bytes.into()).is_some();
        is_valid.then_some(Self { number, hash: *hash, offset, bytes })
    }
}

impl FailReason {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Store => vec![1],
            Self::WrongBytes(hash) => [&[2], &hash[..]].concat(),
            Self::Refused(hash) => [&[3], &hash[..]].concat(),
            Self::Protocol => vec![4],
            Self::Cancelled => vec![5],
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        match body.split_first()? {
            (1, []) => Some(Self::Store),
            (2, hash) => Some(Self::WrongBytes(hash.try_into().ok()?)),
            (3, hash) => Some(Self::Refused(hash.try_into().ok()?)),
            (4, []) => Some(Self::Protocol),
            (5, []) => Some(Self::Cancelled),
            _ => None,
        }
    }
}

/// What precedes the bytes in the body of a `Data` message.
pub(super) fn data_header(number: u32, offset: u64) -> [u8; DATA_HEADER_BYTES] {
    let mut header = [0; DATA_HEADER_BYTES];
    header[..4].copy_from_slice(&number.to_le_bytes());
    header[4..].copy_from_slice(&offset.to_le_bytes());
    header
}

pub(super) fn refused(number: u32, reason: RefuseReason) -> [u8; 5] {
    let [a, b, c, d] = number.to_le_bytes();
    [a, b, c, d, reason as u8]
}

impl<'a> ToReceiver<'a> {
    pub fn decode(kind: u8, body: &'a [u8]) -> Result<Self, WireError> {
        let parsed = match kind {
            DATA => Self::decode_data(body),
            REFUSED => Self::decode_refused(body),
            _ => None,
        };
        parsed.ok_or(WireError::Form(kind))
    }

    fn decode_data(body: &'a [u8]) -> Option<Self> {
        let (number, body) = body.split_first_chunk()?;
        let (offset, bytes) = body.split_first_chunk()?;
        let is_valid = (1..=DATA_BYTES_MAX).contains(&bytes.len());
        is_valid.then_some(Self::Data {
            number: u32::from_le_bytes(*number),
            offset: u64::from_le_bytes(*offset),
            bytes,
        })
    }

    fn decode_refused(body: &[u8]) -> Option<Self> {
        let (number, reason) = body.split_first_chunk()?;
        let reason = match reason {
            [0] => RefuseReason::Absent,
            [1] => RefuseReason::Range,
            _ => return None,
        };
        Some(Self::Refused { number: u32::from_le_bytes(*number), reason })
    }
}

/// Checks that what comes is what was asked for.
#[derive(Debug)]
pub(super) struct Answer {
    number: u32,
    next: u64,
    end: u64,
}

impl Answer {
    pub fn new(request: &TensorRequest) -> Self {
        let TensorRequest { number, offset, bytes, .. } = *request;
        Self { number, next: offset, end: offset + u64::from(bytes) }
    }

    /// Accepts the next bytes. Returns whether they were the last.
    pub fn accept(&mut self, number: u32, offset: u64, bytes: usize) -> Result<bool, WireError> {
        let expected = (self.end - self.next).min(DATA_BYTES_MAX as u64);
        if number != self.number || offset != self.next || bytes as u64 != expected {
            return Err(WireError::Unasked);
        }
        self.next += expected;
        Ok(self.next == self.end)
    }

    pub fn number(&self) -> u32 {
        self.number
    }
}

/// Reads any bytes as messages. Only builds for tests and fuzzing have this; `fuzz/fuzz_targets/weights_wire.rs` drives it.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    use super::*;

    /// Decodes `input`, of which the first byte is the kind, as a message of either side. What decodes encodes to the same
    /// bytes, within the limits; of data, a receiver accepts what it asked for and no more.
    pub fn read_any(input: &[u8]) {
        let Some((&kind, body)) = input.split_first() else { return };
        if let Ok(message) = ToSender::decode(kind, body) {
            assert_eq!(message.encode(), (kind, body.to_vec()), "a message reads back");
            assert!(to_sender_bytes_max(kind).is_some_and(|bytes_max| body.len() <= bytes_max), "within its limit");
        }
        match ToReceiver::decode(kind, body) {
            Ok(ToReceiver::Data { number, offset, bytes }) => {
                assert_eq!([&data_header(number, offset)[..], bytes].concat(), body, "a message reads back");
                assert!(
                    to_receiver_bytes_max(kind).is_some_and(|bytes_max| body.len() <= bytes_max),
                    "within its limit"
                );
                accept(number, offset, bytes.len());
            }
            Ok(ToReceiver::Refused { number, reason }) => assert_eq!(refused(number, reason), body, "it reads back"),
            Err(_) => {}
        }
    }

    /// Whatever is claimed, no more bytes are accepted than were asked for.
    fn accept(number: u32, offset: u64, bytes: usize) {
        let request = TensorRequest { number: 3, hash: [0; 32], offset: 1 << 20, bytes: DATA_BYTES_MAX as u32 + 5 };
        let mut answer = Answer::new(&request);
        let mut accepted = 0;
        while answer.next < answer.end {
            match answer.accept(number, offset.wrapping_add(accepted), bytes) {
                Ok(_) => accepted += bytes as u64,
                Err(_) => break,
            }
        }
        assert!(accepted <= u64::from(request.bytes));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn reasons() -> impl Strategy<Value = FailReason> {
        prop_oneof![
            Just(FailReason::Store),
            any::<[u8; 32]>().prop_map(FailReason::WrongBytes),
            any::<[u8; 32]>().prop_map(FailReason::Refused),
            Just(FailReason::Protocol),
            Just(FailReason::Cancelled),
        ]
    }

    #[test]
    fn requests_beyond_the_limits_are_refused() {
        let request = |offset, bytes| {
            let (kind, body) = ToSender::Request(TensorRequest { number: 1, hash: [2; 32], offset, bytes }).encode();
            ToSender::decode(kind, &body).is_ok()
        };
        assert!(request(0, 1) && request(1 << 40, REQUEST_BYTES_MAX as u32) && request(u64::MAX - 1, 1));
        assert!(!request(0, 0) && !request(0, REQUEST_BYTES_MAX as u32 + 1) && !request(u64::MAX, 1));
    }

    #[test]
    fn a_receiver_accepts_what_it_asked_for_in_its_order() {
        let bytes = DATA_BYTES_MAX as u32 + 10;
        let mut answer = Answer::new(&TensorRequest { number: 7, hash: [0; 32], offset: 100, bytes });
        let after = 100 + DATA_BYTES_MAX as u64;
        for (number, offset, bytes) in
            [(6, 100, DATA_BYTES_MAX), (7, 99, DATA_BYTES_MAX), (7, 100, 10), (7, after, 10), (7, 100, 0)]
        {
            assert_eq!(answer.accept(number, offset, bytes), Err(WireError::Unasked));
        }
        assert_eq!(answer.accept(7, 100, DATA_BYTES_MAX), Ok(false));
        assert_eq!(answer.accept(7, after, DATA_BYTES_MAX), Err(WireError::Unasked));
        assert_eq!(answer.accept(7, after, 10), Ok(true));
        assert_eq!(answer.accept(7, after + 10, 1), Err(WireError::Unasked));
    }

    proptest! {
        #[test]
        fn messages_read_back(
            number: u32, hash: [u8; 32], offset in 0..u64::MAX / 2, bytes in 1..=REQUEST_BYTES_MAX as u32, reason in reasons(),
            data in prop::collection::vec(any::<u8>(), 1..100), is_absent: bool,
        ) {
            let request = ToSender::Request(TensorRequest { number, hash, offset, bytes });
            for message in [request, ToSender::Done, ToSender::Failed(reason)] {
                let (kind, body) = message.encode();
                prop_assert!(to_sender_bytes_max(kind).unwrap() >= body.len());
                prop_assert_eq!(ToSender::decode(kind, &body), Ok(message));
                prop_assert!(ToSender::decode(kind, &[&body[..], &[0]].concat()).is_err());
            }
            let body = [&data_header(number, offset)[..], &data].concat();
            prop_assert_eq!(ToReceiver::decode(DATA, &body), Ok(ToReceiver::Data { number, offset, bytes: &data }));
            let reason = if is_absent { RefuseReason::Absent } else { RefuseReason::Range };
            let body = refused(number, reason);
            prop_assert_eq!(ToReceiver::decode(REFUSED, &body), Ok(ToReceiver::Refused { number, reason }));
        }

        #[test]
        fn any_bytes_are_read_or_refused(kind in 0_u8..8, body in prop::collection::vec(any::<u8>(), 0..60)) {
            fuzzing::read_any(&[&[kind][..], &body].concat());
        }
    }
}
