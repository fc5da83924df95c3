//! `MessageStream`: messages in both directions over one connection, each a kind (1 to 253) and a body.
//!
//! A long message is sent in pieces that take about [`PIECE_TIME`] each at the rate at which the connection takes bytes.
//! Between them go heartbeats, and short messages of other threads.
//!
//! A thread of each stream sends a heartbeat when nothing else has been sent for a quarter of the silence deadline. A
//! receiver that gets nothing for the whole of it, over this connection and those that share its [`LastHeard`], reports
//! [`MessageError::Silent`]. A sender of whose bytes none is taken for as long reports [`MessageError::Stalled`], so a receiver
//! that has much to do must leave the receiving to a thread of its own.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use socket2::SockRef;

use crate::handshake::{HandshakeError, SecureStream, dial};
use crate::hello::Hello;
use crate::key::ClusterKey;
use crate::message::{Event, Header, MessageDecoder, MessageError, WHOLE_BYTES_MAX};
use crate::noise::{LENGTH_BYTES, PLAIN_BYTES_MAX, RECORD_BYTES_MAX, RecordEncryptor, TAG_BYTES};
use crate::record_reader::RecordReader;
use crate::wait_limit::WaitLimit;

/// Bytes written to the connection at once: a few records.
const OUT_BYTES: usize = 4 * RECORD_BYTES_MAX;
/// Heartbeats within the silence deadline.
const HEARTBEATS: u32 = 4;
/// How long a piece of a long message may hold up what is to go between.
const PIECE_TIME: Duration = Duration::from_millis(100);
/// Lengths of pieces. The first ones are the shortest, since the rate is not known yet.
const PIECE_BYTES_MIN: usize = PLAIN_BYTES_MAX;
const PIECE_BYTES_MAX: usize = 8 << 20;
/// Bytes that the operating system takes before it has sent them. Without this limit it takes megabytes: what follows would wait
/// for them, and a slow connection would seem to take nothing for seconds.
const UNSENT_BYTES_MAX: u32 = 128 << 10;

/// The two halves can be used by two threads. When both and all clones of the sender are dropped, the connection is
/// closed.
#[derive(Debug)]
pub struct MessageStream {
    pub sender: MessageSender,
    pub receiver: MessageReceiver,
}

/// Sends messages, also from several threads. Messages of one thread arrive in their order.
#[derive(Clone)]
pub struct MessageSender {
    shared: Arc<Shared>,
}

pub struct MessageReceiver {
    shared: Arc<Shared>,
    decoder: MessageDecoder,
    heard: LastHeard,
    state: ReceiverState,
}

/// When bytes of a machine came last, over whichever of its connections share this: while it sends much over one of them, what
/// it sends over another may be late. Clones share it.
#[derive(Clone, Debug)]
pub struct LastHeard(Arc<Mutex<Instant>>);

impl LastHeard {
    fn now() -> Self {
        Self(Arc::new(Mutex::new(Instant::now())))
    }

    fn get(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ReceiverState {
    Open,
    /// The other side declared the end.
    Ended,
    /// An error has been returned.
    Failed,
}

struct Shared {
    stream: TcpStream,
    silence: Duration,
    is_closed: AtomicBool,
    sending: Mutex<Sending>,
    /// Held while a long message is sent: one after the other.
    long: Mutex<()>,
    /// Short messages that wait for `sending`. A long message lets them go between its pieces.
    waiting: AtomicUsize,
    /// A short message was sent.
    sent: Condvar,
    /// Dropped to end the thread that sends heartbeats.
    heartbeats: Mutex<Option<Sender<()>>>,
}

struct Sending {
    sealer: RecordEncryptor,
    /// Records that are not written yet.
    out: Box<[u8]>,
    out_bytes: usize,
    /// When bytes were written last.
    sent_at: Instant,
    /// Bytes of the next piece of a long message.
    piece_bytes: usize,
    is_finished: bool,
}

impl fmt::Debug for MessageSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageSender").field("stream", &self.shared.stream).finish_non_exhaustive()
    }
}

