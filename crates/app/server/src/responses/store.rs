//! `ResponseStore`: finished responses, in memory, so that a request can continue the conversation of an earlier one.
//!
//! Its size is bounded. If it is full, the tenant that holds most loses its oldest response, so that no tenant can evict the
//! responses of others that hold less; all expire after some time. A response belongs to the tenant that asked for it; to others
//! it does not exist.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::TenantId;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::response::ResponsesReply;

/// The bounds of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    pub responses_max: usize,
    /// Of all responses together, and of the input of all responses that are being generated.
    pub bytes_max: usize,
    /// Of the conversation before one response. A longer one is not stored.
    pub conversation_bytes_max: usize,
    pub age_max: Duration,
}

impl StoreLimits {
    pub const DEFAULT: Self = Self {
        responses_max: 4096,
        bytes_max: 128 << 20,
        conversation_bytes_max: 8 << 20,
        age_max: Duration::from_secs(24 * 60 * 60),
    };
}

#[derive(Debug)]
pub struct ResponseStore {
    limits: StoreLimits,
    table: Mutex<StoreTable>,
}

#[derive(Debug, Default)]
struct StoreTable {
    responses: HashMap<String, Arc<StoredResponse>>,
    /// Ids by their numbers, which are in the order of insertion.
    order: BTreeMap<u64, String>,
    tenants: HashMap<TenantId, TenantEntry>,
    bytes: usize,
    /// Bytes of the tickets of responses that are being generated.
    pending_bytes: usize,
    last_number: u64,
}

/// The responses of one tenant.
#[derive(Debug, Default)]
struct TenantEntry {
    bytes: usize,
    numbers: BTreeSet<u64>,
}

/// A response and the conversation before it, as JSON.
#[derive(Debug)]
pub struct StoredResponse {
    tenant: TenantId,
    number: u64,
    stored_at: Instant,
    response: String,
    /// The items before the response: those of earlier responses, and its own input.
    input: String,
}

impl StoredResponse {
    /// The response, as JSON.
    pub fn response(&self) -> &str {
        &self.response
    }

    pub fn input(&self) -> Vec<Box<RawValue>> {
        serde_json::from_str(&self.input).expect("it was written as a list")
    }

    /// The items of the conversation up to the end of this response.
    pub fn conversation(&self) -> Vec<Box<RawValue>> {
        #[derive(Deserialize)]
        struct Output {
            output: Vec<Box<RawValue>>,
        }
        let response: Output = serde_json::from_str(&self.response).expect("a response has output");
        let mut items = self.input();
        items.extend(response.output);
        items
    }

    pub fn bytes(&self) -> usize {
        self.response.len() + self.input.len()
    }
}

impl ResponseStore {
    pub fn new(limits: StoreLimits) -> Self {
        Self { limits, table: Mutex::default() }
    }

    /// The response with this id, if this tenant asked for it.
    pub fn get(&self, tenant: TenantId, id: &str, now: Instant) -> Option<Arc<StoredResponse>> {
        let mut table = self.table();
        table.drop_expired(self.limits.age_max, now);
        table.responses.get(id).filter(|stored| stored.tenant == tenant).map(Arc::clone)
    }

    /// Deletes a response. Returns whether there was one.
    pub fn delete(&self, tenant: TenantId, id: &str, now: Instant) -> bool {
        self.get(tenant, id, now).is_some() && self.table().remove(id)
    }

    fn insert(&self, tenant: TenantId, response: &ResponsesReply, input: String, now: Instant) {
        let json = serde_json::to_string(response).expect("wire types have string keys");
        let mut table = self.table();
        table.drop_expired(self.limits.age_max, now);
        table.last_number += 1;
        let number = table.last_number;
        table.add(response.id.clone(), StoredResponse { tenant, number, stored_at: now, response: json, input });
        while table.bytes > self.limits.bytes_max || table.responses.len() > self.limits.responses_max {
            if !table.evict() {
                break;
            }
        }
    }

    /// Reserves bytes for a response that is being generated. False if there is no room for them.
    fn reserve(&self, bytes: usize) -> bool {
        let mut table = self.table();
        let fits = bytes <= self.limits.conversation_bytes_max && table.pending_bytes + bytes <= self.limits.bytes_max;
        table.pending_bytes += if fits { bytes } else { 0 };
        fits
    }

    fn table(&self) -> MutexGuard<'_, StoreTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoreTable {
    fn drop_expired(&mut self, age_max: Duration, now: Instant) {
        while let Some((_, id)) = self.order.first_key_value() {
            let stored = self.responses.get(id);
            if stored.is_none_or(|stored| now.saturating_duration_since(stored.stored_at) <= age_max) {
                break;
            }
            let id = id.clone();
            self.remove(&id);
        }
    }

    fn add(&mut self, id: String, stored: StoredResponse) {
        self.bytes += stored.bytes();
        let of_tenant = self.tenants.entry(stored.tenant).or_default();
        of_tenant.bytes += stored.bytes();
        of_tenant.numbers.insert(stored.number);
        self.order.insert(stored.number, id.clone());
        self.responses.insert(id, Arc::new(stored));
    }

