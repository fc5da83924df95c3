//! `Backlog`: what waits for a block's thread, of each client and in all, within limits. What would exceed them is refused before
//! it is sent to the thread, so no client has others wait behind more than this, or takes more memory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{BlockLimits, Client};

#[derive(Debug)]
pub(super) struct Backlog {
    limits: BlockLimits,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    all: Load,
    clients: HashMap<Client, Load>,
}

/// Sessions to open and runs, and the bytes of their activations.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    entries: usize,
    bytes: usize,
}

/// The place of something that waits. Dropping it frees the place.
#[derive(Debug)]
pub(super) struct BacklogPlace {
    backlog: Arc<Backlog>,
    client: Client,
    bytes: usize,
}

impl Backlog {
    pub fn new(limits: BlockLimits) -> Arc<Self> {
        Arc::new(Self { limits, waiting: Mutex::default() })
    }

    /// `None` if too much waits already.
    pub fn enter(self: &Arc<Self>, client: Client, bytes: usize) -> Option<BacklogPlace> {
        let BlockLimits {
            waiting_max, waiting_per_client_max, waiting_bytes_max, waiting_bytes_per_client_max, ..
        } = self.limits;
        let mut waiting = self.lock();
        let own = waiting.clients.get(&client).copied().unwrap_or_default();
        let has_room = waiting.all.has_room(bytes, waiting_max, waiting_bytes_max)
            && own.has_room(bytes, waiting_per_client_max, waiting_bytes_per_client_max);
        if !has_room {
            return None;
        }
        waiting.all.add(bytes);
        waiting.clients.entry(client).or_default().add(bytes);
        Some(BacklogPlace { backlog: Arc::clone(self), client, bytes })
    }

    /// What waits or runs.
    pub fn entries(&self) -> usize {
        self.lock().all.entries
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Load {
    /// Something large may wait alone.
    fn has_room(self, bytes: usize, entries_max: usize, bytes_max: usize) -> bool {
        self.entries < entries_max && (self.bytes == 0 || self.bytes.saturating_add(bytes) <= bytes_max)
    }

    fn add(&mut self, bytes: usize) {
        self.entries += 1;
        self.bytes += bytes;
    }

    fn remove(&mut self, bytes: usize) {
        self.entries -= 1;
        self.bytes -= bytes;
    }
}

impl Drop for BacklogPlace {
    fn drop(&mut self) {
        let mut waiting = self.backlog.lock();
        waiting.all.remove(self.bytes);
        if let Some(own) = waiting.clients.get_mut(&self.client) {
            own.remove(self.bytes);
            if own.entries == 0 {
                waiting.clients.remove(&self.client);
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
    fn a_client_has_its_part_of_what_waits_and_gives_it_back() {
        let backlog = Backlog::new(BlockLimits {
            waiting_max: 5,
            waiting_per_client_max: 3,
            waiting_bytes_max: 100,
            waiting_bytes_per_client_max: 60,
            ..BlockLimits::default()
        });
        let first = backlog.enter(client(1), 50).unwrap();
        assert!(backlog.enter(client(1), 11).is_none(), "too many bytes of one client");
        let second = backlog.enter(client(1), 10).unwrap();
        let third = backlog.enter(client(1), 0).unwrap();
        assert!(backlog.enter(client(1), 0).is_none(), "too many entries of one client");
        assert!(backlog.enter(client(2), 41).is_none(), "too many bytes in all");
        let other = [backlog.enter(client(2), 40).unwrap(), backlog.enter(client(3), 0).unwrap()];
        assert!(backlog.enter(client(4), 0).is_none(), "too many entries in all");
        drop((first, second));
        let large = backlog.enter(client(4), 1000);
        assert!(large.is_none(), "others have something that waits");
        drop((third, other));
        assert!(backlog.enter(client(4), 1000).is_some(), "something large waits alone");
        assert!(backlog.lock().clients.is_empty());
        assert_eq!(backlog.entries(), 0);
    }
}