impl fmt::Debug for MessageReceiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessageReceiver").field("stream", &self.shared.stream).finish_non_exhaustive()
    }
}

impl MessageStream {
    pub fn new(secured: SecureStream) -> io::Result<Self> {
        let SecureStream { stream, sealer, opener, silence } = secured;
        let now = Instant::now();
        SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT_BYTES_MAX)?;
        let (out, out_bytes, piece_bytes) = (vec![0; OUT_BYTES].into(), 0, PIECE_BYTES_MIN);
        let sending = Sending { sealer, out, out_bytes, sent_at: now, piece_bytes, is_finished: false };
        let (running, closed) = channel();
        let shared = Arc::new(Shared {
            stream,
            silence,
            is_closed: AtomicBool::new(false),
            sending: Mutex::new(sending),
            long: Mutex::default(),
            waiting: AtomicUsize::new(0),
            sent: Condvar::new(),
            heartbeats: Mutex::new(Some(running)),
        });
        let weak = Arc::downgrade(&shared);
        thread::Builder::new()
            .name("consort-beats".to_owned())
            .spawn(move || send_heartbeats(&weak, silence / HEARTBEATS, &closed))?;
        let decoder = MessageDecoder::new(RecordReader::new(opener));
        let receiver = MessageReceiver {
            shared: Arc::clone(&shared),
            decoder,
            heard: LastHeard::now(),
            state: ReceiverState::Open,
        };
        Ok(Self { sender: MessageSender { shared }, receiver })
    }

    /// One attempt to connect.
    pub fn connect(
        address: SocketAddr,
        key: &ClusterKey,
        hello: &Hello,
        limit: &WaitLimit<'_>,
    ) -> Result<Self, HandshakeError> {
        Ok(Self::new(dial(address, key, hello, limit)?)?)
    }
}

impl MessageSender {
    /// Sends a message of `kind`, from 1 to 253, whose body is the parts one after the other. Returns when all bytes are
    /// with the operating system. An error ends the stream.
    pub fn send(&self, kind: u8, parts: &[&[u8]]) -> Result<(), MessageError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let header = Header::new(kind, bytes)?;
        if bytes > WHOLE_BYTES_MAX {
            return self.send_long(header, parts);
        }
        let shared = &*self.shared;
        shared.waiting.fetch_add(1, AcqRel);
        let mut sending = shared.sending();
        shared.waiting.fetch_sub(1, AcqRel);
        let sent = shared.append(&mut sending, &header.bytes()).and_then(|()| {
            let mut records = parts.iter().flat_map(|part| part.chunks(PLAIN_BYTES_MAX));
            records.try_for_each(|record| shared.append(&mut sending, record))
        });
        let sent = sent.and_then(|()| shared.flush(&mut sending));
        shared.sent.notify_one();
        sent
    }

    /// Sends a message in pieces. What waits meanwhile goes between them.
    fn send_long(&self, header: Header, parts: &[&[u8]]) -> Result<(), MessageError> {
        let shared = &*self.shared;
        let _turn = shared.long.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sending = shared.sending();
        shared.append(&mut sending, &header.bytes())?;
        let mut parts = parts.iter().copied().filter(|part| !part.is_empty());
        let mut part = parts.next().unwrap_or_default();
        while !part.is_empty() {
            // A piece is of one part, so that nothing is copied.
            let (piece, rest) = part.split_at(part.len().min(sending.piece_bytes));
            let begun = Instant::now();
            shared.append(&mut sending, &Header::piece(piece.len()).bytes())?;
            piece.chunks(PLAIN_BYTES_MAX).try_for_each(|record| shared.append(&mut sending, record))?;
            shared.flush(&mut sending)?;
            sending.piece_bytes = next_piece_bytes(piece.len(), begun.elapsed(), sending.piece_bytes);
            part = if rest.is_empty() { parts.next().unwrap_or_default() } else { rest };
            if shared.waiting.load(Acquire) > 0 {
                // One of them has the turn now, or has had it.
                let waited = shared.sent.wait_timeout(sending, PIECE_TIME);
                sending = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(())
    }

    /// Declares the end of this side's messages. From then on nothing can be sent; the other side can still send, and is
    /// not expected to hear from this side.
    pub fn finish(&self) -> Result<(), MessageError> {
        let _turn = self.shared.long.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sending = self.shared.sending();
        self.shared.append(&mut sending, &Header::END.bytes())?;
        self.shared.flush(&mut sending)?;
        sending.is_finished = true;
        self.shared.end_heartbeats();
        self.shared.stream.shutdown(Shutdown::Write).map_err(MessageError::Broken)
    }

    /// Closes the connection. Pending and later calls of both halves fail with [`MessageError::Closed`].
    pub fn close(&self) {
        self.shared.close();
    }

    /// Waits until the other side has closed the connection or declared its end, for `timeout` at most. Returns whether
    /// it has.
    pub fn wait_for_hangup(&self, timeout: Duration) -> bool {
        wait(&self.shared.stream, PollFlags::RDHUP, Instant::now() + timeout).is_ok_and(|is_ready| is_ready)
    }

    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.shared.stream.local_addr()
    }

    pub fn peer_address(&self) -> io::Result<SocketAddr> {
        self.shared.stream.peer_addr()
    }
}

