//! `KeptAnswer`: the events of one answer, numbered from 0, for any number of readers.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use engine::TenantId;
use futures_util::{Stream, stream};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::sse;
use crate::stream::StreamEvent;

/// What an event takes beside its data.
const EVENT_BYTES: usize = 64;

#[derive(Debug)]
pub struct KeptAnswer {
    tenant: TenantId,
    number: u64,
    state: Mutex<AnswerState>,
    /// Changed whenever the state is.
    changes: watch::Sender<()>,
    cancelled: Arc<Notify>,
}

#[derive(Debug)]
struct AnswerState {
    /// The first event, which is kept whatever is dropped.
    start: Option<Arc<StreamEvent>>,
    events: VecDeque<Arc<StreamEvent>>,
    /// The number of the first event in `events`.
    first: u64,
    bytes: usize,
    ended_at: Option<Instant>,
    readers: usize,
    /// When the last reader has left, or somebody asked for it.
    read_at: Instant,
    /// It is in the store no more: what is appended is not counted.
    is_forgotten: bool,
}

impl KeptAnswer {
    pub(super) fn new(tenant: TenantId, number: u64, now: Instant) -> Self {
        let state = AnswerState {
            start: None,
            events: VecDeque::new(),
            first: 0,
            bytes: 0,
            ended_at: None,
            readers: 0,
            read_at: now,
            is_forgotten: false,
        };
        let (changes, _) = watch::channel(());
        Self { tenant, number, state: Mutex::new(state), changes, cancelled: Arc::default() }
    }

    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub fn has_ended(&self) -> bool {
        self.ended_at().is_some()
    }

    pub(super) fn ended_at(&self) -> Option<Instant> {
        self.state().ended_at
    }

    /// Ends the answer after what it has. Of one that has ended nothing changes.
    pub fn cancel(&self) {
        self.cancelled.notify_one();
    }

    pub(super) fn cancellation(&self) -> Arc<Notify> {
        Arc::clone(&self.cancelled)
    }

    /// The first event and the last one.
    pub fn ends(&self) -> Option<(Arc<StreamEvent>, Arc<StreamEvent>)> {
        let mut state = self.state();
        state.read_at = Instant::now();
        let start = state.start.clone()?;
        let last = state.events.back().cloned().unwrap_or_else(|| Arc::clone(&start));
        Some((start, last))
    }

    /// Waits until `holds`, or until the answer has ended.
    pub async fn wait_until(&self, holds: impl Fn(&Self) -> bool) {
        let mut changes = self.changes.subscribe();
        while !self.has_ended() && !holds(self) {
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    /// The events from number `next` on, framed as server-sent events with their numbers as ids. After each `keep_alive`
    /// without one, a comment. `None` if that event is kept no more.
    pub fn read(self: Arc<Self>, next: u64, keep_alive: Duration) -> Option<impl Stream<Item = Bytes> + Send + use<>> {
        {
            let mut state = self.state();
            if next < state.first {
                return None;
            }
            state.readers += 1;
        }
        let reader = Reader { changes: self.changes.subscribe(), answer: self, next, keep_alive };
        Some(stream::unfold(reader, |mut reader| async move { reader.next().await.map(|frame| (frame, reader)) }))
    }

    /// Appends an event, and drops the first ones if there are too many bytes. Returns the bytes that were added and dropped.
    pub(super) fn push(&self, event: StreamEvent, bytes_max: usize) -> (usize, usize) {
        let event = Arc::new(event);
        let mut state = self.state();
        state.start.get_or_insert_with(|| Arc::clone(&event));
        let added = size(&event);
        state.events.push_back(event);
        state.bytes += added;
        let dropped = state.drop_first(bytes_max);
        let counts = if state.is_forgotten { (0, 0) } else { (added, dropped) };
        drop(state);
        self.changes.send_replace(());
        counts
    }

    /// Drops the first events, of at least so many bytes, but not the last one. Returns the bytes that were dropped.
    pub(super) fn shrink(&self, bytes: usize) -> usize {
        let mut state = self.state();
        let left = state.bytes.saturating_sub(bytes);
        let dropped = state.drop_first(left);
        if state.is_forgotten { 0 } else { dropped }
    }

    pub(super) fn end(&self, now: Instant) {
        self.state().ended_at.get_or_insert(now);
        self.changes.send_replace(());
    }

    /// It is in the store no more. Returns its bytes.
    pub(super) fn forget(&self) -> usize {
        let mut state = self.state();
        if state.is_forgotten {
            return 0;
        }
        state.is_forgotten = true;
        state.bytes
    }

    /// For how long nobody has read it or asked for it.
    pub(super) fn unread_for(&self, now: Instant) -> Duration {
        let state = self.state();
        if state.readers > 0 { Duration::ZERO } else { now.saturating_duration_since(state.read_at) }
    }

    fn state(&self) -> MutexGuard<'_, AnswerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnswerState {
    fn drop_first(&mut self, bytes_max: usize) -> usize {
        let before = self.bytes;
        while self.bytes > bytes_max && self.events.len() > 1 {
            let Some(event) = self.events.pop_front() else { break };
            self.bytes -= size(&event);
            self.first += 1;
        }
        before - self.bytes
    }
}

fn size(event: &StreamEvent) -> usize {
    event.data.len() + EVENT_BYTES
}

/// A client that reads an answer.
struct Reader {
    answer: Arc<KeptAnswer>,
    next: u64,
    changes: watch::Receiver<()>,
    keep_alive: Duration,
}

/// What a reader finds.
enum Found {
    Event(Arc<StreamEvent>),
    Nothing,
    /// The answer has ended, or the reader was so slow that its next event was dropped.
    End,
}

impl Reader {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            self.changes.borrow_and_update();
            match self.find() {
                Found::Event(event) => {
                    let number = self.next;
                    self.next += 1;
                    return Some(sse::numbered(&event, number));
                }
                Found::End => return None,
                Found::Nothing => {}
            }
            if timeout(self.keep_alive, self.changes.changed()).await.is_err() {
                return Some(sse::comment());
            }
        }
    }

