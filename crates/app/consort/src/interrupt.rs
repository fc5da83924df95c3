//! Ctrl-C: ends the program, or cancels the generation if one is running.

use std::process;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result};

/// The exit status after Ctrl-C, by the convention of shells.
pub const EXIT_CODE: u8 = 130;

const EXIT: u8 = 0;
const CANCEL: u8 = 1;
const CANCELLED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(EXIT);

/// Installs the handler of Ctrl-C. Call once per process.
pub fn install() -> Result<()> {
    let handler = || {
        let answering = STATE.compare_exchange(CANCEL, CANCELLED, Ordering::SeqCst, Ordering::SeqCst);
        // No generation is running, or this is the second Ctrl-C: exits at once.
        if answering.is_err() {
            process::exit(EXIT_CODE.into());
        }
    };
    ctrlc::set_handler(handler).context("take over Ctrl-C")
}

/// While this value exists, the first Ctrl-C does not end the program, but sets [`InterruptGuard::is_interrupted`].
pub struct InterruptGuard(());

impl InterruptGuard {
    pub fn new() -> Self {
        STATE.store(CANCEL, Ordering::SeqCst);
        Self(())
    }

    pub fn is_interrupted(&self) -> bool {
        STATE.load(Ordering::SeqCst) == CANCELLED
    }
}

impl Drop for InterruptGuard {
    fn drop(&mut self) {
        STATE.store(EXIT, Ordering::SeqCst);
    }
}
