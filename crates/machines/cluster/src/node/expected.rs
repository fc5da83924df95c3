//! `ExpectedConnections`: the connections that a node waits for. A connection that nobody expects is refused.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use net::{ConnectionSlot, MessageStream};

use crate::purpose::ConnectionId;

/// A connection that was accepted, which counts as open while the slot is held.
#[derive(Debug)]
pub struct NodeConnection {
    pub stream: MessageStream,
    pub slot: ConnectionSlot,
}

#[derive(Clone, Debug, Default)]
pub struct ExpectedConnections(Arc<Mutex<ExpectationTable>>);

#[derive(Debug, Default)]
struct ExpectationTable {
    /// How many expectations there were.
    count: u64,
    /// Who expects a connection: the number of the expectation, and the way to it.
    by_id: HashMap<ConnectionId, (u64, Sender<NodeConnection>)>,
}

/// Waits for connections with one id. They are refused once it is dropped.
#[derive(Debug)]
pub struct Expectation {
    id: ConnectionId,
    number: u64,
    all: ExpectedConnections,
    connections: Receiver<NodeConnection>,
}

impl ExpectedConnections {
    /// Expects connections with this id from now on, and no longer on behalf of an earlier caller.
    pub fn expect(&self, id: ConnectionId) -> Expectation {
        let (sender, connections) = channel();
        let mut table = self.lock();
        table.count += 1;
        let number = table.count;
        table.by_id.insert(id, (number, sender));
        Expectation { id, number, all: self.clone(), connections }
    }

    pub fn is_expected(&self, id: ConnectionId) -> bool {
        self.lock().by_id.contains_key(&id)
    }

    /// Hands a connection to whoever expects it. Otherwise it is closed.
    pub fn deliver(&self, id: ConnectionId, connection: NodeConnection) {
        if let Some((_, sender)) = self.lock().by_id.get(&id) {
            // An error means that it is not expected any more.
            let _ = sender.send(connection);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ExpectationTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Expectation {
    /// The next connection, if one comes before the deadline and `is_over` stays false.
    pub fn next(&self, deadline: Instant, is_over: &dyn Fn() -> bool) -> Option<NodeConnection> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || is_over() {
                return None;
            }
            match self.connections.recv_timeout(left.min(Duration::from_millis(20))) {
                Ok(connection) => return Some(connection),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return None,
            }
        }
    }
}

impl Drop for Expectation {
    fn drop(&mut self) {
        let mut table = self.all.lock();
        // Another caller may expect the same connection by now.
        if table.by_id.get(&self.id).is_some_and(|(number, _)| *number == self.number) {
            table.by_id.remove(&self.id);
        }
    }
}
