//! `BodyBudget`: bounds the bytes of all request bodies that are being read, parsed and turned into prompts.
//!
//! A body counts from its first byte until its prompt is prepared. Where the budget is used up, a body waits. If the wait does
//! not end soon, the client that has been sending for the longest time is cut off, so that slow senders cannot hold it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::TenantId;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::error::{ApiError, RETRY_AFTER};

/// The budget in bodies of the maximum size, of all tenants and of one.
const BODIES_MAX: usize = 8;
const TENANT_BODIES_MAX: usize = 4;
/// Parsing a body of this size takes so much memory that what the allocator keeps of it is returned afterwards.
const LARGE_BODY_BYTES: usize = 1 << 20;
/// How long a body waits before another one is cut off for it, and before it is refused itself.
const WAIT_BEFORE_CUT: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(10);

pub struct BodyBudget {
    bytes_max: usize,
    tenant_bytes_max: usize,
    /// Returns memory to the system.
    trim: fn(),
    counts: Mutex<Counts>,
    released: Notify,
}

#[derive(Default)]
struct Counts {
    bytes: usize,
    tenants: HashMap<TenantId, usize>,
    /// Bodies of which not all bytes have arrived, oldest first.
    incomplete: BTreeMap<u64, Incomplete>,
    /// Whether there was a large body since memory was returned to the system.
    needs_trim: bool,
    bodies: u64,
}

struct Incomplete {
    tenant: TenantId,
    cut: Arc<Notify>,
}

/// The part of the budget that one body uses. Dropping it releases the bytes.
pub struct BodyPermit {
    budget: Arc<BodyBudget>,
    tenant: TenantId,
    bytes: usize,
    number: u64,
    cut: Arc<Notify>,
}

impl BodyBudget {
    /// For bodies of at most `body_bytes_max` bytes. Without keys all clients are one tenant, which may use all of it.
    pub fn new(body_bytes_max: usize, has_keys: bool, trim: fn()) -> Arc<Self> {
        let tenant_bodies = if has_keys { TENANT_BODIES_MAX } else { BODIES_MAX };
        Arc::new(Self {
            bytes_max: body_bytes_max.saturating_mul(BODIES_MAX),
            tenant_bytes_max: body_bytes_max.saturating_mul(tenant_bodies),
            trim,
            counts: Mutex::default(),
            released: Notify::new(),
        })
    }

    /// A permit for a body that begins now.
    pub fn begin(self: &Arc<Self>, tenant: TenantId) -> BodyPermit {
        let cut = Arc::new(Notify::new());
        let mut counts = self.lock();
        let number = counts.bodies;
        counts.bodies += 1;
        counts.incomplete.insert(number, Incomplete { tenant, cut: Arc::clone(&cut) });
        BodyPermit { budget: Arc::clone(self), tenant, bytes: 0, number, cut }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BodyPermit {
    /// The tenant that sent the body.
    pub fn tenant(&self) -> TenantId {
        self.tenant
    }

    /// Counts `bytes` more that have arrived. Waits until the budget has them.
    pub async fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let (budget, began) = (Arc::clone(&self.budget), Instant::now());
        let mut deadline = began + WAIT_BEFORE_CUT;
        loop {
            // Created before the check, so that a release after the check wakes it.
            let released = budget.released.notified();
            if self.try_grow(bytes) {
                return Ok(());
            }
            if timeout_at(deadline, released).await.is_err() {
                if began.elapsed() >= WAIT_MAX {
                    return Err(overloaded());
                }
                self.cut_oldest(bytes);
                deadline = Instant::now() + WAIT_BEFORE_CUT;
            }
        }
    }

    /// All bytes have arrived: the body is not cut off any more.
    pub fn complete(&self) {
        self.budget.lock().incomplete.remove(&self.number);
    }

    /// Waits until the body is cut off for the sake of another one.
    pub async fn cut_off(&self) -> ApiError {
        self.cut.notified().await;
        overloaded()
    }

    fn try_grow(&mut self, bytes: usize) -> bool {
        let mut counts = self.budget.lock();
        let tenant_bytes = counts.tenants.get(&self.tenant).copied().unwrap_or(0);
        if counts.bytes + bytes > self.budget.bytes_max || tenant_bytes + bytes > self.budget.tenant_bytes_max {
            return false;
        }
        counts.bytes += bytes;
        counts.tenants.insert(self.tenant, tenant_bytes + bytes);
        self.bytes += bytes;
        true
    }

    /// Cuts off the oldest other body that is incomplete: of this tenant if its part is used up, else of any.
    fn cut_oldest(&self, bytes: usize) {
        let counts = self.budget.lock();
        let tenant_bytes = counts.tenants.get(&self.tenant).copied().unwrap_or(0);
        let same_tenant = tenant_bytes + bytes > self.budget.tenant_bytes_max;
        let oldest = counts
            .incomplete
            .iter()
            .find(|(number, body)| **number != self.number && (!same_tenant || body.tenant == self.tenant));
        if let Some((_, body)) = oldest {
            body.cut.notify_one();
        }
    }
}

impl Drop for BodyPermit {
    fn drop(&mut self) {
        let mut counts = self.budget.lock();
        counts.incomplete.remove(&self.number);
        counts.bytes -= self.bytes;
        counts.needs_trim |= self.bytes >= LARGE_BODY_BYTES;
        let trims = counts.bytes < LARGE_BODY_BYTES && std::mem::take(&mut counts.needs_trim);
        if let Some(bytes) = counts.tenants.get_mut(&self.tenant) {
            *bytes -= self.bytes;
            if *bytes == 0 {
                counts.tenants.remove(&self.tenant);
            }
        }
        drop(counts);
        self.budget.released.notify_waiters();
        // When the runtime shuts down, the process ends.
        if trims && let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(self.budget.trim);
        }
    }
}

