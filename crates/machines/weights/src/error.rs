//! What can go wrong with the store and with a transfer.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use net::{HandshakeError, MessageError};

use super::wire::{FailReason, RefuseReason, WireError};
use super::{Hex, Size};

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the tensor store {} cannot be used", folder.display())]
    Unusable { folder: PathBuf, source: io::Error },
    #[error("the folder {} belongs to another user: choose another one for received weights, with --store", folder.display())]
    NotOurs { folder: PathBuf },
    #[error("{} is a symbolic link: name the folder for received weights itself, with --store", folder.display())]
    Link { folder: PathBuf },
    #[error(
        "everybody may write to {}: choose another folder for received weights, with --store, or forbid it with `chmod o-w`",
        folder.display()
    )]
    Writable { folder: PathBuf },
    #[error(
        "{} are needed in the tensor store {}, and its limit is {}: raise the limit, or give this node fewer layers",
        Size(*needed), folder.display(), Size(*bytes_max)
    )]
    Limit { folder: PathBuf, needed: u64, bytes_max: u64 },
    #[error(
        "{} have to be written to the tensor store {}, and its disk has room for {}",
        Size(*needed), folder.display(), Size(*free)
    )]
    NoSpace { folder: PathBuf, needed: u64, free: u64 },
    #[error("the disk of the tensor store {} is full", folder.display())]
    DiskFull { folder: PathBuf },
    #[error("tensor {} is listed with two lengths", Hex(.0))]
    TwoLengths([u8; 32]),
    #[error("tensor {} is not in the store", Hex(.0))]
    Absent([u8; 32]),
    #[error("tensor {} was damaged in the store, and has been removed", Hex(.0))]
    Damaged([u8; 32]),
}

impl StoreError {
    /// `error` of an operation on a file in `folder`.
    pub(super) fn new(folder: &Path, source: io::Error) -> Self {
        let folder = folder.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { folder },
            _ => Self::Unusable { folder, source },
        }
    }
}

/// Why tensors could not be transferred.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The connection was lost. What it was doing can go on over another one.
    #[error("the connection for weights was lost")]
    Lost(#[source] MessageError),
    #[error("no byte of a tensor came for {0:?}")]
    Stalled(Duration),
    #[error("the other side broke the protocol for weights: {0}")]
    Protocol(#[from] WireError),
    #[error("the other side sent what is no message for weights")]
    Message(#[source] MessageError),
    #[error("tensor {} came with bytes that do not have its hash", Hex(.0))]
    WrongBytes([u8; 32]),
    #[error("the sender refused tensor {}: {reason}", Hex(hash))]
    Refused { hash: [u8; 32], reason: RefuseReason },
    #[error("the receiver gave up: {0}")]
    ReceiverFailed(FailReason),
    #[error("connect for weights")]
    Connect(#[from] HandshakeError),
    #[error("the transfer was cancelled")]
    Cancelled,
    #[error("start a thread")]
    Thread(#[source] io::Error),
}

impl TransferError {
    /// Whether another connection may succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Lost(_) | Self::Stalled(_) => true,
            Self::Connect(HandshakeError::Io(_)) => true,
            Self::Connect(HandshakeError::RejectedByPeer(reason)) => reason.is_transient(),
            _ => false,
        }
    }
}

impl From<MessageError> for TransferError {
    fn from(error: MessageError) -> Self {
        match error {
            MessageError::Timeout
            | MessageError::Silent(_)
            | MessageError::Stalled(_)
            | MessageError::Broken(_)
            | MessageError::Closed => Self::Lost(error),
            MessageError::Forged(_)
            | MessageError::Malformed
            | MessageError::Kind(_)
            | MessageError::TooLong { .. } => Self::Message(error),
        }
    }
}
