//! `KeptAnswers`: answers that are generated whether or not a client reads them. Their events are kept for a while, so that a
//! client resumes one by its id: after a reload, on another connection, from several at once.
//!
//! A task owns the generation and appends its events; a reader never slows it down. A running answer that nobody reads for too
//! long is cancelled. Number and bytes are bounded for each tenant and in all: the oldest answers that have ended are
//! dropped first, and a running answer that is too long loses its first events. An answer belongs to the tenant that asked
//! for it; to others it does not exist.

mod answer;
mod routes;

use std::collections::{BTreeMap, HashMap};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::TenantId;
use futures_util::StreamExt;
use tokio::time::interval;
use tracing::{Instrument, Span};

pub use answer::KeptAnswer;
pub use routes::{KeptAnswersPaths, resume, router};

use crate::error::{ApiError, ApiErrorKind};
use crate::generation::Generation;
use crate::stream::{self, StreamEncoder, StreamEvent};

/// The length of an id that a client chooses.
pub const ID_BYTES_MIN: usize = 16;
pub const ID_BYTES_MAX: usize = 64;
/// How often it is looked whether anybody still reads an answer.
const LOOK: Duration = Duration::from_secs(5);
/// An event of a kept answer waits for nobody: readers get comments of their own.
const NO_KEEP_ALIVE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// The bounds of kept answers.
#[derive(Clone, Copy, Debug)]
pub struct KeptLimits {
    /// Of one tenant, running or ended.
    pub answers_max: usize,
    /// Of one tenant.
    pub running_max: usize,
    /// Of the events of one answer.
    pub answer_bytes_max: usize,
    /// Of all answers together; a running one keeps its last event.
    pub bytes_max: usize,
    /// How long an answer is kept after its end.
    pub ended_max: Duration,
    /// How long an answer runs that nobody reads or asks for.
    pub unread_max: Duration,
}

impl KeptLimits {
    pub const DEFAULT: Self = Self {
        answers_max: 256,
        running_max: 64,
        answer_bytes_max: 8 << 20,
        bytes_max: 64 << 20,
        ended_max: Duration::from_secs(60 * 60),
        unread_max: Duration::from_secs(15 * 60),
    };
}

#[derive(Debug)]
pub struct KeptAnswers {
    limits: KeptLimits,
    table: Mutex<AnswerTable>,
    /// Of the events of all answers.
    bytes: AtomicUsize,
}

type AnswerKey = (TenantId, String);

#[derive(Debug, Default)]
struct AnswerTable {
    answers: HashMap<AnswerKey, Arc<KeptAnswer>>,
    /// Keys by their numbers, which are in the order of insertion.
    order: BTreeMap<u64, AnswerKey>,
    last_number: u64,
}