impl MessageReceiver {
    /// For other connections of the same machine.
    pub fn last_heard(&self) -> LastHeard {
        self.heard.clone()
    }

    /// From now on, the other side counts as silent only if nothing comes over any of the connections that share this.
    pub fn share_last_heard(&mut self, heard: LastHeard) {
        self.heard = heard;
    }

    /// Waits for the next message, until `deadline`. Returns its kind, or `None` once the other side has declared the
    /// end. The body replaces what is in `body`; giving the same buffer again saves allocations.
    ///
    /// `body_bytes_max` is the limit for the body of a message of a kind; `None` if that kind is not expected.
    pub fn receive(
        &mut self,
        deadline: Option<Instant>,
        body_bytes_max: impl Fn(u8) -> Option<usize>,
        body: &mut Vec<u8>,
    ) -> Result<Option<u8>, MessageError> {
        let received = match self.state {
            ReceiverState::Open => self.receive_open(deadline, body_bytes_max, body),
            ReceiverState::Ended => Ok(None),
            ReceiverState::Failed => Err(MessageError::Closed),
        };
        match &received {
            Ok(Some(_)) | Err(MessageError::Timeout) => {}
            Ok(None) => self.state = ReceiverState::Ended,
            Err(_) => {
                self.state = ReceiverState::Failed;
                self.shared.close();
            }
        }
        received
    }

    fn receive_open(
        &mut self,
        deadline: Option<Instant>,
        body_bytes_max: impl Fn(u8) -> Option<usize>,
        body: &mut Vec<u8>,
    ) -> Result<Option<u8>, MessageError> {
        loop {
            match self.decoder.next(&body_bytes_max, body)? {
                Some(Event::Message(kind)) => return Ok(Some(kind)),
                Some(Event::End) => return Ok(None),
                Some(Event::Heartbeat) => {}
                None => self.fill(deadline)?,
            }
        }
    }

