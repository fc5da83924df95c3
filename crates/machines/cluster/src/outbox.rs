//! `Outbox`: sends messages to the next machine of a chain, in order.
//!
//! A thread that computes sends small messages itself. A thread that it woke for that would wait until the scheduler takes the CPU
//! from the next step's computation, for milliseconds. Large messages are left to a thread, so that the next step does not wait
//! until the network has taken them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use net::{MessageError, MessageSender};

/// A message: its kind and its body.
pub(crate) type Message = (u8, Vec<u8>);

/// The longest message that is sent by the thread that has it.
const DIRECT_BYTES_MAX: usize = 256 << 10;

/// Used by one thread.
pub(crate) struct Outbox {
    sender: MessageSender,
    queue: SyncSender<Message>,
    /// Messages that the thread of the queue has not sent yet.
    queued: Arc<AtomicUsize>,
}

/// The messages that a thread has to send.
pub(crate) struct OutboxQueue {
    sender: MessageSender,
    messages: Receiver<Message>,
    queued: Arc<AtomicUsize>,
}

impl Outbox {
    /// At most `messages_max` messages are queued.
    pub fn new(sender: MessageSender, messages_max: usize) -> (Self, OutboxQueue) {
        let (queue, messages) = sync_channel(messages_max);
        let queued = Arc::<AtomicUsize>::default();
        let rest = OutboxQueue { sender: sender.clone(), messages, queued: Arc::clone(&queued) };
        (Self { sender, queue, queued }, rest)
    }

    /// Fails with [`MessageError::Closed`] if the queue's thread has ended; then that thread knows why.
    pub fn send(&self, (kind, body): Message) -> Result<(), MessageError> {
        if body.len() <= DIRECT_BYTES_MAX && self.queued.load(Ordering::Acquire) == 0 {
            return self.sender.send(kind, &[&body]);
        }
        self.queued.fetch_add(1, Ordering::Relaxed);
        self.queue.send((kind, body)).map_err(|_| MessageError::Closed)
    }
}

impl OutboxQueue {
    /// Sends until the outbox is dropped. Fails if a message could not be sent.
    pub fn send_all(self) -> Result<(), MessageError> {
        for (kind, body) in &self.messages {
            self.sender.send(kind, &[&body])?;
            self.queued.fetch_sub(1, Ordering::Release);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::{Duration, Instant};

    use net::{ClusterKey, MessageReceiver, MessageStream, WaitLimit, respond};

    use super::*;
    use crate::purpose::ConnectionId;

    const SILENCE: Duration = Duration::from_secs(30);

    fn connected() -> (MessageStream, MessageStream) {
        let key = ClusterKey::from_passphrase("a passphrase for tests").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, limit) = (listener.local_addr().unwrap(), WaitLimit::until(Instant::now() + SILENCE));
        thread::scope(|scope| {
            let accepted = scope.spawn(|| respond(listener.accept().unwrap().0, &key, &limit, |_| Ok(())).unwrap().1);
            let near = MessageStream::connect(address, &key, &ConnectionId::control().hello(SILENCE), &limit).unwrap();
            (near, MessageStream::new(accepted.join().unwrap()).unwrap())
        })
    }

    fn next(receiver: &mut MessageReceiver, body: &mut Vec<u8>) -> Option<u8> {
        receiver.receive(None, |_| Some(usize::MAX), body).unwrap()
    }

    #[test]
    fn small_messages_need_no_thread_and_never_overtake_large_ones() {
        let (near, mut far) = connected();
        let (outbox, queue) = Outbox::new(near.sender.clone(), 4);
        let mut body = Vec::new();
        outbox.send((1, vec![1; 10])).unwrap();
        assert_eq!(next(&mut far.receiver, &mut body), Some(1));
        // Nothing sends the large one yet, so the small one has to wait behind it.
        outbox.send((2, vec![2; DIRECT_BYTES_MAX + 1])).unwrap();
        outbox.send((3, vec![3; 10])).unwrap();
        thread::scope(|scope| {
            let sending = scope.spawn(|| queue.send_all());
            assert_eq!((next(&mut far.receiver, &mut body), body.len()), (Some(2), DIRECT_BYTES_MAX + 1));
            assert_eq!((next(&mut far.receiver, &mut body), body.as_slice()), (Some(3), [3; 10].as_slice()));
            drop(outbox);
            sending.join().unwrap().unwrap();
        });
    }

    #[test]
    fn an_outbox_whose_thread_has_ended_is_closed() {
        let (near, far) = connected();
        let (outbox, queue) = Outbox::new(near.sender.clone(), 4);
        outbox.send((2, vec![2; DIRECT_BYTES_MAX + 1])).unwrap();
        near.sender.close();
        assert!(matches!(queue.send_all(), Err(MessageError::Closed)));
        assert!(matches!(outbox.send((3, vec![3; 10])), Err(MessageError::Closed)));
        drop(far);
    }
}
