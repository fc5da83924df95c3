//! Progress bars on standard error. Hidden unless it is a terminal.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write, stderr};
use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};

/// How often a bar that nobody moves is drawn.
const TICK: Duration = Duration::from_millis(100);

/// The bars that are shown while lines are written to standard error.
static BESIDE_LOG: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A bar that stays below the lines that [`LogWriter`] and [`suspend`] write.
pub fn beside_log(bar: ProgressBar) -> ProgressBar {
    BESIDE_LOG.add(bar)
}

/// Writes to standard error without disturbing bars.
pub fn suspend<T>(write: impl FnOnce() -> T) -> T {
    BESIDE_LOG.suspend(write)
}

/// Standard error, for a log.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        suspend(|| stderr().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        stderr().flush()
    }
}

/// A bar for bytes, with rate and time left. The message names the current file.
pub fn bytes(total: u64) -> ProgressBar {
    let template = "{bar:24} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec}{left}  {wide_msg}";
    ProgressBar::new(total).with_style(style(template).with_key("left", write_left))
}

/// The time left, once there is a rate.
fn write_left(state: &ProgressState, out: &mut dyn fmt::Write) {
    if state.per_sec() > 0.0 && state.pos() < state.len().unwrap_or_default() {
        // A bar is not worth an error.
        let _ = write!(out, ", {:#} left", HumanDuration(state.eta()));
    }
}

/// The same for a download, whose time left is counted also while no bytes come.
pub fn download(total: u64) -> ProgressBar {
    let bar = bytes(total);
    bar.enable_steady_tick(TICK);
    bar
}

/// A bar for `total` equal steps.
pub fn steps(total: u64, message: impl Into<Cow<'static, str>>) -> ProgressBar {
    ProgressBar::new(total).with_style(style("{msg} {bar:30} {pos}/{len}")).with_message(message)
}

/// For work of unknown length.
pub fn spinner(message: impl Into<Cow<'static, str>>) -> ProgressBar {
    let spinner = ProgressBar::new_spinner().with_message(message);
    spinner.enable_steady_tick(TICK);
    spinner
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is a constant")
}