    fn find(&self) -> Found {
        let state = self.answer.state();
        let Some(index) = self.next.checked_sub(state.first) else { return Found::End };
        let event = usize::try_from(index).ok().and_then(|index| state.events.get(index));
        match event {
            Some(event) => Found::Event(Arc::clone(event)),
            None if state.ended_at.is_some() => Found::End,
            None => Found::Nothing,
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.answer.state();
        state.readers -= 1;
        state.read_at = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn answer() -> Arc<KeptAnswer> {
        Arc::new(KeptAnswer::new(TenantId(0), 1, Instant::now()))
    }

    fn push(answer: &KeptAnswer, text: &str) {
        answer.push(StreamEvent::literal(text), 3 * (EVENT_BYTES + 1));
    }

    #[tokio::test]
    async fn readers_get_all_events_from_where_they_begin() {
        let answer = answer();
        push(&answer, "a");
        let early = Arc::clone(&answer).read(0, LONG).unwrap();
        push(&answer, "b");
        let late = Arc::clone(&answer).read(1, LONG).unwrap();
        push(&answer, "c");
        answer.end(Instant::now());
        let all: Vec<_> = early.collect().await;
        assert_eq!(all, ["id: 0\ndata: a\n\n", "id: 1\ndata: b\n\n", "id: 2\ndata: c\n\n"]);
        assert_eq!(late.collect::<Vec<_>>().await, all[1..]);
        assert!(Arc::clone(&answer).read(9, LONG).unwrap().collect::<Vec<_>>().await.is_empty());
    }

    #[tokio::test]
    async fn what_was_dropped_cannot_be_read_and_a_slow_reader_ends() {
        let answer = answer();
        push(&answer, "a");
        let slow = Arc::clone(&answer).read(0, LONG).unwrap();
        ["b", "c", "d", "e"].into_iter().for_each(|text| push(&answer, text));
        assert!(Arc::clone(&answer).read(1, LONG).is_none());
        assert!(slow.collect::<Vec<_>>().await.is_empty());
        let (start, last) = answer.ends().unwrap();
        assert_eq!((&start.data[..], &last.data[..]), (&b"a"[..], &b"e"[..]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_waits_gets_comments() {
        let answer = answer();
        let mut reader = Box::pin(Arc::clone(&answer).read(0, Duration::from_secs(10)).unwrap());
        assert_eq!(reader.next().await.unwrap(), sse::comment());
        push(&answer, "a");
        assert_eq!(reader.next().await.unwrap(), "id: 0\ndata: a\n\n");
    }

    #[test]
    fn an_answer_is_unread_without_readers() {
        let answer = answer();
        let later = Instant::now() + LONG;
        let reader = Arc::clone(&answer).read(0, LONG);
        assert_eq!(answer.unread_for(later), Duration::ZERO);
        drop(reader);
        assert!(answer.unread_for(later) > Duration::ZERO);
    }
}
