//! One persistent set of threads. Between ops of a step they spin, because the next op follows within microseconds;
//! after a quiet moment they sleep.
//!
//! A job is a number of chunks and a function of (worker, chunk). Workers, the calling thread among them as worker 0,
//! take chunks from a shared counter until none is left. Which worker runs a chunk never changes a result.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

/// How long a worker waits for the next job before it sleeps: longer than the host-side work between two steps of a
/// decode loop, short enough not to burn a core when nothing runs.
const SPINS_BEFORE_SLEEP: u32 = 20_000;

type Job = dyn Fn(usize, usize) + Sync;

/// A line of its own for each counter, so that writers do not disturb each other.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// Odd while a job is offered, even between jobs; grows by one at each change.
    epoch: Line<AtomicU64>,
    next: Line<AtomicUsize>,
    /// Workers that have not yet left the present job.
    busy: Line<AtomicUsize>,
    /// The job on offer, readable while the epoch is odd.
    current: std::cell::UnsafeCell<Option<(*const Job, usize)>>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

// SAFETY: `current` is written only between jobs (no worker reads it then: see `Pool::run`) and the pointer in it is
// used only while `run` keeps the job alive.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Only one job at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// `threads` workers in all, the caller of [`Pool::run`] being one of them.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU64::new(0)),
            next: Line(AtomicUsize::new(0)),
            busy: Line(AtomicUsize::new(0)),
            current: std::cell::UnsafeCell::new(None),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let handles = (1..threads.max(1))
            .map(|worker| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("consort-{worker}"))
                    .spawn(move || work(&shared, worker))
                    .expect("the operating system gives us a thread")
            })
            .collect();
        Self { shared, handles, turn: Mutex::new(()) }
    }

    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Calls `job(worker, chunk)` for every chunk below `chunks` and returns when all have returned. A job must not
    /// call `run` on the same pool.
    pub fn run(&self, chunks: usize, job: &(dyn Fn(usize, usize) + Sync)) {
        if self.handles.is_empty() || chunks <= 1 {
            for chunk in 0..chunks {
                job(0, chunk);
            }
            return;
        }
        let _turn = self.turn.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. Every worker has left the job when this function returns (`busy` is
        // zero), also when a chunk panicked, so the pointer never outlives the borrow.
        let job: *const Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync), *const Job>(job) };
        shared.next.0.store(0, Ordering::Relaxed);
        shared.busy.0.store(self.handles.len(), Ordering::Relaxed);
        // SAFETY: the epoch is even and all workers have left the last job: nobody reads `current`.
        unsafe { *shared.current.get() = Some((job, chunks)) };
        // SeqCst orders this against a worker that registers as a sleeper and then looks at the epoch once more.
        shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().expect("never poisoned: nothing panics under it");
            shared.wake.notify_all();
        }
        take_chunks(shared, 0, job, chunks);
        let mut spins = 0;
        while shared.busy.0.load(Ordering::Acquire) > 0 {
            relax(&mut spins);
        }
        shared.epoch.0.fetch_add(1, Ordering::Release);
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a kernel panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep.lock().expect("never poisoned: nothing panics under it");
            self.shared.wake.notify_all();
        }
        for handle in self.handles.drain(..) {
            handle.join().expect("workers catch the panics of their jobs");
        }
    }
}

/// One turn of waiting. Others may need this core, the very worker that is waited for among them: after some turns each
/// gives way to whoever is ready to run.
fn relax(spins: &mut u32) {
    const SPINS_BEFORE_YIELD: u32 = 2_000;
    *spins += 1;
    if *spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { std::thread::yield_now() }
}

fn take_chunks(shared: &Shared, worker: usize, job: *const Job, chunks: usize) {
    // SAFETY: `Pool::run` keeps the job alive until all workers have left it.
    let job = unsafe { &*job };
    loop {
        let chunk = shared.next.0.fetch_add(1, Ordering::Relaxed);
        if chunk >= chunks {
            return;
        }
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(worker, chunk)));
        if outcome.is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
    }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        seen = match await_job(shared, seen) {
            Some(epoch) => epoch,
            None => return,
        };
        // SAFETY: the epoch is odd, so `current` holds the job and does not change before this worker leaves it.
        let (job, chunks) = unsafe { *shared.current.get() }.expect("set before the epoch became odd");
        take_chunks(shared, worker, job, chunks);
        shared.busy.0.fetch_sub(1, Ordering::Release);
    }
}

/// Waits for an odd epoch above `seen`; `None` when the pool is dropped.
fn await_job(shared: &Shared, seen: u64) -> Option<u64> {
    let ready = |order| {
        let epoch = shared.epoch.0.load(order);
        (epoch > seen && epoch % 2 == 1).then_some(epoch)
    };
    let mut spins = 0;
    while spins < SPINS_BEFORE_SLEEP && !shared.stop.load(Ordering::Relaxed) {
        if let Some(epoch) = ready(Ordering::Acquire) {
            return Some(epoch);
        }
        relax(&mut spins);
    }
    let mut guard = shared.sleep.lock().expect("never poisoned: nothing panics under it");
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    let found = loop {
        if shared.stop.load(Ordering::SeqCst) {
            break None;
        }
        if let Some(epoch) = ready(Ordering::SeqCst) {
            break Some(epoch);
        }
        guard = shared.wake.wait(guard).expect("never poisoned: nothing panics under it");
    };
    shared.sleepers.fetch_sub(1, Ordering::SeqCst);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for chunks in [0, 1, 2, 7, 100] {
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..50 {
                    pool.run(chunks, &|_, chunk| {
                        counts[chunk].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 50));
            }
        }
    }

    #[test]
    fn a_sleeping_worker_wakes_for_the_next_job() {
        let pool = Pool::new(2);
        let ran = AtomicUsize::new(0);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(30));
            pool.run(2, &|_, _| {
                ran.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(ran.load(Ordering::Relaxed), 6);
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(4, &|_, chunk| assert!(chunk != 2, "odd one out"));
        }));
        assert!(outcome.is_err());
        pool.run(4, &|_, _| {});
    }
}
