//! `Connections`: the open connections of a listener, and which of them is evicted for another.
//!
//! Each address has a share, so that no client can take all connections. A connection without a request is evicted before
//! one whose request is still being received, and of these the one that has been so for longer. A connection with an
//! answer under way is never evicted: then the new connection is refused.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use super::connection_table::{ConnectionTable, Peer, RequestPart};
use super::guarded_body::BodyGuard;
use super::send_watch::SendWatch;
use crate::metrics::ConnectionMetrics;

/// The most connections of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// In all.
    pub total: usize,
    /// From one IPv4 address, or from one /64 network of IPv6.
    pub per_address: usize,
}

impl ConnectionLimits {
    /// One address gets half of the connections: it may be a proxy with many clients.
    pub fn new(total: usize) -> Self {
        let total = total.max(1);
        Self { total, per_address: total.div_ceil(2) }
    }
}

/// The connections of a listener.
pub struct Connections {
    limits: ConnectionLimits,
    metrics: ConnectionMetrics,
    table: Mutex<ConnectionTable>,
    /// Notified when a connection closes, and when the last request of a connection ends.
    changed: Notify,
}

impl Connections {
    pub fn new(limits: ConnectionLimits, metrics: ConnectionMetrics) -> Arc<Self> {
        Arc::new(Self { limits, metrics, table: Mutex::default(), changed: Notify::new() })
    }

    /// Adds a connection of this address, and evicts another for it if there are too many. `None`: all connections that could be
    /// evicted have an answer under way.
    pub async fn admit(self: &Arc<Self>, address: IpAddr) -> Option<Connection> {
        let peer = Peer::from(address);
        if !self.evict_for(peer) {
            self.metrics.refused.inc();
            return None;
        }
        // A connection that was told to close still has its descriptor until its task has run.
        self.wait_until(|table| table.open() < self.limits.total).await;
        let evicted = Arc::new(Notify::new());
        let id = self.lock().insert(peer, Arc::clone(&evicted));
        self.metrics.open.inc();
        Some(Connection { connections: Arc::clone(self), id, evicted, sends: SendWatch::new() })
    }

    /// Evicts the first connection of the order: without a request, or with bodies that have not arrived. False if there is none.
    pub fn evict_first(&self) -> bool {
        self.evict(&mut self.lock(), None)
    }

    /// Waits until no request is running.
    pub async fn no_requests(&self) {
        self.wait_until(|table| table.busy() == 0).await;
    }

    /// Waits until all connections are closed.
    pub async fn all_closed(&self) {
        self.wait_until(|table| table.open() == 0).await;
    }

    /// Evicts a connection if there are too many for one more of this peer. False if there are, and none can be evicted.
    fn evict_for(&self, peer: Peer) -> bool {
        let mut table = self.lock();
        if table.remaining_of(peer) >= self.limits.per_address {
            return self.evict(&mut table, Some(peer));
        }
        table.remaining() < self.limits.total || self.evict(&mut table, None)
    }

    fn evict(&self, table: &mut ConnectionTable, peer: Option<Peer>) -> bool {
        let evicted = table.evict(peer);
        if evicted {
            self.metrics.evicted.inc();
        }
        evicted
    }

