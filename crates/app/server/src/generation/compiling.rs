//! `CompilerThreads`: grammars are compiled on threads of their own, a few at once, so that a grammar that takes long keeps
//! nobody waiting who has none, or a usual one: what is not done at once waits for a place among those that take long, and
//! begins again there. Whoever disconnects gives up a place in the queue, and ends a compilation that runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use text::{COMPILE_TIME_MAX, COMPILER_STACK_BYTES, GrammarError};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::error::{ApiError, RETRY_AFTER};

/// Compilations at once, of each kind. Each may take all of a CPU, and the memory that the compiler's limits allow.
const QUICK_MAX: usize = 2;
const LONG_MAX: usize = 1;
/// Usual schemas take some milliseconds.
const QUICK_TIME_MAX: Duration = Duration::from_millis(50);
/// How long a request waits for a thread.
const WAIT_MAX: Duration = Duration::from_secs(10);

pub struct CompilerThreads {
    quick: Arc<Semaphore>,
    long: Arc<Semaphore>,
}

/// Tells a compilation that nobody waits for it any more.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Default for CompilerThreads {
    fn default() -> Self {
        Self { quick: Arc::new(Semaphore::new(QUICK_MAX)), long: Arc::new(Semaphore::new(LONG_MAX)) }
    }
}

impl CompilerThreads {
    /// Runs `compile` as soon as a thread is free. Its flag is set when the caller is dropped; if it runs out of its time, it
    /// is called once more with a longer one.
    pub async fn run<T: Send + 'static>(
        &self,
        compile: impl Fn(&AtomicBool, Duration) -> Result<T, GrammarError> + Send + Sync + 'static,
    ) -> Result<Result<T, GrammarError>, ApiError> {
        let compile = Arc::new(compile);
        match run_once(&self.quick, Arc::clone(&compile), QUICK_TIME_MAX).await? {
            Err(GrammarError::OutOfTime) => run_once(&self.long, compile, COMPILE_TIME_MAX).await,
            compiled => Ok(compiled),
        }
    }
}

