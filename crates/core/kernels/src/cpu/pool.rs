//! The thread pool. Workers spin between the ops of a step, because the next op follows within microseconds; when idle for
//! longer they sleep.
//!
//! A job is a number of chunks and a function of (worker, chunk). The calling thread is worker 0. Each worker has an equal
//! number of chunks of its own and runs them in order; then it takes chunks that other workers have not started. Which
//! worker runs a chunk never changes a result. The caller closes a job when no chunk is left, and waits only for workers
//! that have joined it. So a worker that the operating system does not schedule delays only the chunk that it is running.

use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Spins of a worker before it sleeps: longer than the work between two steps of a decode loop, short enough not to keep
/// a core busy when nothing runs.
const SPINS_BEFORE_SLEEP: u32 = 20_000;

type Job = dyn Fn(usize, usize) + Sync;

/// Aligns each counter to its own cache line (and its prefetch pair), to avoid false sharing.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    slot: Line<JobSlot>,
    /// One counter per worker: how many of that worker's chunks have been taken.
    taken: Box<[Line<ChunkCounter>]>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// The state that a worker polls and the job that it then needs, on one cache line.
struct JobSlot {
    /// See [`State`].
    state: AtomicU64,
    /// Written only while no job is open and no worker is in one.
    current: UnsafeCell<Option<RunningJob>>,
}

/// The current job.
#[derive(Clone, Copy)]
struct RunningJob {
    job: *const Job,
    chunks: usize,
}

// SAFETY: `current` is read only by workers that joined an open job, and written only when there are none; the
// pointer in it is used only while `run` keeps the job alive.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The number of the current job (in the upper bits), whether workers may still join it, and how many workers are in it.
#[derive(Clone, Copy)]
struct State(u64);

impl State {
    const OPEN: u64 = 1 << 15;
    const WORKERS: u64 = Self::OPEN - 1;
    const JOB: u64 = 1 << 16;

    fn job(self) -> u64 {
        self.0 / Self::JOB
    }

    fn is_open(self) -> bool {
        self.0 & Self::OPEN != 0
    }

    fn workers(self) -> u64 {
        self.0 & Self::WORKERS
    }
}

/// How many of a worker's own chunks have been taken (lower half), and of which job (upper half).
#[derive(Default)]
struct ChunkCounter(AtomicU64);

impl ChunkCounter {
    /// Prefetches the counter's cache line for writing: a worker that looked for chunks here may hold it in its cache.
    fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch reads nothing; SSE is part of the architecture.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_ET0>((&raw const self.0).cast());
        }
    }

    /// Takes the next chunk of `share`, the chunks of one worker in `job`.
    fn take(&self, job: u64, share: Range<usize>) -> Option<usize> {
        let job = job << 32;
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            // A count of an older job is zero for this job.
            let count = if (seen ^ job) >> 32 == 0 { seen & u64::from(u32::MAX) } else { 0 };
            let chunk = Some(share.start + count as usize).filter(|chunk| share.contains(chunk))?;
            match self.0.compare_exchange_weak(seen, job | (count + 1), Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(chunk),
                Err(now) => seen = now,
            }
        }
    }
}

pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    /// Held by the thread that runs a job (worker 0): only one job runs at a time.
    turn: Mutex<()>,
}