    async fn wait_until(&self, holds: impl Fn(&ConnectionTable) -> bool) {
        loop {
            // Created before the table is read, so that no change in between is missed.
            let changed = self.changed.notified();
            if holds(&self.lock()) {
                return;
            }
            changed.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        // No code that holds the lock can panic in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open connection. Its entry is removed when it is dropped.
pub struct Connection {
    connections: Arc<Connections>,
    id: u64,
    evicted: Arc<Notify>,
    sends: Arc<SendWatch>,
}

impl Connection {
    /// Waits until this connection is evicted.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }

    /// Waits until this connection has been without a request for `limit` since this call.
    pub async fn idle_for(&self, limit: Duration) {
        let begun = Instant::now();
        loop {
            let Some(since) = self.connections.lock().idle_since(self.id) else {
                sleep(limit).await;
                continue;
            };
            let until = since.max(begun) + limit;
            if until <= Instant::now() {
                return;
            }
            sleep_until(until).await;
        }
    }

    /// To watch whether the client takes its responses.
    pub fn sends(&self) -> &Arc<SendWatch> {
        &self.sends
    }

    /// To count the requests of this connection.
    pub fn requests(&self) -> RequestCounter {
        RequestCounter { connections: Arc::clone(&self.connections), id: self.id }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.connections.lock().remove(self.id);
        self.connections.metrics.open.dec();
        self.connections.changed.notify_waiters();
    }
}

/// Counts the requests of one connection.
pub struct RequestCounter {
    connections: Arc<Connections>,
    id: u64,
}

impl RequestCounter {
    /// A request has begun. It has ended when the guard is dropped.
    pub fn begin(&self) -> RequestGuard {
        self.guard(RequestPart::Answer)
    }

    /// The body of a request that has begun is being received, until the guard is dropped.
    pub fn receive(&self) -> RequestGuard {
        self.guard(RequestPart::Body)
    }

    fn guard(&self, part: RequestPart) -> RequestGuard {
        self.connections.lock().begin(self.id, part);
        RequestGuard { connections: Arc::clone(&self.connections), id: self.id, part }
    }
}

/// A request, or its body, that has not ended.
pub struct RequestGuard {
    connections: Arc<Connections>,
    id: u64,
    part: RequestPart,
}

impl BodyGuard for RequestGuard {}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        if self.connections.lock().end(self.id, self.part) {
            self.connections.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const LIMITS: ConnectionLimits = ConnectionLimits { total: 4, per_address: 2 };

    fn connections() -> Arc<Connections> {
        Connections::new(LIMITS, ConnectionMetrics::default())
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// The connection, if it is admitted without a wait for another to close.
    fn admit(connections: &Arc<Connections>, from: &str) -> Option<Connection> {
        connections.admit(address(from)).now_or_never().flatten()
    }

    fn is_evicted(connection: &Connection) -> bool {
        connection.evicted().now_or_never().is_some()
    }

    #[tokio::test]
    async fn one_address_evicts_its_own_quietest_connection_and_no_other() {
        let connections = connections();
        let other = admit(&connections, "10.0.0.2").unwrap();
        let first = admit(&connections, "10.0.0.1").unwrap();
        let second = admit(&connections, "::ffff:10.0.0.1").unwrap();
        let third = admit(&connections, "10.0.0.1").unwrap();
        assert!(is_evicted(&first) && !is_evicted(&second) && !is_evicted(&third) && !is_evicted(&other));
    }

    #[tokio::test]
    async fn hosts_of_one_ipv6_network_have_one_share() {
        let connections = connections();
        let first = admit(&connections, "2001:db8::1").unwrap();
        let _second = admit(&connections, "2001:db8::2").unwrap();
        let _third = admit(&connections, "2001:db8::3").unwrap();
        assert!(is_evicted(&first));
        let neighbour = admit(&connections, "2001:db8:0:1::1").unwrap();
        assert!(!is_evicted(&neighbour));
    }

    #[tokio::test]
    async fn idle_connections_are_evicted_before_those_that_receive_and_answers_never() {
        let connections = connections();
        let all: Vec<_> = (1..=4).map(|i| admit(&connections, &format!("10.0.0.{i}")).unwrap()).collect();
        let answering = all[0].requests().begin();
        let receiving = (all[1].requests().begin(), all[1].requests().receive());
        // It has been idle for a shorter time than the last connection, because it had a request meanwhile.
        drop(all[2].requests().begin());
        for next in [3, 2, 1] {
            assert!(connections.evict_first());
            assert!(is_evicted(&all[next]), "{next}");
        }
        assert!(!connections.evict_first() && !is_evicted(&all[0]));
        drop((answering, receiving));
        assert!(connections.evict_first() && is_evicted(&all[0]));
    }

    #[tokio::test]
    async fn a_connection_waits_for_the_descriptor_of_the_one_it_replaces() {
        let connections = connections();
        let mut all: Vec<_> = (1..=4).map(|i| admit(&connections, &format!("10.0.0.{i}")).unwrap()).collect();
        let mut next = Box::pin(connections.admit(address("10.0.0.5")));
        assert!((&mut next).now_or_never().is_none());
        assert!(is_evicted(&all[0]));
        all.remove(0);
        assert!(next.await.is_some());
        assert_eq!(connections.metrics.evicted.get(), 1);
    }

    #[tokio::test]
    async fn without_an_idle_connection_the_new_one_is_refused() {
        let connections = connections();
        let all: Vec<_> = (1..=4).map(|i| admit(&connections, &format!("10.0.0.{i}")).unwrap()).collect();
        let running: Vec<_> = all.iter().map(|connection| connection.requests().begin()).collect();
        assert!(connections.admit(address("10.0.0.5")).await.is_none());
        assert_eq!((connections.metrics.refused.get(), connections.metrics.open.get()), (1, 4));
        assert!(connections.no_requests().now_or_never().is_none());
        drop(running);
        connections.no_requests().await;
        drop(all);
        connections.all_closed().await;
        assert!(connections.lock().is_clear(), "nothing is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_without_a_request_counts_from_the_last_one() {
        let connections = connections();
        let connection = admit(&connections, "10.0.0.1").unwrap();
        let begun = Instant::now();
        let request = connection.requests().begin();
        let busy = async {
            sleep(Duration::from_secs(50)).await;
            drop(request);
        };
        tokio::join!(busy, connection.idle_for(Duration::from_secs(30)));
        assert_eq!(begun.elapsed(), Duration::from_secs(80));
    }
}
