//! Ctrl-C: ends the program, or cancels the generation if one is running. Esc in a chat only cancels.

use std::process;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result};

use crate::terminal_mode;

/// The exit status after Ctrl-C, by the convention of shells.
pub const EXIT_CODE: u8 = 130;

const EXIT: u8 = 0;
const CANCEL: u8 = 1;
const CANCELLED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(EXIT);

/// Installs the handler of Ctrl-C. Call once per process.
pub fn install() -> Result<()> {
    let handler = || {
        // No generation is running, or this is the second Ctrl-C: exits at once.
        if !cancel() {
            terminal_mode::restore();
            process::exit(EXIT_CODE.into());
        }
    };
    ctrlc::set_handler(handler).context("take over Ctrl-C")
}

/// Cancels the generation that is running. Returns whether there is one that was not cancelled before.
pub fn cancel() -> bool {
    STATE.compare_exchange(CANCEL, CANCELLED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
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