    /// Removes the oldest response of the tenant that holds most. False if there is none.
    fn evict(&mut self) -> bool {
        let largest = self.tenants.values().max_by_key(|of_tenant| of_tenant.bytes);
        let oldest = largest.and_then(|of_tenant| self.order.get(of_tenant.numbers.first()?)).cloned();
        oldest.is_some_and(|id| self.remove(&id))
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(stored) = self.responses.remove(id) else { return false };
        self.bytes -= stored.bytes();
        self.order.remove(&stored.number);
        if let Some(of_tenant) = self.tenants.get_mut(&stored.tenant) {
            of_tenant.bytes -= stored.bytes();
            of_tenant.numbers.remove(&stored.number);
            if of_tenant.numbers.is_empty() {
                self.tenants.remove(&stored.tenant);
            }
        }
        true
    }
}

/// The right to store one response, with the conversation before it. Its bytes are reserved in the store until it is dropped.
pub struct StoreTicket {
    store: Arc<ResponseStore>,
    tenant: TenantId,
    input: String,
    reserved: usize,
}

impl StoreTicket {
    /// `input` is the JSON of a list of items. `None`: it is too long to be stored, or too much is being generated.
    pub fn new(store: Arc<ResponseStore>, tenant: TenantId, input: String) -> Option<Self> {
        let reserved = input.len();
        store.reserve(reserved).then(|| Self { store, tenant, input, reserved })
    }

    pub fn store(mut self, response: &ResponsesReply) {
        let input = std::mem::take(&mut self.input);
        self.store.insert(self.tenant, response, input, Instant::now());
    }
}

impl Drop for StoreTicket {
    fn drop(&mut self) {
        self.store.table().pending_bytes -= self.reserved;
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoder::tests::finished_response;
    use super::*;

    const ONE: TenantId = TenantId(1);
    const TWO: TenantId = TenantId(2);
    const LIMITS: StoreLimits = StoreLimits {
        responses_max: 2,
        bytes_max: 1 << 20,
        conversation_bytes_max: 1 << 19,
        age_max: Duration::from_secs(60),
    };

    fn add(store: &ResponseStore, id: &str, input: usize, now: Instant) {
        add_of(ONE, store, id, input, now);
    }

    fn add_of(tenant: TenantId, store: &ResponseStore, id: &str, input: usize, now: Instant) {
        let response = ResponsesReply { id: id.to_owned(), ..finished_response() };
        store.insert(tenant, &response, format!("[\"{}\"]", "x".repeat(input)), now);
    }

    fn there(store: &ResponseStore, now: Instant) -> String {
        ["a", "b", "c", "d", "e", "f"].into_iter().filter(|id| store.get(ONE, id, now).is_some()).collect()
    }

    /// Whether nothing is left of any response.
    fn is_clear(store: &ResponseStore) -> bool {
        let table = store.table();
        (table.bytes, table.order.len(), table.tenants.len(), table.responses.len()) == (0, 0, 0, 0)
    }

    #[test]
    fn the_oldest_responses_are_evicted() {
        let (store, now) = (ResponseStore::new(LIMITS), Instant::now());
        ["a", "b", "c"].into_iter().for_each(|id| add(&store, id, 1, now));
        assert_eq!(there(&store, now), "bc");
        add(&store, "d", 1 << 19, now);
        add(&store, "e", 1 << 19, now);
        assert_eq!(there(&store, now), "e");
        add(&store, "f", 1 << 20, now);
        assert!(is_clear(&store), "one that is too large is not kept");
    }

    #[test]
    fn a_tenant_evicts_its_own_responses_before_those_of_one_that_holds_less() {
        let (store, now) = (ResponseStore::new(StoreLimits { responses_max: 3, ..LIMITS }), Instant::now());
        add_of(TWO, &store, "other", 1, now);
        ["a", "b", "c", "d"].into_iter().for_each(|id| add(&store, id, 1000, now));
        assert_eq!(there(&store, now), "cd");
        assert!(store.get(TWO, "other", now).is_some());
        ["a", "b"].into_iter().for_each(|id| add(&store, id, 1 << 19, now));
        assert_eq!(there(&store, now), "b");
        assert!(store.get(TWO, "other", now).is_some());
    }

    #[test]
    fn what_is_not_stored_yet_is_bounded_too() {
        let store = Arc::new(ResponseStore::new(LIMITS));
        let ticket = |bytes: usize| StoreTicket::new(Arc::clone(&store), ONE, "x".repeat(bytes));
        assert!(ticket((1 << 19) + 1).is_none(), "a conversation that is too long");
        let tickets = (ticket(1 << 19).unwrap(), ticket(1 << 19).unwrap());
        assert!(ticket(1).is_none());
        drop(tickets.0);
        assert!(ticket(1).is_some());
        tickets.1.store(&finished_response());
        assert_eq!(store.table().pending_bytes, 0);
    }

    #[test]
    fn a_response_expires() {
        let (store, now) = (ResponseStore::new(LIMITS), Instant::now());
        add(&store, "a", 1, now);
        add(&store, "b", 1, now + Duration::from_secs(30));
        assert_eq!(there(&store, now + Duration::from_secs(60)), "ab");
        assert_eq!(there(&store, now + Duration::from_secs(61)), "b");
    }

    #[test]
    fn a_response_is_its_tenant_s_alone() {
        let (store, now) = (ResponseStore::new(LIMITS), Instant::now());
        add(&store, "a", 1, now);
        assert!(store.get(TWO, "a", now).is_none() && !store.delete(TWO, "a", now));
        assert!(store.delete(ONE, "a", now) && !store.delete(ONE, "a", now));
        assert!(is_clear(&store));
    }
}