impl Pool {
    /// A pool of `threads` workers, including the caller of [`Pool::run`]. Fails if the system cannot start the threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let threads = threads.clamp(1, State::WORKERS as usize);
        let shared = Arc::new(Shared {
            slot: Line(JobSlot { state: AtomicU64::new(0), current: UnsafeCell::new(None) }),
            taken: (0..threads).map(|_| Line(ChunkCounter::default())).collect(),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        // If a thread cannot be started, dropping `pool` stops the threads started so far.
        let mut pool = Self { shared, handles: Vec::new(), turn: Mutex::new(()) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("consort-{worker}"));
            pool.handles.push(thread.spawn(move || work(&shared, worker))?);
        }
        Ok(pool)
    }

    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// The own chunks of a worker. If the chunks do not divide evenly, worker 0 has more rather than fewer, because the
    /// caller starts without having to be notified.
    fn own_chunks(chunks: usize, threads: usize, worker: usize) -> Range<usize> {
        (chunks * worker).div_ceil(threads)..(chunks * (worker + 1)).div_ceil(threads)
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
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        shared.taken[0].0.prefetch();
        // SAFETY: only the lifetime is changed. When this function returns the job is closed and every worker has left
        // it, also when a chunk panicked, so the pointer never outlives the borrow.
        let job: *const Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync), *const Job>(job) };
        // SAFETY: no job is open and no worker is in one, so no thread reads `current`.
        unsafe { *shared.slot.0.current.get() = Some(RunningJob { job, chunks }) };
        let number = State(shared.slot.0.state.load(Ordering::Relaxed)).job() + 1;
        // SeqCst orders this store against a worker that registers as a sleeper and then checks the state once more.
        shared.slot.0.state.store((number * State::JOB) | State::OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            shared.wake.notify_all();
        }
        take_chunks(shared, 0, number, job, chunks);
        shared.slot.0.state.fetch_and(!State::OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while State(shared.slot.0.state.load(Ordering::Acquire)).workers() > 0 {
            relax(&mut spins);
        }
        // Load before the swap: a write would take the cache line from workers that poll other fields on it.
        assert!(
            !shared.panicked.load(Ordering::Relaxed) || !shared.panicked.swap(false, Ordering::Relaxed),
            "a kernel panicked"
        );
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for handle in self.handles.drain(..) {
            handle.join().expect("workers catch the panics of their jobs");
        }
    }
}

/// One iteration of a spin loop. After some iterations it yields the core to other threads, because the worker that this
/// thread waits for may need it.
fn relax(spins: &mut u32) {
    const SPINS_BEFORE_YIELD: u32 = 2_000;
    *spins += 1;
    if *spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { std::thread::yield_now() }
}

fn take_chunks(shared: &Shared, worker: usize, number: u64, job: *const Job, chunks: usize) {
    // SAFETY: `Pool::run` keeps the job alive until all workers have left it.
    let job = unsafe { &*job };
    let threads = shared.taken.len();
    for whose in (worker..threads).chain(0..worker.min(threads)) {
        let own = Pool::own_chunks(chunks, threads, whose);
        while let Some(chunk) = shared.taken[whose].0.take(number, own.clone()) {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job(worker, chunk)));
            if outcome.is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
    }
}

fn work(shared: &Shared, worker: usize) {
    let mut seen = 0;
    while let Some(state) = await_job(shared, seen) {
        shared.taken[worker].0.prefetch();
        let Some(current) = join(shared, state) else { continue };
        seen = state.job();
        take_chunks(shared, worker, seen, current.job, current.chunks);
        shared.slot.0.state.fetch_sub(1, Ordering::Release);
    }
}

/// Joins the open job of `state`. Returns `None` if the state has changed: another worker joined or left, or the job was
/// closed. A worker that has joined must leave by decrementing the state.
fn join(shared: &Shared, state: State) -> Option<RunningJob> {
    let joined = State(state.0 + 1);
    shared.slot.0.state.compare_exchange(state.0, joined.0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    // SAFETY: this worker joined while the job was open, so `current` is the job and is not written until this worker leaves.
    Some(unsafe { *shared.slot.0.current.get() }.expect("set before the job was opened"))
}

/// An open job other than `seen`.
fn open_job(shared: &Shared, seen: u64, order: Ordering) -> Option<State> {
    let state = State(shared.slot.0.state.load(order));
    (state.is_open() && state.job() != seen).then_some(state)
}

/// Waits for an open job other than `seen`; `None` when the pool is dropped.
fn await_job(shared: &Shared, seen: u64) -> Option<State> {
    let ready = |order| open_job(shared, seen, order);
    let mut spins = 0;
    while spins < SPINS_BEFORE_SLEEP && !shared.stop.load(Ordering::Relaxed) {
        if let Some(state) = ready(Ordering::Acquire) {
            return Some(state);
        }
        relax(&mut spins);
    }
    let mut guard = shared.sleep.lock().unwrap_or_else(PoisonError::into_inner);
    shared.sleepers.fetch_add(1, Ordering::SeqCst);
    let found = loop {
        if shared.stop.load(Ordering::SeqCst) {
            break None;
        }
        if let Some(state) = ready(Ordering::SeqCst) {
            break Some(state);
        }
        guard = shared.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
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
            let pool = Pool::new(threads).unwrap();
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
        let pool = Pool::new(2).unwrap();
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
        let pool = Pool::new(2).unwrap();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(4, &|_, chunk| assert!(chunk != 2, "odd one out"));
        }));
        assert!(outcome.is_err());
        pool.run(4, &|_, _| {});
    }
}
