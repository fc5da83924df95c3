//! A time limit for tests that may hang.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Far longer than a test takes.
const HANGS: Duration = Duration::from_secs(300);

/// Runs a test, and fails it when it hangs.
pub fn watched(test: impl FnOnce() + Send + 'static) {
    let (done, end) = channel();
    // The thread gets the name of the test, which panic messages show.
    let named = thread::Builder::new().name(thread::current().name().unwrap_or("test").to_owned());
    let run = named.spawn(move || {
        test();
        let _ = done.send(());
    });
    let run = run.unwrap();
    match end.recv_timeout(HANGS) {
        Err(RecvTimeoutError::Timeout) => panic!("the test hangs"),
        _ => run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}
