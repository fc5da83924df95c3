//! `RequestError`: the error reply to a request. Its kind is decided on the variants of errors alone.

use std::error::Error;

use engine::ExecutorError;
use kernels::BackendError;
use model::{CollectiveError, DescriptionError, LoadError};

use crate::protocol::ErrorKind;
use crate::protocol::limits::LimitError;
use collectives::CommError;
use collectives::NoGroup;
use collectives::shared_memory::SegmentError;
use collectives::tcp::ConnectError;

#[derive(Debug)]
pub struct RequestError {
    pub kind: ErrorKind,
    pub message: String,
}

impl RequestError {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The error with its causes.
    pub fn of(kind: ErrorKind, error: &(dyn Error + 'static)) -> Self {
        let (mut message, mut cause) = (error.to_string(), error.source());
        while let Some(error) = cause {
            // Some errors include their cause in their text.
            let text = error.to_string();
            if !message.ends_with(&text) {
                message = format!("{message}: {text}");
            }
            cause = error.source();
        }
        Self { kind, message }
    }
}

impl From<LimitError> for RequestError {
    fn from(error: LimitError) -> Self {
        Self::of(ErrorKind::BadRequest, &error)
    }
}

impl From<SegmentError> for RequestError {
    fn from(error: SegmentError) -> Self {
        Self::of(ErrorKind::NcclInitFailed, &error)
    }
}

impl From<CommError> for RequestError {
    fn from(error: CommError) -> Self {
        let kind = group_kind(&error).unwrap_or(ErrorKind::NcclInitFailed);
        Self::of(kind, &error)
    }
}

impl From<ConnectError> for RequestError {
    fn from(error: ConnectError) -> Self {
        let kind = match &error {
            ConnectError::Aborted | ConnectError::Comm(CommError::Aborted | CommError::Lost(_)) => ErrorKind::Aborted,
            _ => ErrorKind::NcclInitFailed,
        };
        Self::of(kind, &error)
    }
}

impl From<LoadError> for RequestError {
    fn from(error: LoadError) -> Self {
        let kind = match &error {
            LoadError::Memory(source) | LoadError::Tensor { source, .. } if is_out_of_memory(source) => {
                ErrorKind::InsufficientMemory
            }
            LoadError::Description(DescriptionError::Architecture { .. } | DescriptionError::Unsupported(_)) => {
                ErrorKind::UnsupportedArch
            }
            _ => ErrorKind::LoadFailed,
        };
        Self::of(kind, &error)
    }
}

impl From<ExecutorError> for RequestError {
    fn from(error: ExecutorError) -> Self {
        let kind = match &error {
            ExecutorError::Collective(source) => collective_kind(source),
            ExecutorError::Backend(source) if is_out_of_memory(source) => ErrorKind::InsufficientMemory,
            _ => ErrorKind::ForwardFailed,
        };
        Self::of(kind, &error)
    }
}

fn collective_kind(error: &CollectiveError) -> ErrorKind {
    match error {
        CollectiveError::Aborted | CollectiveError::Lost(_) => ErrorKind::Aborted,
        CollectiveError::Backend(source) if is_out_of_memory(source) => ErrorKind::InsufficientMemory,
        CollectiveError::Backend(_) => ErrorKind::ForwardFailed,
        CollectiveError::Transport(source) if source.is::<NoGroup>() => ErrorKind::NcclNotInitialised,
        CollectiveError::Transport(source) => {
            source.downcast_ref().and_then(group_kind).unwrap_or(ErrorKind::ForwardFailed)
        }
    }
}

pub fn group_kind(error: &CommError) -> Option<ErrorKind> {
    match error {
        CommError::Aborted | CommError::Lost(_) => Some(ErrorKind::Aborted),
        CommError::Stale { .. } => Some(ErrorKind::Stale),
        _ => None,
    }
}

fn is_out_of_memory(error: &BackendError) -> bool {
    matches!(error, BackendError::OutOfMemory { .. })
}
