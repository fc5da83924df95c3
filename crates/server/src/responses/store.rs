//! `ResponseStore`: finished responses, in memory, so that a request can continue the conversation of an earlier one.
//!
//! Its size is bounded: the oldest responses are dropped first, and all after some time. A response belongs to the tenant
//! that asked for it; to others it does not exist.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::TenantId;
use serde_json::{Value, json};

use super::response::ResponsesReply;

/// The bounds of a store.
#[derive(Clone, Copy, Debug)]
pub struct StoreLimits {
    pub responses_max: usize,
    /// Of all responses together.
    pub bytes_max: usize,
    pub age_max: Duration,
}

impl StoreLimits {
    pub const DEFAULT: Self =
        Self { responses_max: 4096, bytes_max: 128 << 20, age_max: Duration::from_secs(24 * 60 * 60) };
}

#[derive(Debug)]
pub struct ResponseStore {
    limits: StoreLimits,
    table: Mutex<StoreTable>,
}

#[derive(Debug, Default)]
struct StoreTable {
    responses: HashMap<String, Arc<StoredResponse>>,
    /// Ids in the order of insertion. Those of deleted responses are skipped.
    order: VecDeque<String>,
    bytes: usize,
}

/// A response and the conversation before it, as JSON.
#[derive(Debug)]
pub struct StoredResponse {
    tenant: TenantId,
    stored_at: Instant,
    response: String,
    /// The items before the response: those of earlier responses, and its own input.
    input: String,
}

impl StoredResponse {
    pub fn response(&self) -> Value {
        serde_json::from_str(&self.response).expect("it was written by this file")
    }

    pub fn input(&self) -> Vec<Value> {
        serde_json::from_str(&self.input).expect("it was written by this file")
    }

    /// The items of the conversation up to the end of this response.
    pub fn conversation(&self) -> Vec<Value> {
        let mut items = self.input();
        if let Value::Array(output) = self.response()["output"].take() {
            items.extend(output);
        }
        items
    }

    fn bytes(&self) -> usize {
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

    fn insert(&self, tenant: TenantId, response: &ResponsesReply, input: &[Value], now: Instant) {
        let (json, input) = (json!(response).to_string(), json!(input).to_string());
        let stored = StoredResponse { tenant, stored_at: now, response: json, input };
        let mut table = self.table();
        table.drop_expired(self.limits.age_max, now);
        table.bytes += stored.bytes();
        table.order.push_back(response.id.clone());
        table.responses.insert(response.id.clone(), Arc::new(stored));
        while table.bytes > self.limits.bytes_max || table.responses.len() > self.limits.responses_max {
            let Some(oldest) = table.order.pop_front() else { break };
            table.remove(&oldest);
        }
    }

    fn table(&self) -> MutexGuard<'_, StoreTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StoreTable {
    fn drop_expired(&mut self, age_max: Duration, now: Instant) {
        while let Some(id) = self.order.front() {
            let stored = self.responses.get(id);
            if stored.is_some_and(|stored| now.saturating_duration_since(stored.stored_at) <= age_max) {
                break;
            }
            if let Some(id) = self.order.pop_front() {
                self.remove(&id);
            }
        }
    }

    fn remove(&mut self, id: &str) -> bool {
        let Some(stored) = self.responses.remove(id) else { return false };
        self.bytes -= stored.bytes();
        true
    }
}

/// The right to store one response, with the conversation before it.
pub struct StoreTicket {
    pub store: Arc<ResponseStore>,
    pub tenant: TenantId,
    pub input: Vec<Value>,
}

impl StoreTicket {
    pub fn store(self, response: &ResponsesReply) {
        self.store.insert(self.tenant, response, &self.input, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoder::tests::finished_response;
    use super::*;

    const ONE: TenantId = TenantId(1);
    const LIMITS: StoreLimits = StoreLimits { responses_max: 2, bytes_max: 1 << 20, age_max: Duration::from_secs(60) };

    fn add(store: &ResponseStore, id: &str, input: usize, now: Instant) {
        let response = ResponsesReply { id: id.to_owned(), ..finished_response() };
        store.insert(ONE, &response, &[json!("x".repeat(input))], now);
    }

    fn there(store: &ResponseStore, now: Instant) -> String {
        ["a", "b", "c", "d", "e", "f"].into_iter().filter(|id| store.get(ONE, id, now).is_some()).collect()
    }

    fn bytes(store: &ResponseStore) -> usize {
        store.table().bytes
    }

    #[test]
    fn the_oldest_responses_make_room() {
        let (store, now) = (ResponseStore::new(LIMITS), Instant::now());
        ["a", "b", "c"].into_iter().for_each(|id| add(&store, id, 1, now));
        assert_eq!(there(&store, now), "bc");
        add(&store, "d", 1 << 19, now);
        add(&store, "e", 1 << 19, now);
        assert_eq!(there(&store, now), "e");
        add(&store, "f", 1 << 20, now);
        assert_eq!((there(&store, now).as_str(), bytes(&store)), ("", 0), "one that is too large is not kept");
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
        let other = TenantId(2);
        assert!(store.get(other, "a", now).is_none() && !store.delete(other, "a", now));
        assert!(store.delete(ONE, "a", now) && !store.delete(ONE, "a", now));
        assert_eq!((there(&store, now).as_str(), bytes(&store)), ("", 0));
    }
}