fn overloaded() -> ApiError {
    ApiError::unavailable("the server is busy with other large requests", RETRY_AFTER).code("overloaded")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const BODY: usize = 100;

    async fn full(budget: &Arc<BodyBudget>, tenant: u64, bodies: usize) -> Vec<BodyPermit> {
        let mut permits = Vec::new();
        for _ in 0..bodies {
            let mut permit = budget.begin(TenantId(tenant));
            permit.grow(BODY).await.unwrap();
            permits.push(permit);
        }
        permits
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_waits_until_another_is_released() {
        let budget = BodyBudget::new(BODY, false, || {});
        let mut permits = full(&budget, 0, BODIES_MAX).await;
        permits.iter().for_each(BodyPermit::complete);
        let mut late = budget.begin(TenantId(0));
        let release = async {
            tokio::time::sleep(WAIT_BEFORE_CUT * 3).await;
            permits.pop();
        };
        let (grown, ()) = tokio::join!(late.grow(1), release);
        assert!(grown.is_ok());
        drop((late, permits));
        let counts = budget.lock();
        assert_eq!((counts.bytes, counts.tenants.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_is_refused_when_nothing_is_released() {
        let budget = BodyBudget::new(BODY, false, || {});
        let permits = full(&budget, 0, BODIES_MAX).await;
        permits.iter().for_each(BodyPermit::complete);
        let error = budget.begin(TenantId(0)).grow(1).await.unwrap_err();
        assert_eq!((error.code, error.retry_after), (Some("overloaded"), Some(RETRY_AFTER)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_sender_is_cut_off_for_a_body_that_waits() {
        let budget = BodyBudget::new(BODY, false, || {});
        let mut permits = full(&budget, 0, BODIES_MAX).await;
        permits[0].complete();
        let slowest = permits.remove(1);
        let cut = async move {
            slowest.cut_off().await;
            drop(slowest);
        };
        let mut late = budget.begin(TenantId(0));
        let (grown, ()) = tokio::join!(late.grow(BODY), cut);
        assert!(grown.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn one_tenant_cannot_use_up_the_budget_of_others() {
        let budget = BodyBudget::new(BODY, true, || {});
        let greedy = full(&budget, 1, TENANT_BODIES_MAX).await;
        greedy.iter().for_each(BodyPermit::complete);
        assert!(budget.begin(TenantId(1)).grow(1).await.is_err());
        let began = Instant::now();
        full(&budget, 2, 1).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn memory_is_returned_after_the_last_large_body() {
        static TRIMS: AtomicUsize = AtomicUsize::new(0);
        let trim = || {
            TRIMS.fetch_add(1, Ordering::Relaxed);
        };
        let budget = BodyBudget::new(LARGE_BODY_BYTES, false, trim);
        let body = async |bytes| {
            let mut permit = budget.begin(TenantId(0));
            permit.grow(bytes).await.unwrap();
            permit
        };
        drop(body(1).await);
        let (first, second) = (body(LARGE_BODY_BYTES).await, body(LARGE_BODY_BYTES).await);
        drop(first);
        drop(second);
        drop(body(1).await);
        let trimmed = async {
            while TRIMS.load(Ordering::Relaxed) == 0 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), trimmed).await.unwrap();
        assert_eq!(TRIMS.load(Ordering::Relaxed), 1);
    }
}