    /// Reads some bytes, and waits for them if there are none.
    fn fill(&mut self, deadline: Option<Instant>) -> Result<(), MessageError> {
        let Self { shared, decoder, heard, .. } = self;
        loop {
            match decoder.fill(|bytes| Ok(recv(&shared.stream, bytes, RecvFlags::DONTWAIT)?.1)) {
                Ok(0) => return Err(shared.failure(ErrorKind::UnexpectedEof.into())),
                Ok(_) => {
                    heard.set();
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                // By TCP keepalive.
                Err(error) if error.kind() == ErrorKind::TimedOut => return Err(MessageError::Silent(shared.silence)),
                Err(error) => return Err(shared.failure(error)),
            }
            let silent_at = heard.get() + shared.silence;
            let until = deadline.map_or(silent_at, |deadline| deadline.min(silent_at));
            if !wait(&shared.stream, PollFlags::IN, until).map_err(|error| shared.failure(error))? {
                let now = Instant::now();
                if now >= heard.get() + shared.silence {
                    return Err(MessageError::Silent(shared.silence));
                }
                if deadline.is_some_and(|deadline| now >= deadline) {
                    return Err(MessageError::Timeout);
                }
            }
        }
    }
}

impl Shared {
    fn sending(&self) -> MutexGuard<'_, Sending> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a record to those that are to be written; writes them first if there is no room.
    fn append(&self, sending: &mut Sending, plain: &[u8]) -> Result<(), MessageError> {
        if sending.is_finished {
            return Err(MessageError::Closed);
        }
        if sending.out.len() - sending.out_bytes < LENGTH_BYTES + plain.len() + TAG_BYTES {
            self.flush(sending)?;
        }
        sending.out_bytes += sending.sealer.seal(plain, &mut sending.out[sending.out_bytes..]);
        Ok(())
    }

    /// Writes the records that have been appended.
    fn flush(&self, sending: &mut Sending) -> Result<(), MessageError> {
        let written = self.write(&sending.out[..sending.out_bytes]);
        sending.out_bytes = 0;
        sending.sent_at = Instant::now();
        if written.is_err() {
            // Half a record may have been written, so nothing can follow it.
            sending.is_finished = true;
            self.close();
        }
        written
    }

    fn write(&self, mut bytes: &[u8]) -> Result<(), MessageError> {
        while !bytes.is_empty() {
            match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::AGAIN) => {
                    let until = Instant::now() + self.silence;
                    if !wait(&self.stream, PollFlags::OUT, until).map_err(|error| self.failure(error))? {
                        return Err(MessageError::Stalled(self.silence));
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::TIMEDOUT) => return Err(MessageError::Stalled(self.silence)),
                Err(errno) => return Err(self.failure(errno.into())),
            }
        }
        Ok(())
    }

    /// Why an operation failed: because this side closed the connection, or because of `error`.
    fn failure(&self, error: io::Error) -> MessageError {
        if self.is_closed.load(Acquire) { MessageError::Closed } else { MessageError::Broken(error) }
    }

    fn close(&self) {
        self.is_closed.store(true, Release);
        self.end_heartbeats();
        // An error means that the other side has closed the connection already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn end_heartbeats(&self) {
        *self.heartbeats.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// How long the next piece is, if so many bytes took so long to be taken.
fn next_piece_bytes(bytes: usize, took: Duration, before: usize) -> usize {
    let in_time = bytes as f64 * PIECE_TIME.as_secs_f64() / took.as_secs_f64().max(1e-6);
    // A short piece at the end of a message says little of the rate: pieces at most double.
    (in_time as usize).min(2 * before).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX)
}

/// Closes the connection also if its descriptor has been duplicated.
impl Drop for Shared {
    fn drop(&mut self) {
        self.close();
    }
}

/// Sends a heartbeat when nothing else has been sent for `interval`, until the stream is closed.
fn send_heartbeats(shared: &Weak<Shared>, interval: Duration, closed: &Receiver<()>) {
    let mut pause = interval;
    while closed.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
        let Some(shared) = shared.upgrade() else { return };
        pause = match shared.sending.try_lock() {
            Ok(mut sending) => match interval.checked_sub(sending.sent_at.elapsed()) {
                Some(rest) if !rest.is_zero() => rest,
                _ => {
                    let appended = shared.append(&mut sending, &Header::HEARTBEAT.bytes());
                    if appended.and_then(|()| shared.flush(&mut sending)).is_err() {
                        return;
                    }
                    interval
                }
            },
            // A message is being sent.
            Err(TryLockError::WouldBlock) => interval,
            Err(TryLockError::Poisoned(_)) => return,
        };
    }
}

/// Waits until the connection is ready for `events` or has ended. Returns false at `until`.
fn wait(stream: &TcpStream, events: PollFlags, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(stream, events)], Some(&timeout)) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}
