//! `BodyBudget`: bounds the bytes of all request bodies that are being read, parsed and turned into prompts.
//!
//! A body counts from its first byte until its prompt is prepared. Where the budget is used up, a body waits. If the wait does
//! not end soon, the client that has been sending for the longest time is cut off, so that slow senders cannot hold it. Small
//! bodies have a reserve, so that they do not wait for large ones.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine::TenantId;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::error::{ApiError, RETRY_AFTER};

/// The budget in bodies of the maximum size, of all tenants and of one.
const BODIES_MAX: usize = 8;
const TENANT_BODIES_MAX: usize = 4;
/// A body is small if this many of them have the maximum size of one. Their reserve is one body of that size.
const SMALL_BODIES_PER_BODY: usize = 128;
/// Parsing a body of this size takes so much memory that what the allocator keeps of it is returned afterwards.
const LARGE_BODY_BYTES: usize = 1 << 20;
/// How long a body waits before another one is cut off for it, and before it is refused itself.
const WAIT_BEFORE_CUT: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(10);
/// The time between two bodies that are cut off: the first may have released enough.
const CUT_INTERVAL: Duration = Duration::from_millis(100);

pub struct BodyBudget {
    bytes_max: usize,
    tenant_bytes_max: usize,
    /// What a small body may have, and what all of them may have beyond the limits.
    small_bytes_max: usize,
    reserve_bytes: usize,
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
    /// When a body was cut off last.
    cut_at: Option<Instant>,
}

struct Incomplete {
    tenant: TenantId,
    /// What it has of the budget.
    bytes: usize,
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
            small_bytes_max: body_bytes_max / SMALL_BODIES_PER_BODY,
            reserve_bytes: body_bytes_max,
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
        counts.incomplete.insert(number, Incomplete { tenant, bytes: 0, cut: Arc::clone(&cut) });
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

    /// Counts `bytes` more that have arrived. Waits until the budget has them; fails if this body is cut off meanwhile.
    pub async fn grow(&mut self, bytes: usize) -> Result<(), ApiError> {
        let (budget, cut, began) = (Arc::clone(&self.budget), Arc::clone(&self.cut), Instant::now());
        let mut deadline = began + WAIT_BEFORE_CUT;
        loop {
            // Created before the check, so that a release after the check wakes it.
            let released = budget.released.notified();
            if self.try_grow(bytes) {
                return Ok(());
            }
            tokio::select! {
                () = released => {}
                () = cut.notified() => return Err(overloaded()),
                () = sleep_until(deadline) => {
                    if began.elapsed() >= WAIT_MAX {
                        return Err(overloaded());
                    }
                    self.cut_oldest(bytes);
                    deadline = Instant::now() + CUT_INTERVAL;
                }
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
        let is_small = self.bytes + bytes <= self.budget.small_bytes_max;
        let reserve = if is_small { self.budget.reserve_bytes } else { 0 };
        let fits = counts.bytes + bytes <= self.budget.bytes_max.saturating_add(reserve)
            && tenant_bytes + bytes <= self.budget.tenant_bytes_max.saturating_add(reserve);
        if !fits {
            return false;
        }
        counts.bytes += bytes;
        counts.tenants.insert(self.tenant, tenant_bytes + bytes);
        self.bytes += bytes;
        if let Some(body) = counts.incomplete.get_mut(&self.number) {
            body.bytes = self.bytes;
        }
        true
    }

    /// Cuts off the oldest other body that is incomplete and has bytes: of this tenant if its part is used up, else of any.
    fn cut_oldest(&self, bytes: usize) {
        let mut counts = self.budget.lock();
        if counts.cut_at.is_some_and(|cut_at| cut_at.elapsed() < CUT_INTERVAL) {
            return;
        }
        let tenant_bytes = counts.tenants.get(&self.tenant).copied().unwrap_or(0);
        let same_tenant = tenant_bytes + bytes > self.budget.tenant_bytes_max;
        let is_other = |number: u64, body: &Incomplete| {
            number != self.number && body.bytes > 0 && (!same_tenant || body.tenant == self.tenant)
        };
        let oldest =
            counts.incomplete.iter().find(|(number, body)| is_other(**number, body)).map(|(number, _)| *number);
        if let Some(body) = oldest.and_then(|number| counts.incomplete.remove(&number)) {
            body.cut.notify_one();
            counts.cut_at = Some(Instant::now());
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

    const BODY: usize = 100 * SMALL_BODIES_PER_BODY;

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
        let (grown, ()) = tokio::join!(late.grow(BODY), release);
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
        let error = budget.begin(TenantId(0)).grow(BODY).await.unwrap_err();
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
    async fn of_bodies_that_wait_for_each_other_some_are_cut_off_and_the_others_go_on() {
        let budget = BodyBudget::new(BODY, false, || {});
        let body = async || {
            let mut permit = budget.begin(TenantId(0));
            for _ in 0..2 {
                permit.grow(BODY / 2).await?;
                tokio::task::yield_now().await;
            }
            permit.complete();
            Ok::<_, ApiError>(permit)
        };
        let began = Instant::now();
        let ended = futures_util::future::join_all((0..2 * BODIES_MAX).map(|_| body())).await;
        assert_eq!(ended.iter().filter(|ended| ended.is_ok()).count(), BODIES_MAX);
        assert!(began.elapsed() < WAIT_MAX / 2, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_of_which_nothing_has_arrived_is_not_cut_off() {
        let budget = BodyBudget::new(BODY, false, || {});
        let idle = budget.begin(TenantId(0));
        let permits = full(&budget, 0, BODIES_MAX).await;
        let mut late = budget.begin(TenantId(0));
        tokio::select! {
            _ = idle.cut_off() => panic!("it has nothing to release"),
            _ = permits[0].cut_off() => {}
            _ = late.grow(BODY) => panic!("nothing was released"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_small_body_does_not_wait_for_large_ones() {
        let budget = BodyBudget::new(BODY, false, || {});
        let _permits = full(&budget, 0, BODIES_MAX).await;
        let began = Instant::now();
        let mut small: Vec<_> = (0..SMALL_BODIES_PER_BODY).map(|_| budget.begin(TenantId(0))).collect();
        for permit in &mut small {
            permit.grow(BODY / SMALL_BODIES_PER_BODY).await.unwrap();
        }
        assert_eq!(began.elapsed(), Duration::ZERO);
        assert!(!budget.begin(TenantId(0)).try_grow(1), "the reserve is used up");
        assert!(!small[0].try_grow(1), "it is not small any more");
    }

    #[tokio::test(start_paused = true)]
    async fn one_tenant_cannot_use_up_the_budget_of_others() {
        let budget = BodyBudget::new(BODY, true, || {});
        let greedy = full(&budget, 1, TENANT_BODIES_MAX).await;
        greedy.iter().for_each(BodyPermit::complete);
        assert!(budget.begin(TenantId(1)).grow(BODY).await.is_err());
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
