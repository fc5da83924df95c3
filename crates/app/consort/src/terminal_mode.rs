//! The mode of the terminal while a chat does not read a line: keys are not echoed, and wait for the chat.
//!
//! However the program ends, the terminal gets the mode back that it had at first: by dropping [`QuietMode`], and by
//! [`restore`] after a panic, Ctrl-C, SIGTERM or SIGHUP, and before Ctrl-Z stops the program.

use std::io::IsTerminal;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Signal, kill_current_process_group};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

/// Has the terminal mark a paste, so that its line breaks are told from the Enter key.
const PASTE_MARKS_ON: &[u8] = b"\x1b[?2004h";
const PASTE_MARKS_OFF: &[u8] = b"\x1b[?2004l";
/// The status of a process that a signal ended is this and the signal's number, by the convention of shells.
const SIGNAL_EXIT_CODE: i32 = 128;

/// How long the signal that stops the program may take.
const STOP_WAIT: Duration = Duration::from_secs(1);

/// The mode that the terminal had at first.
static ORIGINAL: OnceLock<Termios> = OnceLock::new();
static IS_QUIET: AtomicBool = AtomicBool::new(false);
/// How often SIGCONT came.
static RESUMED: (Mutex<u64>, Condvar) = (Mutex::new(0), Condvar::new());

/// While this value exists, the terminal of standard input is quiet.
pub struct QuietMode(());

impl QuietMode {
    /// `None` if standard input is no terminal.
    pub fn enter() -> Option<Self> {
        if ORIGINAL.get().is_none() {
            // A second thread would find the same mode.
            let _ = ORIGINAL.set(tcgetattr(stdin()).ok()?);
        }
        IS_QUIET.store(true, Ordering::SeqCst);
        apply()?;
        Some(Self(()))
    }
}

impl Drop for QuietMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal its mode back. Does nothing if the mode was never changed.
pub fn restore() {
    IS_QUIET.store(false, Ordering::SeqCst);
    set_original();
}

/// Stops the program with its process group, as Ctrl-Z does. It continues in the mode that the terminal has now.
pub fn suspend() {
    let Ok(mode) = tcgetattr(stdin()) else { return };
    let resumed = *RESUMED.0.lock().unwrap_or_else(PoisonError::into_inner);
    set_original();
    if kill_current_process_group(Signal::TSTP).is_ok() {
        // The signal stops all threads, but perhaps after this one has gone on. Without job control it stops none.
        let count = RESUMED.0.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = RESUMED.1.wait_timeout_while(count, STOP_WAIT, |count| *count == resumed);
    }
    let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
    write_marks(PASTE_MARKS_ON);
}

/// Restores the terminal after a panic, and when SIGTERM or SIGHUP ends the program. Call once per process.
pub fn restore_at_end() -> Result<()> {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        restore();
        report(panic);
    }));
    let runtime = Builder::new_current_thread().enable_io().build().context("listen for signals")?;
    let listen = |kind| signal(kind).context("listen for signals");
    let [mut terminate, mut hang_up, mut resume] = {
        let _runtime = runtime.enter();
        let kinds = [SignalKind::terminate(), SignalKind::hangup(), SignalKind::from_raw(Signal::CONT.as_raw())];
        let [terminate, hang_up, resume] = kinds.map(listen);
        [terminate?, hang_up?, resume?]
    };
    let end = |signal: Signal| {
        restore();
        process::exit(SIGNAL_EXIT_CODE + signal.as_raw())
    };
    let wait = move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = terminate.recv() => end(Signal::TERM),
                    _ = hang_up.recv() => end(Signal::HUP),
                    _ = resume.recv() => {
                        *RESUMED.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                        RESUMED.1.notify_all();
                        if IS_QUIET.load(Ordering::SeqCst) {
                            let _ = apply();
                        }
                    }
                }
            }
        })
    };
    thread::Builder::new().name("signals".to_owned()).spawn(wait).context("start a thread")?;
    Ok(())
}

fn apply() -> Option<()> {
    let mut quiet = ORIGINAL.get()?.clone();
    // Ctrl-C and Ctrl-Z arrive as keys: the mode is restored before the program stops, and ranks do not get the signal.
    quiet.local_modes &= !(LocalModes::ECHO | LocalModes::ICANON | LocalModes::IEXTEN | LocalModes::ISIG);
    // Enter and Ctrl-J stay two keys.
    quiet.input_modes &= !(InputModes::ICRNL | InputModes::INLCR | InputModes::IGNCR);
    quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
    quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
    tcsetattr(stdin(), OptionalActions::Now, &quiet).ok()?;
    write_marks(PASTE_MARKS_ON);
    Some(())
}

fn set_original() {
    let Some(original) = ORIGINAL.get() else { return };
    // There is nobody to tell of an error, and nothing else to try.
    let _ = tcsetattr(stdin(), OptionalActions::Now, original);
    write_marks(PASTE_MARKS_OFF);
}

/// Does not take the lock of standard output, which another thread may hold.
fn write_marks(marks: &[u8]) {
    if std::io::stdout().is_terminal() {
        let _ = rustix::io::write(stdout(), marks);
    }
}
