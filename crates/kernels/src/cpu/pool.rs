//! One persistent set of threads. Between ops of a step they spin, because the next op follows within microseconds;
//! after a quiet moment they sleep.
//!
//! A job is a number of chunks and a function of (worker, chunk). Each worker, the calling thread among them as worker 0,
//! has an equal share of the chunks and takes them in order; then it takes what others have left. Which worker runs a chunk
//! never changes a result. A worker that comes late finds the job closed: the caller waits only for those who took part, so a
//! thread that the system keeps from running costs its share of the work, not the whole.

use std::cell::UnsafeCell;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// How long a worker waits for the next job before it sleeps: longer than the host-side work between two steps of a
/// decode loop, short enough not to burn a core when nothing runs.
const SPINS_BEFORE_SLEEP: u32 = 20_000;

type Job = dyn Fn(usize, usize) + Sync;

/// A line of its own for each counter, so that writers do not disturb each other.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    offer: Line<Offer>,
    /// Of each worker's share.
    taken: Box<[Line<Taken>]>,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// What a worker looks at while it waits, and what it then needs, on one line.
struct Offer {
    /// See [`State`].
    state: AtomicU64,
    /// Written only while no job is open and nobody takes part in one.
    current: UnsafeCell<Option<Current>>,
}

/// The job on offer.
#[derive(Clone, Copy)]
struct Current {
    job: *const Job,
    chunks: usize,
}

// SAFETY: `current` is read only by workers that joined an open job, and written only when there are none; the
// pointer in it is used only while `run` keeps the job alive.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// Which job is on offer (its number, in the upper bits), whether it may still be joined, and how many workers are in it.
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

/// How many chunks of a share are taken (the lower half), and of which job (the upper half).
#[derive(Default)]
struct Taken(AtomicU64);

impl Taken {
    /// Asks for the counter's line, to be written soon: whoever looked for chunks here last has it too.
    fn ask(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch reads nothing; SSE is part of the architecture.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_ET0>((&raw const self.0).cast());
        }
    }

    /// Takes the next chunk of a share of `job`.
    fn take(&self, job: u64, share: Range<usize>) -> Option<usize> {
        let job = job << 32;
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            // What is left of an older job counts for nothing.
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
    /// Only one job at a time. Whoever has it is worker 0.
    turn: Mutex<()>,
}

impl Pool {
    /// `threads` workers in all, the caller of [`Pool::run`] being one of them. Fails if the system gives no more threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let threads = threads.clamp(1, State::WORKERS as usize);
        let shared = Arc::new(Shared {
            offer: Line(Offer { state: AtomicU64::new(0), current: UnsafeCell::new(None) }),
            taken: (0..threads).map(|_| Line(Taken::default())).collect(),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        // Dropped on the way out of an error, the pool ends the threads that it has.
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

    /// The chunks that a worker has before it looks for those of others. The first, which is the caller and does not have to be told,
    /// has one more rather than one less.
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
        shared.taken[0].0.ask();
        // SAFETY: only the lifetime is changed. When this function returns the job is closed and every worker has left
        // it, also when a chunk panicked, so the pointer never outlives the borrow.
        let job: *const Job = unsafe { std::mem::transmute::<*const (dyn Fn(usize, usize) + Sync), *const Job>(job) };
        // SAFETY: no job is open and nobody takes part in one: nobody reads `current`.
        unsafe { *shared.offer.0.current.get() = Some(Current { job, chunks }) };
        let number = State(shared.offer.0.state.load(Ordering::Relaxed)).job() + 1;
        // SeqCst orders this against a worker that registers as a sleeper and then looks at the state once more.
        shared.offer.0.state.store((number * State::JOB) | State::OPEN, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep.lock().unwrap_or_else(PoisonError::into_inner);
            shared.wake.notify_all();
        }
        take_chunks(shared, 0, number, job, chunks);
        shared.offer.0.state.fetch_and(!State::OPEN, Ordering::AcqRel);
        let mut spins = 0;
        while State(shared.offer.0.state.load(Ordering::Acquire)).workers() > 0 {
            relax(&mut spins);
        }
        // Looked at first: writing would take the line from workers that read what else is on it while they wait.
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

/// One turn of waiting. Others may need this core, the very worker that is waited for among them: after some turns each
/// gives way to whoever is ready to run.
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
        shared.taken[worker].0.ask();
        let Some(current) = join(shared, state) else { continue };
        seen = state.job();
        take_chunks(shared, worker, seen, current.job, current.chunks);
        shared.offer.0.state.fetch_sub(1, Ordering::Release);
    }
}

/// Joins the open job of `state`, unless others joined or left it meanwhile, or it was closed. Who joined leaves it again.
fn join(shared: &Shared, state: State) -> Option<Current> {
    let joined = State(state.0 + 1);
    shared.offer.0.state.compare_exchange(state.0, joined.0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    // SAFETY: it was joined while it was open, so `current` holds it and stays until this worker leaves.
    Some(unsafe { *shared.offer.0.current.get() }.expect("set before the job was opened"))
}

/// An open job other than `seen`.
fn open_job(shared: &Shared, seen: u64, order: Ordering) -> Option<State> {
    let state = State(shared.offer.0.state.load(order));
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
