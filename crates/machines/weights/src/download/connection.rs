//! One connection of a download: asks for ranges, receives them, and passes what comes to a writer thread.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use net::{MessageError, MessageReceiver, MessageSender, MessageStream};

use super::incoming::RangeWork;
use super::writer::{Chunk, write_chunks};
use super::{Download, Next, TICK, fail_reason};
use crate::error::TransferError;
use crate::wire::{
    Answer, DATA_HEADER_BYTES, REQUEST_BYTES_MAX, REQUESTS_MAX, TensorRequest, ToReceiver, ToSender, WireError,
    to_receiver_bytes_max,
};

/// The most bytes that are asked for and have not come: enough that a sender never waits for the next request.
const ASKED_BYTES_MAX: u64 = 2 * REQUEST_BYTES_MAX;
/// Messages that wait for the writer.
const CHUNKS_MAX: usize = 16;
/// How long a sender may take for one message of data.
const DATA_DEADLINE: Duration = Duration::from_secs(30);
/// How long the rest of the data is received after the download has failed.
const DISCARD_DEADLINE: Duration = Duration::from_secs(2);

pub struct Connection<'a> {
    download: &'a Download,
    sender: &'a MessageSender,
    receiver: &'a mut MessageReceiver,
    /// Requests without a complete answer, in their order.
    asked: VecDeque<Asked>,
    next_number: u32,
    chunks: SyncSender<Chunk>,
    /// Buffers that the writer has emptied.
    spare: Receiver<Vec<u8>>,
}

struct Asked {
    work: RangeWork,
    answer: Answer,
    bytes: u64,
}

impl Connection<'_> {
    pub fn run(download: &Download, stream: MessageStream) -> Result<(), TransferError> {
        let MessageStream { sender, mut receiver } = stream;
        let (chunks, to_write) = sync_channel(CHUNKS_MAX);
        let (emptied, spare) = channel();
        let (asked, received) = thread::scope(|scope| {
            let write = move || write_chunks(download, &to_write, &emptied);
            let writer = thread::Builder::new().name("consort-store".to_owned());
            let writer = writer.spawn_scoped(scope, write).map_err(TransferError::Thread)?;
            let mut connection = Connection {
                download,
                sender: &sender,
                receiver: &mut receiver,
                asked: VecDeque::new(),
                next_number: 0,
                chunks,
                spare,
            };
            let received = connection.receive_all();
            let asked = connection.end();
            writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, TransferError>((asked, received))
        })?;
        download.put_back(asked.into_iter().map(|asked| asked.work));
        let result = match received {
            Err(error) if error.is_retryable() => return Err(error),
            Err(error) => Err(download.fail(error)),
            Ok(()) => Ok(()),
        };
        let last = download.failure().map_or(ToSender::Done, |error| ToSender::Failed(fail_reason(&error)));
        let (kind, body) = last.encode();
        // The sender may have disconnected already, so the error is ignored.
        let _ = sender.send(kind, &[&body]).and_then(|()| sender.finish());
        if last != ToSender::Done {
            discard_until_hangup(&mut receiver);
        }
        result
    }

    /// The requests without a complete answer. The writer writes what has come, and ends.
    fn end(self) -> VecDeque<Asked> {
        self.asked
    }

    /// Returns at the end of the download.
    fn receive_all(&mut self) -> Result<(), TransferError> {
        let mut body = Vec::new();
        loop {
            if !self.ask()? {
                return Ok(());
            }
            if !self.asked.is_empty() {
                let kind = match self.receive_message(&mut body)? {
                    Some(kind) => kind,
                    None => return Ok(()),
                };
                self.take(kind, &mut body)?;
            }
        }
    }

    /// Sends requests as long as there is room and work. Returns false at the end of the download.
    fn ask(&mut self) -> Result<bool, TransferError> {
        while self.asked.is_empty()
            || (self.asked.len() < REQUESTS_MAX
                && self.asked.iter().map(|asked| asked.bytes).sum::<u64>() < ASKED_BYTES_MAX)
        {
            match self.download.next(self.asked.is_empty())? {
                Next::Receive(work) => self.ask_for(work)?,
                Next::Idle => return Ok(true),
                Next::End => return Ok(false),
            }
        }
        Ok(true)
    }

    fn ask_for(&mut self, work: RangeWork) -> Result<(), TransferError> {
        let rest = work.rest();
        if rest.is_empty() {
            // All of it came in an earlier attempt, so it only has to be hashed.
            self.write(Chunk { work, offset: rest.start, body: vec![0; DATA_HEADER_BYTES] });
            return Ok(());
        }
        let (number, bytes) = (self.next_number, rest.end - rest.start);
        self.next_number = number.wrapping_add(1);
        let hash = work.tensor.id.hash;
        let request = TensorRequest { number, hash, offset: rest.start, bytes: bytes as u32 };
        // Before it is sent, so that it is put back if sending fails.
        self.asked.push_back(Asked { work, answer: Answer::new(&request), bytes });
        let (kind, body) = ToSender::Request(request).encode();
        Ok(self.sender.send(kind, &[&body])?)
    }

    /// The kind of the next message; `None` if the download has ended meanwhile.
    fn receive_message(&mut self, body: &mut Vec<u8>) -> Result<Option<u8>, TransferError> {
        let started = Instant::now();
        loop {
            match self.receiver.receive(Some(Instant::now() + TICK), to_receiver_bytes_max, body) {
                Ok(Some(kind)) => return Ok(Some(kind)),
                Ok(None) => return Err(MessageError::Broken(std::io::ErrorKind::UnexpectedEof.into()).into()),
                Err(MessageError::Timeout) if self.download.failure().is_some() => return Ok(None),
                Err(MessageError::Timeout) if started.elapsed() < DATA_DEADLINE => {}
                Err(MessageError::Timeout) => return Err(TransferError::Stalled(DATA_DEADLINE)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes a message that came while something was asked for.
    fn take(&mut self, kind: u8, body: &mut Vec<u8>) -> Result<(), TransferError> {
        let asked = self.asked.front_mut().ok_or(WireError::Unasked)?;
        match ToReceiver::decode(kind, body)? {
            ToReceiver::Data { number, offset, bytes } => {
                let is_last = asked.answer.accept(number, offset, bytes.len())?;
                let work = asked.work.clone();
                if is_last {
                    self.asked.pop_front();
                }
                let spare = self.spare.try_recv().unwrap_or_default();
                self.write(Chunk { work, offset, body: std::mem::replace(body, spare) });
                Ok(())
            }
            ToReceiver::Refused { number, reason } if number == asked.answer.number() => {
                Err(TransferError::Refused { hash: asked.work.tensor.id.hash, reason })
            }
            ToReceiver::Refused { .. } => Err(WireError::Unasked.into()),
        }
    }

    fn write(&self, chunk: Chunk) {
        // The writer ends early only when the download has failed, which is seen before the next request.
        let _ = self.chunks.send(chunk);
    }
}

/// Receives what the sender still sends, for a while: it reads why the receiver gave up only after it has sent what it was
/// asked for.
fn discard_until_hangup(receiver: &mut MessageReceiver) {
    let (deadline, mut body) = (Instant::now() + DISCARD_DEADLINE, Vec::new());
    while matches!(receiver.receive(Some(deadline), to_receiver_bytes_max, &mut body), Ok(Some(_))) {}
}
