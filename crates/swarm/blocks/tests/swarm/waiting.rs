//! Waits for what happens in other tasks and threads.

use std::time::{Duration, Instant};

/// Far longer than anything that is waited for takes.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `holds`. Otherwise the test fails with what `state` says.
#[track_caller]
pub fn until(mut holds: impl FnMut() -> bool, state: impl Fn() -> String) {
    tokio::task::block_in_place(|| {
        let begun = Instant::now();
        while !holds() {
            assert!(begun.elapsed() < PATIENCE, "{}", state());
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}
