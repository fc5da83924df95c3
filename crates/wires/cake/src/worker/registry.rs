//! `ConnectionRegistry`: the open connections of a worker, so that strangers cannot hold all of them, and so that all can be
//! closed.

use std::collections::BTreeMap;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections at once: a cake master opens one for each layer.
pub const CONNECTIONS_MAX: usize = 1024;
/// Connections at once that have not authenticated.
pub const HANDSHAKES_MAX: usize = 32;

#[derive(Default)]
pub(super) struct ConnectionRegistry {
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    next: u64,
    open: BTreeMap<u64, OpenConnection>,
}

struct OpenConnection {
    stream: TcpStream,
    is_admitted: bool,
}

impl ConnectionRegistry {
    /// Adds a connection that has not authenticated. If there are too many of these, the oldest is closed: a peer with the
    /// key completes its handshake in a moment. `None` if there are too many connections in all.
    pub fn add(&self, stream: &TcpStream) -> io::Result<Option<RegisteredConnection<'_>>> {
        let mut connections = self.lock();
        if connections.open.len() >= CONNECTIONS_MAX {
            return Ok(None);
        }
        let strangers = || connections.open.values().filter(|connection| !connection.is_admitted);
        if strangers().count() >= HANDSHAKES_MAX {
            strangers().take(1).for_each(OpenConnection::close);
        }
        let number = connections.next;
        connections.next += 1;
        let connection = OpenConnection { stream: stream.try_clone()?, is_admitted: false };
        connections.open.insert(number, connection);
        Ok(Some(RegisteredConnection { registry: self, number }))
    }

    /// Closes all connections. Their threads see it at once.
    pub fn close_all(&self) {
        self.lock().open.values().for_each(OpenConnection::close);
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenConnection {
    fn close(&self) {
        // The peer may have closed it already, so the error is ignored.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// A connection in the registry, until this is dropped.
pub(super) struct RegisteredConnection<'a> {
    registry: &'a ConnectionRegistry,
    number: u64,
}

impl RegisteredConnection<'_> {
    /// The peer has authenticated.
    pub fn admit(&self) {
        if let Some(connection) = self.registry.lock().open.get_mut(&self.number) {
            connection.is_admitted = true;
        }
    }
}

impl Drop for RegisteredConnection<'_> {
    fn drop(&mut self) {
        self.registry.lock().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn strangers_displace_the_oldest_stranger_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (stream, listener.accept().unwrap().0)
        };
        let registry = ConnectionRegistry::default();
        let streams: Vec<_> = (0..HANDSHAKES_MAX + 2).map(|_| connect()).collect();
        let add = |(_, accepted): &(TcpStream, TcpStream)| registry.add(accepted).unwrap().unwrap();
        let admitted = add(&streams[0]);
        admitted.admit();
        let strangers: Vec<_> = streams[1..].iter().map(add).collect();
        assert_eq!((&streams[1].0).read(&mut [0]).unwrap(), 0);
        for (stream, _) in [&streams[0], &streams[2]] {
            stream.set_nonblocking(true).unwrap();
            assert_eq!({ stream }.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        }
        drop((admitted, strangers));
        assert!(registry.lock().open.is_empty());
    }
}
