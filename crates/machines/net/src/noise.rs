//! The Noise protocol of a connection: two handshake messages, and the records that follow them. A record is a length
//! (u16, little endian) and a Noise message. Its nonce is its number, so a record that is missing, repeated, moved or
//! altered fails to decrypt.

use std::sync::Arc;

use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::key::ClusterKey;

/// AES-GCM: all hosts that run models have it in hardware. Nonces never repeat: each connection has its own keys, and
/// the nonce is a counter.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";

/// Each of the two handshake messages: an ephemeral key and the tag of an empty payload.
pub(crate) const HANDSHAKE_BYTES: usize = 32 + TAG_BYTES;

pub(crate) const TAG_BYTES: usize = 16;
pub(crate) const LENGTH_BYTES: usize = 2;
/// The longest Noise message, by the specification, with the length before it.
pub const RECORD_BYTES_MAX: usize = LENGTH_BYTES + 65535;
/// The largest plaintext of a record.
pub const PLAIN_BYTES_MAX: usize = RECORD_BYTES_MAX - LENGTH_BYTES - TAG_BYTES;

/// A message that was not written with the key, or not at this position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not authentic")]
pub struct Forged;

/// A handshake in progress, of either side.
pub(crate) struct Handshake(HandshakeState);

impl Handshake {
    pub fn initiator(key: &ClusterKey, prologue: &[u8]) -> Self {
        Self(builder(key, prologue).build_initiator().expect(COMPLETE))
    }

    pub fn responder(key: &ClusterKey, prologue: &[u8]) -> Self {
        Self(builder(key, prologue).build_responder().expect(COMPLETE))
    }

    /// The next message of this side.
    pub fn write(&mut self) -> [u8; HANDSHAKE_BYTES] {
        let mut message = [0; HANDSHAKE_BYTES];
        let bytes = self.0.write_message(&[], &mut message).expect("it is this side's turn");
        assert_eq!(bytes, HANDSHAKE_BYTES);
        message
    }

    pub fn read(&mut self, message: &[u8; HANDSHAKE_BYTES]) -> Result<(), Forged> {
        let mut nothing = [0; HANDSHAKE_BYTES];
        self.0.read_message(message, &mut nothing).map(drop).map_err(|_| Forged)
    }

    /// To be called after both messages.
    pub fn finish(self) -> (RecordEncryptor, RecordDecryptor) {
        let state = Arc::new(self.0.into_stateless_transport_mode().expect("both messages have passed"));
        (RecordEncryptor { state: Arc::clone(&state), nonce: 0 }, RecordDecryptor { state, nonce: 0 })
    }
}

const COMPLETE: &str = "the pattern has all that it needs";

fn builder<'a>(key: &'a ClusterKey, prologue: &'a [u8]) -> Builder<'a> {
    let builder = Builder::new(PATTERN.parse().expect("the pattern is a pattern"));
    builder.psk(0, key.bytes()).and_then(|builder| builder.prologue(prologue)).expect(COMPLETE)
}

/// Encrypts the records that this side sends.
#[derive(Debug)]
pub struct RecordEncryptor {
    state: Arc<StatelessTransportState>,
    nonce: u64,
}

impl RecordEncryptor {
    /// Encrypts `plain`, of at most [`PLAIN_BYTES_MAX`] bytes, as a record at the start of `record`, which has room for
    /// it. Returns the record's length.
    pub fn seal(&mut self, plain: &[u8], record: &mut [u8]) -> usize {
        assert!(plain.len() <= PLAIN_BYTES_MAX, "{} bytes for a record", plain.len());
        let (length, message) = record.split_at_mut(LENGTH_BYTES);
        let sealed = self.state.write_message(self.nonce, plain, message);
        let bytes = sealed.expect("the record has room, and nobody sends 2^64 of them");
        self.nonce += 1;
        length.copy_from_slice(&(bytes as u16).to_le_bytes());
        LENGTH_BYTES + bytes
    }
}

/// Decrypts the records that the other side sent. A clone starts at the same record.
#[derive(Clone, Debug)]
pub struct RecordDecryptor {
    state: Arc<StatelessTransportState>,
    nonce: u64,
}

