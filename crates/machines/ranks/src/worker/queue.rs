//! `RequestQueue`: requests between the thread that reads them and the thread that handles them.
//!
//! It is bounded, and `push` never blocks: a request that does not fit is rejected, so that the reading thread always
//! gets to an `abort` behind it.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::protocol::{LineMessage as _, RankReply, RankRequest};

/// Limits of the waiting requests and of the bytes of their lines.
pub const REQUESTS_MAX: usize = 1 << 10;
pub const BYTES_MAX: usize = 256 << 20;

/// A line that was read.
#[derive(Debug)]
pub enum QueuedLine {
    Run(RankRequest),
    /// The line was malformed. The reply is sent in its turn.
    Answer(RankReply),
}

#[derive(Debug, Default)]
pub struct RequestQueue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<(QueuedLine, usize)>,
    bytes: usize,
    /// Whether the request that was popped last may take long; `None` if it is done.
    running: Option<bool>,
    ended: bool,
    /// A finished step request, whose memory is reused for the next one.
    spare: Option<RankRequest>,
}

impl RequestQueue {
    /// Adds a line of so many bytes. Returns it if the queue is full.
    pub fn push(&self, work: QueuedLine, bytes: usize) -> Option<QueuedLine> {
        let mut state = self.lock();
        if state.waiting.len() >= REQUESTS_MAX || bytes > BYTES_MAX - state.bytes {
            return Some(work);
        }
        state.bytes += bytes;
        state.waiting.push_back((work, bytes));
        self.changed.notify_one();
        None
    }

    /// Waits for the next line. `None`: the queue is empty and has ended.
    pub fn pop(&self) -> Option<QueuedLine> {
        let mut state = self.lock();
        state.running = None;
        loop {
            if let Some((work, bytes)) = state.waiting.pop_front() {
                state.bytes -= bytes;
                state.running = Some(may_take_long(&work));
                return Some(work);
            }
            if state.ended {
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Keeps the memory of a request that was handled.
    pub fn recycle(&self, request: RankRequest) {
        if matches!(request, RankRequest::Step { .. }) {
            self.lock().spare = Some(request);
        }
    }

    pub fn take_spare(&self) -> Option<RankRequest> {
        self.lock().spare.take()
    }

    /// The request that was popped last is done, and its reply is the next to be written.
    pub fn finish(&self) {
        self.lock().running = None;
    }

    /// Removes the request with this id. False if it has begun, or is unknown.
    pub fn cancel(&self, id: u64) -> bool {
        let mut state = self.lock();
        let is_target =
            |(work, _): &(QueuedLine, usize)| matches!(work, QueuedLine::Run(request) if request.id() == Some(id));
        let found = state.waiting.iter().position(is_target).and_then(|index| state.waiting.remove(index));
        if let Some((_, bytes)) = &found {
            state.bytes -= bytes;
        }
        found.is_some()
    }

    /// No more lines will be pushed.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    #[cfg(debug_assertions)]
    pub fn is_empty(&self) -> bool {
        self.lock().waiting.is_empty()
    }

    /// Whether there are unfinished requests, all of which may take long.
    pub fn is_at_long_work(&self) -> bool {
        let state = self.lock();
        let waiting = state.waiting.iter().map(|(line, _)| may_take_long(line));
        let mut unfinished = state.running.into_iter().chain(waiting).peekable();
        unfinished.peek().is_some() && unfinished.all(|is_long| is_long)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a request computes much or waits for other ranks.
fn may_take_long(line: &QueuedLine) -> bool {
    let QueuedLine::Run(request) = line else { return false };
    matches!(
        request,
        RankRequest::Init { .. }
            | RankRequest::NcclSanityCheck
            | RankRequest::LoadDenseShard { .. }
            | RankRequest::GenerateStep { .. }
            | RankRequest::GenerateStepWithImages { .. }
            | RankRequest::Join { .. }
            | RankRequest::Load { .. }
            | RankRequest::Step { .. }
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn stats(id: u64) -> QueuedLine {
        QueuedLine::Run(RankRequest::Stats { id })
    }

    fn next(queue: &RequestQueue) -> Option<u64> {
        match queue.pop()? {
            QueuedLine::Run(request) => request.id(),
            QueuedLine::Answer(reply) => reply.id(),
        }
    }

    #[test]
    fn requests_come_out_in_order_and_cancelled_ones_do_not() {
        let queue = RequestQueue::default();
        (1..=4).for_each(|id| assert!(queue.push(stats(id), 10).is_none()));
        assert!(queue.cancel(3) && !queue.cancel(3) && !queue.cancel(9));
        queue.end();
        assert_eq!([next(&queue), next(&queue), next(&queue), next(&queue)], [Some(1), Some(2), Some(4), None]);
        assert!(!queue.cancel(1), "it has begun");
    }

    #[test]
    fn a_full_queue_refuses_and_takes_again_what_fits() {
        let queue = RequestQueue::default();
        (0..REQUESTS_MAX as u64).for_each(|id| assert!(queue.push(stats(id), 1).is_none()));
        assert!(queue.push(stats(7), 1).is_some());
        assert!(queue.cancel(5) && queue.push(stats(7), 1).is_none());

        let queue = RequestQueue::default();
        assert!(queue.push(stats(1), BYTES_MAX - 1).is_none());
        assert!(queue.push(stats(2), 2).is_some() && queue.push(stats(2), usize::MAX).is_some());
        assert!(queue.push(stats(2), 1).is_none());
        assert!(queue.cancel(1) && queue.push(stats(3), BYTES_MAX - 1).is_none());
    }

    #[test]
    fn only_long_work_can_be_overtaken() {
        let queue = RequestQueue::default();
        assert!(!queue.is_at_long_work(), "there is none");
        let step = || {
            QueuedLine::Run(RankRequest::GenerateStep { model_id: String::new(), tokens: vec![1].into(), offset: 0 })
        };
        assert!(queue.push(step(), 1).is_none() && queue.is_at_long_work(), "also before it has begun");
        queue.pop().unwrap();
        assert!(queue.is_at_long_work());
        assert!(queue.push(stats(1), 1).is_none() && !queue.is_at_long_work(), "something short waits");
        queue.pop().unwrap();
        assert!(!queue.is_at_long_work(), "it runs");
        assert!(queue.push(step(), 1).is_none() && !queue.is_at_long_work(), "it still runs");
        queue.finish();
        assert!(queue.is_at_long_work(), "only the step is left");
        queue.pop().unwrap();
        assert!(queue.is_at_long_work());
    }

    #[test]
    fn who_waits_wakes_when_the_end_comes() {
        let queue = RequestQueue::default();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.pop().is_none());
            queue.end();
            assert!(waiter.join().unwrap());
        });
    }
}
