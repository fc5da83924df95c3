//! `SecureListener`: accepts connections of several purposes on one port, and runs each in a thread of its own. A purpose
//! has limits on its connections, in all and for each address.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use tracing::info;
use types::LogLimit;

use crate::accept::accept_all;
use crate::handshake::{HandshakeError, SecureStream, respond};
use crate::hello::{Hello, Purpose, RejectReason};
use crate::key::ClusterKey;
use crate::wait_limit::WaitLimit;

/// How many connections of a purpose may be open at once.
#[derive(Clone, Copy, Debug)]
pub struct PurposeLimit {
    pub purpose: Purpose,
    pub in_all: usize,
    pub per_address: usize,
}

#[derive(Clone, Copy, Debug)]
pub struct SecureListener<'a> {
    /// It is made non-blocking.
    pub listener: &'a TcpListener,
    pub key: &'a ClusterKey,
    /// Connections of other purposes are refused.
    pub limits: &'a [PurposeLimit],
}

/// A connection that was accepted.
#[derive(Debug)]
pub struct AcceptedStream {
    pub hello: Hello,
    pub address: SocketAddr,
    pub secured: SecureStream,
    pub slot: ConnectionSlot,
}

/// Counts a connection as open until it is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    open: Arc<OpenConnections>,
    number: u64,
}

impl SecureListener<'_> {
    /// Accepts connections until `is_over`; then closes them all and waits for their threads. `admit` gets the hello of a
    /// peer that has the key; what it returns goes to `run`, together with the connection, in a thread of its own.
    pub fn serve<T: Send>(
        &self,
        admit: impl Fn(&Hello) -> Result<T, RejectReason> + Sync,
        run: impl Fn(T, AcceptedStream) + Sync,
        is_over: impl Fn() -> bool + Sync,
    ) -> io::Result<()> {
        let open = Arc::<OpenConnections>::default();
        let refusals = Mutex::new(LogLimit::default());
        let answer = |stream: TcpStream, limit: &WaitLimit<'_>| {
            let address = stream.peer_addr().ok()?;
            let admit = |hello: &Hello| {
                let limit = self.limits.iter().find(|limit| limit.purpose == hello.purpose);
                let (limit, admitted) = (limit.ok_or(RejectReason::Purpose)?, admit(hello)?);
                // The slot is taken once the peer has proved that it is there: until then, it may repeat what it has heard.
                open.lock().has_room(limit, address.ip())?;
                Ok((admitted, *hello, limit))
            };
            let accepted = respond(stream, self.key, limit, admit).and_then(|((admitted, hello, limit), secured)| {
                let slot = OpenConnections::take(&open, limit, address.ip()).map_err(HandshakeError::Rejected)?;
                Ok((admitted, AcceptedStream { hello, address, secured, slot }))
            });
            accepted.inspect_err(|error| log_refusal(&refusals, address, error)).ok()
        };
        let run = &run;
        thread::scope(|scope| {
            let take = |(admitted, accepted): (T, AcceptedStream)| {
                // If no thread can be started, the connection is closed.
                if accepted.slot.hold(&accepted.secured.stream).is_ok() {
                    let run = move || run(admitted, accepted);
                    let _ = thread::Builder::new().name("consort-stream".to_owned()).spawn_scoped(scope, run);
                }
                ControlFlow::Continue(())
            };
            let served = accept_all(self.listener, &WaitLimit::new(None, &is_over), answer, take);
            open.close_all();
            match served {
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
                served => served,
            }
        })
    }
}

fn log_refusal(refusals: &Mutex<LogLimit>, address: SocketAddr, error: &HandshakeError) {
    let count = refusals.lock().unwrap_or_else(PoisonError::into_inner).count(Instant::now());
    match (count, error) {
        (None, _) => {}
        (Some(count), HandshakeError::Rejected(RejectReason::Key)) => {
            info!(%address, count, "not connected to a machine that has another cluster key");
        }
        (Some(count), error) => info!(%address, count, "connections were refused, the last one because: {error}"),
    }
}

#[derive(Debug, Default)]
struct OpenConnections(Mutex<ConnectionTable>);

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    open: HashMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    purpose: Purpose,
    address: IpAddr,
    /// `None` until its thread is to start.
    stream: Option<TcpStream>,
}

impl ConnectionTable {
    fn has_room(&self, limit: &PurposeLimit, address: IpAddr) -> Result<(), RejectReason> {
        let address = address.to_canonical();
        let same = || self.open.values().filter(|connection| connection.purpose == limit.purpose);
        let of_address = same().filter(|connection| connection.address == address).count();
        let has_room = same().count() < limit.in_all && of_address < limit.per_address;
        if has_room { Ok(()) } else { Err(RejectReason::Busy) }
    }
}

impl OpenConnections {
    fn take(open: &Arc<Self>, limit: &PurposeLimit, address: IpAddr) -> Result<ConnectionSlot, RejectReason> {
        let mut table = open.lock();
        table.has_room(limit, address)?;
        let number = table.next;
        table.next += 1;
        let connection = OpenConnection { purpose: limit.purpose, address: address.to_canonical(), stream: None };
        table.open.insert(number, connection);
        Ok(ConnectionSlot { open: Arc::clone(open), number })
    }

    fn close_all(&self) {
        for stream in self.lock().open.values().filter_map(|connection| connection.stream.as_ref()) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConnectionSlot {
    /// Keeps a descriptor of the connection, to close it by.
    fn hold(&self, stream: &TcpStream) -> io::Result<()> {
        let stream = stream.try_clone()?;
        if let Some(connection) = self.open.lock().open.get_mut(&self.number) {
            connection.stream = Some(stream);
        }
        Ok(())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.open.lock().open.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_counted_per_purpose_and_address_until_they_are_dropped() {
        let open = Arc::<OpenConnections>::default();
        let limits = [5, 6].map(|purpose| PurposeLimit { purpose: Purpose(purpose), in_all: 3, per_address: 2 });
        let [near, mapped, far] = ["10.0.0.1", "::ffff:10.0.0.1", "::1"].map(|text| text.parse::<IpAddr>().unwrap());
        let take = |limit: usize, address| OpenConnections::take(&open, &limits[limit], address);
        let first = take(0, near).unwrap();
        let _second = take(0, mapped).unwrap();
        assert_eq!(take(0, near).unwrap_err(), RejectReason::Busy);
        let _others = [take(0, far).unwrap(), take(1, near).unwrap()];
        assert_eq!(take(0, far).unwrap_err(), RejectReason::Busy);
        drop(first);
        take(0, near).unwrap();
    }
}
