//! `CompilerThreads`: grammars are compiled on threads of their own, a few at once, so that a grammar that takes long keeps
//! nobody waiting who has none. Whoever disconnects gives up a place in the queue, and ends a compilation that runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::error::{ApiError, RETRY_AFTER};

/// Compilations at once. Each may take all of a CPU, and the memory that the compiler's limits allow.
const THREADS_MAX: usize = 2;
/// How long a request waits for a thread.
const WAIT_MAX: Duration = Duration::from_secs(10);

pub struct CompilerThreads(Arc<Semaphore>);

/// Tells a compilation that nobody waits for it any more.
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Default for CompilerThreads {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(THREADS_MAX)))
    }
}

impl CompilerThreads {
    /// Runs `compile` on a thread with a stack of `stack_bytes`, as soon as one is free. The flag is set when the caller is
    /// dropped. The thread counts until `compile` has ended.
    pub async fn run<T: Send + 'static>(
        &self,
        stack_bytes: usize,
        compile: impl FnOnce(&AtomicBool) -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let busy = |_| ApiError::unavailable("the server is busy with other grammars", RETRY_AFTER).code("overloaded");
        let permit = timeout(WAIT_MAX, Arc::clone(&self.0).acquire_owned()).await.map_err(busy)?;
        let permit = permit.expect("the semaphore is never closed");
        let cancelled = CancelOnDrop(Arc::default());
        let (tell, compiled) = oneshot::channel();
        let flag = Arc::clone(&cancelled.0);
        let work = move || {
            let result = compile(&flag);
            drop(permit);
            // The caller may have gone.
            let _ = tell.send(result);
        };
        let thread = thread::Builder::new().name("grammar".to_owned()).stack_size(stack_bytes);
        thread
            .spawn(work)
            .map_err(|error| ApiError::internal(format!("cannot start the grammar compiler: {error}")))?;
        compiled.await.map_err(|_| ApiError::internal("the grammar compiler ended without a result"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocking;
    use std::sync::mpsc;

    const STACK_BYTES: usize = 64 << 10;

    /// All threads compile until this is dropped.
    struct Held {
        release: Vec<mpsc::Sender<()>>,
        callers: Vec<tokio::task::JoinHandle<Result<bool, ApiError>>>,
    }

    impl Held {
        async fn end(self) {
            drop(self.release);
            for caller in self.callers {
                assert!(!caller.await.unwrap().unwrap(), "nobody has gone");
            }
        }
    }

    /// Occupies all threads, with compilations that return whether they were cancelled.
    async fn hold(threads: &Arc<CompilerThreads>) -> Held {
        let mut held = Held { release: Vec::new(), callers: Vec::new() };
        for _ in 0..THREADS_MAX {
            let (release, released) = mpsc::channel::<()>();
            let (begin, begun) = oneshot::channel();
            let threads = Arc::clone(threads);
            held.release.push(release);
            held.callers.push(tokio::spawn(async move {
                let compile = move |cancelled: &AtomicBool| {
                    let _ = begin.send(());
                    let _ = released.recv();
                    cancelled.load(Ordering::Relaxed)
                };
                threads.run(STACK_BYTES, compile).await
            }));
            begun.await.unwrap();
        }
        held
    }

    #[test]
    fn grammars_that_take_long_keep_nobody_else_waiting() {
        // As in a server, where few threads parse bodies: here it is one. The time stands still.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        runtime.max_blocking_threads(1).enable_all().start_paused(true).build().unwrap().block_on(async {
            let threads = Arc::new(CompilerThreads::default());
            let held = hold(&threads).await;
            let waiting: Vec<_> = (0..40)
                .map(|_| {
                    let threads = Arc::clone(&threads);
                    tokio::spawn(async move { threads.run(STACK_BYTES, |_| ()).await })
                })
                .collect();
            for number in 0..10 {
                assert_eq!(blocking::run(move || Ok(number)).await.unwrap(), number);
            }
            assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
            waiting.iter().for_each(tokio::task::JoinHandle::abort);
            held.end().await;
        });
    }

    #[tokio::test]
    async fn a_compilation_ends_with_its_client() {
        let threads = Arc::new(CompilerThreads::default());
        let (tell, told) = mpsc::channel();
        let (begin, begun) = oneshot::channel();
        let caller = tokio::spawn({
            let threads = Arc::clone(&threads);
            let compile = move |cancelled: &AtomicBool| {
                let _ = begin.send(());
                while !cancelled.load(Ordering::Relaxed) {
                    thread::yield_now();
                }
                tell.send(()).unwrap();
            };
            async move { threads.run(STACK_BYTES, compile).await }
        });
        begun.await.unwrap();
        caller.abort();
        assert!(caller.await.unwrap_err().is_cancelled());
        told.recv().unwrap();
        // Its thread is free again.
        hold(&threads).await.end().await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_grammar_that_finds_no_thread_is_refused() {
        let threads = Arc::new(CompilerThreads::default());
        let held = hold(&threads).await;
        let refused = threads.run(STACK_BYTES, |_| ()).await.unwrap_err();
        assert_eq!((refused.code, refused.retry_after), (Some("overloaded"), Some(RETRY_AFTER)));
        held.end().await;
        threads.run(STACK_BYTES, |_| ()).await.unwrap();
    }
}
