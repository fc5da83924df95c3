//! The sending side: answers a receiver's requests from tensors in memory, which are the mapped files of a checkpoint.

use std::fmt;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use net::{HandshakeError, MessageError, MessageStream};

use super::error::TransferError;
use super::wire::{
    DATA, DATA_BYTES_MAX, REFUSED, RefuseReason, TensorRequest, ToSender, data_header, refused, to_sender_bytes_max,
};

pub const CONNECTIONS_DEFAULT: usize = 3;
pub const CONNECTIONS_MAX: usize = 16;

/// How often a wait looks whether it is over.
const TICK: Duration = Duration::from_millis(100);
/// Pauses between attempts to connect: the first, which doubles, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// After so many lost connections in a row over which nothing was sent, an upload fails.
const ATTEMPTS_MAX: u32 = 8;

/// The tensors that can be sent.
pub trait TensorSource: Sync {
    /// All bytes of the tensor with this hash.
    fn tensor(&self, hash: &[u8; 32]) -> Option<&[u8]>;
}

impl<B: AsRef<[u8]> + Sync, S: std::hash::BuildHasher + Sync> TensorSource
    for std::collections::HashMap<[u8; 32], B, S>
{
    fn tensor(&self, hash: &[u8; 32]) -> Option<&[u8]> {
        self.get(hash).map(AsRef::as_ref)
    }
}

/// Answers the requests of a receiver over one connection, until it has what it wants. `sent` gets the number of bytes
/// that were sent since its last call.
pub fn serve_tensors(
    stream: MessageStream,
    source: &dyn TensorSource,
    sent: &(dyn Fn(u64) + Sync),
    is_over: &(dyn Fn() -> bool + Sync),
) -> Result<(), TransferError> {
    let MessageStream { sender, mut receiver } = stream;
    let mut body = Vec::new();
    loop {
        if is_over() {
            return Err(TransferError::Cancelled);
        }
        let kind = match receiver.receive(Some(Instant::now() + TICK), to_sender_bytes_max, &mut body) {
            Ok(Some(kind)) => kind,
            Ok(None) => return Err(MessageError::Broken(ErrorKind::UnexpectedEof.into()).into()),
            Err(MessageError::Timeout) => continue,
            Err(error) => return Err(error.into()),
        };
        let TensorRequest { number, hash, offset, bytes } = match ToSender::decode(kind, &body)? {
            ToSender::Request(request) => request,
            ToSender::Done => return Ok(()),
            ToSender::Failed(reason) => return Err(TransferError::ReceiverFailed(reason)),
        };
        let tensor = source.tensor(&hash).ok_or(RefuseReason::Absent);
        let within = |tensor: &'_ [u8]| -> Option<std::ops::Range<usize>> {
            let (start, end) = (usize::try_from(offset).ok()?, usize::try_from(offset + u64::from(bytes)).ok()?);
            (end <= tensor.len()).then_some(start..end)
        };
        match tensor.and_then(|tensor| Ok(&tensor[within(tensor).ok_or(RefuseReason::Range)?])) {
            Err(reason) => sender.send(REFUSED, &[&refused(number, reason)])?,
            Ok(range) => {
                let mut offset = offset;
                for data in range.chunks(DATA_BYTES_MAX) {
                    sender.send(DATA, &[&data_header(number, offset), data])?;
                    offset += data.len() as u64;
                    sent(data.len() as u64);
                    if is_over() {
                        return Err(TransferError::Cancelled);
                    }
                }
            }
        }
    }
}

/// How to send to one receiver.
pub struct Upload<'a> {
    /// Makes one attempt to connect to the receiver.
    pub dial: &'a (dyn Fn() -> Result<MessageStream, HandshakeError> + Sync),
    /// 1 to [`CONNECTIONS_MAX`].
    pub connections: usize,
    pub source: &'a dyn TensorSource,
    /// Gets the number of bytes that were sent since its last call.
    pub sent: &'a (dyn Fn(u64) + Sync),
    pub is_over: &'a (dyn Fn() -> bool + Sync),
}

impl fmt::Debug for Upload<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload").field("connections", &self.connections).finish_non_exhaustive()
    }
}

/// Serves a receiver over several connections, until it has what it wants. Connections that are lost are made again.
pub fn upload(upload: &Upload<'_>) -> Result<(), TransferError> {
    let is_decided = AtomicBool::new(false);
    let results = Mutex::new(Vec::new());
    let serve = || {
        let result = serve_until_decided(upload, &is_decided);
        // A connection that cannot be made is not needed as long as there are others.
        if result.as_ref().err().is_none_or(|error| !error.is_retryable()) {
            is_decided.store(true, Relaxed);
        }
        results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
    };
    thread::scope(|scope| {
        for _ in 1..upload.connections.clamp(1, CONNECTIONS_MAX) {
            // If no thread can be started, the others do its part.
            let _ = thread::Builder::new().name("consort-weights".to_owned()).spawn_scoped(scope, serve);
        }
        serve();
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    // The receiver's word counts; the rest are connections that were lost, or stopped because it was given.
    results.sort_by_key(|result| match result {
        Ok(()) => 0,
        Err(TransferError::Cancelled) => 2,
        Err(error) if error.is_retryable() => 3,
        Err(_) => 1,
    });
    results.swap_remove(0)
}

/// Serves over one connection after the other, until the receiver is done or has failed, over this one or another.
fn serve_until_decided(upload: &Upload<'_>, is_decided: &AtomicBool) -> Result<(), TransferError> {
    let is_over = || is_decided.load(Relaxed) || (upload.is_over)();
    let (mut attempts, mut pause) = (0, PAUSE_MIN);
    loop {
        let has_sent = AtomicBool::new(false);
        let sent = |bytes| {
            has_sent.store(true, Relaxed);
            (upload.sent)(bytes);
        };
        let served = (upload.dial)().map_err(TransferError::from);
        let error = match served.and_then(|stream| serve_tensors(stream, upload.source, &sent, &is_over)) {
            Err(error) if error.is_retryable() => error,
            result => return result,
        };
        if has_sent.into_inner() {
            (attempts, pause) = (0, PAUSE_MIN);
        }
        attempts += 1;
        if attempts == ATTEMPTS_MAX {
            return Err(error);
        }
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if is_over() {
                return Err(TransferError::Cancelled);
            }
            thread::sleep(TICK.min(pause));
        }
        pause = PAUSE_MAX.min(2 * pause);
    }
}
