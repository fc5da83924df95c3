//! `Calls`: how many calls run, of each client and in all, and how many bytes their frames have.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::block::Client;

/// Permits count units of this size, because their number is limited.
const UNIT_BYTES: usize = 1 << 10;

#[derive(Clone, Copy, Debug)]
pub struct CallLimits {
    pub calls_max: usize,
    /// KwaaiNet allows as many on a connection.
    pub calls_per_client_max: usize,
    /// Calls beyond these that are answered with "node at capacity"; further ones are dropped.
    pub refusals_per_client_max: usize,
    /// Bytes of frames that are read or that are in work. What is decoded from them takes up to six times as much.
    pub frame_bytes_max: usize,
    pub frame_bytes_per_client_max: usize,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self {
            calls_max: 256,
            calls_per_client_max: 100,
            refusals_per_client_max: 16,
            frame_bytes_max: 128 << 20,
            frame_bytes_per_client_max: 64 << 20,
        }
    }
}

pub(super) struct Calls {
    limits: CallLimits,
    bytes: Arc<Semaphore>,
    clients: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    calls: usize,
    clients: HashMap<Client, RunningOfClient>,
}

struct RunningOfClient {
    calls: usize,
    bytes: Arc<Semaphore>,
}

pub(super) enum Admission<'a> {
    Run(CallPlace<'a>),
    /// The client is told that there is no room.
    Refuse(CallPlace<'a>),
    Drop,
}

/// A call's place among those that run. Dropping it frees the place.
pub(super) struct CallPlace<'a> {
    calls: &'a Calls,
    client: Client,
    bytes: Arc<Semaphore>,
}

impl Calls {
    pub fn new(limits: CallLimits) -> Self {
        let bytes = Arc::new(Semaphore::new(limits.frame_bytes_max / UNIT_BYTES));
        Self { limits, bytes, clients: Mutex::default() }
    }

    pub fn enter(&self, client: Client) -> Admission<'_> {
        let CallLimits { calls_max, calls_per_client_max, refusals_per_client_max, .. } = self.limits;
        let mut running = self.lock();
        let own = running.clients.get(&client).map_or(0, |own| own.calls);
        let is_full = running.calls >= calls_max || own >= calls_per_client_max;
        let beyond = (running.calls + 1).saturating_sub(calls_max).max((own + 1).saturating_sub(calls_per_client_max));
        if beyond > refusals_per_client_max {
            return Admission::Drop;
        }
        running.calls += 1;
        let own = running.clients.entry(client).or_insert_with(|| RunningOfClient {
            calls: 0,
            bytes: Arc::new(Semaphore::new(self.limits.frame_bytes_per_client_max / UNIT_BYTES)),
        });
        own.calls += 1;
        let place = CallPlace { calls: self, client, bytes: Arc::clone(&own.bytes) };
        if is_full { Admission::Refuse(place) } else { Admission::Run(place) }
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CallPlace<'_> {
    /// Waits until a frame of so many bytes may be read. The caller limits the wait, and keeps the permits with the frame.
    pub async fn frame(&self, bytes: usize) -> Option<[OwnedSemaphorePermit; 2]> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).ok()?;
        // The client's own first: while it waits for these, others are not kept waiting.
        let own = Arc::clone(&self.bytes).acquire_many_owned(units).await.ok()?;
        let all = Arc::clone(&self.calls.bytes).acquire_many_owned(units).await.ok()?;
        Some([own, all])
    }
}

impl Drop for CallPlace<'_> {
    fn drop(&mut self) {
        let mut running = self.calls.lock();
        running.calls -= 1;
        if let Some(own) = running.clients.get_mut(&self.client) {
            own.calls -= 1;
            if own.calls == 0 {
                running.clients.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn client(last: u8) -> Client {
        Client::Address(IpAddr::from([127, 0, 0, last]))
    }

    #[test]
    fn a_client_with_many_calls_is_refused_and_then_dropped() {
        let calls = Calls::new(CallLimits {
            calls_max: 4,
            calls_per_client_max: 2,
            refusals_per_client_max: 1,
            ..CallLimits::default()
        });
        let first: Vec<_> = [(); 2].map(|()| calls.enter(client(1))).into();
        assert!(first.iter().all(|call| matches!(call, Admission::Run(_))));
        let refused = calls.enter(client(1));
        assert!(matches!(refused, Admission::Refuse(_)) && matches!(calls.enter(client(1)), Admission::Drop));
        let other = calls.enter(client(2));
        assert!(matches!(other, Admission::Run(_)));
        // A refused call has a place too.
        let third = calls.enter(client(3));
        assert!(matches!(third, Admission::Refuse(_)) && matches!(calls.enter(client(4)), Admission::Drop));
        drop((first, refused, other, third));
        assert!(calls.lock().clients.is_empty() && calls.lock().calls == 0);
    }

    #[tokio::test]
    async fn frames_share_the_bytes_that_there_are() {
        let limits =
            CallLimits { frame_bytes_max: 3 << 10, frame_bytes_per_client_max: 2 << 10, ..CallLimits::default() };
        let calls = Calls::new(limits);
        let places = [1, 1, 2].map(|last| match calls.enter(client(last)) {
            Admission::Run(place) => place,
            _ => panic!("there is room"),
        });
        let frame = places[0].frame(2 << 10).await.unwrap();
        // The client has no more, another one has a little.
        let mut second = std::pin::pin!(places[1].frame(1));
        let is_ready = async |future: &mut std::pin::Pin<&mut _>| {
            tokio::select! { biased; permits = future => Some(permits), () = std::future::ready(()) => None }
        };
        assert!(is_ready(&mut second).await.is_none());
        assert!(places[2].frame(1 << 10).await.is_some());
        drop(frame);
        assert!(is_ready(&mut second).await.flatten().is_some());
    }
}
