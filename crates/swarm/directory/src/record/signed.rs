//! Records with their signatures. What may enter a [`Directory`](crate::Directory) is a [`VerifiedRecord`]: its values
//! are within limits, its time is right, and its peer signed it.

use std::sync::Arc;

use super::wire::{self, BODY_BYTES_MAX};
use super::{BlockRecord, RecordError};
use crate::identity::{PeerId, UnixTime};

/// The longest signature: RSA with 4096 bits.
pub const SIGNATURE_BYTES_MAX: usize = 512;
/// The longest record with its signature.
pub const RECORD_BYTES_MAX: usize = BODY_BYTES_MAX + 2 + SIGNATURE_BYTES_MAX;

/// Precedes the record in what is signed, so that no signature made for something else is taken for one of a record.
const DOMAIN: &[u8] = b"consort swarm record\0";

/// The key of this peer.
pub trait Signer {
    fn peer(&self) -> PeerId;
    /// At most [`SIGNATURE_BYTES_MAX`] bytes.
    fn sign(&self, message: &[u8]) -> Vec<u8>;
}

/// Knows the keys of peers.
pub trait Verifier {
    /// True if the key of `peer` made this signature.
    fn verify(&self, peer: &PeerId, message: &[u8], signature: &[u8]) -> bool;
}

/// A record as it travels. Its values are within limits; the signature is not checked yet.
#[derive(Clone, Debug, PartialEq)]
pub struct SignedRecord {
    record: BlockRecord,
    signature: Vec<u8>,
}

/// A record that its peer signed and that was valid when it was verified.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedRecord(Arc<SignedRecord>);

impl SignedRecord {
    /// Fails if the record is of another peer than the key, or if a value is beyond its limit.
    pub fn sign(record: BlockRecord, signer: &impl Signer) -> Result<Self, RecordError> {
        record.check()?;
        if signer.peer() != record.peer {
            return Err(RecordError::Field { field: "peer" });
        }
        let signature = signer.sign(&signed_bytes(&record));
        assert!(signature.len() <= SIGNATURE_BYTES_MAX, "a signer keeps to its contract");
        Ok(Self { record, signature })
    }

    pub fn record(&self) -> &BlockRecord {
        &self.record
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = wire::encode(&self.record);
        bytes.extend((self.signature.len() as u16).to_le_bytes());
        bytes.extend(&self.signature);
        bytes
    }

    /// Only one sequence of bytes is decoded as a given record.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(RecordError::TooLong { bytes: bytes.len() });
        }
        let (record, rest) = wire::decode(bytes)?;
        record.check()?;
        let (len, signature) = rest.split_first_chunk().ok_or(RecordError::Length)?;
        let len = usize::from(u16::from_le_bytes(*len));
        if len != signature.len() || len > SIGNATURE_BYTES_MAX {
            return Err(RecordError::Length);
        }
        Ok(Self { record, signature: signature.to_vec() })
    }

    pub fn verify(self, verifier: &impl Verifier, now: UnixTime) -> Result<VerifiedRecord, RecordError> {
        self.record.check_time(now)?;
        let peer = self.record.peer;
        match verifier.verify(&peer, &signed_bytes(&self.record), &self.signature) {
            true => Ok(VerifiedRecord(Arc::new(self))),
            false => Err(RecordError::Signature { peer }),
        }
    }
}

impl VerifiedRecord {
    pub fn record(&self) -> &BlockRecord {
        &self.0.record
    }

    /// To pass it on.
    pub fn signed(&self) -> &SignedRecord {
        &self.0
    }

    /// Whether it can be passed on.
    pub fn is_signed(&self) -> bool {
        !self.0.signature.is_empty()
    }

    /// A record that nobody signed, of a peer that the user of this process named. It cannot be passed on.
    pub fn configured(record: BlockRecord) -> Result<Self, RecordError> {
        record.check()?;
        Ok(Self(Arc::new(SignedRecord { record, signature: Vec::new() })))
    }
}

fn signed_bytes(record: &BlockRecord) -> Vec<u8> {
    [DOMAIN, &wire::encode(record)].concat()
}