/// The thread counts until `compile` has ended.
async fn run_once<T: Send + 'static>(
    places: &Arc<Semaphore>,
    compile: Arc<impl Fn(&AtomicBool, Duration) -> Result<T, GrammarError> + Send + Sync + 'static>,
    time_max: Duration,
) -> Result<Result<T, GrammarError>, ApiError> {
    let busy = |_| ApiError::unavailable("the server is busy with other grammars", RETRY_AFTER).code("overloaded");
    let permit = timeout(WAIT_MAX, Arc::clone(places).acquire_owned()).await.map_err(busy)?;
    let permit = permit.expect("the semaphore is never closed");
    let cancelled = CancelOnDrop(Arc::default());
    let (tell, compiled) = oneshot::channel();
    let flag = Arc::clone(&cancelled.0);
    let work = move || {
        let result = compile(&flag, time_max);
        drop(permit);
        // The caller may have gone.
        let _ = tell.send(result);
    };
    let thread = thread::Builder::new().name("grammar".to_owned()).stack_size(COMPILER_STACK_BYTES);
    thread.spawn(work).map_err(|error| ApiError::internal(format!("cannot start the grammar compiler: {error}")))?;
    compiled.await.map_err(|_| ApiError::internal("the grammar compiler ended without a result"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocking;
    use std::sync::Mutex;
    use std::sync::mpsc;

    /// All threads of one kind compile until this is dropped.
    struct Held {
        release: Vec<mpsc::Sender<()>>,
        callers: Vec<tokio::task::JoinHandle<Result<Result<bool, GrammarError>, ApiError>>>,
    }

    impl Held {
        async fn end(self) {
            drop(self.release);
            for caller in self.callers {
                assert!(!caller.await.unwrap().unwrap().unwrap(), "nobody has gone");
            }
        }
    }

    /// Occupies all threads for quick compilations, or all others, with some that return whether they were cancelled.
    async fn hold(threads: &Arc<CompilerThreads>, is_long: bool) -> Held {
        let mut held = Held { release: Vec::new(), callers: Vec::new() };
        for _ in 0..if is_long { LONG_MAX } else { QUICK_MAX } {
            let (release, released) = mpsc::channel::<()>();
            let (begin, begun) = oneshot::channel();
            let threads = Arc::clone(threads);
            let once = Mutex::new(Some((begin, released)));
            held.release.push(release);
            held.callers.push(tokio::spawn(async move {
                let compile = move |cancelled: &AtomicBool, time_max: Duration| {
                    if is_long && time_max == QUICK_TIME_MAX {
                        return Err(GrammarError::OutOfTime);
                    }
                    let (begin, released) = once.lock().unwrap().take().unwrap();
                    let _ = begin.send(());
                    let _ = released.recv();
                    Ok(cancelled.load(Ordering::Relaxed))
                };
                threads.run(compile).await
            }));
            begun.await.unwrap();
        }
        held
    }

    /// A compilation that is done at once, or needs longer than a quick one may.
    async fn compile(threads: &Arc<CompilerThreads>, is_long: bool) -> Result<(), ApiError> {
        let compile = move |_: &AtomicBool, time_max| match is_long && time_max == QUICK_TIME_MAX {
            true => Err(GrammarError::OutOfTime),
            false => Ok(()),
        };
        threads.run(compile).await.map(Result::unwrap)
    }

    #[test]
    fn grammars_that_take_long_keep_nobody_else_waiting() {
        // As in a server, where few threads parse bodies: here it is one. The time stands still.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.max_blocking_threads(1).enable_all().start_paused(true).build().unwrap().block_on(async {
            let threads = Arc::new(CompilerThreads::default());
            let held = [hold(&threads, true).await, hold(&threads, false).await];
            let waiting: Vec<_> = (0..40)
                .map(|_| {
                    let threads = Arc::clone(&threads);
                    tokio::spawn(async move { compile(&threads, false).await })
                })
                .collect();
            for number in 0..10 {
                assert_eq!(blocking::run(move || Ok(number)).await.unwrap(), number);
            }
            assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
            waiting.iter().for_each(tokio::task::JoinHandle::abort);
            for held in held {
                held.end().await;
            }
        });
    }

    #[tokio::test]
    async fn usual_grammars_do_not_wait_for_those_that_take_long() {
        let threads = Arc::new(CompilerThreads::default());
        let held = hold(&threads, true).await;
        let waiting: Vec<_> = (0..40)
            .map(|_| {
                let threads = Arc::clone(&threads);
                tokio::spawn(async move { compile(&threads, true).await })
            })
            .collect();
        for _ in 0..10 {
            compile(&threads, false).await.unwrap();
        }
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        held.end().await;
        for waiting in waiting {
            waiting.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn a_compilation_ends_with_its_client() {
        let threads = Arc::new(CompilerThreads::default());
        let (tell, told) = mpsc::channel();
        let (begin, begun) = oneshot::channel();
        let begin = Mutex::new(Some(begin));
        let caller = tokio::spawn({
            let threads = Arc::clone(&threads);
            let compile = move |cancelled: &AtomicBool, _| {
                let _ = begin.lock().unwrap().take().unwrap().send(());
                while !cancelled.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                tell.send(()).unwrap();
                Err::<(), _>(GrammarError::Cancelled)
            };
            async move { threads.run(compile).await.map(drop) }
        });
        begun.await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        told.recv().unwrap();
        // Its thread is free again.
        hold(&threads, false).await.end().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_grammar_that_finds_no_thread_is_refused() {
        let threads = Arc::new(CompilerThreads::default());
        for is_long in [false, true] {
            let held = hold(&threads, is_long).await;
            let refused = compile(&threads, is_long).await.unwrap_err();
            assert_eq!((refused.code, refused.retry_after), (Some("overloaded"), Some(RETRY_AFTER)));
            held.end().await;
            compile(&threads, is_long).await.unwrap();
        }
    }
}
