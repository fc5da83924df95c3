//! `Handshakes`: incoming connections whose handshake is not complete, so that they can be evicted for others. libp2p gives its
//! behaviours no way to end them, so the transport does.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use libp2p_core::muxing::StreamMuxerBox;
use libp2p_core::transport::{Boxed, DialOpts, ListenerId, TransportError, TransportEvent};
use libp2p_core::{Multiaddr, Transport};
use libp2p_identity::PeerId;
use tokio::sync::oneshot;

type Connection = (PeerId, StreamMuxerBox);
type Upgrade = Pin<Box<dyn Future<Output = io::Result<Connection>> + Send>>;

/// Clones are the same.
#[derive(Clone, Default)]
pub struct Handshakes(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    next: u64,
    running: HashMap<u64, (Multiaddr, oneshot::Sender<()>)>,
}

/// A handshake in the table. Dropping it removes the handshake.
struct Running {
    table: Handshakes,
    number: u64,
}

impl Handshakes {
    /// Ends those with this remote address.
    pub fn end(&self, remote: &Multiaddr) {
        self.lock().running.retain(|_, (address, _)| address != remote);
    }

    /// Makes a connection's handshake one that can be ended.
    fn endable(
        &self,
        remote: Multiaddr,
        upgrade: impl Future<Output = io::Result<Connection>> + Send + 'static,
    ) -> Upgrade {
        let (sender, ended) = oneshot::channel();
        let running = {
            let mut table = self.lock();
            let number = table.next;
            table.next += 1;
            table.running.insert(number, (remote, sender));
            Running { table: self.clone(), number }
        };
        Box::pin(async move {
            let _running = running;
            tokio::select! {
                connection = upgrade => connection,
                // Its sender is dropped.
                _ = ended => Err(io::Error::new(io::ErrorKind::ConnectionAborted, "evicted for another connection")),
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.table.lock().running.remove(&self.number);
    }
}

/// A transport whose incoming handshakes are in the table.
pub struct Evictable {
    inner: Boxed<Connection>,
    handshakes: Handshakes,
}

impl Evictable {
    pub fn new(inner: Boxed<Connection>, handshakes: Handshakes) -> Self {
        Self { inner, handshakes }
    }
}

impl Transport for Evictable {
    type Output = Connection;
    type Error = io::Error;
    type ListenerUpgrade = Upgrade;
    type Dial = <Boxed<Connection> as Transport>::Dial;

    fn listen_on(&mut self, id: ListenerId, address: Multiaddr) -> Result<(), TransportError<io::Error>> {
        self.inner.listen_on(id, address)
    }

    fn remove_listener(&mut self, id: ListenerId) -> bool {
        self.inner.remove_listener(id)
    }

    fn dial(&mut self, address: Multiaddr, options: DialOpts) -> Result<Self::Dial, TransportError<io::Error>> {
        self.inner.dial(address, options)
    }

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<TransportEvent<Upgrade, io::Error>> {
        let event = ready!(Pin::new(&mut self.inner).poll(context));
        let remote = match &event {
            TransportEvent::Incoming { send_back_addr, .. } => send_back_addr.clone(),
            _ => Multiaddr::empty(),
        };
        Poll::Ready(event.map_upgrade(|upgrade| self.handshakes.endable(remote, upgrade)))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_handshake_is_ended_by_its_address_and_forgotten_when_it_is_over() {
        let handshakes = Handshakes::default();
        let [a, b]: [Multiaddr; 2] = ["/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.1/tcp/2"].map(|text| text.parse().unwrap());
        let begin = |remote: &Multiaddr| handshakes.endable(remote.clone(), std::future::pending());
        let (mut first, mut second, third) = (begin(&a), begin(&b), begin(&b));
        drop(third);
        assert_eq!(handshakes.lock().running.len(), 2);
        handshakes.end(&a);
        assert!(matches!((&mut first).now_or_never(), Some(Err(_))));
        assert!((&mut second).now_or_never().is_none());
        drop((first, second));
        assert!(handshakes.lock().running.is_empty());
    }
}