impl KeptAnswers {
    pub fn new(limits: KeptLimits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default(), bytes: AtomicUsize::new(0) })
    }

    /// Begins an answer. Fails if there is one with this id, or if too many of this tenant's run.
    pub fn begin(self: &Arc<Self>, tenant: TenantId, id: &str) -> Result<AnswerWriter, ApiError> {
        let now = Instant::now();
        let mut table = self.table();
        table.drop_expired(self, now);
        let key = (tenant, id.to_owned());
        if table.answers.contains_key(&key) {
            let message = "there is an answer with this id already";
            return Err(ApiError::invalid("answer_id", message).code("answer_exists"));
        }
        let own = || table.answers.values().filter(|answer| answer.tenant() == tenant);
        if own().filter(|answer| !answer.has_ended()).count() >= self.limits.running_max {
            let message = "too many answers run in the background: wait for one to end, or cancel one";
            return Err(ApiError::new(ApiErrorKind::Overloaded, message).code("too_many_answers"));
        }
        if own().count() >= self.limits.answers_max {
            let mine = |answer: &KeptAnswer| answer.tenant() == tenant;
            table.drop_oldest_ended(self, mine);
        }
        table.last_number += 1;
        let number = table.last_number;
        let answer = Arc::new(KeptAnswer::new(tenant, number, now));
        table.order.insert(number, key.clone());
        table.answers.insert(key, Arc::clone(&answer));
        Ok(AnswerWriter { store: Arc::clone(self), answer })
    }

    /// The answer with this id, if this tenant asked for it.
    pub fn get(&self, tenant: TenantId, id: &str) -> Option<Arc<KeptAnswer>> {
        let mut table = self.table();
        table.drop_expired(self, Instant::now());
        table.answers.get(&(tenant, id.to_owned())).map(Arc::clone)
    }

    /// Cancels an answer and forgets it. Returns whether there was one.
    pub fn remove(&self, tenant: TenantId, id: &str) -> bool {
        let removed = self.table().remove(self, &(tenant, id.to_owned()));
        if let Some(answer) = &removed {
            answer.cancel();
        }
        removed.is_some()
    }

    fn table(&self) -> MutexGuard<'_, AnswerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AnswerTable {
    fn drop_expired(&mut self, store: &KeptAnswers, now: Instant) {
        let ended_max = store.limits.ended_max;
        let is_old =
            |answer: &KeptAnswer| answer.ended_at().is_some_and(|at| now.saturating_duration_since(at) > ended_max);
        let expired: Vec<_> =
            self.answers.iter().filter(|(_, answer)| is_old(answer)).map(|(key, _)| key.clone()).collect();
        for key in expired {
            self.remove(store, &key);
        }
    }

    /// Drops the oldest answer of these that has ended. False if there is none.
    fn drop_oldest_ended(&mut self, store: &KeptAnswers, of: impl Fn(&KeptAnswer) -> bool) -> bool {
        let fits = |key: &&AnswerKey| self.answers.get(*key).is_some_and(|answer| answer.has_ended() && of(answer));
        let Some(key) = self.order.values().find(fits).cloned() else { return false };
        self.remove(store, &key).is_some()
    }

    fn remove(&mut self, store: &KeptAnswers, key: &AnswerKey) -> Option<Arc<KeptAnswer>> {
        let answer = self.answers.remove(key)?;
        self.order.remove(&answer.number());
        store.bytes.fetch_sub(answer.forget(), Ordering::Relaxed);
        Some(answer)
    }
}

/// The right to append events to an answer. The answer has ended when it is dropped.
pub struct AnswerWriter {
    store: Arc<KeptAnswers>,
    answer: Arc<KeptAnswer>,
}

impl AnswerWriter {
    pub fn answer(&self) -> Arc<KeptAnswer> {
        Arc::clone(&self.answer)
    }

    /// Appends the events of a generation until its end, on a task of its own.
    pub fn run<E: StreamEncoder>(self, generation: Generation, encoder: E) {
        tokio::spawn(self.append(generation, encoder).instrument(Span::current()));
    }

    /// Appends the events of a generation until its end, or until the answer is cancelled.
    pub async fn append<E: StreamEncoder>(self, generation: Generation, encoder: E) {
        let mut events =
            pin!(stream::events_until(generation, encoder, NO_KEEP_ALIVE, Some(self.answer.cancellation())));
        let mut look = interval(LOOK);
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(event) => self.push(event),
                    None => return,
                },
                _ = look.tick() => {
                    if self.answer.unread_for(Instant::now()) > self.store.limits.unread_max {
                        tracing::info!("an answer is cancelled that nobody reads");
                        self.answer.cancel();
                    }
                }
            }
        }
    }

    pub fn push(&self, event: StreamEvent) {
        let limits = self.store.limits;
        let (added, dropped) = self.answer.push(event, limits.answer_bytes_max);
        let before = self.store.bytes.fetch_add(added, Ordering::Relaxed);
        let mut bytes = (before + added).saturating_sub(dropped);
        self.store.bytes.fetch_sub(dropped, Ordering::Relaxed);
        while bytes > limits.bytes_max && self.store.table().drop_oldest_ended(&self.store, |_| true) {
            bytes = self.store.bytes.load(Ordering::Relaxed);
        }
        if bytes > limits.bytes_max {
            self.store.bytes.fetch_sub(self.answer.shrink(bytes - limits.bytes_max), Ordering::Relaxed);
        }
    }

    /// Forgets the answer, which has no events.
    pub fn discard(self, id: &str) {
        self.store.remove(self.answer.tenant(), id);
    }
}

