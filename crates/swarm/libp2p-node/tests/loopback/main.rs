//! Nodes on loopback: what they do for each other, and what a bad one can not do to the others.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod claims;
mod finding;
mod hostile;
mod identity;
mod peer;
mod relaying;
mod streams;

/// Runs a test in a runtime of its own, and fails it when it hangs.
fn run(test: impl Future<Output = ()> + Send + 'static) {
    testing::watchdog::watched(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(test);
    });
}
