//! `Helper`: the thread of a rank that works on CPUs of other ranks while these lend them.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use kernels::cpu::Guest;
use tracing::warn;

use crate::shared_memory::Borrower;

/// Starts its thread when there is something to help with. Dropped, it ends.
#[derive(Debug, Default)]
pub struct Helper {
    post: Arc<Post>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Post {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    /// What to help with.
    guest: Option<Arc<Guest>>,
    /// Where.
    borrower: Option<Arc<Borrower>>,
    is_over: bool,
}

impl Helper {
    /// From now on this is helped with.
    pub fn help(&self, guest: Guest) {
        self.post.lock().guest = Some(Arc::new(guest));
        self.post.changed.notify_all();
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let post = Arc::clone(&self.post);
            let spawned = thread::Builder::new().name("consort-helper".to_owned()).spawn(move || post.stand());
            *thread = spawned.inspect_err(|error| warn!(%error, "no thread to help other ranks")).ok();
        }
    }

    /// From now on CPUs are borrowed there, or nowhere.
    pub fn borrow_from(&self, borrower: Option<Borrower>) {
        let before = std::mem::replace(&mut self.post.lock().borrower, borrower.map(Arc::new));
        self.post.changed.notify_all();
        if let Some(before) = before {
            before.disturb();
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let mut orders = self.post.lock();
        orders.is_over = true;
        self.post.changed.notify_all();
        if let Some(borrower) = &orders.borrower {
            borrower.disturb();
        }
        drop(orders);
        if let Some(thread) = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join(); // a panic was reported where it happened
        }
    }
}

impl Post {
    fn stand(&self) {
        while let Some(borrower) = self.next() {
            match borrower.wait(&|| self.is_past(&borrower)) {
                Some(loan) => {
                    let guest = self.lock().guest.clone();
                    if let Some(guest) = guest {
                        guest.work(&loan);
                    }
                }
                None => self.forget(&borrower),
            }
        }
    }

    /// Where to borrow, when that is known; `None` when it is over.
    fn next(&self) -> Option<Arc<Borrower>> {
        let waits = |orders: &mut Orders| !orders.is_over && orders.borrower.is_none();
        let orders = self.changed.wait_while(self.lock(), waits).unwrap_or_else(PoisonError::into_inner);
        orders.borrower.clone().filter(|_| !orders.is_over)
    }

    /// Whether nothing is to be borrowed there any more.
    fn is_past(&self, borrower: &Arc<Borrower>) -> bool {
        let orders = self.lock();
        orders.is_over || !orders.borrower.as_ref().is_some_and(|present| Arc::ptr_eq(present, borrower))
    }

    /// There is nothing to be borrowed any more, unless another has taken its place.
    fn forget(&self, borrower: &Arc<Borrower>) {
        self.lock().borrower.take_if(|present| Arc::ptr_eq(present, borrower));
    }

    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use kernels::Backend as _;
    use kernels::cpu::{CpuBackend, CpuOptions};
    use types::WorldSize;

    use super::*;
    use crate::shared_memory::{GroupLimits, Seat, Segment};

    const COLS: usize = 1024;
    const ROWS: usize = 64;

    /// Works as the second rank, for which the first waits, until it is helped.
    fn be_helped(backend: &CpuBackend, mut first: Seat, mut second: Seat) {
        let waiting = thread::spawn(move || {
            first.bring_rows(0, COLS, &mut [1.0; ROWS * COLS]).unwrap();
            first.take_lent()
        });
        let (mut values, was_helped) = ([0.0; 64], AtomicBool::new(false));
        while !was_helped.load(Relaxed) {
            backend.host_runs(&mut values, 1, &|_, values| {
                (0..1000).for_each(|_| values[0] += std::hint::black_box(1.0));
                was_helped.fetch_or(thread::current().name() == Some("consort-helper"), Relaxed);
            });
        }
        assert!(values.iter().all(|&value| value >= 1000.0 && value == values[0]), "{values:?}");
        second.bring_rows(0, COLS, &mut [2.0; ROWS * COLS]).unwrap();
        waiting.join().unwrap();
    }

    #[test]
    fn a_rank_is_helped_while_another_waits_for_it() {
        let world = WorldSize::new(2).unwrap();
        let backend = CpuBackend::new(CpuOptions { threads: 1, ..CpuOptions::default() }).unwrap();
        let helper = Helper::default();
        helper.help(backend.guest());
        // The group that takes the place of another may have the same number.
        for _ in 0..2 {
            let (segment, _fd) = Segment::create(GroupLimits { world, elements_max: ROWS * COLS }).unwrap();
            let [first, second] =
                [0, 1].map(|index| segment.seat(world.rank(index).unwrap(), segment.generation()).unwrap());
            helper.borrow_from(Some(second.borrower()));
            be_helped(&backend, first, second);
        }
        drop(helper); // does not wait for another loan
    }
}
