//! Ctrl-C: ends the program, except while an answer is written, where it ends the answer.

use std::process;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result};

/// The status of a program that was ended by Ctrl-C, as shells count it.
pub const EXIT_CODE: u8 = 130;

const ENDS_PROGRAM: u8 = 0;
const ENDS_ANSWER: u8 = 1;
const WAS_PRESSED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(ENDS_PROGRAM);

/// Takes over Ctrl-C. Once per program.
pub fn install() -> Result<()> {
    let handler = || {
        let answering = STATE.compare_exchange(ENDS_ANSWER, WAS_PRESSED, Ordering::SeqCst, Ordering::SeqCst);
        // A second time, or while nothing is answered: whatever goes on is not worth waiting for.
        if answering.is_err() {
            process::exit(EXIT_CODE.into());
        }
    };
    ctrlc::set_handler(handler).context("take over Ctrl-C")
}

/// While this lives, Ctrl-C does not end the program: [`InterruptGuard::is_interrupted`] tells of it.
pub struct InterruptGuard(());

impl InterruptGuard {
    pub fn new() -> Self {
        STATE.store(ENDS_ANSWER, Ordering::SeqCst);
        Self(())
    }

    pub fn is_interrupted(&self) -> bool {
        STATE.load(Ordering::SeqCst) == WAS_PRESSED
    }
}

impl Drop for InterruptGuard {
    fn drop(&mut self) {
        STATE.store(ENDS_PROGRAM, Ordering::SeqCst);
    }
}