impl RecordDecryptor {
    /// Decrypts a record's `message` to the start of `plain`, which has at least the message's length. Returns the
    /// length of the plaintext.
    pub fn open(&mut self, message: &[u8], plain: &mut [u8]) -> Result<usize, Forged> {
        let bytes = self.peek(message, plain)?;
        self.nonce += 1;
        Ok(bytes)
    }

    /// The same without advancing the nonce, so that the record can still be opened.
    pub fn peek(&self, message: &[u8], plain: &mut [u8]) -> Result<usize, Forged> {
        assert!(plain.len() >= message.len(), "{} bytes for a message of {}", plain.len(), message.len());
        self.state.read_message(self.nonce, message, plain).map_err(|_| Forged)
    }
}

/// The message of the record at the start of `bytes`, if the record is complete.
pub(crate) fn split_record(bytes: &[u8]) -> Option<&[u8]> {
    let (length, rest) = bytes.split_at_checked(LENGTH_BYTES)?;
    rest.get(..usize::from(u16::from_le_bytes([length[0], length[1]])))
}

/// The two sides of a connection, after their handshake.
#[cfg(any(test, fuzzing))]
pub(crate) fn pair() -> ((RecordEncryptor, RecordDecryptor), (RecordEncryptor, RecordDecryptor)) {
    let key = ClusterKey::from_bytes([7; 32]);
    let (mut initiator, mut responder) = (Handshake::initiator(&key, b"p"), Handshake::responder(&key, b"p"));
    responder.read(&initiator.write()).expect("both have the key");
    initiator.read(&responder.write()).expect("both have the key");
    (initiator.finish(), responder.finish())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn another_prologue_fails_the_handshake() {
        let key = ClusterKey::from_bytes([7; 32]);
        let mut responder = Handshake::responder(&key, b"epoch 2");
        assert_eq!(responder.read(&Handshake::initiator(&key, b"epoch 1").write()), Err(Forged));
    }

    #[test]
    fn a_record_opens_once_and_in_its_order() {
        let ((mut sealer, _), (_, mut opener)) = pair();
        let (mut first, mut second) = ([0; 64], [0; 64]);
        let (first_bytes, second_bytes) = (sealer.seal(b"one", &mut first), sealer.seal(b"two", &mut second));
        let (first, second) = (&first[LENGTH_BYTES..first_bytes], &second[LENGTH_BYTES..second_bytes]);
        let mut plain = [0; 64];
        assert_eq!(opener.open(second, &mut plain), Err(Forged));
        assert_eq!(opener.open(first, &mut plain), Ok(3));
        assert_eq!(opener.open(first, &mut plain), Err(Forged));
        assert_eq!(opener.open(second, &mut plain), Ok(3));
        assert_eq!(&plain[..3], b"two");
    }

    proptest! {
        #[test]
        fn a_record_is_split_off_only_when_it_is_whole(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let length = bytes.first_chunk().map(|&length| usize::from(u16::from_le_bytes(length)));
            let is_whole = length.is_some_and(|length| length + LENGTH_BYTES <= bytes.len());
            prop_assert_eq!(split_record(&bytes).map(<[u8]>::len), length.filter(|_| is_whole));
        }

        #[test]
        fn what_was_altered_does_not_open(plain in prop::collection::vec(any::<u8>(), 0..100), at: usize, flip in 1_u8..) {
            let ((mut sealer, _), (_, mut opener)) = pair();
            let mut record = [0; 200];
            let bytes = sealer.seal(&plain, &mut record);
            let message = &mut record[LENGTH_BYTES..bytes];
            let mut opened = vec![0; message.len()];
            let at = at % message.len();
            message[at] ^= flip;
            prop_assert_eq!(opener.open(message, &mut opened), Err(Forged));
            message[at] ^= flip;
            prop_assert_eq!(opener.open(message, &mut opened), Ok(plain.len()));
            prop_assert_eq!(&opened[..plain.len()], &plain[..]);
        }
    }
}