impl Drop for AnswerWriter {
    fn drop(&mut self) {
        self.answer.end(Instant::now());
    }
}

/// Checks an id that a client has chosen.
pub fn check_id(id: &str) -> Result<(), ApiError> {
    let is_word = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if is_word && (ID_BYTES_MIN..=ID_BYTES_MAX).contains(&id.len()) {
        return Ok(());
    }
    let message = format!("an id has {ID_BYTES_MIN} to {ID_BYTES_MAX} letters, digits, `-` and `_`");
    Err(ApiError::invalid("answer_id", message))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const LIMITS: KeptLimits = KeptLimits {
        answers_max: 3,
        running_max: 2,
        answer_bytes_max: 200,
        bytes_max: 300,
        ended_max: Duration::ZERO,
        unread_max: Duration::ZERO,
    };

    fn event(bytes: usize) -> StreamEvent {
        StreamEvent::literal(&"x".repeat(bytes))
    }

    fn kept_for_long() -> KeptLimits {
        KeptLimits { ended_max: Duration::from_secs(3600), ..LIMITS }
    }

    #[test]
    fn an_answer_is_its_tenant_s_alone_and_its_id_is_used_once() {
        let store = KeptAnswers::new(LIMITS);
        let writer = store.begin(ONE, "a").unwrap();
        assert_eq!(store.begin(ONE, "a").err().unwrap().code, Some("answer_exists"));
        assert!(store.get(ONE, "a").is_some() && store.get(TWO, "a").is_none());
        assert!(!store.remove(TWO, "a") && store.remove(ONE, "a"));
        writer.push(event(10));
        drop(writer);
        assert!(store.get(ONE, "a").is_none());
    }

    #[test]
    fn too_many_answers_at_once_are_refused_and_ended_ones_give_way() {
        let store = KeptAnswers::new(kept_for_long());
        let first = store.begin(ONE, "a").unwrap();
        let second = store.begin(ONE, "b").unwrap();
        assert_eq!(store.begin(ONE, "c").err().unwrap().kind, ApiErrorKind::Overloaded);
        let other = store.begin(TWO, "c").unwrap();
        drop((first, second, other));
        drop(store.begin(ONE, "c").unwrap());
        drop(store.begin(ONE, "d").unwrap());
        let there = ["a", "b", "c", "d"].map(|id| store.get(ONE, id).is_some());
        assert_eq!(there, [false, true, true, true]);
        assert!(store.get(TWO, "c").is_some());
    }

    #[test]
    fn an_ended_answer_expires_and_a_running_one_does_not() {
        let store = KeptAnswers::new(LIMITS);
        let writer = store.begin(ONE, "a").unwrap();
        assert!(store.get(ONE, "a").is_some());
        let ended_at = Instant::now();
        drop(writer);
        while Instant::now() == ended_at {}
        assert!(store.get(ONE, "a").is_none());
    }

    #[test]
    fn bytes_are_bounded_and_counted_to_the_end() {
        let store = KeptAnswers::new(kept_for_long());
        let writer = store.begin(ONE, "a").unwrap();
        (0..20).for_each(|_| writer.push(event(30)));
        let kept = store.bytes.load(Ordering::Relaxed);
        assert!(kept <= 200 && kept > 0, "{kept}");
        drop(writer);
        let others: Vec<_> = [(ONE, "b"), (TWO, "c")]
            .map(|(tenant, id)| {
                let writer = store.begin(tenant, id).unwrap();
                (0..3).for_each(|_| writer.push(event(30)));
                writer
            })
            .into();
        assert!(store.get(ONE, "a").is_none(), "the ended one has given way");
        assert!(store.bytes.load(Ordering::Relaxed) <= 300);
        drop(others);
        [(ONE, "b"), (TWO, "c")].into_iter().for_each(|(tenant, id)| assert!(store.remove(tenant, id)));
        assert_eq!(store.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn ids_of_clients_are_checked() {
        for id in ["0123456789abcdef", "a-b_c-d_e-f_g-h_i"] {
            assert!(check_id(id).is_ok(), "{id}");
        }
        for id in ["short", "0123456789abcde/", &"x".repeat(65)] {
            assert!(check_id(id).is_err(), "{id}");
        }
    }
}
